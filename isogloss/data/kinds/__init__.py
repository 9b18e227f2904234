"""Data of other kinds than lines of JSON in one file, each behind a door of its own."""
