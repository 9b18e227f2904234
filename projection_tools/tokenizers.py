"""The two tokenizers of a pair: load them, as their files say, and tell them apart."""

import hashlib
import json
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from isogloss.align import ROLES, TokenTable, fingerprint
from isogloss.doors import door
from isogloss.flags.model_names import read_model_name


@dataclass
class Pair:
    """A student's and a teacher's tokenizer, with what is known of them; the student's comes first.

    Attributes:
        names: hub ids or directories.
        tokenizers, tables: the fast tokenizers and their TokenTables.
        fingerprints: digests of the tokenizers.
        roles: which id is the eos, bos, ... of each, as text; a tokenizer.json does not say that.
    """

    names: tuple
    tokenizers: tuple
    tables: tuple
    fingerprints: tuple

    @property
    def roles(self):
        of_tables = []
        for table in self.tables:
            of_tables.append(", ".join(f"{role} {getattr(table, role)}" for role in ROLES))
        return tuple(of_tables)

    @property
    def digest(self):
        """The digest of all that tables of the pair depend on, for the names of cached files."""
        roles = hashlib.sha256(repr(self.roles).encode()).hexdigest()[:8]
        return f"{self.fingerprints[0][:16]}-{self.fingerprints[1][:16]}-{roles}"

    @classmethod
    def of(cls, student_tokenizer, teacher_tokenizer, names=("", ""), tables=None):
        """Return the pair of two fast tokenizers; `tables`: their TokenTables, if at hand."""
        tokenizers = (student_tokenizer, teacher_tokenizer)
        if tables is None:
            tables = tuple(map(TokenTable.from_tokenizer, tokenizers))
        return cls(tuple(names), tokenizers, tables, tuple(map(fingerprint, tokenizers)))

    @classmethod
    def load(cls, student, teacher, trust_remote_code=False):
        """Load the tokenizers of two hub ids or directories.

        Args:
            trust_remote_code: run the Python code that comes with a tokenizer.
        Raises:
            ValueError: one of them cannot be loaded.
        """
        student_tokenizer, student_table = load_tokenizer("student", student, trust_remote_code)
        teacher_tokenizer, teacher_table = load_tokenizer("teacher", teacher, trust_remote_code)
        tables = (student_table, teacher_table)
        return cls.of(student_tokenizer, teacher_tokenizer, (student, teacher), tables)


def load_tokenizer(flag, name, trust_remote_code=False):
    """Load a tokenizer and the table of its tokens.

    Control tokens beyond the rows of the model's lm_head, which no text holds, are left out of the
    table.

    Returns:
        (tokenizer, TokenTable).
    Raises:
        ValueError: it cannot be loaded, or is no fast tokenizer.
    """
    from transformers import AutoTokenizer, logging  # seconds to import

    # What it raises is reported in one line, which stands alone.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = read_model_name(flag, name)
    place, revision = model.of_tokenizer
    with reading(flag, name, "its tokenizer"):
        if _file_of(place, revision, "tokenizer.json") is None:
            tokenizer = door("tokenizer_files").load(place, revision, trust_remote_code)
        else:
            tokenizer = AutoTokenizer.from_pretrained(
                place, revision=revision, trust_remote_code=trust_remote_code, mistral_format=False)
            tokenizer = as_in_its_file(flag, name, tokenizer, place, revision)
    try:
        table = TokenTable.from_tokenizer(tokenizer)
    except (ValueError, KeyError) as error:
        raise ValueError(f"--{flag} {name}: its tokenizer cannot be used ({reason_of(error)})") \
            from None
    num_rows = _rows_of_head(model.base, model.revision)
    if num_rows and num_rows < len(table):
        with suppress(ValueError):  # ids that may stand in a text are for the caller to refuse
            table = table.below(num_rows)
    return tokenizer, table


