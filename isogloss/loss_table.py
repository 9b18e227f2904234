"""The name of isogloss.objective.loss_table in version 0.1, kept for one release."""

from isogloss.objective.loss_table import LOSSES, LossSpec

__all__ = ["LOSSES", "LossSpec"]
