"""Leave out the tail of a text that is far too long for the models, before it is tokenized.

A book on one line would otherwise be tokenized and aligned whole for the sake of its first page.
The text is cut between a letter and a space, where the tokens before do not depend on what comes
after.  `splits_at_spaces` tells for which tokenizers that is certain, from their parts; texts of
all others are read whole.

Tests: tests/test_long_texts.py.
"""

import itertools
import json
import re

# Shorter texts are read whole: they cost little, and the metrics of an alignment speak of all of
# the text that was read.
MIN_CHARACTERS = 16_384
# Of a text that is tokenized in one piece: 16 Mi take 3 GB and, on one core, half a minute.
MOST_CHARACTERS = 2**24
CHARACTERS_PER_TOKEN = 16  # tried first; of most texts it is 3 to 5, of indented code up to 16

# Between a letter and a space: letters of alphabets that every library has known for long.  The
# space is a character of its own in every normal form.
BOUNDARY = re.compile("[A-Za-z\u00c0-\u024f\u0391-\u03a1\u03a3-\u03ce\u0400-\u0481](?= )")
LETTER_AND_SPACE = re.compile("[^\\W\\d_]\\s")
LETTER_AND_MARK = re.compile("[^\\W\\d_][\\s\u2581]")  # as SentencePiece writes a space


def leave_out_tail(text, student, teachers):
    """Return the part of a text that these TextEncoders need, or the whole if that is not certain.

    A sample of the part is that of the whole text if every teacher has a chunk in it: then
    `sample.cut_sample` cuts behind a chunk, within the student's limit.
    """
    size = max(MIN_CHARACTERS, CHARACTERS_PER_TOKEN * student.max_length)
    if len(text) <= size:
        return text
    if not all(encoder.splits_at_spaces for encoder in (student, *teachers)):
        return text
    while size < len(text):
        boundary = _last_boundary(text, size)
        # one token more than positions is kept, so the cut lies before the boundary
        if boundary and student.num_tokens(text[:boundary]) > student.max_length + 1:
            return text[:boundary]
        size *= 2
    return text


def fits(text):
    return len(text) <= MOST_CHARACTERS


def check_size(texts):
    """Raise a ValueError for a text that a tokenizer could not take in one piece."""
    for text in [texts] if isinstance(texts, str) else texts:
        if not fits(text):
            raise ValueError(f"a text of {len(text)} characters ({text[:40]!r} ...) has no place "
                             f"where it could be cut; a tokenizer takes up to {MOST_CHARACTERS}; "
                             "split it, or remove it from the data")


def _last_boundary(text, size):
    """Return the last place to cut in the second half of the first `size` characters, or None."""
    boundaries = BOUNDARY.finditer(text, size // 2, size)
    return max((boundary.end() for boundary in boundaries), default=None)


# --- tokenizers -----------------------------------------------------------------------------------

# Normalizers that treat what stands before a space without regard to what stands after.
LOCAL_NORMALIZERS = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer",
                     "Prepend", "Strip", "Precompiled", "Nmt")
LOCAL_REPLACEMENTS = (
    {"String": " "},  # becomes the mark of SentencePiece
    {"Regex": " {2,}"},
    {"Regex": "\\A +| +\\z"},
    {"Regex": "\\A +"},
)

# Pre-tokenizers that end a piece between a letter and a space ...
SPLITTING = ("BertPreTokenizer", "Whitespace", "WhitespaceSplit")
# ... and those that may not, but look no further.
LOCAL = ("Digits", "Punctuation")

