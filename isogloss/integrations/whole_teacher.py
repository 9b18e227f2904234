"""Keep a trainer's ZeRO-3, which shards the student, away from the teacher.

Tests: tests/test_integrations.py.
"""

from transformers.integrations import deepspeed

from isogloss.models.pretrained import load_model


def load_whole(name):
    """Return a teacher with all its weights, on every rank.

    While TrainingArguments with ZeRO-3 live, transformers loads every model in parts, for an engine
    that gathers them: a teacher has none.
    """
    known = getattr(deepspeed, "_hf_deepspeed_config_weak_ref", None)
    config = known and known()
    if config is None:
        return load_model("teacher", name, dtype="auto")
    deepspeed.unset_hf_deepspeed_config()
    try:
        return load_model("teacher", name, dtype="auto")
    finally:
        deepspeed.set_hf_deepspeed_config(config)


def check_whole(model):
    """Raise a ValueError if a teacher has parts of its weights on other ranks."""
    for name, weight in model.named_parameters():
        if hasattr(weight, "ds_id"):
            raise ValueError(
                f"teacher: ZeRO-3 has left each rank a part of {name}, as transformers loads "
                "models where the settings of a trainer ask for it; give the teacher's name, of "
                "which every rank loads a whole copy, or load it before you make the settings")
