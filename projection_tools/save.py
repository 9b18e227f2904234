"""Write tables as files, by atomic rename.

Tests: tests/test_wrong_projections.py.
"""

import io
import json
import os
import secrets
from pathlib import Path

import torch

from isogloss.flags.tool import check_output


def save_atomically(tables, path):
    """Write tensors and plain values, as .safetensors or by torch.save.

    The file appears under its name when it is complete, or not at all.

    Raises:
        ValueError: it cannot be written there.
    """
    path = Path(path)
    check_output(path)
    buffer = io.BytesIO()  # torch.save would write a file's name into its content
    if path.suffix == ".safetensors":
        buffer.write(_safetensors(tables))
    else:
        torch.save(tables, buffer)
    # By chance, because processes of two machines may have one number.
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(scratch, "xb") as file:  # a new one: it follows no link that waits there
                file.write(buffer.getvalue())
            os.replace(scratch, path)
        finally:
            scratch.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written ({error.strerror}); name another file") \
            from None


def _safetensors(tables):
    from safetensors.torch import save

    tensors = {}
    plain = {}
    for key, value in tables.items():
        group = tensors if isinstance(value, torch.Tensor) else plain
        group[key] = value
    # One JSON text, because safetensors does not keep the order of several metadata keys.
    return save(tensors, metadata={"isogloss": json.dumps(plain)})


def tokenizer_metadata(pair):
    """Return what a file says of the tokenizers that it belongs to, by the names of its keys."""
    values = {"fingerprint": pair.fingerprints, "roles": pair.roles, "model_id": pair.names}
    metadata = {}
    for key, (student_value, teacher_value) in values.items():
        metadata[f"student_{key}"] = student_value
        metadata[f"teacher_{key}"] = teacher_value
    return metadata
