"""Balance the experts of a student: the loss of its routers, over all tokens of a step.

loss = E sum_e f_e P_e, with the share f_e of tokens that have expert e among their choices, and the
mean P_e of its probability, over layers and tokens (Switch Transformers, arXiv:2101.03961,
equations 4 to 6, as `load_balancing_loss_func` of transformers has it).  Its gradient flows through
P alone, so f is counted first: over all micro-batches and ranks of the step, without padding.  So
the gradient does not depend on how a step is divided.

Tests: tests/test_families.py.
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist

from isogloss.job.counts import device_sums
from isogloss.job.transfers import Readback
from isogloss.job.watch import print_line


def router_weight(cfg, config):
    """Return the weight of the routers' loss: --router_weight, or what the student's config says.

    Args:
        config: of the student, its text part.
    Raises:
        ValueError: its model has no such loss.
    """
    coefficient = getattr(config, "router_aux_loss_coef", None)
    asks = bool(getattr(config, "output_router_logits", False)) and coefficient is not None
    wanted = cfg.router_weight > 0 or cfg.freeze_router
    if wanted and coefficient is None:
        flag = "freeze_router" if cfg.freeze_router else f"router_weight {cfg.router_weight:g}"
        raise ValueError(f"--{flag}: --student {cfg.student} is a {config.model_type} model, whose "
                         "router, if there is one, has no loss in transformers; leave it out")
    if cfg.freeze_router:
        return 0.0
    weight = cfg.router_weight if cfg.router_weight >= 0 else float(asks and coefficient)
    if not weight or cfg.pipeline_parallel == 1:
        return weight
    if dist.get_rank() == 0:
        print_line(f"--student {cfg.student}: its config.json asks for the loss of its router "
                   "(output_router_logits); a pipeline learns without it")
    return 0.0


def change(model, cfg):
    """Train no router of a student."""
    for router in routers_of(model)[0]:
        router.requires_grad_(False)


class RouterBalance:
    """Add the loss of the routers to that of every micro-batch of a step.

    Attributes:
        weight: of the loss, whose terms are all tokens of the step.
        totals: (E + 1,) float64, how many tokens of the step choose each expert in each layer, and
            tokens x layers; None: its one micro-batch has still to tell.
        probability_E: sum of the probabilities of each expert, over this rank's part of the step.
    """

    def __init__(self, model, weight):
        self.weight = weight
        self.chosen = model.config.get_text_config().num_experts_per_tok
        self.routers, self.index = routers_of(model)
        self.heard = None  # what routers say, while something listens
        for router in self.routers:
            router.register_forward_hook(self._hear)

    def _hear(self, router, _, output):
        if self.heard is not None:  # not when backward computes it again
            self.heard.append(output[self.index])

    @contextmanager
    def listening(self):
        """Yield the list of the routers' logits, (tokens, E) each, of the forward pass inside."""
        self.heard = heard = []
        try:
            yield heard
        finally:
            self.heard = None

    def begin(self, engine, micro_batches):
        """Count what the tokens of several micro-batches choose: the student reads them once more.

        Args:
            engine: DeepSpeed engine of a StudentWithLoss; micro_batches: Batches on the device.
        """
        self.scale = self.weight * dist.get_world_size() * len(micro_batches)
        self.totals = None
        self.probability_E = 0
        if len(micro_batches) == 1:
            return
        engine.eval()
        with torch.no_grad():
            counts = [engine(batch.student, ExpertChoices(self)) for batch in micro_batches]
        engine.train()
        self.totals = device_sums(torch.stack(counts).sum(0))

    def choices(self, heard, is_text):
        """Return (E + 1,) float64: see `totals`, of a micro-batch.

        Args:
            is_text: (B, S) bool, positions that hold no padding.
        """
        counts = 0
        for logits in heard:
            chosen = torch.zeros_like(logits, dtype=torch.float64)
            chosen.scatter_(1, logits.topk(self.chosen, -1).indices, 1.0)
            counts = counts + (chosen * is_text.flatten()[:, None]).sum(0)
        return torch.cat([counts, is_text.sum()[None].double() * len(heard)])

    def loss(self, heard, is_text):
        """Return this rank's part of the loss, weighed so that the engine's mean is that of a step.
        """
        if self.totals is None:
            self.totals = device_sums(self.choices(heard, is_text))
        probability_E = 0
        for logits in heard:
            probabilities = logits.float().softmax(-1) * is_text.flatten()[:, None]
            probability_E = probability_E + probabilities.sum(0)
        self.probability_E = self.probability_E + probability_E.detach()
        return self.scale * self._balance(probability_E)

    def _balance(self, probability_E):
        counts_E, rows = self.totals[:-1].float(), self.totals[-1].float()
        return len(counts_E) * (counts_E / rows * probability_E / rows).sum()

    def metrics(self):
        """Return the metrics of the step, Readbacks; all ranks call it."""
        loss = self._balance(device_sums(self.probability_E).float())
        load_E = self.totals[:-1] * len(self.totals[:-1]) / self.totals[-1] / self.chosen
        return {"router_loss": Readback(loss), "most_chosen_expert": Readback(load_E.max()),
                "least_chosen_expert": Readback(load_E.min())}


class ExpertChoices:
    """Tell `StudentWithLoss` to count what its routers choose, and to compute nothing else."""

    def __init__(self, balance):
        self.balance = balance

    def reduce(self, student_logits):
        """Make nothing of the logits."""

    def with_routers(self, _, heard, is_text):
        return self.balance.choices(heard, is_text)


def routers_of(model):
    """Return (the modules that choose experts, where their logits stand in what they return)."""
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model  # of an adapter
    recorder = (getattr(whole, "_can_record_outputs", None) or {}).get("router_logits")
    if recorder is None:
        return [], 0
    routers = [module for module in whole.modules() if isinstance(module, recorder.target_class)]
    return routers, recorder.index
