"""Give a model another tokenizer: the student of a run whose teacher is the model as it was.

    isogloss transfer --model HuggingFaceTB/SmolLM2-135M --tokenizer openai-community/gpt2 \\
        --output student

All weights stay but the embedding and the head, whose rows for the new tokens are made of those of
the old ones (projection_tools/retokenize.py).  Files are read and written one at a time, so that a
model of many files never is in memory; it is loaded once, from the new files, to choose the
head's offset on a text and to say bits per byte before and after (--head_offset 0 does neither).

Tests: tests/test_transfer.py.
"""

import copy
import json
import math
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pydoc_data import topics

from isogloss.command import tool

if __name__ == "__main__":  # flags come before torch is imported
    raise SystemExit(tool("transfer"))

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import cached_file

from isogloss.align import TokenTable
from isogloss.checkpoints.export_files import check_output, write_folder
from isogloss.data.ends import load_generation
from isogloss.flags.model_names import read_model_name
from isogloss.models.pretrained import (
    check_language_model,
    load_config,
    load_model,
    quantization_of,
)
from isogloss.models.tied import empty_model, is_tied, untie_as_files_do
from isogloss.projection_tools.retokenize import (
    OFFSETS,
    common_direction,
    new_rows,
    origins_of,
)
from isogloss.projection_tools.tokenizers import load_tokenizer, reading, reason_of
from isogloss.spelling import CHARACTER_OF_BYTE
from isogloss.tiles import head_of

PLAIN = "F32", "F16", "BF16", "F64"  # types of numbers in a file that are no code
INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
BYTES = "bytes"  # the name of a tokenizer of single bytes
SHOWN_BYTES = 4000  # of the texts on which the offset is chosen, and of those that are reported
TEXT_BYTES = 400  # of a text
IDS = "bos_token_id", "eos_token_id", "pad_token_id"


# --- files of the model ---------------------------------------------------------------------------


@dataclass
class Files:
    """Say where a model's weights are.

    Attributes:
        path_of: {name of a file: path}.
        file_of: {name of a tensor: name of its file}.
        shape_of: {name of a tensor: its shape}; () where its numbers are packed or of 8 bits.
        index: of the directory, or None.
    """

    path_of: dict
    file_of: dict
    shape_of: dict
    index: dict | None


def files_of(role, path):
    """Return the Files of a model.

    Raises:
        ValueError: its weights are not in safetensors.
    """
    name = read_model_name(role, path)
    if name.adapter:
        raise ValueError(f"--{role} {path}: is an adapter; merge it into its model first (export "
                         "with --merge)")
    find = partial(cached_file, name.base, revision=name.revision,
                   _raise_exceptions_for_missing_entries=False)
    with reading(role, path, "its weights"):
        whole = find(WEIGHTS)  # transformers looks for it first
        index_path = None if whole else find(INDEX)
        index = json.loads(Path(index_path).read_text()) if index_path else None
        names = sorted(set(index["weight_map"].values())) if index else [WEIGHTS]
        paths = {file: find(file) for file in names} if index or whole else {}
    if not paths or None in paths.values():
        raise ValueError(f"--{role} {path}: has no {WEIGHTS}; save_pretrained of transformers "
                         "writes one of a model in another format")
    files = Files(paths, {}, {}, index)
    with reading(role, path, "its weights"):
        for file, place in paths.items():
            with safe_open(place, "pt") as tensors:
                for name in tensors.keys():
                    weight = tensors.get_slice(name)
                    is_plain = weight.get_dtype() in PLAIN
                    files.file_of[name] = file
                    files.shape_of[name] = tuple(weight.get_shape()) if is_plain else ()
    return files


def vocabulary_tensors(role, path, config, files, trust_remote_code):
    """Return {name in the files: "embedding", "head" or "bias"} of the rows of the vocabulary.

    Raises:
        ValueError: the model has further weights with a row for each token, or its files do not
            have those that are known, in numbers.
    """
    model = empty_model(config, trust_remote_code)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    ends = {"embedding": model.get_input_embeddings(), "head": model.get_output_embeddings()}
    kinds = {}
    for name in _names_that_grow(config, parameters, trust_remote_code):
        parameter = parameters[name]
        if parameter is getattr(ends["head"], "bias", None):
            kinds[name] = "bias"
        elif parameter is getattr(ends["head"], "weight", None) and \
                name.startswith(_name_of(model, ends["head"])):
            kinds[name] = "head"
        elif parameter is getattr(ends["embedding"], "weight", None):
            kinds[name] = "embedding"
        else:
            raise ValueError(f"--{role} {path}: {name} has a row for each token too, which this "
                             "does not know to make; it cannot be given another tokenizer")
    names = _names_in_files(model, kinds, files)
    for name, kind in kinds.items():
        if name not in names and not (kind == "head" and is_tied(model)):
            raise ValueError(
                f"--{role} {path}: its files have no weight that is the {kind}, "
                f"{tuple(parameters[name].shape)} numbers of 16 or 32 bits; expected one model as "
                "save_pretrained writes it, of which this is not quantized")
    return {names[name]: kind for name, kind in kinds.items() if name in names}


