"""Read a dataclass from a command line, with fire: typed values, help in full, errors in one line.

    cfg = parse_flags(Config, sys.argv[1:])

Fire reads the values.  The words around them are read here, because fire alone

- calls the function before it rejects a misspelled flag,
- takes ``--resume=false`` for true, ``--name=2024`` for a number and ``--output`` for "True",
- offers short flags.
"""

import dataclasses
import inspect
import json
import math
import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields

from fire.parser import DefaultParseValue

import isogloss
from isogloss.flags.model_names import without_secrets
from isogloss.flags.terminal import guard_terminal, one_line

# Flags of any command line that name a file, a directory, or a model by its directory.
PATH_FLAGS = frozenset("""assets config data ds_config dump_losses embedding_model eval_data
    export golden model other output output_dir png projection recipe resume run
    student teacher teacher_cache teacher_tokenizer texts tokenizer""".split())
# Those that are written, over a scratch file beside them with a longer name.
WRITTEN = frozenset(("dump_losses", "export", "output", "output_dir", "png"))
LONGEST_NAME = 255  # bytes, of Linux's file systems
SCRATCH_BYTES = 32

# Folders of files that come with us: beside the package in a checkout, inside it when installed.
SHIPPED = "ds_configs", "recipes"

DATE = "strftime_now"  # what chat templates ask for the date, a key of template kwargs


# --- one entry a flag -----------------------------------------------------------------------------


def flag(default, about, *, low=None, high=None, choices=(), free=False, key="", options=None):
    """Return a field of a dataclass that is a flag; help, bounds and checks follow from it.

    Args:
        default: of the type of the field.
        about: what it means, for --help and the page of flags.
        low, high: the smallest and the largest number that it takes; None: no bound.
        choices: the texts that it takes, or a function that lists them; read when it is checked.
        free: it may change when a run resumes; all others decide what is learned.
        key: its name in an entry of --teachers; empty: it is of the whole run.
        options: it is a JSON object; the Options that it takes, or a function of the instance that
            returns them; read when it is checked.
    """
    return dataclasses.field(default=default, metadata=dict(
        about=about, low=low, high=high, choices=choices, free=free, key=key, options=options))


def choices_of(entry):
    """Return the values that the field of a flag takes; empty: any."""
    choices = entry.metadata.get("choices", ())
    return tuple(choices() if callable(choices) else choices)


def flags_that(kind, word):
    """Return {name: value} of the flags whose entry says something under that word."""
    values = {entry.name: entry.metadata.get(word) for entry in fields(kind)}
    return {name: value for name, value in values.items() if value not in (None, False, "", ())}


def groups_of(kind):
    """Return {title: names of flags}: those of each of several base classes, named by its doc.

    A base class whose doc is a sentence is no group of the help.
    """
    bases = [base for base in kind.__bases__
             if dataclasses.is_dataclass(base) and not base.__doc__.endswith(".")]
    return {base.__doc__: list(base.__annotations__) for base in bases}


def check_flags(config):
    """Check every flag of a dataclass by itself; for its __post_init__.

    Raises:
        ValueError: see `check_types`; a number beyond its bounds, or a text that is no choice.
    """
    check_types(config)
    for entry in fields(config):
        value = getattr(config, entry.name)
        low, high = entry.metadata.get("low"), entry.metadata.get("high")
        if low is not None and value < low:
            raise ValueError(f"--{entry.name} {value}: expected {low} or more")
        if high is not None and value > high:
            raise ValueError(f"--{entry.name} {value}: expected {high} or less")
        if value != entry.default and value not in (choices_of(entry) or [value]):
            raise ValueError(f"--{entry.name} {value}: expected one of "
                             f"{', '.join(choices_of(entry))}")
        if value and entry.metadata.get("options"):
            setattr(config, entry.name, options_text(config, entry.name))


# --- values ---------------------------------------------------------------------------------------


