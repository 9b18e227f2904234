"""Scale the distillation losses to the size of the cross-entropy, for --dynamic_scale.

Tests: tests/test_distributed.py.
"""

from dataclasses import dataclass

import torch

from isogloss.teachers.mixing import dynamic_scale


@dataclass
class ScaleHook:
    """Set the factors of the next step by this one's losses; a `build.StepHook`.

    Attributes:
        state: `build.TrainState`.
    """

    state: object

    def before_step(self, micro_batches):
        pass

    def after_step(self, report, micro_batches, parts):
        """Wait for the losses; a step without a term of one has no ratio, nor a skipped one."""
        state = self.state
        for number, setup in enumerate(state.teachers):
            kd = report.kd(number) or 0  # None: no term
            if kd > 0 and (report.ce or 0) > 0 and state.engine.was_step_applied():
                scale = dynamic_scale(torch.tensor(report.ce), torch.tensor(kd))
                state.scales[setup.name] = float(scale)


def prepare(state, inputs, stack):
    state.hooks.append(ScaleHook(state))
