"""Read what a user names a model by: a hub id, one revision of it, a directory, an adapter.

    Qwen/Qwen3-0.6B            the newest version on the hub
    Qwen/Qwen3-0.6B@v1.0       a branch, a tag or a commit of it
    runs/a/student             a directory with config.json
    runs/b/adapter             one with adapter_config.json, which names the model below it

Tests: tests/test_adapters.py.
"""

import json
import os
from pathlib import Path
from typing import NamedTuple

ADAPTER_CONFIG = "adapter_config.json"


class ModelName(NamedTuple):
    """Say where the files of a model are.

    Attributes:
        base: hub id or directory of its config and its weights.
        revision: branch, tag or commit of a hub id; None: the newest version.
        adapter: directory of the adapter on top of it, or None.
    """

    base: str
    revision: str | None = None
    adapter: str | None = None

    @property
    def of_tokenizer(self):
        """Keyword-free arguments of a tokenizer's `from_pretrained`: (place, revision)."""
        if self.adapter and os.path.isfile(os.path.join(self.adapter, "tokenizer_config.json")):
            return self.adapter, None
        return self.base, self.revision


def split_revision(name):
    """Return (hub id or directory, revision or None) of a name like org/name@revision."""
    base, at, revision = name.rpartition("@")
    if not at or os.path.isdir(os.path.expanduser(name)):
        return name, None
    return base, revision


def read_model_name(flag, name):
    """Return the ModelName of a name.

    Args:
        flag: that gives the name, for errors.
    Raises:
        ValueError: a revision of a directory; an adapter whose config names no base model, or which
            stands in one directory with another model.
    """
    base, revision = split_revision(name)
    folder = os.path.expanduser(base)
    if not os.path.isdir(folder):
        if revision == "":
            raise ValueError(f"--{flag} {name}: names no revision; expected org/name@revision")
        return ModelName(base, revision)
    if revision is not None:
        raise ValueError(f"--{flag} {name}: {base} is a directory, which has no revisions; leave "
                         f"out @{revision}")
    if not os.path.isfile(os.path.join(folder, ADAPTER_CONFIG)):
        return ModelName(base)
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
    except (OSError, ValueError, AttributeError):
        raise ValueError(f"--{flag} {name}: its {ADAPTER_CONFIG} cannot be read; expected a JSON "
                         "object, as peft writes it") from None
    if not base or not isinstance(base, str):
        raise ValueError(f"--{flag} {name}: its {ADAPTER_CONFIG} says base_model_name_or_path "
                         f"{base!r}; expected the hub id or the directory of its base model")
    return f"{base}@{revision}" if revision else base
