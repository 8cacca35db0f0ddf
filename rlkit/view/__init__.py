"""The view: readers of a run folder. Training never calls into it, so a fault of the view cannot stop a run."""
