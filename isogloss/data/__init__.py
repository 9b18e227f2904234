"""Data: from a row of a file to a micro-batch of tensors."""
