"""Tell texts from chats, and leave out the tail of one that is far too long for the models.

A book on one line would otherwise be tokenized and aligned whole for the sake of its first page.
The text is cut between a letter and a space, where tokenizers cut too or soon agree again: what
comes after decides at most the last tokens before, and MARGIN of them no sample reads.

Tests: tests/test_long_texts.py.
"""

import json
import re

# Of a text that is tokenized in one piece: 16 Mi take 3 GB and, on one core, half a minute.
MOST_CHARACTERS = 2**24
CHARACTERS_PER_TOKEN = 5  # tried first; of most texts it is 3 to 5, of indented code up to 16
SPARE = 1.1  # times the characters that the first part says are needed (not tuned)
MARGIN = 64  # of the student's tokens; of many tokenizers it is 0 (not tuned)

HALF_PAIR = "holds half of a surrogate pair, which is no text"

# Between a letter and a space: letters of alphabets that every library has known for long.  The
# space is a character of its own in every normal form.
BOUNDARY = re.compile("[A-Za-z\u00c0-\u024f\u0391-\u03a1\u03a3-\u03ce\u0400-\u0481](?= )")


def leave_out_tails(texts, student, teachers):
    """Return the parts of some texts that these TextEncoders need, the whole where none is known.

    A sample of a part is that of the whole text if every teacher has a chunk in it: then
    `sample.cut_sample` cuts behind a chunk, within the student's limit.

    Returns:
        [(part, what `student.encode` makes of it) of each; (text, None): nothing is left out].
    """
    # One token more than positions is kept, and eos counts as one, so the cut lies before the
    # margin.
    enough = student.max_length + 2 + MARGIN
    read = [(text, None) for text in texts]
    sizes = dict.fromkeys(range(len(texts)), CHARACTERS_PER_TOKEN * enough)
    if any(map(_draws_splits, (student, *teachers))):
        return read
    while sizes := {number: size for number, size in sizes.items() if size < len(texts[number])}:
        parts = [texts[number][: _last_boundary(texts[number], sizes[number])] for number in sizes]
        # one call for all: it takes little more than half as long
        for number, part, ids in zip(list(sizes), parts, student.encode(parts)):
            size = sizes.pop(number)
            if part and len(ids) > enough:
                read[number] = part, ids
            else:
                needed = int(SPARE * len(part) * enough / max(1, len(ids)))
                sizes[number] = max(needed, size + size // 2)
    return read


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
    """Return the last place to cut in the second half of the first `size` characters; 0: none."""
    half = size // 2
    for begin in (max(half, size - 256), half):  # most often one is near
        boundaries = [boundary.end() for boundary in BOUNDARY.finditer(text, begin, size)]
        if boundaries:
            return boundaries[-1]
    return 0


def _draws_splits(encoder):
    """Tell whether a text is split in another way every time, as by BPE dropout."""
    return bool(getattr(encoder.tokenizer.backend_tokenizer.model, "dropout", None))


# --- what a row holds ----------------------------------------------------------------------------


def problem_of(content):
    """Return what is wrong with the text or chat of a row, to follow its name; None: nothing."""
    if isinstance(content, str):
        return None if is_text(content) else f" {HALF_PAIR}"
    if content is None:
        return " is null, expected text"
    content = listed(content)
    if not isinstance(content, list):
        return f" holds {content!r:.40}, expected text"
    from isogloss.data.chat_rows import problem_of_chat

    return problem_of_chat(content)


def is_text(value):
    """Tell whether all strings of a value can be written as UTF-8, which lone surrogates cannot."""
    if isinstance(value, dict):
        return all(map(is_text, value)) and all(map(is_text, value.values()))
    if isinstance(value, list):
        return all(map(is_text, value))
    if not isinstance(value, str) or value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def listed(value):
    """Return an object of lists of one length as a list of objects; another value as it is."""
    if not isinstance(value, dict):
        return value
    columns = {key: items for key, items in value.items() if items is not None}
    if not columns or not all(isinstance(items, list) for items in columns.values()):
        return value
    if len(set(map(len, columns.values()))) > 1:
        return value
    return [dict(zip(columns, cells)) for cells in zip(*columns.values())]


def is_message(value):
    return isinstance(value, dict) and ("role" in value or "from" in value)


def chat_of_text(text):
    """Return the messages that a text holds as JSON, [] of a blank one; None: it holds others."""
    if not text.lstrip().startswith("["):
        return None if text.strip() else []
    try:
        chat = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return chat if all(map(is_message, chat)) else None
