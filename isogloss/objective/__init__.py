"""The objective: the table of losses, and their sum over a micro-batch."""
