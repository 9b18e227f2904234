"""The tokens at which a student stops writing, and its generation_config.json, which names some.

A student learns here to end a text with eos, and a turn as its chat template ends it.  What it
came with stops at the end tokens of its generation_config.json.  It stops at all of these wherever
it writes: in rollouts, samples and tasks, and exported, in `generate` and in servers.

Tests: tests/test_ends.py, tests/test_export.py.
"""

import copy
import json
import os
from pathlib import Path

from transformers import GenerationConfig
from transformers.utils import cached_file

from isogloss.flags.model_names import read_model_name
from isogloss.job.files import write_atomically
from isogloss.projection_tools.tokenizers import reading

FILE = "generation_config.json"


def load_generation(role, path, config, tokenizer):
    """Return the generation_config.json of a model; without one, what transformers makes of config.

    Args:
        role: flag that names the model; path: its value.
        config, tokenizer: AutoConfig and tokenizer of the model.
    Raises:
        ValueError: it cannot be read, or names end tokens that the model cannot write.
    """
    # a tokenizer may have control tokens beyond the head, and the other way round
    limit = max(config.get_text_config().vocab_size, len(tokenizer))
    file = _file_of(role, path)
    if file is None:
        with reading(role, path, "the generation settings of its config"):
            generation = GenerationConfig.from_model_config(config).to_diff_dict()
        generation.pop("_from_model_config", None)  # it is to be read as a file from now on
        generation["eos_token_id"] = [end for end in _as_list(generation.get("eos_token_id"))
                                      if _is_id(end, limit)]
        return generation
    with reading(role, path, f"its {FILE}"):
        generation = json.loads(Path(file).read_text(encoding="utf-8"))
        if not isinstance(generation, dict):
            raise ValueError(f"a {type(generation).__name__}; expected a JSON object")
        GenerationConfig.from_dict(copy.deepcopy(generation))
    for end in _as_list(generation.get("eos_token_id")):
        if not _is_id(end, limit):
            raise ValueError(f"--{role} {path}: its {FILE} says eos_token_id {end!r}; expected "
                             f"ids below {limit}, which its lm_head or tokenizer has; use the "
                             "file of this model, or remove it")
    return generation


def _file_of(role, path):
    """Return the path of a model's generation_config.json, of an adapter its own one; or None."""
    name = read_model_name(role, path)
    if name.adapter and os.path.isfile(os.path.join(name.adapter, FILE)):
        return os.path.join(name.adapter, FILE)
    with reading(role, path, f"its {FILE}"):
        return cached_file(
            name.base, FILE, revision=name.revision, _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False)


def _as_list(ends):
    """Return end tokens as a list; files have a number, a list or nothing."""
    if ends is None:
        return []
    return ends if isinstance(ends, list) else [ends]


def _is_id(value, limit):
    return type(value) is int and 0 <= value < limit


def taught_ends(encoder):
    """List the tokens that a student, of this TextEncoder, learns to end texts and turns with."""
    table = encoder.table
    ends = [table.eos]
    if table.end_of_turn not in (-1, table.eos) or encoder.tokenizer.chat_template:
        ends.append(encoder.template_end)
    return [end for end in dict.fromkeys(ends) if end >= 0]


def all_ends(encoder):
    """List the end tokens of a TextEncoder's generation_config.json, then those it is taught."""
    ends = _as_list(encoder.generation.get("eos_token_id"))
    return list(dict.fromkeys([*ends, *taught_ends(encoder)]))


def turn_ends(encoder):
    """List the tokens that may end a turn of the assistant in a chat."""
    return [*all_ends(encoder), encoder.table.end_of_turn]


def stop_ids(encoder):
    """List the tokens that end what a student writes, in ascending order."""
    return sorted(end for end in all_ends(encoder) if end < len(encoder.table))


def write_generation(encoder, folder):
    """Write a student's generation_config.json as it was, with the ends that it was taught."""
    ends = all_ends(encoder)
    generation = encoder.generation | {"eos_token_id": ends[0] if len(ends) == 1 else ends}
    content = json.dumps(generation, indent=2, ensure_ascii=False)
    write_atomically(Path(folder) / FILE, content + "\n")
