"""Writing: the student's own texts, who writes them, and how old they may be."""
