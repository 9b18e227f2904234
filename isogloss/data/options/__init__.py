"""What a flag adds to a batch: packed rows, weights of terms, keys of texts."""
