"""A dataclass as a command line, by fire: values get their type, an unknown flag names the nearest known one.

    cfg = parse_flags(Config, sys.argv[1:])

Fire alone would call the function before it refuses a misspelt flag, take `--resume=false` for true, and
`--name=2024` for a number.
"""

import difflib
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import fire


def typed(name, value, kind):
    """The value as `kind`; fire reads 1e3 as a float and passes `=false` as text.

    Raises:
        ValueError: it is of another type.
    """
    if kind is bool and str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"--{name}={value}: expected {kind.__name__}, got {type(value).__name__}")
    return value


def check_types(config):
    """Give every field of a dataclass its type; for its __post_init__."""
    for field in fields(config):
        setattr(config, field.name, typed(field.name, getattr(config, field.name), field.type))


def parse_flags(kind, argv, positional=()):
    """An instance of a keyword-only dataclass from the command line; hyphens or underscores.

    Args:
        positional: names of the fields that the first words without a flag fill.
    Raises:
        ValueError: unknown flag, wrong type, a word that belongs to no flag, a flag that is missing.
    """
    names = [field.name for field in fields(kind)]
    words, argv = list(positional), list(argv)
    while words and argv and not argv[0].startswith("-"):
        argv.append(f"--{words.pop(0)}={argv.pop(0)}")
    after_flag, given = False, set()
    for word in argv:
        if word in ("-h", "--help", "--"):
            break
        if word.startswith("--"):
            name = word[2:].split("=")[0].replace("-", "_")
            if name not in names and name.removeprefix("no") not in names:
                near = difflib.get_close_matches(name, names, 1)
                hint = f"; did you mean --{near[0]}?" if near else "; --help lists them all"
                raise ValueError(f"unknown flag --{name}{hint}")
            given.add(name)
        elif not after_flag:
            raise ValueError(f"unexpected argument {word!r}: a value belongs to a flag, as in --{names[0]} X")
        after_flag = word.startswith("--") and "=" not in word
    else:
        missing = [f.name for f in fields(kind) if f.default is MISSING and f.name not in given]
        if missing:
            raise ValueError(f"--{missing[0]} is missing; --help describes all flags")
    as_text = {field.name: str for field in fields(kind) if field.type is str}  # --text_key=2024 stays text
    config = fire.Fire(fire.decorators.SetParseFns(**as_text)(kind), command=argv, serialize=lambda _: None)
    assert isinstance(config, kind), config
    return config


def tool(kind, main, positional=(), argv=None):
    """Run `main(args)` of a small tool; wrong input ends it with one line and exit code 2."""
    try:
        main(parse_flags(kind, sys.argv[1:] if argv is None else argv, positional))
    except ValueError as error:
        where = Path(main.__code__.co_filename)
        print(f"{where.parent.name}.{where.stem}: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
