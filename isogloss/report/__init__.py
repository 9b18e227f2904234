"""A run on one page to look at: curves, tables, samples, and held-out text in colors."""
