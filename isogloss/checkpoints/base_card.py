"""Read what the card of a base model or of a teacher says of licenses and languages.

Tests: tests/test_export.py, tests/test_hostile_files.py.
"""

import re
from functools import lru_cache
from pathlib import Path

import yaml
from huggingface_hub import hf_hub_download

from isogloss.checkpoints.model_card import public_name
from isogloss.flags.parse import one_line

OF_BASE = "license", "license_name", "license_link", "language"  # keys that a student inherits
MOST_CARD = 2**16  # characters of a card that are read; PyYAML takes up to three seconds for them
MOST_WORDS = 200  # of a list, and characters of each
# {what a license's name begins with: what it asks of a model made with it, or taught by it}, of the
# texts of Meta and Google of 2023 to 2025
RULES = {
    "llama2": "its outputs may improve no other model than Llama 2 and what derives from it",
    "llama3": 'a model that was made with it or taught by it has a name that begins with "Llama", '
              'and says "Built with Llama"',
    "llama4": 'a model that was made with it or taught by it has a name that begins with "Llama", '
              'and says "Built with Llama"',
    "gemma": "a model that learns from its outputs is a derivative, which hands on its terms",
    "cc-by-nc": "it is not for commercial use",
}


@lru_cache
def card_of(name):
    """Return what a model's own card says of `OF_BASE`; {}: nothing, or no card can be had.

    It is read as anyone may have written it, and as far as MOST_CARD.
    """
    try:
        path = Path(name) / "README.md"
        if not path.is_file():
            path = hf_hub_download(name, "README.md", etag_timeout=5)
        with open(path, encoding="utf-8") as file:
            front = re.match(r"\s*---\n(.*?)\n---", file.read(MOST_CARD), re.DOTALL)
        card = yaml.load(front[1], WithoutAliases)
        return {key: words for key in OF_BASE if (words := words_of(card.get(key)))}
    except Exception:  # a card is a help, and what hinders it is of many kinds
        return {}


def words_of(value):
    """Return a text of a card, or a list of them, of which each is one short line; else None."""
    if isinstance(value, list):
        return [word for word in map(words_of, value[:MOST_WORDS]) if isinstance(word, str)]
    return one_line(value)[:MOST_WORDS] if isinstance(value, str) else None


class WithoutAliases(yaml.SafeLoader):
    """Refuse aliases: a few lines of them stand for more than any memory holds."""

    def compose_node(self, parent, index):
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.composer.ComposerError(problem="an alias")
        return super().compose_node(parent, index)


def rules_of(names):
    """List what the licenses of some models ask of a student that is made with them."""
    rules = []
    for name in names:
        card = card_of(name)
        license = str(card.get("license_name") or card.get("license") or "")
        for beginning, rule in RULES.items():
            if license.lower().replace("-", "").startswith(beginning.replace("-", "")):
                rules.append(f"{public_name(name)} ({license}): {rule}")
    return rules
