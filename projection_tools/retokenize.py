"""Rows of a model's embedding and head for the tokens of another tokenizer, from those that it has.

    python -m projection_tools.retokenize --model S --tokenizer B --output DIR   # isogloss transfer

A new token that says the bytes of an old one has its row; any other one the mean of the rows of its
pieces, which are the old tokenizer's spelling of it.  Control tokens have the row of the one in
their role, or of their name.  What is left (control tokens without a counterpart, bytes that the
old tokenizer cannot write) has the mean of all rows.

In the head such a mean is as likely as a piece, though a token is as likely as all of its pieces
together.  A constant takes that back: final hidden states have a direction in common
(`common_direction`), along which the rows of all tokens of several pieces lose some nats, as many
as are best on a text (isogloss/transfer.py).

Shapes: N tokens of the new tokenizer, P pieces, O rows of the old vocabulary, H hidden size.
Tests: tests/test_transfer.py.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module

import numpy as np
import torch

from isogloss.align import ROLE, TokenTable
from isogloss.spelling import link_special_tokens, spell

MOST_PIECES = 32
ROWS_AT_A_TIME = 4096
OFFSETS = 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0  # nats that are tried
RIDGE = 1e-2  # of the mean square of a hidden state, per position


@dataclass
class Origins:
    """Say which old rows each new token is made of.

    Attributes:
        pieces_NP: int64 ids of old tokens, -1 behind the last one; all -1: the mean of all rows.
        links: {new id: old id} of control tokens in one role, or of one name.
        old, new: TokenTables.
    """

    pieces_NP: np.ndarray
    links: dict
    old: TokenTable
    new: TokenTable

    @cached_property
    def num_pieces_N(self):
        return (self.pieces_NP >= 0).sum(1)

    @property
    def is_text_N(self):
        return ~self.new.special & (np.diff(self.new.starts) > 0)

    def summary(self):
        """Return lines that say what the new tokens are made of."""
        text = self.num_pieces_N[self.is_text_N]
        several = text[text > 1]
        lines = [f"{len(self.new):,} tokens for {len(self.old):,}: {(text == 1).sum():,} say what "
                 f"an old one says, {len(several):,} the mean of "
                 f"{several.mean() if len(several) else 0:.1f} pieces, "
                 f"{(text == 0).sum():,} that the old tokenizer cannot write the mean of all"]
        linked = ", ".join(f"{self.new.tokens[new]} <- {self.old.tokens[old]}"
                           for new, old in sorted(self.links.items())) or "none"
        lines.append(f"control tokens: {linked}")
        alone = [self.new.tokens[i] for i in np.flatnonzero(self.new.special)
                 if i not in self.links and self.new.tokens[i]]
        if alone:
            more = f" and {len(alone) - 8:,} more" if len(alone) > 8 else ""
            lines.append(f"control tokens that begin as the mean of all: {', '.join(alone[:8])}"
                         f"{more}")
        return lines


def origins_of(tokenizers, tables, rows):
    """Return the Origins of the tokens of a new vocabulary.

    Args:
        tokenizers: (old, new) fast tokenizers; tables: their TokenTables.
        rows: of the model's embedding, which may be fewer than the tokenizer's ids.
    Raises:
        ValueError: the old tokenizer can write less than half of the new tokens.
    """
    old, new = tables
    pieces_NP = spell(new, tokenizers[0], old, MOST_PIECES).astype(np.int64)
    for new_id, old_id in _equal_names(new, old):
        pieces_NP[new_id] = -1
        pieces_NP[new_id, 0] = old_id
    pieces_NP[(pieces_NP >= rows).any(1)] = -1
    links = {v: w for v, w in _links(tokenizers, tables).items() if w < rows}
    for v, w in links.items():
        pieces_NP[v] = -1
        pieces_NP[v, 0] = w
    origins = Origins(pieces_NP, links, old, new)
    text = origins.num_pieces_N[origins.is_text_N]
    if (text == 0).sum() > len(text) / 2:
        raise ValueError(f"the model's tokenizer can write {(text > 0).sum():,} of the "
                         f"{len(text):,} tokens of the new one; it lacks bytes, or a case of "
                         "letters, and what it cannot write the model does not know")
    return origins


def _links(tokenizers, tables):
    """Return {new id: old id} of control tokens, of which several may begin as one.

    So <|im_end|> and </s> are the old <|im_end|>, an eos, and <s> and </s> the old <|endoftext|>.
    """
    old, new = tables
    links = dict(link_special_tokens(new, old))
    names = {old.tokens[w]: w for w in np.flatnonzero(old.special).tolist()}
    for v in np.flatnonzero(new.special).tolist():
        if new.tokens[v] in names:
            links[v] = names[new.tokens[v]]
    headers = [_header_of(*each) for each in zip(tokenizers, tables)]
    for w, v in ((old.end_of_turn, new.end_of_turn), (old.bos, new.bos), headers):
        if v >= 0 and w >= 0:
            links.setdefault(v, w)
    return links


def _header_of(tokenizer, table):
    """Return the id of the control token that a chat template writes before a role; -1: none."""
    template = getattr(tokenizer, "chat_template", None) or ""
    for i in np.flatnonzero(table.special).tolist():
        if table.tokens[i] and re.search(re.escape(table.tokens[i]) + ROLE, str(template)):
            return i
    return -1


def _equal_names(new, old):
    """Yield (new id, old id) of tokens of one name and the same bytes.

    Of tokens with the same bytes, as "A" and the byte <0x41>, only one is what a text is cut into.
    """
    id_of_name = {name: i for i, name in enumerate(old.tokens) if not old.special[i]}
    for i, name in enumerate(new.tokens):
        j = id_of_name.get(name, -1)
        if name and j >= 0 and not new.special[i] and new.bytes_of(i) == old.bytes_of(j):
            yield i, j


def new_rows(old_OH, origins):
    """Return the rows of the new tokens, (N, H), or (N,) of a bias, in the dtype of the old ones.

    Args:
        old_OH: rows of the old ones, beyond which there may be more, as padding.
    """
    num_known = min(len(origins.old), len(old_OH))
    mean_H = old_OH[:num_known].mean(0, dtype=torch.float32)
    rows_NH = old_OH.new_empty(len(origins.pieces_NP), *old_OH.shape[1:])
    for first in range(0, len(rows_NH), ROWS_AT_A_TIME):
        pieces = torch.from_numpy(origins.pieces_NP[first : first + ROWS_AT_A_TIME])
        total = torch.zeros(len(pieces), *old_OH.shape[1:])
        for column in range(pieces.shape[1]):  # few tokens have many
            [longer] = torch.nonzero(pieces[:, column] >= 0, as_tuple=True)
            total[longer] += old_OH[pieces[longer, column]].to(torch.float32)
        count = (pieces >= 0).sum(1).reshape(-1, *[1] * (old_OH.dim() - 1))
        mean = torch.where(count > 0, total / count.clamp(min=1), mean_H)
        rows_NH[first : first + len(pieces)] = mean.to(old_OH.dtype)
    return rows_NH


# --- the head -------------------------------------------------------------------------------------


def common_direction(hidden_SH):
    """Return the (H,) direction u with h @ u = 1 for final hidden states, by least squares.

    Args:
        hidden_SH: float32 final hidden states of some text.
    """
    H = hidden_SH.shape[1]
    ridge = RIDGE * len(hidden_SH) * hidden_SH.square().mean()
    gram_HH = hidden_SH.T @ hidden_SH + ridge * torch.eye(H, dtype=hidden_SH.dtype)
    return torch.linalg.solve(gram_HH, hidden_SH.sum(0))


if __name__ == "__main__":
    import_module("isogloss.command").tool("transfer")