def typed(name, value, kind):
    """Return the value as `kind`; fire reads 1e3 as a float and passes `=false` as text.

    Args:
        name: the flag's name, for the message.
        value: what fire made of the text.
        kind: bool, int, float or str.
    Raises:
        ValueError: it is of another type.
    """
    if kind is bool and str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind is float and type(value) is int:  # not isinstance: True is an int too
        return float(str(value))  # of a number beyond all floats infinity, which is refused
    if type(value) is not kind:
        raise ValueError(f"--{name}={value}: expected {kind.__name__}, got {type(value).__name__}")
    return value


def check_types(config):
    """Convert every field of a dataclass to its type, and expand paths; for its __post_init__.

    Raises:
        ValueError: a value is of another type, not finite, or a path that cannot be one.
    """
    for field in fields(config):
        value = getattr(config, field.name)
        if isinstance(value, dict) and field.metadata.get("options"):
            value = json.dumps(value)
        value = typed(field.name, value, field.type)
        if field.type is float and not math.isfinite(value):
            raise ValueError(f"--{field.name} {value}: expected a number")
        if field.name in PATH_FLAGS and value != field.default:
            value = expanded(f"--{field.name}", value, field.name in WRITTEN)
        elif field.name in PATH_FLAGS:
            value = shipped(value)
        setattr(config, field.name, value)


def expanded(flag, path, is_written=False):
    """Return a path with a home directory in place of `~`; shells leave it in ``--flag=~/x``.

    Args:
        flag: that names the path, for errors.
        path: it, a hub id, or an address.
        is_written: a file or a directory of this name will be made.
    Raises:
        ValueError: no file can have this name.
    """
    if is_table(path):  # whose entries name paths
        return path
    if not path.strip():
        raise ValueError(f"{flag}={path}: is empty; expected a path")
    full = os.path.expanduser(path)
    if full.startswith("~"):
        raise ValueError(f"{flag} {path}: there is no such user; for a name that begins with ~ "
                         f"write ./{path}")
    if "\0" in full:
        raise ValueError(f"{flag} {path!r}: holds a zero byte; expected a path")
    limit = LONGEST_NAME - SCRATCH_BYTES * is_written
    longest = max(len(os.fsencode(name)) for name in full.split("/"))
    if longest > limit and "://" not in full:
        raise ValueError(f"{flag} {path:.200}: a name in it has {longest} bytes; expected {limit} "
                         "or fewer")
    return full if is_written else shipped(full)


def shipped(path):
    """Return where a file lies that comes with us, such as ds_configs/zero2.json.

    A file of that name in the working directory wins; any other path is returned as it is.
    """
    if path.split("/")[0] in SHIPPED and not os.path.exists(path):
        for folder in isogloss.__path__:
            if os.path.exists(os.path.join(folder, path)):
                return os.path.join(folder, path)
    return path


# --- options: a flag that is a JSON object --------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """Hold what a flag takes that is a JSON object, as --loss_options.

    Attributes:
        owner: whose options they are, for errors.
        defaults: {option: its default}, by whose type a value is read.
        check: function of all options as keywords; raises a ValueError.
        main: the option that a word which is no object stands for; empty: none.
    """

    owner: str
    defaults: dict
    check: Callable = dict
    main: str = ""


def keywords_of(function, leave_out=()):
    """Return {name: default} of a function's parameters, of those that are numbers or words."""
    defaults = {}
    for name, parameter in inspect.signature(function).parameters.items():
        default = parameter.default
        if isinstance(default, (bool, int, float, str)) and name not in leave_out:
            is_float = parameter.annotation in (float, "float")  # its default may be 1
            defaults[name] = float(default) if is_float else default
    return defaults


