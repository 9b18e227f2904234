"""Read the directory of an adapter as the name of a model: the one below it, and the adapter.

Tests: tests/test_adapters.py.
"""

import json
import os
from pathlib import Path

from isogloss.flags.model_names import ADAPTER_CONFIG, ModelName, split_revision


def read_adapter_name(flag, name, folder):
    """Return the ModelName of an adapter's directory; see `read_model_name`."""
    if os.path.isfile(os.path.join(folder, "config.json")):
        raise ValueError(f"--{flag} {name}: holds {ADAPTER_CONFIG} beside a config.json; put the "
                         "adapter into a directory of its own")
    below, below_revision = split_revision(_base_of_adapter(flag, name, folder))
    if os.path.isfile(os.path.join(os.path.expanduser(below), ADAPTER_CONFIG)):
        raise ValueError(f"--{flag} {name}: is an adapter of an adapter ({below}); merge that one "
                         "into its base model first")
    return ModelName(below, below_revision, folder)


def _base_of_adapter(flag, name, folder):
    """Return the name of the model to which an adapter belongs, with its revision."""
    try:
        config = json.loads(Path(folder, ADAPTER_CONFIG).read_text(encoding="utf-8"))
        base = config.get("base_model_name_or_path")
        revision = config.get("revision")
    except (OSError, ValueError, AttributeError, RecursionError):
        raise ValueError(f"--{flag} {name}: its {ADAPTER_CONFIG} cannot be read; expected a JSON "
                         "object, as peft writes it") from None
    if not base or not isinstance(base, str):
        raise ValueError(f"--{flag} {name}: its {ADAPTER_CONFIG} says base_model_name_or_path "
                         f"{base!r}; expected the hub id or the directory of its base model")
    return f"{base}@{revision}" if revision else base
