"""Spelling tables: how each tokenizer spells the other's tokens, and the events both can express.

    python -m projection_tools.spell --student A --teacher B [--output spelling.pt]

event_kl.py reads these.  spelling.py makes the spellings.  A token and the first piece
of its spelling are linked; connected components are the events.

Shapes: V student vocabulary, W teacher vocabulary, P pieces, N tokens of either vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numba import njit

from isogloss.flags.parse import OLD_NAMES, tool
from isogloss.projection_tools.arrays import counted
from isogloss.projection_tools.files import TableArgs, cached, finish_tables
from isogloss.projection_tools.tokenizers import tokenizer_metadata
from isogloss.spelling import prefix_ranges, spell_each_other

VERSION = 5  # of the tables; raise it when they change for the same two tokenizers


@njit(cache=True)
def _components(links, count):
    """Return for each of `count` nodes the smallest node of its component (union-find)."""
    root = np.arange(count)
    for k in range(len(links)):
        a = links[k, 0]
        b = links[k, 1]
        while root[a] != a:
            root[a] = root[root[a]]  # path halving
            a = root[a]
        while root[b] != b:
            root[b] = root[root[b]]
            b = root[b]
        root[max(a, b)] = min(a, b)
    for i in range(count):  # parents are smaller, so one pass in order is enough
        root[i] = root[root[i]]
    return root


def events(student_pieces_WP, teacher_pieces_VP):
    """Number the connected components of w -- A[w][0] and v -- B[v][0].

    Args:
        student_pieces_WP: A, how the student spells the teacher's tokens, -1 behind the last piece.
        teacher_pieces_VP: B, how the teacher spells the student's tokens.
    Returns:
        (event_V, event_W, count): int64; -1 for a token that is linked to nothing on the other
        side.
    """
    W = len(student_pieces_WP)
    V = len(teacher_pieces_VP)
    w = np.flatnonzero(student_pieces_WP[:, 0] >= 0)
    v = np.flatnonzero(teacher_pieces_VP[:, 0] >= 0)
    # Nodes: the student's tokens 0 .. V - 1, then the teacher's V .. V + W - 1.
    first_of_teacher = student_pieces_WP[w, 0]
    first_of_student = teacher_pieces_VP[v, 0]
    teacher_links = np.stack([first_of_teacher, V + w], 1)
    student_links = np.stack([v, V + first_of_student], 1)
    links = np.concatenate([teacher_links, student_links])
    roots = _components(links.astype(np.int64), V + W)

    linked = np.zeros(V + W, bool)
    linked[links.reshape(-1)] = True
    _, event = np.unique(roots[linked], return_inverse=True)
    numbers = np.full(V + W, -1)
    numbers[linked] = event
    count = int(event.max(initial=-1)) + 1
    return numbers[:V], numbers[V:], count


def build_spelling(pair, max_pieces=16):
    """Return all tables of `event_kl.Spelling` (int32 tensors), with the tokenizers' fingerprints.

    Args:
        pair: Pair.
        max_pieces: longest spelling kept, in pieces; of longer ones the beginning.
    """
    student_pieces_WP, teacher_pieces_VP = spell_each_other(
        pair.tokenizers, pair.tables, max_pieces)
    event_V, event_W, count = events(student_pieces_WP, teacher_pieces_VP)
    arrays = {"event_V": event_V, "event_W": event_W}
    for axis, pieces in (("W", student_pieces_WP), ("V", teacher_pieces_VP)):
        order, low, high = prefix_ranges(pieces)
        arrays[f"pieces_{axis}"] = pieces
        arrays[f"order_{axis}"] = order
        arrays[f"low_{axis}"] = low
        arrays[f"high_{axis}"] = high
    tables = {}
    for key, array in arrays.items():
        array = np.ascontiguousarray(array).astype(np.int32)
        tables[key] = torch.from_numpy(array)
    return tables | {"num_events": count} | tokenizer_metadata(pair)


def cached_spelling(pair, directory=None):
    """Return the tables of `build_spelling`, kept on disk under the digest of the pair."""
    name = f"spelling-{VERSION}-{pair.digest}.pt"
    return cached(name, lambda: build_spelling(pair), directory)


def statistics(tables, pair):
    """Return facts about spelling tables, as {name: number or text}."""
    count = tables["num_events"]
    event_V = tables["event_V"].long()
    event_W = tables["event_W"].long()
    student_tokens = torch.bincount(event_V[event_V >= 0], minlength=count)  # of each event
    teacher_tokens = torch.bincount(event_W[event_W >= 0], minlength=count)
    single = (student_tokens == 1) & (teacher_tokens == 1)
    facts = {
        "events": count,
        "with one token on each side": int(single.sum()),
        "tokens in the largest": int((student_tokens + teacher_tokens).max()) if count else 0,
    }
    for role, event in (("student", event_V), ("teacher", event_W)):
        linked = event[event >= 0]
        num_single = float(single[linked].sum())
        fraction = num_single / max(1, len(event))
        # These tokens are compared one to one; all others only as a sum.
        facts[f"{role} tokens in events with one token on each side"] = f"{fraction:.1%}"

    student, teacher = pair.tables
    facts |= _piece_statistics("student", student, teacher, tables["pieces_V"].numpy())
    facts |= _piece_statistics("teacher", teacher, student, tables["pieces_W"].numpy())
    return facts


def _piece_statistics(role, source, target, pieces):
    used = pieces >= 0
    lengths = target.lengths[np.where(used, pieces, 0)]
    total = np.where(used, lengths, 0).sum(1)
    spelled = used[:, 0].sum()
    mean = used.sum() / max(1, spelled)
    facts = {f"pieces per {role} token": f"{mean:.2f}"}
    for reason, number in unencodable_reasons(source, pieces, total).items():
        facts[f"{role}: {reason}"] = number
    return facts


def unencodable_reasons(source, pieces, total):
    """Return {reason: number} of the tokens without a spelling, or with the beginning of one.

    Args:
        source: TokenTable of the tokens.
        pieces: (N, P) their spelling.
        total: (N,) bytes that the pieces stand for.
    """
    unused = np.diff(source.starts) == 0
    missing = pieces[:, 0] < 0
    text = ~source.special & ~unused
    return counted({
        "control tokens without a counterpart": missing & source.special,
        "ids without a token": missing & ~source.special & unused,
        "bytes that the other side cannot write": missing & text,
        "longer than the most pieces kept": ~missing & text & (total < source.lengths),
    })


@dataclass(kw_only=True)
class Args(TableArgs):
    """Build the spelling tables of a student's and a teacher's tokenizer."""


def main(args):
    finish_tables(args, build_spelling, statistics)


def cli(argv=None):
    tool(Args, main, aliases=OLD_NAMES, argv=argv)


if __name__ == "__main__":
    cli()
