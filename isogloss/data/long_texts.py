"""Leave out the tail of a text that is far too long for the models, before it is tokenized.

A book on one line would otherwise be tokenized and aligned whole for the sake of its first page.
The text is cut between a letter and a space, where tokenizers cut too or soon agree again: what
comes after decides at most the last tokens before, and MARGIN of them no sample reads.

Tests: tests/test_long_texts.py.
"""

import re

# Shorter texts are read whole: they cost little, and the metrics of an alignment speak of all of
# the text that was read.
MIN_CHARACTERS = 16_384
# Of a text that is tokenized in one piece: 16 Mi take 3 GB and, on one core, half a minute.
MOST_CHARACTERS = 2**24
CHARACTERS_PER_TOKEN = 16  # tried first; of most texts it is 3 to 5, of indented code up to 16
MARGIN = 64  # of the student's tokens; of many tokenizers it is 0 (not tuned)

# Between a letter and a space: letters of alphabets that every library has known for long.  The
# space is a character of its own in every normal form.
BOUNDARY = re.compile("[A-Za-z\u00c0-\u024f\u0391-\u03a1\u03a3-\u03ce\u0400-\u0481](?= )")


def leave_out_tail(text, student, teachers):
    """Return the part of a text that these TextEncoders need, or the whole where none is known.

    A sample of the part is that of the whole text if every teacher has a chunk in it: then
    `sample.cut_sample` cuts behind a chunk, within the student's limit.
    """
    size = max(MIN_CHARACTERS, CHARACTERS_PER_TOKEN * student.max_length)
    if len(text) <= size:
        return text
    if any(map(_draws_splits, (student, *teachers))):
        return text
    while size < len(text):
        boundary = _last_boundary(text, size)
        # one token more than positions is kept, so the cut lies before the margin
        if boundary and student.num_tokens(text[:boundary]) > student.max_length + 1 + MARGIN:
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


def _draws_splits(encoder):
    """Tell whether a text is split in another way every time, as by BPE dropout."""
    return bool(getattr(encoder.tokenizer.backend_tokenizer.model, "dropout", None))
