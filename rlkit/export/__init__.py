"""Notebook to script, and script to cluster job."""
