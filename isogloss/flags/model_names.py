"""Read what a user names a model by, and say names where others read them.

    Qwen/Qwen3-0.6B            the newest version on the hub
    Qwen/Qwen3-0.6B@v1.0       a branch, a tag or a commit of it
    runs/a/student             a directory with config.json
    runs/b/adapter             one with adapter_config.json, which names the model below it

What leaves the process, in a line, a record or a model card, goes through `without_secrets`.

Tests: tests/test_adapters.py, tests/test_export.py.
"""

import os
import re
from typing import NamedTuple

ADAPTER_CONFIG = "adapter_config.json"

# Of an address: the scheme, a name and a password (which may hold a slash, as those of S3 do), and
# what stands behind a question mark.  Bounds keep a text without an end of a word cheap.
ADDRESS = re.compile(
    r"\b([A-Za-z][\w+.-]{0,30}://)"
    r"([^\s\"<>/]{0,500}@|[^\s\"<>/:@]{0,500}:(?!\d+/)[^\s\"<>]{0,500}@)?([^\s\"<>?]*)"
    r"(\?[^\s\"<>]*?(?=[:;,.)\]']*(?:[\s\"<>]|$)))?")
SECRET_NAME = (r"(?:\w*_)?(?:api[_-]?key|access[_-]token|auth[_-]token|hf_token|password|passwd|"
               r"secret(?:[_-]key)?)")
ASSIGNED = re.compile(rf"(?i)(\b{SECRET_NAME}[\"']?\s*[:=]\s*[\"']?)[^\s\"',}}]+")
OPTION = re.compile(  # of a command that a flag holds
    r"(?i)(--?(?:[\w-]{0,40}[_-])?(?:api[_-]?key|token|password|passwd|secret)(?:\s|=))"
    r"[^\s\"'-][^\s\"']*")
SECRET_KEY = re.compile(rf"(?i){SECRET_NAME}|token")
TOKEN = re.compile(r"\b(hf_|sk-|ghp_|github_pat_)[A-Za-z0-9]{16,}[\w-]*")
SECRET_VARIABLE = re.compile(r"(?i)(KEY|TOKEN|SECRET|PASSWORD)$")
HIDDEN = "***"


def without_secrets(value):
    """Return a text, or lists and dicts of them, in which stars stand for what is secret.

    That is a name and a password in an address, and its query, which may be signed; a token of the
    hub; the value of a key or a variable of the environment that is named after a secret.
    """
    secrets = [secret for name, secret in os.environ.items()
               if len(secret) >= 8 and SECRET_VARIABLE.search(name)]
    return _hide(value, secrets)


def _hide(value, secrets):
    if isinstance(value, dict):
        clean = {}
        for key, item in value.items():
            is_secret = isinstance(item, str) and item and SECRET_KEY.fullmatch(str(key))
            clean[_hide(key, secrets)] = HIDDEN if is_secret else _hide(item, secrets)
        return clean
    if isinstance(value, (list, tuple)):
        return [_hide(item, secrets) for item in value]
    if not isinstance(value, str):
        return value
    for secret in secrets:
        value = value.replace(secret, HIDDEN)
    value = OPTION.sub(rf"\g<1>{HIDDEN}", ADDRESS.sub(_public_address, value))
    return TOKEN.sub(rf"\g<1>{HIDDEN}", ASSIGNED.sub(rf"\g<1>{HIDDEN}", value))


def _public_address(match):
    scheme, user, rest, query = match.groups()
    return scheme + (f"{HIDDEN}@" if user else "") + rest + (f"?{HIDDEN}" if query else "")


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


def is_address(name):
    return str(name).lower().startswith(("http://", "https://"))


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
    from isogloss.flags.adapter_names import read_adapter_name

    return read_adapter_name(flag, name, folder)
