"""Check that --attention flash_attention_2 can run.

Tests: tests/test_wrong_flags.py.
"""

import torch
from transformers.utils import is_flash_attn_2_available

from isogloss.config import configs_by_teacher
from isogloss.models import pretrained


def check_flash_attention(cfg, ds_config):
    """Raise a ValueError where --attention flash_attention_2 cannot run."""
    if not is_flash_attn_2_available():
        raise ValueError("--attention flash_attention_2: needs a CUDA device and the package "
                         "flash-attn, and one of them is missing; use sdpa")
    precision = "--attention flash_attention_2: needs bfloat16 or float16, and"
    is_half = any(ds_config.get(name, {}).get("enabled") for name in ("bf16", "fp16"))
    if not is_half and cfg.sequence_parallel == 1:
        raise ValueError(f"{precision} {cfg.ds_config} leaves the student in float32; enable bf16 "
                         "there, or use sdpa")
    for teacher_cfg in configs_by_teacher(cfg).values() if cfg.kd_weight else ():
        if not teacher_cfg.teacher_kind.has_weights:
            continue
        dtype = teacher_cfg.teacher_dtype
        if dtype == "auto":
            config = pretrained.load_config("teacher", teacher_cfg.teacher, cfg.trust_remote_code)
            dtype = str(config.dtype or torch.float32).removeprefix("torch.")
        if dtype == "float32":
            raise ValueError(f"{precision} --teacher {teacher_cfg.teacher} is in float32; use "
                             "--teacher_dtype bfloat16, or --attention sdpa")
