"""Train the input embedding and the head alone, for a whole run or for its first steps.

For a whole run the other weights are frozen before the engine starts: they have no gradient, no
master weight and no optimizer state.  For the first steps the engine starts with all weights, and
those that wait are in parameter groups of their own:

- they require no gradient while the student runs, so backward makes none, and they add nothing to
  the norm by which gradients are clipped;
- the optimizer leaves their groups out, so weight decay does not move them, and their moments and
  their count of steps begin with their own first step.

Between steps they look like all others, to checkpoints and to whoever copies the student.  The
engine's count of steps, which a checkpoint restores, says which phase it is.  Two runs, the second
from the export of the first, would be another thing: moments and schedule would begin anew.

Tests: tests/test_freezing.py.
"""

from contextlib import contextmanager
from functools import wraps

from isogloss.models.adapter_parts import end_parameters

WAITS = "waits"  # key of a parameter group: its weight decay, None: the optimizer's own


def waiting_weights(model):
    """List the trained parameters of a model that are neither of its embedding nor of its head."""
    ends = {id(weight) for _, weight in end_parameters(model)}
    return [weight for weight in model.parameters()
            if weight.requires_grad and id(weight) not in ends]


def waiting_groups(*groups):
    """Return parameter groups as those that wait, with their weight decay put aside.

    DeepSpeed's optimizer of 16-bit weights at ZeRO stage 0 takes a step without gradients at its
    start, in which decay would move them.
    """
    return [group | {"weight_decay": 0.0, WAITS: group.get("weight_decay")} for group in groups]


def change(model, cfg):
    """Freeze all weights but embedding and head for the whole run."""
    if not cfg.freeze_until:
        require_gradients(waiting_weights(model), False)


def prepare(state, inputs, stack):
    """Let the other weights of a student wait for the first steps."""
    if state.cfg.freeze_until:
        state.student.late = LateWeights(state.engine, state.cfg.freeze_until)


def require_gradients(weights, choice):
    for weight in weights:
        weight.requires_grad_(choice)


class LateWeights:
    """Hold all weights but embedding and head for the first steps of an engine.

    Attributes:
        num_steps: how many.
        weights: those that wait.
        description: what a user may want to know of it.
    """

    def __init__(self, engine, num_steps):
        """Raise a ValueError for an optimizer that does not keep the groups it is given."""
        self.engine = engine
        self.num_steps = num_steps
        self.weights = waiting_weights(engine.module.model)
        self.description = f"embedding and head alone learn in the first {num_steps} steps"
        optimizer = engine.basic_optimizer
        if not any(WAITS in group for group in optimizer.param_groups):
            raise ValueError(f"--freeze_until {num_steps}: {type(optimizer).__name__} makes "
                             "parameter groups of its own, which cannot wait; use AdamW")
        for group in optimizer.param_groups:
            if WAITS in group:
                own = optimizer.defaults.get("weight_decay", 0.0)
                group["weight_decay"] = own if group[WAITS] is None else group[WAITS]
        # of weights that ZeRO-3 leaves on the GPU when it offloads a part of the others
        for each in filter(None, (optimizer, getattr(engine.optimizer, "backup_optimizer", None))):
            self._let_wait(each)

    def wait(self):
        """Tell whether the next step is one of the first."""
        return self.engine.global_steps < self.num_steps

    @contextmanager
    def held(self):
        """Return the context of a step, in which weights that wait require no gradient."""
        holds = self.wait()
        if holds:
            require_gradients(self.weights, False)
        try:
            yield
        finally:
            if holds:
                require_gradients(self.weights, True)

    def _let_wait(self, optimizer):
        take_step = optimizer.step

        @wraps(take_step)  # schedules of torch look for a mark on it
        def step_of_others(*args, **options):
            groups = optimizer.param_groups
            if self.wait():
                optimizer.param_groups = [group for group in groups if WAITS not in group]
            try:
                return take_step(*args, **options)
            finally:
                optimizer.param_groups = groups

        optimizer.step = step_of_others
