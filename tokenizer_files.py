"""Make a fast tokenizer of a model's files, also where no tokenizer.json is among them.

It is what transformers makes of these files, with what its converters leave out:

    tokenizer.model, spiece.model    SentencePiece: prefix, spaces and characters as the file says
    tokenizer.model, tiktoken.model  tiktoken: a token in base64 and its rank a line
    tekken.json                      Mistral: the roles, and the control tokens of early files
    Python code that comes with it   the tiktoken Encoding that this code makes

    tokenizer = load("path/of/a/model")

Needs transformers, tokenizers and sentencepiece.  Copy this file into your own repository.
License: Apache-2.0 (see LICENSE).  Tests: tests/test_tokenizer_files.py.
"""

import base64
import binascii
import json
import re
import warnings
from pathlib import Path
from unittest import mock

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Regex, decoders, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter, generate_merges
from transformers.integrations.mistral import tokenizer as mistral
from transformers.utils import cached_file

TEKKEN = "tekken.json"
TIKTOKEN = "tiktoken.model"
SENTENCEPIECE = "tokenizer.model"  # in which tiktoken files are, too
LINE_OF_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+=* [0-9]+\r?\n")
NORMAL, BPE = 1, 2  # a type of pieces, a type of models
METASPACE = "\u2581"  # how SentencePiece writes a space
ROLES = "bos_token", "eos_token", "unk_token", "pad_token"
ROLES_OF_TEKKEN = dict(zip(ROLES, ("<s>", "</s>", "<unk>", "<pad>")))
# Control tokens of tekken.json files that list none, by id, as mistral-common 1.13 has them.
EARLY_TEKKEN = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]",
    "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]")
# Text that tokenizers cut differently: spaces, breaks, digits, capitals, marks, many scripts.
PROBE = ("In 2010,  there\n\n wasn't a naïve 12345 \t e\u0301tude: Привет, 東京都は 「日本」。 "
         "สวัสดี مرحبا 👩‍👩‍👧\r\n"
         "    def f_x(x):\n\treturn x.toString()  # HTTP\n")
NEEDS_CODE = "its tokenizer is Python code that comes with it, and needs trust_remote_code"
WAY_OUT = ("load it with its own library, write a fast tokenizer with save_pretrained, and name "
           "that directory")
NO_TOKENIZER = ("it holds no tokenizer.json, and transformers makes no fast tokenizer of its other "
                f"files; {WAY_OUT}")


def load(place, revision=None, trust_remote_code=False):
    """Return the fast tokenizer of a directory or hub id.

    Args:
        trust_remote_code: run the Python code that comes with it.
    Raises:
        ValueError: transformers makes no fast tokenizer of it, or only by that code.
        Exception: whatever transformers says of damaged files.
    """
    if _file(place, "tokenizer.json", revision):
        return AutoTokenizer.from_pretrained(place, revision=revision, mistral_format=False,
                                             trust_remote_code=trust_remote_code)
    with mock.patch.object(TikTokenConverter, "load_tiktoken_bpe", staticmethod(read_tiktoken)):
        tokenizer = _made(place, revision, trust_remote_code)
    if not tokenizer.is_fast:
        return _of_code(tokenizer)
    proto = _sentencepiece(getattr(tokenizer, "vocab_file", None))
    if proto is not None:
        _cut_as_the_file_says(tokenizer, proto)
    tokenizer.init_kwargs.pop("vocab_file", None)  # save_pretrained would write that path
    return tokenizer


def _made(place, revision, trust_remote_code):
    """Return what transformers makes of other files than tokenizer.json; see `load`."""
    has_code = _has_code(place, revision)
    tekken = _file(place, TEKKEN, revision)
    ranks = _file(place, TIKTOKEN, revision) or _file(place, SENTENCEPIECE, revision)
    is_tiktoken = ranks is not None and _is_tiktoken(ranks)
    is_refused = has_code and not trust_remote_code
    if is_refused and (tekken or is_tiktoken):  # transformers would guess how it cuts text
        raise ValueError(NEEDS_CODE)
    if not has_code and tekken:
        return _of_tekken(place, revision, tekken)
    if not has_code and is_tiktoken:
        return _of_tiktoken(place, revision, ranks)
    try:
        return AutoTokenizer.from_pretrained(place, revision=revision, mistral_format=False,
                                             trust_remote_code=trust_remote_code)
    except ValueError as error:
        if "instantiate the backend tokenizer" not in str(error):
            raise
        raise ValueError(NEEDS_CODE if is_refused else NO_TOKENIZER) from None


def as_written(source, tokenizer, place, revision, ids_of):
    """Return the tokenizer that a tokenizer.json describes, where AutoTokenizer made another one.

    Args:
        source: what a warning names.
        tokenizer: what AutoTokenizer made.
        ids_of: {text: its ids by that file}.
    """
    plain = PreTrainedTokenizerFast.from_pretrained(place, revision=revision)
    for text, ids in ids_of.items():
        if plain(text, add_special_tokens=False)["input_ids"] != ids:
            return tokenizer
    warnings.warn(
        f"{source}: AutoTokenizer makes a {type(tokenizer).__name__} of it, which cuts text in "
        "another way than its tokenizer.json; the file is right here, and whoever uses the model "
        "should read it with PreTrainedTokenizerFast", stacklevel=3)
    return plain


def _file(place, name, revision):
    """Return the path of a file of a model, None: it has none such."""
    path = cached_file(place, name, revision=revision,
                       _raise_exceptions_for_missing_entries=False,
                       _raise_exceptions_for_connection_errors=False)
    return None if path is None else Path(path)


