"""What several ranks tell one another: plain values, their secret, their roles, how they end."""
