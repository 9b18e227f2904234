"""Say in one line what is wrong with the files of a model.

Tests: tests/test_pretrained.py.
"""

import re
from pathlib import Path

from isogloss.flags.model_names import read_model_name

# Masks and constants that earlier versions of transformers wrote beside the weights.
OLD_BUFFERS = re.compile(r"(masked_bias|(attn|attention)\.bias|inv_freq|position_ids)$")


NAMES_SHOWN = 3  # of tensors or files, in a message


WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt", ".h5", ".msgpack", ".npz"}


def check_names(role, path, info, model):
    """Raise a ValueError for files that do not fit a model, by what `from_pretrained` reports."""
    wrong = []
    if info["missing_keys"]:
        wrong.append(f"missing: {_some(info['missing_keys'])}")
    left_over = [name for name in info["unexpected_keys"] if _belongs_to_a_layer(name, model)]
    if left_over:
        wrong.append(f"left over: {_some(left_over)}")
    shapes = []
    for name, in_file, in_model in info["mismatched_keys"]:
        shapes.append(f"{name} {list(in_file)} in place of {list(in_model)}")
    if shapes:
        wrong.append(f"of another shape: {_some(shapes)}")
    if wrong:
        raise ValueError(f"--{role} {path}: its weights are not those of its config.json "
                         f"({'; '.join(wrong)}); use the files of one model, as save_pretrained "
                         "writes them")


def _some(names):
    """Return the first of some names as text, and how many there are."""
    names = sorted(names)
    text = ", ".join(names[:NAMES_SHOWN])
    more = len(names) - NAMES_SHOWN
    return f"{text} and {more} more" if more > 0 else text


def _belongs_to_a_layer(name, model):
    """Return whether a tensor without a parameter would be part of one of the model's layers.

    It would change what the layer computes.  Whole parts that a language model has no use for,
    such as an image encoder or a value head, do not.
    """
    if OLD_BUFFERS.search(name):
        return False
    modules = {_without_numbers(module) for module, _ in model.named_modules()}
    leaves = {_without_numbers(parameter).rpartition(".")[0]
              for parameter, _ in model.named_parameters()}
    for full_name in (name, f"{model.base_model_prefix}.{name}"):  # a file may lack the prefix
        pattern = _without_numbers(full_name)
        layers, number, _ = pattern.partition(".*")
        if pattern.rpartition(".")[0] in leaves or (number and layers in modules):
            return True
    return False


def _without_numbers(name):
    """Return a tensor's name with * for the numbers of layers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def without_weights(role, path, error):
    """Return what to say of a directory in which transformers finds no weights."""
    base = Path(read_model_name(role, path).base).expanduser()
    files = sorted(file.name for file in base.iterdir() if file.suffix in WEIGHTS)
    if files:  # --from_scratch would train noise in their place
        return (f"--{role} {path}: holds {_some(files)}, but no model.safetensors, nor a "
                "model.safetensors.index.json by which shards are read; fetch that file of the "
                "model, too, or write the model anew with save_pretrained")
    return f"{error}; --from_scratch starts from random weights" if role == "student" else error