def _has_code(place, revision):
    """Return whether a tokenizer_config.json names Python code that comes with it."""
    path = _file(place, "tokenizer_config.json", revision)
    return path is not None and "auto_map" in json.loads(path.read_text(encoding="utf-8"))


# --- tiktoken -------------------------------------------------------------------------------------


def _is_tiktoken(path):
    with path.open("rb") as file:
        return LINE_OF_TIKTOKEN.fullmatch(file.readline(2**16)) is not None


def read_tiktoken(path):
    """Return {bytes of a token: its rank}.

    Raises:
        ValueError: the number of a line that holds something else.
    """
    ranks = {}
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(f"{Path(path).name} is no SentencePiece model, and its line {number} "
                             "no token in base64 and a rank, as in tiktoken's files") from None
    return ranks


def _of_tiktoken(place, revision, path):
    """Return the tokenizer of a tiktoken file, which does not say how text is cut."""
    warnings.warn(f"{place}: its {path.name} of tiktoken does not say how text is cut into words; "
                  "it is cut as Llama 3 does, by the pattern that transformers assumes",
                  stacklevel=3)
    return PreTrainedTokenizerFast.from_pretrained(place, revision=revision, vocab_file=str(path))


def _of_code(slow):
    """Return the fast tokenizer of Python code whose tokenizer holds a tiktoken Encoding.

    Raises:
        ValueError: it holds none, or does more than that.
    """
    kind = type(slow).__name__
    encodings = [value for value in vars(slow).values() if hasattr(value, "_mergeable_ranks")]
    if not encodings:
        raise ValueError(f"its {kind} is no fast tokenizer, and transformers makes none of it; "
                         f"{WAY_OUT}")
    names = sorted(encodings[0]._special_tokens, key=encodings[0]._special_tokens.get)
    converter = TikTokenConverter(pattern=encodings[0]._pat_str, extra_special_tokens=names)
    converter.load_tiktoken_bpe = lambda _: encodings[0]._mergeable_ranks
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=converter.converted(), chat_template=slow.chat_template,
        model_max_length=slow.model_max_length, **{role: getattr(slow, role) for role in ROLES})
    text = PROBE + "".join(names[:4])
    for sample in (PROBE, text):
        ids = slow(sample, add_special_tokens=False)["input_ids"]
        if tokenizer(sample, add_special_tokens=False)["input_ids"] != ids:
            raise ValueError(f"its {kind} cuts text in another way than its Encoding; {WAY_OUT}")
    return tokenizer


# --- Mistral --------------------------------------------------------------------------------------


def _of_tekken(place, revision, path):
    """Return the tokenizer of a tekken.json, with its roles."""
    specials_of = mistral._derive_tekken_specials
    early = [{"rank": rank, "token_str": name} for rank, name in enumerate(EARLY_TEKKEN)]

    def with_control_tokens(raw):
        return specials_of({**raw, "special_tokens": raw.get("special_tokens") or early})

    with mock.patch.object(mistral, "_derive_tekken_specials", with_control_tokens):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(place, revision=revision,
                                                            vocab_file=str(path))
    vocab = tokenizer.get_vocab()
    for role, name in ROLES_OF_TEKKEN.items():
        if getattr(tokenizer, role) is None and name in vocab:
            setattr(tokenizer, role, name)
    return tokenizer


# --- SentencePiece --------------------------------------------------------------------------------


def _sentencepiece(path):
    """Return the ModelProto of a SentencePiece file; None: it is none."""
    if path is None or not str(path).endswith(".model") or _is_tiktoken(Path(path)):
        return None
    return sentencepiece_model_pb2.ModelProto.FromString(Path(path).read_bytes())


def _cut_as_the_file_says(tokenizer, proto):
    """Let a tokenizer cut text as its SentencePiece file says, where transformers leaves that out.

    A warning says where it cuts in another way all the same.
    """
    backend = tokenizer.backend_tokenizer
    if type(tokenizer) is PreTrainedTokenizerFast:  # transformers has no class for it
        _set_normalizer(backend, proto.normalizer_spec)
    scores = [piece.score for piece in proto.pieces if piece.type == NORMAL]
    if proto.trainer_spec.model_type == BPE and scores != sorted(scores, reverse=True):
        _set_merges(backend, proto)
    model = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    expected = [model.id_to_piece(token) for token in model.encode(PROBE)]
    ids = tokenizer(PROBE, add_special_tokens=False)["input_ids"]
    if tokenizer.convert_ids_to_tokens(ids) != expected:
        warnings.warn(
            f"{tokenizer.name_or_path}: the {type(tokenizer).__name__} that transformers makes of "
            "its SentencePiece file cuts some text in another way than SentencePiece",
            stacklevel=3)


def _set_normalizer(backend, spec):
    """Set what becomes of a text before it is cut, and of its prefix when it is decoded."""
    steps = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(METASPACE))
        backend.decoder = decoders.Sequence(
            [backend.decoder, decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", METASPACE)])


def _set_merges(backend, proto):
    """Order the merges by the scores of what they make; transformers orders them by its id.

    SentencePiece merges the first one of equal scores, so that a run of spaces grows from its left.
    """
    score = {piece.piece: piece.score for piece in proto.pieces}
    merges = generate_merges(backend.get_vocab(with_added_tokens=False), score)
    merges.sort(key=lambda pair: (-score["".join(pair)], -len(pair[0])))
    backend.model = models.BPE(
        vocab=backend.get_vocab(with_added_tokens=False), merges=merges, fuse_unk=True,
        unk_token=proto.trainer_spec.unk_piece, byte_fallback=proto.trainer_spec.byte_fallback)