# Patterns whose matches neither hold a letter in front of a space nor look beyond that space.
# Backtracking stays inside runs of letters, digits, marks or white space.
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
_WORD = "[^\\r\\n\\p{L}\\p{N}]?\\p{L}+"
_UPPER = "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
_LOWER = "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
_START = "[^\\r\\n\\p{L}\\p{N}]?"
_REST_WITH_SLASH = _REST.replace("[\\r\\n]*", "[\\r\\n/]*")
SPLITTING_PATTERNS = {
    # GPT-2 and StarCoder
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+",
    # GPT-4, Llama 3, Qwen 2 and later, DeepSeek coder
    f"{_CONTRACTIONS}|{_WORD}|\\p{{N}}{{1,3}}|{_REST}",
    f"{_CONTRACTIONS}|{_WORD}|\\p{{N}}|{_REST}",
    # GPT-4o and Llama 4; Mistral's
    f"{_START}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_START}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    f"|\\p{{N}}{{1,3}}|{_REST_WITH_SLASH}",
    f"{_START}{_UPPER}*{_LOWER}+|{_START}{_UPPER}+{_LOWER}*|\\p{{N}}|{_REST_WITH_SLASH}",
    "\\s?\\p{L}+",
}
LOCAL_PATTERNS = {
    "[\\r\\n]",
    "\\s?\\p{P}+",
    "\\p{N}{1,3}",
    "\\p{N}",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
}


def splits_at_spaces(tokenizer):
    """Return whether tokens before a boundary never depend on the text after it.

    A boundary is a place between a letter and a space.  True if every step of the tokenizer is
    known to treat what comes before as it would treat it at the end of a text.

    Args:
        tokenizer: fast Hugging Face tokenizer.
    """
    backend = tokenizer.backend_tokenizer
    for added in backend.get_added_tokens_decoder().values():
        # it would stand across the boundary, or swallow the space behind it
        if LETTER_AND_SPACE.search(added.content) or (added.rstrip and added.content[-1].isalpha()):
            return False
    if not all(_is_local_normalizer(state) for state in _parts(backend.normalizer, "normalizers")):
        return False
    parts = _parts(backend.pre_tokenizer, "pretokenizers")
    effects = list(map(_effect_of_pre_tokenizer, parts))
    if None in effects:
        return False
    return _is_local_model(backend, splits="splits" in effects)


def _parts(component, key):
    """List the states of a component, or of the members of a sequence of them."""
    if component is None:
        return []
    return list(_members(json.loads(component.__getstate__()), key))


def _members(state, key):
    if state["type"] != "Sequence":
        return [state]
    return itertools.chain.from_iterable(_members(member, key) for member in state[key])


def _is_local_normalizer(state):
    if state["type"] == "Replace":
        return state["pattern"] in LOCAL_REPLACEMENTS
    return state["type"] in LOCAL_NORMALIZERS


def _effect_of_pre_tokenizer(state):
    """Return "splits" (at every boundary), "local" (perhaps not there) or None (not known)."""
    kind = state["type"]
    if kind == "Split":
        return _effect_of_split(state)
    splits = kind in SPLITTING
    splits |= kind == "ByteLevel" and state["use_regex"]
    splits |= kind == "Metaspace" and state.get("split", True)
    if splits:
        return "splits"
    if kind in ("ByteLevel", "Metaspace", *LOCAL):
        return "local"
    return None


def _effect_of_split(state):
    pattern = state["pattern"]
    regex = pattern.get("Regex")
    joins = state["behavior"] not in ("Isolated", "Removed", "MergedWithNext")
    if state.get("invert") or (joins and regex is not None):
        return None
    if regex in LOCAL_PATTERNS or (pattern == {"String": " "} and joins):
        return "local"
    if regex in SPLITTING_PATTERNS or pattern == {"String": " "}:
        return "splits"
    return None


def _is_local_model(backend, splits):
    """Return whether a model that reads pieces, or else the whole text, keeps to boundaries."""
    model = backend.model
    kind = type(model).__name__
    if getattr(model, "dropout", None):
        return False  # draws how it splits
    if splits:
        return kind in ("BPE", "Unigram", "WordPiece", "WordLevel")
    # The best split of a whole text is the best one of each side, if no token joins them: merges
    # and scores of the sides do not meet.  Unknown characters do, unless the mark is a known one.
    vocab = backend.get_vocab(with_added_tokens=False)
    has_mark = "\u2581" in vocab
    if kind not in ("BPE", "Unigram") or not has_mark:
        return False
    return not any(LETTER_AND_MARK.search(token) for token in vocab)