def read_options(config, name):
    """Return {option: value} of a flag that is a JSON object, with those that it does not name.

    Raises:
        ValueError: it is no JSON object, or an option is unknown or has a wrong value.
    """
    from isogloss.flags.json_text import parse_json

    options = options_for(config, name)
    text = getattr(config, name)
    given = {options.main: text}
    if not options.main or text.lstrip().startswith("{"):
        given = parse_json(f"--{name}", text, "; expected a JSON object") if text else {}
    if not isinstance(given, dict):
        raise ValueError(f"--{name} {text}: expected a JSON object")
    values = dict(options.defaults)
    for option, value in given.items():
        if option not in values:
            known = f"has {', '.join(values)}" if values else "takes none"
            raise ValueError(f"--{name}: unknown option {option!r}; {options.owner} {known}")
        values[option] = typed(f"{name} {option}", value, type(values[option]))
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"--{name}: {option}={value}: expected a number")
    try:
        options.check(**values)
    except ValueError as error:
        raise ValueError(f"--{name}: {str(error).removeprefix('--')}") from None
    return values


def options_for(config, name):
    """Return the Options of a flag that is a JSON object."""
    options = config.__dataclass_fields__[name].metadata["options"]
    return options(config) if callable(options) else options


def options_text(config, name):
    """Return a flag that is a JSON object, sorted and without defaults; empty: they are all.

    So a run has one identity, however its options were written.
    """
    defaults = options_for(config, name).defaults
    values = read_options(config, name)
    given = {option: values[option] for option in sorted(values)
             if values[option] != defaults[option]}
    return json.dumps(given) if given else ""


# --- tables ---------------------------------------------------------------------------------------


def is_table(text):
    """Return whether a flag's value is a JSON list of objects, as --teachers and --data may be."""
    return re.match(r"\s*\[\s*\{", text) is not None


# --- the command line -----------------------------------------------------------------------------


def parse_flags(kind, argv, positional=(), aliases=None, file_flag=""):
    """Return an instance of a keyword-only dataclass from the command line.

    Its attribute `given` is a frozenset of the names of the flags that were written, there or in
    the file, with their default value too.

    Flags are written with hyphens or underscores.  A bool flag may stand alone: ``--pack`` is true,
    ``--nopack`` is false.  ``-h`` or ``--help`` anywhere prints the help.

    Args:
        kind: the dataclass; its fields are of type bool, int, float or str.  Where it says
            `has_foreign`, unknown.py names what does here what other programs call otherwise.
        argv: the words of the command line, without the program.
        positional: names of the fields that the first words without a flag fill.
        aliases: {other name of a flag: field name}.
        file_flag: field that names a YAML file of other flags, over which the command line wins.
    Raises:
        ValueError: an unknown flag, a wrong type, a word that belongs to no flag, a missing flag.
        SystemExit: code 0, after the help was printed.
    """
    aliases = aliases or {}
    if "-h" in argv or "--help" in argv:
        from isogloss.flags.help import help_text

        print(help_text(kind, positional=positional, aliases=aliases))
        raise SystemExit(0)
    given = _assignments(kind, list(argv), positional, aliases)
    of_file = {}
    if given.get(file_flag):
        given[file_flag] = expanded(f"--{file_flag}", given[file_flag])
        from isogloss.flags.yaml_file import assignments_of_file

        of_file = assignments_of_file(kind, given[file_flag], file_flag, aliases)
    try:
        config = _instance(kind, of_file | given)
        config.given = frozenset(of_file | given)
        if hasattr(config, "check_run"):
            config.check_run()
    except ValueError as error:
        # the flag that a message begins with may be none that its reader wrote
        name = re.match(r"--(\w*)", str(error))
        if name and name[1] in of_file.keys() - given.keys():
            raise ValueError(f"{error} ({name[0]} is from {given[file_flag]})") from None
        raise
    return config


def _instance(kind, given):
    """Return an instance of a dataclass from {field name: text of its value}."""
    values = {}
    for field in fields(kind):
        if field.name in given:
            text = given[field.name]
            # a text is not evaluated: --text_key=2024 stays text
            values[field.name] = text if field.type is str else DefaultParseValue(text)
        elif field.default is MISSING:
            raise ValueError(f"--{field.name} is missing; --help describes every flag")
    return kind(**values)


def fields_by_name(kind):
    return {field.name: field for field in fields(kind)}


def _is_flag(word):
    return re.match(r"--|-[A-Za-z]", word) is not None


