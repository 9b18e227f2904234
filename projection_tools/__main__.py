"""The commands about two vocabularies, and their flags: `--help` waits for no torch.

    python -m projection_tools build --student A --teacher B --output projection.pt

`python -m projection_tools` lists them.  Each is a module, too: python -m projection_tools.build.
Tests: tests/test_projection_tools.py.
"""

import sys
from dataclasses import dataclass
from importlib import import_module

from isogloss.flags.parse import MISSING, check_flags, flag, parse_flags, refusing
from isogloss.flags.tool import MOST_SLOTS, check_output, shared

# Names of flags that public recipes use, and what they are called here.
OLD_NAMES = {"student_model": "student", "teacher_model": "teacher"}


@dataclass(kw_only=True)
class Recipe:
    """The choices that decide a projection."""

    # None of these defaults is tuned.  A change of one changes the cached files' names by itself.
    top_k: int = flag(4, "entries kept per row, 1 or more.", low=1, high=MOST_SLOTS)
    threshold: float = flag(0.0, "drop entries that weigh less than this, 0 to 1.", low=0, high=1)
    max_pieces: int = flag(
        4, "pieces of a spelling that are used, 1 or more.", low=1, high=MOST_SLOTS)
    reverse: bool = flag(
        False, "also add teacher tokens that the student spells with several tokens.")
    special_threshold: float = flag(
        0.8, "pair control tokens whose names are at least this similar, 0 to 1.", low=0, high=1)
    embedding_model: str = flag(
        "", "hub id or directory of a model whose embeddings fill the rows that bytes leave empty; "
        "if not given, these rows stay empty.")


@dataclass(kw_only=True)
class PairArgs:
    """The flags of every command that is about two tokenizers."""

    student: str = flag(MISSING, "hub id or directory with the student's tokenizer.")
    teacher: str = flag(MISSING, "hub id or directory with the teacher's tokenizer.")
    trust_remote_code: bool = flag(
        False, "run the Python code that comes with a model, which can do anything.")

    def __post_init__(self):
        check_flags(self)

    def load_pair(self):
        from isogloss.projection_tools.tokenizers import Pair

        output = getattr(self, "output", "")
        check_output(output)
        if output and not output.endswith((".pt", ".safetensors")):
            raise ValueError(f"--output {output}: expected a name that ends in .pt or .safetensors")
        return Pair.load(self.student, self.teacher, self.trust_remote_code)


@dataclass(kw_only=True)
class WriteArgs(PairArgs):
    """The flags of every command that writes a projection."""

    output: str = flag(MISSING, "file to write, .pt or .safetensors.")


@dataclass(kw_only=True)
class BuildArgs(Recipe, WriteArgs):
    """Build the projection between a student's and a teacher's vocabulary."""


@dataclass(kw_only=True)
class MultitokenArgs(WriteArgs):
    """Make the rows of a projection from spellings."""

    projection: str = flag("", "file whose rows replace those left empty here; empty: none.")
    top_k: int = shared(Recipe, "top_k")
    max_pieces: int = shared(Recipe, "max_pieces", 8)
    reverse: bool = shared(Recipe, "reverse")
    special_threshold: float = shared(Recipe, "special_threshold")


@dataclass(kw_only=True)
class ExactArgs(WriteArgs):
    """Pin tokens of equal bytes: weight 1, alone in their row."""

    projection: str = flag("", "file that supplies all other rows; empty: they stay empty.")


@dataclass(kw_only=True)
class GenerateArgs(WriteArgs):
    """Make the rows of a projection from the similarity of embeddings."""

    embedding_model: str = flag(
        MISSING, "hub id or directory of the model that embeds the tokens of both vocabularies.")
    top_k: int = shared(Recipe, "top_k")
    sharpness: float = flag(
        10.0, "weights are proportional to exp(sharpness * cosine), > 0.", high=1e6)

    def __post_init__(self):
        super().__post_init__()
        if self.sharpness <= 0:
            raise ValueError(f"--sharpness {self.sharpness}: expected more than 0")


@dataclass(kw_only=True)
class CutArgs(WriteArgs):
    """Keep the heaviest entries of every row of a projection, and normalize them again."""

    projection: str = flag(MISSING, "file to read.")
    top_k: int = shared(Recipe, "top_k")
    threshold: float = shared(Recipe, "threshold")


@dataclass(kw_only=True)
class ShowArgs(PairArgs):
    """Show examples and statistics of a projection, and check it against its two tokenizers."""

    projection: str = flag(MISSING, "file to show, .pt or .safetensors.")
    tokens: str = flag(
        "", "student tokens to show, separated by commas: text, name in the vocabulary, or #id.")
    num_examples: int = flag(
        20, "rows to show if tokens is empty, evenly spaced among those with several teacher "
        "tokens.", low=0, high=10**6)


@dataclass(kw_only=True)
class CompareArgs(PairArgs):
    """Show how two projections of the same pair differ."""

    projection: str = flag(MISSING, "the first file, .pt or .safetensors.")
    other: str = flag(MISSING, "the second file, .pt or .safetensors.")
    num_examples: int = flag(
        20, "rows to show, those that differ most; 0: none.", low=0, high=10**6)


@dataclass(kw_only=True)
class CellsArgs(PairArgs):
    """Build the tables by which a teacher's belief is translated into a student's vocabulary."""

    output: str = flag(
        "", "file to write, .pt or .safetensors; empty: none, only print statistics.")
    max_pieces: int = flag(16, "pieces kept of a spelling, 1 or more.", low=1, high=MOST_SLOTS)


@dataclass(kw_only=True)
class PairsArgs:
    """Say of pairs of tokenizers how much of a text a teacher can teach."""

    tokenizers: str = flag(MISSING, "hub ids or directories, two or more, with commas.")
    texts: str = flag(MISSING, "as english=FILE, files of text in UTF-8, with commas.")
    pages: int = flag(50, "pieces of 2,000 characters that are read of each text.", low=1)
    trust_remote_code: bool = shared(PairArgs, "trust_remote_code")


KINDS = (BuildArgs, MultitokenArgs, ExactArgs, GenerateArgs, CutArgs, ShowArgs, CompareArgs,
         CellsArgs, PairsArgs)
COMMANDS = {kind.__name__.removesuffix("Args").lower(): kind for kind in KINDS}


def run(name, argv=None):
    """Run `main` of a command, whose module is imported once its flags are read.

    Args:
        argv: the words of the command line; None: those of this process.
    """
    with refusing(f"projection_tools.{name}", loud=True):
        positional = ("projection", "other") if name == "compare" else ()
        words = sys.argv[1:] if argv is None else argv
        args = parse_flags(COMMANDS[name], words, positional, OLD_NAMES)
        import_module(f"isogloss.projection_tools.{name}").main(args)


def cli(argv=None):
    """Run the command that the first word names."""
    name, *words = (sys.argv[1:] if argv is None else argv) or [""]
    if name in COMMANDS:
        run(name, words)
    elif name in ("-h", "--help"):
        print("usage: python -m projection_tools COMMAND [--flag value ...]\n")
        for command, kind in COMMANDS.items():
            print(f"{command:10}  {kind.__doc__}")
        print("\nCOMMAND --help describes its flags.")
    else:
        what = f"unknown command {name!r}" if name else "no command"
        with refusing("projection_tools"):
            raise ValueError(f"{what}; expected one of {', '.join(COMMANDS)}; --help describes "
                             "them")


if __name__ == "__main__":
    cli()
