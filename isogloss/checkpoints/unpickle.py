"""Read checkpoints without running what may hide in them: a pickle can hold any command.

Tests: tests/test_checkpoint.py.
"""

import pickle
from contextlib import contextmanager

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

# What DeepSpeed's checkpoints hold beside tensors and plain values.  None of these runs code.
CLASSES = DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address


def zero_stage(kind, name):
    """Stand in for getattr, by which Python 3.11 before 3.11.4 writes a member of an Enum.

    Raises:
        pickle.UnpicklingError: it would get something else.
    """
    if kind is not ZeroStageEnum:
        raise pickle.UnpicklingError(f"getattr of {kind}")
    return ZeroStageEnum[name]


@contextmanager
def known_classes_only(checkpoint):
    """Let torch.load make nothing but tensors, plain values and CLASSES, whoever calls it.

    DeepSpeed itself calls it with weights_only=False.

    Raises:
        ValueError: a file holds something else.
    """
    load = torch.load

    def load_known(*args, **options):
        return load(*args, **(options | {"weights_only": True}))

    torch.load = load_known
    try:
        with torch.serialization.safe_globals([*CLASSES, (zero_stage, "builtins.getattr")]):
            yield
    except pickle.UnpicklingError as error:
        reason = str(error).partition("Please file an issue")[0]
        raise ValueError(f"{checkpoint}: a file of it holds more than a checkpoint does, so it was "
                         f"not read; use a checkpoint that you trust ({reason})") from None
    finally:
        torch.load = load
