"""Choose between PyTorch's Adam and DeepSpeed's own, which is compiled on first use.

Tests: tests/test_ds_config.py.
"""

import os
import warnings
from pathlib import Path

from deepspeed.git_version_info import installed_ops
from torch.utils.cpp_extension import CUDA_HOME, get_default_build_root


def choose_adam(config, on_gpu):
    """Let PyTorch's Adam take all weights of a GPU in one kernel, unless the file says how it does.

    It also takes the place of DeepSpeed's where that is not installed and cannot be compiled, or
    on a CPU gains nothing, but not of the one for offloaded state.

    Args:
        config: of a run, changed in place.
    """
    params = config["optimizer"]["params"]
    if str(config["optimizer"].get("type")).lower() not in ("adam", "adamw"):
        return
    is_offloaded = config.get("zero_optimization", {}).get("offload_optimizer")
    if not (on_gpu and has_own_adam()) and not is_offloaded and "bias_correction" not in params:
        params.setdefault("torch_adam", True)
    if not params.get("torch_adam"):
        warn_of_locks()
    elif on_gpu and not {"fused", "foreach", "differentiable"} & set(params):
        params["fused"] = True


def has_own_adam():
    """Tell whether DeepSpeed has its own Adam for CUDA, or CUDA's compiler to make it."""
    return installed_ops.get("fused_adam", False) or CUDA_HOME is not None


def warn_of_locks():
    """Warn of files for which DeepSpeed would wait without an end and without a word."""
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    for lock in folder.glob("**/*_adam/lock"):
        warnings.warn(f"{lock}: another process compiles DeepSpeed's Adam, or was killed while it "
                      "did; this run waits until the file is gone, so delete it if nobody does",
                      stacklevel=2)
