"""The live view: readers of a run's folder. Training never calls into it."""
