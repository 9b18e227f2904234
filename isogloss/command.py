"""The command `isogloss-distill`: the DeepSpeed launcher with `isogloss.distill` as its module.

    isogloss-distill [flags of the launcher, such as --num_gpus 4] --student S --teacher T ...

Tests: tests/test_install.py.
"""

import sys
from dataclasses import fields


def split_words(words, names):
    """Return (words of the launcher, words of distill.py): ours begin at the first flag of ours.

    Args:
        words: of the command line, without the program.
        names: of our flags.
    """
    known = {*names, *(f"no{name}" for name in names)}
    for place, word in enumerate(words):
        name = word.removeprefix("--").partition("=")[0].replace("-", "_")
        if word.startswith("--") and name in known:
            return words[:place], words[place:]
    return words, []


def main():
    """Start the ranks, or print our help."""
    from isogloss.config import Config

    words = sys.argv[1:]
    if "-h" in words or "--help" in words or not words:
        from isogloss.distill import cli

        cli(["--help"])
    launcher, ours = split_words(words, [entry.name for entry in fields(Config)])
    from deepspeed.launcher import runner

    runner.main([*launcher, "--module", "isogloss.distill", *ours])