def _rows_of_head(place, revision):
    """Return the rows of a model's lm_head by its config.json; None: there is none that says so.

    Not by AutoConfig: a folder may hold a tokenizer alone, and a wrong config is for others to
    refuse.
    """
    try:
        path = _file_of(place, revision, "config.json")
        config = json.loads(Path(path).read_text(encoding="utf-8"))
        num_rows = config.get("vocab_size") or config["text_config"]["vocab_size"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return num_rows if type(num_rows) is int and num_rows > 0 else None


def _file_of(place, revision, name):
    """Return the path of a model's file, None: it has none such."""
    from transformers.utils import cached_file

    return cached_file(place, name, revision=revision, _raise_exceptions_for_missing_entries=False,
                       _raise_exceptions_for_connection_errors=False)


# Text that tokenizers cut differently: spaces, breaks, digits, words that no English has.
PROBE = "In 2010,  there\n\n was a naïve 12345 日本 🙂\tdef f(x):\n    return x_1 ** 2\r\n"


def as_in_its_file(flag, name, tokenizer, place, revision):
    """Return the tokenizer that tokenizer.json describes, if AutoTokenizer has made another one.

    For some types of models (`qwen2` in config.json) transformers 5 takes the tokenizer class of
    that type, whatever tokenizer_config.json names: the vocabulary is the file's, how text is cut
    is not.
    """
    from tokenizers import Tokenizer

    if not tokenizer.is_fast:
        return tokenizer
    raw = Tokenizer.from_file(_file_of(place, revision, "tokenizer.json"))
    raw.no_truncation()  # settings of whoever saved it
    raw.no_padding()
    ids = raw.encode(PROBE, add_special_tokens=False).ids
    if tokenizer(PROBE, add_special_tokens=False)["input_ids"] == ids:
        return tokenizer
    files = door("tokenizer_files")
    return files.as_written(f"--{flag} {name}", tokenizer, place, revision, {PROBE: ids})


@contextmanager
def reading(flag, name, what):
    """Turn whatever a library raises about a model's files into a ValueError that names the flag.

    A damaged file makes the libraries raise errors of any type, so the block should hold nothing
    but their calls: an error of our own must not look like a damaged file.

    Raises:
        ValueError: the block failed.
    """
    from transformers import PreTrainedConfig  # seconds to import

    get_config_dict = PreTrainedConfig.get_config_dict.__func__

    def with_dtypes(cls, *args, **options):
        config, unused = get_config_dict(cls, *args, **options)
        return _with_torch_dtypes(config), unused

    try:
        # AutoConfig and AutoTokenizer both read a model's config.json by it
        with mock.patch.object(PreTrainedConfig, "get_config_dict", classmethod(with_dtypes)):
            yield
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"--{flag} {name}: needs Python code that comes with the model; read that code, "
                "and add --trust_remote_code to run it") from None
        raise ValueError(f"--{flag} {name}: {what} cannot be loaded ({reason_of(error)})") from None


# What tools write into a config.json beside torch's own names.
DTYPES = {"auto": None, "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


def _with_torch_dtypes(config):
    """Return a config.json whose precisions, in place and at every level, have torch's names."""
    import torch

    for key, value in config.items():
        if isinstance(value, dict) and key != "quantization_config":  # which has names of its own
            _with_torch_dtypes(value)
        elif key in ("dtype", "torch_dtype") and isinstance(value, str):
            name = DTYPES.get(value, value.removeprefix("torch."))
            dtype = getattr(torch, name or "float32", None)
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise ValueError(f"config.json says {key} {value!r}, expected float32, bfloat16 or "
                                 "float16")
            config[key] = name
    return config


def reason_of(error):
    """Return the first line of an error's text, with its type where the text alone says little."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    text = lines[0]
    if text.endswith(":") and len(lines) > 1:
        text = f"{text} {lines[1]}"
    text = text.removesuffix(".")
    if isinstance(error, (OSError, ValueError, ImportError)):
        return text
    return f"{type(error).__name__}: {text}"