def _names_that_grow(config, parameters, trust_remote_code):
    """Return the names of the parameters that a model with one token more has larger."""
    larger = copy.deepcopy(config)
    larger.get_text_config().vocab_size += 1
    model = empty_model(larger, trust_remote_code)
    return [name for name, each in model.named_parameters(remove_duplicate=False)
            if name in parameters and each.shape != parameters[name].shape]


def _name_of(model, module):
    """Return the name of a module with a dot behind, or what no name begins with."""
    found = [name for name, each in model.named_modules() if each is module]
    return f"{found[0]}." if found else "\0"


def _names_in_files(model, kinds, files):
    """Return {name of a parameter: name in the files}, of those that the files have in numbers.

    Files may call it by another name, as embed_out of GPT-NeoX, or by another beginning.
    """
    names = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in kinds:
        [saved_as] = revert_weight_conversion(model, {name: parameters[name]})
        ending = "." + ".".join(saved_as.split(".")[-2:])
        alike = [each for each in files.shape_of if f".{each}".endswith(ending)]
        exact = [each for each in alike if each == saved_as] or alike
        if len(exact) == 1 and files.shape_of[exact[0]] == parameters[name].shape:
            names[name] = exact[0]
    return names


def write_weights(files, kinds, make, folder):
    """Write the files of a model with new rows of the vocabulary, one after the other.

    Args:
        kinds: {name of a tensor: its kind}.
        make: function of the old rows and the kind that returns the new ones.
    """
    total = 0
    for file, path in files.path_of.items():
        changed = {name for name in kinds if files.file_of[name] == file}
        if not changed:
            shutil.copyfile(path, folder / file)
            total += _bytes_of(path)
            continue
        with safe_open(path, "pt") as tensors:
            weights = {name: tensors.get_tensor(name) for name in tensors.keys()}
        for name in changed:
            weights[name] = make(weights[name], kinds[name])
        total += sum(tensor.nbytes for tensor in weights.values())
        save_file(weights, folder / file, metadata={"format": "pt"})
    if files.index:
        index = files.index | {"metadata": files.index.get("metadata", {}) | {"total_size": total}}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _bytes_of(path):
    """Return the bytes of the tensors of a file, by its header."""
    with open(path, "rb") as file:
        header = int.from_bytes(file.read(8), "little")
    return Path(path).stat().st_size - 8 - header


# --- tokenizers and what names their tokens -------------------------------------------------------


def byte_tokenizer(model_tokenizer):
    """Return a tokenizer of the 256 bytes and the control tokens of another one."""
    vocab = {CHARACTER_OF_BYTE[byte]: byte for byte in range(256)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    roles = model_tokenizer.special_tokens_map
    roles = {role: token for role, token in roles.items() if isinstance(token, str)}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **roles)


def load_new_tokenizer(args, old_tokenizer, old):
    """Return (tokenizer, TokenTable) of --tokenizer, with the chat template of --chat_template.

    The old template brings the control tokens that it writes.
    """
    if args.tokenizer == BYTES:
        tokenizer = byte_tokenizer(old_tokenizer)
    else:
        tokenizer, _ = load_tokenizer("tokenizer", args.tokenizer, args.trust_remote_code)
    template = args.chat_template
    if template == "auto":
        template = "tokenizer" if tokenizer.chat_template else "model"
    if args.chat_template == "model" and not old_tokenizer.chat_template:
        raise ValueError(f"--chat_template model: {args.model} has none; leave the flag out")
    if template == "model" and old_tokenizer.chat_template:
        text = str(old_tokenizer.chat_template)
        written = [old.tokens[i] for i in old.special.nonzero()[0] if old.tokens[i]
                   and (old.tokens[i] in text or i in (old.eos, old.end_of_turn))]
        tokenizer.add_tokens(written, special_tokens=True)
        tokenizer.chat_template = old_tokenizer.chat_template
    return tokenizer, TokenTable.from_tokenizer(tokenizer)


def new_ids(old_ids, origins):
    """Return all new ids that stand for old control tokens, in the order of these."""
    return [new for i in old_ids for new, old in origins.links.items() if old == i]


