"""Evaluation: on held-out rows, on tasks, of code that is run in a sandbox."""
