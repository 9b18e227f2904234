"""Checkpoints: written, read, converted, described."""
