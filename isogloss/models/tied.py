"""Tell whether a model's head is its embedding, by its files and not by its config alone.

A config may say `tie_word_embeddings` beside files whose head was trained or resized apart.  For
that transformers has three answers: it leaves the two apart, under ZeRO-3 it drops the file's head,
and a model that is made of the config has one weight for both.  Here such a config is untied before
anyone uses it, so that the model that is trained, cut, copied and exported is that of the files.

Tests: tests/test_tied.py, tests/test_tied_exports.py.
"""

import contextlib
import copy
import functools
import logging
import os
from unittest import mock

import torch
import transformers.integrations.deepspeed
from transformers import AutoModelForCausalLM

from isogloss.flags.model_names import read_model_name
from isogloss.job.watch import print_line
from isogloss.projection_tools.tokenizers import reading


def untie_as_files_do(role, path, config, trust_remote_code=False, *, download=True):
    """Untie a config, in place, where the model's files hold a head of other values; say so once.

    Args:
        config: of the model.
        download: fetch the weights of a hub id; else only files that are here are looked at.
    Raises:
        ValueError: the weights cannot be read.
    """
    if not any(getattr(level, "tie_word_embeddings", False) for level in _levels(config)):
        return
    name = read_model_name(role, path)
    with reading(role, path, "its weights"):
        key = name, trust_remote_code, _stamps_of(name.base) or download
        if key not in _known:  # a job asks of each model several times
            _known[key] = _names_apart(name, config, trust_remote_code, download)
        names = _known[key]
    if names:
        _say_once(f"--{role} {path}: its config.json says tie_word_embeddings, but in its files "
                  f"{', '.join(names)} has other values than the embedding; both are kept, "
                  "untied, here and in what is exported")
        untie(config)


def untie(config):
    """Let a config have a head apart from the embedding, whichever of its levels says it."""
    for level in _levels(config):
        level.tie_word_embeddings = False


def untie_as_weights_do(config, weights, trust_remote_code=False):
    """Untie a config, in place, of which a model has one weight where these are two.

    Args:
        weights: {name: tensor}.
    Raises:
        ValueError: the code of the model ties them, whatever its config says.
    """
    if not _names_of_one(config, weights, trust_remote_code):
        return
    untie(config)
    names = _names_of_one(config, weights, trust_remote_code)
    if names:
        raise ValueError(f"the code of the model ties {' and '.join(names)}, which were trained "
                         "apart")


def _names_of_one(config, weights, trust_remote_code):
    """Return two names of one weight of a config's model that have other values; else None."""
    model = empty_model(config, trust_remote_code)
    names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in weights:
            first = names.setdefault(id(parameter), name)
            if not torch.allclose(weights[first], weights[name], 0, 0, equal_nan=True):
                return first, name
    return None


def empty_model(config, trust_remote_code=False):
    """Return a model of a config without values."""
    config = copy.deepcopy(config)  # from_config writes dtype and attention into it
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def is_tied(model):
    """Tell whether a model's head and embedding are one weight."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def check_code(role, path, model):
    """Raise a ValueError where the code of a model ties what its files hold twice.

    Such a model is loaded with two weights, and made of its config with one.
    """
    if not getattr(model.config, "auto_map", None) or is_tied(model) or model.all_tied_weights_keys:
        return
    if is_tied(empty_model(model.config, trust_remote_code=True)):
        raise ValueError(f"--{role} {path}: its code ties its head to the embedding whatever its "
                         "config.json says, and its files hold both; take that out of its code, "
                         "or the head out of its files and name it in _tied_weights_keys")


def _levels(config):
    return config, config.get_text_config()


_known = {}  # {where files are and what they are like: names of weights}


def _stamps_of(base):
    """Return (name, bytes, time of the last change) of each file of a directory; () of a hub id."""
    folder = os.path.expanduser(base)
    stamps = []
    for file in os.scandir(folder) if os.path.isdir(folder) else []:
        if file.is_file():
            about = file.stat()
            stamps.append((file.name, about.st_size, about.st_mtime_ns))
    return tuple(sorted(stamps))


def _names_apart(name, config, trust_remote_code, download):
    """List the weights that a config ties to others, and whose values in the files differ.

    Which names the files hold is known from their headers; only those of both ends are read.
    """
    load = functools.partial(
        AutoModelForCausalLM.from_pretrained, name.base, revision=name.revision, config=config,
        trust_remote_code=trust_remote_code, ignore_mismatched_sizes=True, dtype=torch.float32,
        local_files_only=not download)
    with _whole_and_silent():
        model, info = load(device_map="meta", output_loading_info=True)
        of_another_shape = {name for name, *_ in info["mismatched_keys"]}  # `load_model` refuses
        devices = {"": "meta"}
        for pair in model.all_tied_weights_keys.items():
            # an end that the files lack is the other end by now
            are_two = len({id(model.get_parameter(end)) for end in pair}) == 2
            if are_two and not of_another_shape.intersection(pair):
                devices |= {end.rpartition(".")[0]: "cpu" for end in pair}
        if len(devices) == 1:
            return []
        # transformers goes on to tie those that are equal
        equal = load(device_map=devices).all_tied_weights_keys
    return sorted(model.all_tied_weights_keys.keys() - equal.keys())


@contextlib.contextmanager
def _whole_and_silent():
    """Let transformers load whole models, as outside of ZeRO-3, and not warn of what it finds."""
    transformers.utils.logging.disable_progress_bar()
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with mock.patch.object(transformers.integrations.deepspeed,
                               "_hf_deepspeed_config_weak_ref", None):
            yield
    finally:
        logging.disable(disabled)


@functools.cache
def _say_once(line):
    if os.environ.get("RANK", "0") == "0":
        print_line(line)