def config_text(role, path, config, origins):
    """Return the model's config.json as a dict, with the new number of rows and the new ids.

    Args:
        config: of the model, untied where its files are.
    """
    name = read_model_name(role, path)
    with reading(role, path, "its config.json"):
        text = Path(cached_file(name.base, "config.json", revision=name.revision)).read_text()
        new = json.loads(text)
    levels = [level for level in (new, new.get("text_config")) if isinstance(level, dict)]
    inner = levels[-1]
    for level in levels:
        for key in IDS:
            if key in level or level is inner:  # what a class says by default is of other tokens
                token = getattr(origins.new, key.removesuffix("_token_id"))
                level[key] = token if token >= 0 else None
    for level in levels:
        if "vocab_size" in level or level is inner:
            level["vocab_size"] = len(origins.new)
        if "tie_word_embeddings" in level or level is inner:
            level["tie_word_embeddings"] = bool(config.get_text_config().tie_word_embeddings)
    return new


def generation_of(generation, origins):
    """Return what generation_config.json says with new ids: its ends are the old ones and eos."""
    table = origins.new
    ends = generation.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    ends = list(dict.fromkeys([*new_ids(ends, origins), *([table.eos] if table.eos >= 0 else [])]))
    new = {key: value for key, value in generation.items()
           if not key.startswith("_") and not key.endswith(("_id", "_ids"))
           and not key.startswith(("suppress_", "begin_suppress_", "bad_words", "forced_",
                                    "sequence_bias"))}
    new["eos_token_id"] = ends if len(ends) > 1 else next(iter(ends), None)
    for role in ("bos", "pad"):
        if getattr(table, role) >= 0:
            new[f"{role}_token_id"] = getattr(table, role)
    return new


# --- how good it is -------------------------------------------------------------------------------


