"""Teachers: where their outputs come from, one file a kind."""
