"""What a step did: its metrics, read once the device has computed them; docs/evaluate.md.

Tests: tests/test_transfers.py.
"""

import torch

from isogloss.job.counts import TermSums, mean_of
from isogloss.job.transfers import Readback


class StepReport:
    """Hold what a step did; its metrics are read once the device has computed them.

    All ranks make a report together, and each reads it alone.

    Attributes:
        state: TrainState.
        counts: global Counts.
        sums: Readback of the global `TermSums` of every teacher.
        kd_weights: list of the weight of each teacher's mean loss in this step.
        teacher_bytes: memory that the logits of a position of each teacher occupied.
        others: metrics that do not follow from these, numbers or Readbacks of them.
    """

    def __init__(self, state, counts, sums, kd_weights):
        self.state = state
        self.counts = counts
        self.sums = sums
        self.kd_weights = kd_weights
        bytes_per_token = [setup.bytes_per_token for setup in state.teachers]
        self.teacher_bytes = state.student.share(bytes_per_token)
        self.others = {}

    def add_engine(self, lr, local_norm):
        """Add how the step was taken.

        Args:
            lr: learning rate; local_norm: see `StudentRunner.train`.
        """
        state = self.state
        norm = state.engine.get_global_grad_norm()
        # a tensor is not asked whether it is 0: that would wait for the device
        norm = Readback(norm) if torch.is_tensor(norm) else float(norm or local_norm)
        self.others |= state.student.metrics() | {
            "lr": lr, "grad_norm": norm, "skipped_steps": state.engine.skipped_steps,
            "data_seconds": state.data_seconds}
        state.data_seconds = 0.0

    def sums_of(self, number):
        return TermSums(*self.sums.read()[number])

    @property
    def ce(self):
        return mean_of(self.sums_of(0).ce, self.counts.ce_tokens)

    def kd(self, number):
        return mean_of(self.sums_of(number).kd, self.counts.pairs[number].kd_terms)

    def metrics(self):
        """Return global means, equal on every rank; see docs/evaluate.md."""
        cfg = self.state.cfg
        weighted = [(cfg.ce_weight, self.ce)] if cfg.ce_weight else []
        weighted += [(weight, self.kd(number)) for number, weight in enumerate(self.kd_weights)]
        terms = [weight * mean for weight, mean in weighted if mean is not None]
        metrics = {"loss": sum(terms) if terms else None}
        if cfg.ce_weight:
            metrics["ce"] = self.ce
        metrics["accuracy"] = mean_of(self.sums_of(0).correct, self.counts.ce_tokens)
        for number, setup in enumerate(self.state.teachers):
            metrics |= named(self.state, setup, self.of_teacher(number))
        metrics["tokens"] = int(self.counts.tokens)
        metrics["tokens_per_sample"] = mean_of(self.counts.tokens, self.counts.rows)
        unlearned = self.counts.rows - self.counts.samples
        metrics["without_labels"] = mean_of(unlearned, self.counts.rows)
        metrics["cut_before_labels"] = mean_of(self.counts.cut_samples, self.counts.samples)
        if self.counts.overlapping_turns:
            metrics["overlapping_turns"] = int(self.counts.overlapping_turns)
        for name, value in self.others.items():
            metrics[name] = value.read() if isinstance(value, Readback) else value
        if "router_loss" in metrics and terms:
            metrics["loss"] += self.state.student.balance.weight * metrics["router_loss"]
        return metrics

    def of_teacher(self, number):
        """Return the metrics of a teacher, without its name."""
        pair = self.counts.pairs[number]
        metrics = {"kd": self.kd(number), "teacher_output_bytes": self.teacher_bytes[number]}
        metrics |= pair.metrics()
        sums = self.sums_of(number)
        loss = self.state.teachers[number].loss
        if loss.is_observed:  # its terms are chunks
            metrics["projected_accuracy"] = mean_of(sums.agreed, pair.kd_terms)
        if hasattr(loss.loss_fn, "clipped"):
            metrics["clipped_terms"] = mean_of(sums.clipped, pair.kd_terms)
        if len(self.state.teachers) > 1 or self.state.cfg.dynamic_scale:
            metrics["kd_weight"] = self.kd_weights[number]
        if self.state.writer:
            # on what the student wrote, and on the data
            metrics["kd/on"] = mean_of(sums.rollout_kd, pair.rollout_terms)
            metrics["kd/off"] = mean_of(sums.kd - sums.rollout_kd,
                                        pair.kd_terms - pair.rollout_terms)
        return metrics


def named(state, setup, metrics):
    """Let metrics end in the name of their teacher where there are several."""
    if len(state.teachers) == 1:
        return metrics
    return {f"{key}/{setup.name}": value for key, value in metrics.items()}
