"""Ask DeepSpeed about a ds_config before any weight is loaded, and start its engine.

What it would answer with a traceback of its own becomes one line.  Tests: tests/test_ds_config.py,
tests/test_wrong_flags.py.
"""

import copy
import inspect
import math
import warnings
from typing import NamedTuple

import deepspeed
import pydantic
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS, DeepSpeedConfig

# They need what a step here does not give: a closure, or sparse gradients.
UNUSABLE_OPTIMIZERS = {"Optimizer", "LBFGS", "SparseAdam"}
# Parameters of adam and adamw that DeepSpeed takes for itself.
OWN_ADAM_PARAMS = {"torch_adam", "adam_w_mode", "fp32_optimizer_states", "bias_correction"}


class DataParallelRanks(NamedTuple):
    """State how many ranks read samples of their own, as DeepSpeed asks for it."""

    count: int

    def get_data_parallel_world_size(self):
        return self.count


def check_with_deepspeed(config, path, num_data_parallel=None):
    """Ask DeepSpeed's own model of its configuration; try the optimizer and the schedule.

    Args:
        config: dict that the engine will get, every "auto" filled.
        path: of the file, for errors.
        num_data_parallel: ranks over which the engine averages gradients; None: all.
    Raises:
        ValueError: what DeepSpeed, the optimizer or the schedule refuses.
    """
    try:
        mpu = num_data_parallel and DataParallelRanks(num_data_parallel)
        parsed = DeepSpeedConfig(copy.deepcopy(config), mpu=mpu)
    except Exception as error:  # pydantic's, DeepSpeed's own, assertions
        raise ValueError(f"--ds_config {path}: {_reason(error)}") from None
    if parsed.float16_config.enabled and not get_accelerator().is_fp16_supported():
        raise ValueError(f"--ds_config {path}: fp16 is not supported on this device; use bf16")
    optimizer = _try_optimizer(config["optimizer"], path)
    if "scheduler" in config:
        _try_schedule(config["scheduler"], optimizer, path)


def _reason(error):
    if isinstance(error, pydantic.ValidationError):
        reasons = []
        for each in error.errors():
            place = ".".join(map(str, each["loc"]))
            reasons.append(f"{place}: {each['msg']} (got {each['input']!r:.60})")
        return f"{error.title} {'; '.join(reasons)}"
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _try_optimizer(section, path):
    """Return an optimizer of one number with these settings, or of the class that is nearest."""
    name = section.get("type")
    params = section.get("params", {})
    if not isinstance(name, str):
        raise ValueError(f"--ds_config {path}: optimizer.type is {name!r}, expected a name such "
                         "as AdamW")
    chosen = _optimizer_class(name, params, path)
    if name.lower() in ("adam", "adamw"):
        params = {key: value for key, value in params.items() if key not in OWN_ADAM_PARAMS}
    elif name.lower() in DEEPSPEED_OPTIMIZERS:
        # compiled ones; their values are checked where DeepSpeed builds them
        params = {"lr": params.get("lr", 1e-3)}
    try:
        return chosen([torch.nn.Parameter(torch.zeros(1))], **params)
    except Exception as error:
        known = sorted(set(inspect.signature(chosen).parameters) - {"params"})
        raise ValueError(f"--ds_config {path}: optimizer.params of {name}: {_reason(error)}; it "
                         f"takes {', '.join(known)}") from None


def _optimizer_class(name, params, path):
    """Return PyTorch's optimizer of that name, or AdamW in place of one of DeepSpeed's own."""
    if "max_grad_norm" in params:
        raise ValueError(f"--ds_config {path}: optimizer.params.max_grad_norm: expected "
                         "gradient_clipping, at the top level")
    if name.lower() in DEEPSPEED_OPTIMIZERS:
        return torch.optim.AdamW
    chosen = getattr(torch.optim, name, None)
    is_optimizer = isinstance(chosen, type) and issubclass(chosen, torch.optim.Optimizer)
    if not is_optimizer or name in UNUSABLE_OPTIMIZERS:
        raise ValueError(f"--ds_config {path}: optimizer.type {name!r}: expected AdamW, another "
                         f"of DeepSpeed's ({', '.join(DEEPSPEED_OPTIMIZERS)}) or a class of "
                         "torch.optim that steps without a closure")
    return chosen


def _try_schedule(section, optimizer, path):
    name = section.get("type")
    params = section.get("params", {})
    chosen = None
    if isinstance(name, str):
        chosen = getattr(lr_schedules, name, None) or getattr(torch.optim.lr_scheduler, name, None)
    if not isinstance(chosen, type) or not hasattr(chosen, "step"):
        raise ValueError(f"--ds_config {path}: scheduler.type {name!r}: expected one of "
                         f"{', '.join(lr_schedules.VALID_LR_SCHEDULES)} or a class of "
                         "torch.optim.lr_scheduler")
    known = sorted(set(inspect.signature(chosen).parameters) - {"optimizer"})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the optimizer has not stepped
            schedule = chosen(optimizer, **copy.deepcopy(params))
            schedule.step()
            schedule.step()
    except Exception as error:
        raise ValueError(f"--ds_config {path}: scheduler.params of {name}: {_reason(error)}; it "
                         f"takes {', '.join(known)}") from None
    rate = optimizer.param_groups[0]["lr"]
    if not math.isfinite(rate) or rate < 0:
        raise ValueError(f"--ds_config {path}: scheduler {name} gives a learning rate of {rate}; "
                         "check its params")


def start_deepspeed(path, **arguments):
    """Return deepspeed.initialize(**arguments); what it refuses becomes one line.

    Raises:
        ValueError: settings that do not go together, a missing compiler or package.
    """
    try:
        return deepspeed.initialize(**arguments)[0]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        where = f"--ds_config {path}: DeepSpeed does not start with it"
        if type(error).__module__.partition(".")[0] == "wandb":
            where = "wandb, of --wandb_project or ds_config (WANDB_MODE=offline needs no network)"
        raise ValueError(f"{where} ({type(error).__name__}: {_reason(error)})") from error