def _assignments(kind, argv, positional, aliases):
    """Return {field name: text of its value} of a command line.

    A flag that is given twice counts as given last, so that a script may append to a fixed command.
    """
    given = {}
    for name in positional:
        if not argv or argv[0].startswith("-"):
            break
        given[name] = argv.pop(0)

    # A stack with the first word on top: a flag without "=" takes the word behind it.
    words = argv[::-1]
    while words:
        word = words.pop()
        if word == "--":
            raise ValueError("unexpected argument '--': no flags of another kind, such as "
                             "--interactive or --trace, follow it; leave it out")
        if not _is_flag(word):
            example = fields(kind)[0].name
            raise ValueError(f"unexpected argument {word!r}: a value follows a flag, as in "
                             f"--{example} VALUE")
        flag, equals, value = word.partition("=")
        field, negated = field_of(kind, flag, aliases)
        if negated and equals:
            raise ValueError(f"{flag} takes no value; write --{field.name}={value}")
        if negated:
            value = "False"
        elif not equals and words and not _is_flag(words[-1]):
            value = words.pop()
        elif not equals and field.type is bool:
            value = "True"
        elif not equals:
            # Fire would pass the text "True": --export alone would write to a folder of that name.
            raise ValueError(f"--{field.name} needs a value, as in --{field.name}=VALUE")
        given[field.name] = value
    return given


def field_of(kind, flag, aliases):
    """Return (field, negated) of a flag as it was written, such as --top-k or --nopack."""
    by_name = fields_by_name(kind)
    name = flag.lstrip("-").replace("-", "_")
    name = aliases.get(name, name)
    is_long = flag.startswith("--")
    if is_long and name in by_name:
        return by_name[name], False
    opposite = by_name.get(name.removeprefix("no"))
    if is_long and opposite is not None and opposite.type is bool:
        return opposite, True

    from isogloss.flags.unknown import refuse_unknown

    refuse_unknown(kind, flag, name, aliases)


# --- errors ---------------------------------------------------------------------------------------


def program_name():
    """Return what messages call this program: distill.py, or the module that runs by itself."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = getattr(spec, "name", "")
    return name if name.startswith("isogloss.") else "distill.py"


def line_about(error, program=None):
    """Return the line that says an error, without secrets."""
    return f"{program or program_name()}: {one_line(without_secrets(str(error)))}"


def is_first_rank():
    """Tell whether this is rank 0, or one to which its launcher has given no number."""
    rank = os.environ.get("RANK", "0")
    return not rank.isdecimal() or int(rank) == 0


def is_first_of_node():
    """Tell whether this rank speaks for its node, where ranks have not met yet."""
    rank = os.environ.get("LOCAL_RANK", "0")
    return is_first_rank() or not rank.isdecimal() or int(rank) == 0


@contextmanager
def refusing(program=None, loud=False):
    """End this process with a line on stderr and code 2 where the block raises a ValueError.

    For what comes before the ranks of a job know of one another; see `launch.fail_together`.  It is
    the frame of every program, so from here on what is printed is guarded, too.

    Args:
        loud: each rank says it; else rank 0 alone.
    """
    guard_terminal()
    try:
        yield
    except ValueError as error:
        if loud or is_first_rank():
            print(line_about(error, program), file=sys.stderr, flush=True)
        raise SystemExit(2) from None


# --- ranks, before torch is imported --------------------------------------------------------------

def prepare_rank(program=None):
    """Make a process ready to import torch, or end it with a line where it can be no rank."""
    # Torch would print a lost connection, as to a rank that has ended, with thirty lines of C++.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of an import
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # see job/launcher.py
    if re.search(r"^(WORLD_SIZE|(LOCAL_)?RANK|LOCAL_(WORLD_)?SIZE|MASTER_PORT)$",
                 "\n".join(os.environ), re.MULTILINE):
        from isogloss.flags.launcher_variables import check_launcher

        with refusing(program, loud=is_first_of_node()):
            check_launcher()