def sample_texts(path):
    """Return (texts to choose on, texts to report), of a file or of the interpreter's pages.

    Raises:
        ValueError: the file cannot be read, or is too short.
    """
    if path:
        with reading("texts", path, "its text"):
            text = Path(path).read_text(encoding="utf-8", errors="replace")
        if len(text) <= TEXT_BYTES:
            raise ValueError(f"--texts {path}: has {len(text)} characters; expected more than "
                             f"{TEXT_BYTES}, of which some choose and others are reported")
    else:
        text = "\n".join(text for _, text in sorted(topics.topics.items()))
    texts = [text[first : first + TEXT_BYTES] for first in range(0, len(text), TEXT_BYTES)]
    half = min(SHOWN_BYTES // TEXT_BYTES, len(texts) // 2)
    step = max(1, len(texts) // max(1, 2 * half))
    spread = texts[::step]
    return spread[: 2 * half : 2], spread[1 : 2 * half : 2]


def batches_of(model, tokenizer, table, texts):
    """Yield (1, S) ids of each text, behind bos or, where there is none, eos.

    A text that is longer than the model's context comes in several.
    """
    start = table.bos if table.bos >= 0 else table.eos
    prefix = [start] if start >= 0 else []
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    size = (context or 4 * TEXT_BYTES) - len(prefix)
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        for first in range(0, len(ids), size):
            yield torch.tensor([prefix + ids[first : first + size]])


@torch.no_grad()
def bits_per_byte(model, tokenizer, table, texts):
    """Return bits of all texts over their bytes."""
    nats = 0.0
    for ids in batches_of(model, tokenizer, table, texts):
        logits = model(ids.to(model.device)).logits[0, :-1].float().cpu()
        nats += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
    return nats / math.log(2) / max(1, sum(len(text.encode()) for text in texts))


@torch.no_grad()
def hidden_states(model, tokenizer, table, texts):
    """Return (what the head of a model reads of some texts, what follows): (S, H), (S,)."""
    read = []
    labels = []
    head = model.get_output_embeddings()
    handle = head.register_forward_pre_hook(lambda _, arguments: read.append(arguments[0][0, :-1]))
    for ids in batches_of(model, tokenizer, table, texts):
        model(ids.to(model.device))
        labels.append(ids[0, 1:])
    handle.remove()
    return torch.cat(read).float().cpu(), torch.cat(labels)


@torch.no_grad()
def choose_offset(model, tokenizer, origins, texts):
    """Return what to add to the rows of the head, (N, H), and its nats.

    Of the offsets up to the first that is no better it is the best.  Hidden states stay those of
    the embedding without an offset, also where it is the head.
    """
    hidden_SH, labels_S = hidden_states(model, tokenizer, origins.new, texts)
    head = head_of(model, len(origins.new))
    weight_NH = head.weight_VH.float().cpu()
    bias_N = None if head.bias_V is None else head.bias_V.float().cpu()
    several_N = torch.from_numpy(origins.num_pieces_N > 1)
    shift_NH = several_N[:, None] * common_direction(hidden_SH)
    best = 0.0
    least = math.inf
    for offset in OFFSETS:
        shifted = head.with_tensors(weight_NH - offset * shift_NH, bias_N, None, None)
        logits_SN = shifted.finish(shifted.linear(hidden_SH))
        loss = float(torch.nn.functional.cross_entropy(logits_SN, labels_S))
        if loss >= least:
            break
        least = loss
        best = offset
    return -best * shift_NH, best


@torch.no_grad()
def with_new_rows(model, origins):
    """Give a model the rows of the new tokens, in place."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    rows = [new_rows(end.weight.cpu(), origins) for end in ends]
    biases = [getattr(end, "bias", None) for end in ends]
    model.resize_token_embeddings(len(origins.new), mean_resizing=False)
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    for end, weight, bias in zip(ends, rows, biases):
        end.weight.copy_(weight)
        if bias is not None:
            end.bias.copy_(new_rows(bias.cpu(), origins))


def offset_of(args, origins, tokenizer, old_tokenizer, texts):
    """Choose the head's offset on texts; print bits per byte of the model, and of what it becomes.

    Where the whole model is no better by it on the texts to choose on, as where the head is the
    embedding, which it changes too, there is none.

    Args:
        texts: (to choose on, to report).
    Returns:
        what to add to the rows of the head: (N, H), or 0.0.
    """
    chosen_on, reported = texts
    model = load_model("model", args.model, args.trust_remote_code, dtype="auto").eval()
    if torch.cuda.is_available():
        model.to("cuda")
    bits = {"the model as it was": bits_per_byte(model, old_tokenizer, origins.old, reported)}
    with_new_rows(model, origins)
    now = partial(bits_per_byte, model, tokenizer, origins.new)
    bits["means of pieces"] = now(reported)
    before = now(chosen_on)
    shift, nats = choose_offset(model, tokenizer, origins, chosen_on)
    head = model.get_output_embeddings().weight
    means = head.detach().clone()
    with torch.no_grad():
        head += shift.to(head)
        if now(chosen_on) >= before:
            head.copy_(means)
            shift, nats = 0.0, 0.0
    bits[f"with {nats:g} nats less for tokens of several pieces"] = now(reported)
    text = ", ".join(f"{value:.3f} {what}" for what, value in bits.items())
    num_bytes = sum(len(text.encode()) for text in reported)
    print(f"bits per byte of {len(reported)} texts ({num_bytes:,} bytes): {text}", flush=True)
    return shift


def main(args):
    """Write the model with its new tokenizer, and say what became of it."""
    check_output("--output", args.output, [("--model", args.model),
                                           ("--tokenizer", args.tokenizer)])
    texts = sample_texts(args.texts) if args.head_offset else None
    config = load_config("model", args.model, args.trust_remote_code)
    check_language_model("model", args.model, config)
    if quantization_of(config):
        raise ValueError(f"--model {args.model}: its weights are quantized "
                         f"({quantization_of(config)}); name the model that they were made of")
    untie_as_files_do("model", args.model, config, args.trust_remote_code)
    old_tokenizer, old = load_tokenizer("model", args.model, args.trust_remote_code)
    tokenizer, new = load_new_tokenizer(args, old_tokenizer, old)
    files = files_of("model", args.model)
    kinds = vocabulary_tensors("model", args.model, config, files, args.trust_remote_code)
    generation = load_generation("model", args.model, config, old_tokenizer)
    origins = origins_of((old_tokenizer, tokenizer), (old, new),
                         config.get_text_config().vocab_size)
    print(*origins.summary(), sep="\n", flush=True)
    shift = 0.0
    if args.head_offset:
        shift = offset_of(args, origins, tokenizer, old_tokenizer, texts)
    # an embedding that is the head too may lie in the files under both names
    is_one = config.get_text_config().tie_word_embeddings or "head" not in kinds.values()
    shifted = ("embedding", "head") if is_one else ("head",)

    def make(rows, kind):
        made = new_rows(rows, origins)
        return (made + shift).to(rows.dtype) if kind in shifted else made

    def save(folder):
        folder.mkdir(parents=True)
        write_weights(files, kinds, make, folder)
        tokenizer.save_pretrained(folder)
        if getattr(config, "auto_map", None):  # its code comes along
            for each in config, empty_model(config, args.trust_remote_code):
                custom_object_save(each, folder)
        for name, content in (
                ("config.json", config_text("model", args.model, config, origins)),
                ("generation_config.json", generation_of(generation, origins))):
            (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")

    try:
        write_folder(save, args.output, "--output")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"--output {args.output}: cannot be written ({reason_of(error)})") \
            from None
    load_tokenizer("output", args.output, args.trust_remote_code)  # warns of what transformers does
    print(f"{args.output}: a student, whose teacher is {args.model}")
