"""Hold what only the training job of distill.py needs; the modules to copy stand beside it."""
