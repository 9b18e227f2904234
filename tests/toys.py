"""Toys of which everything is known: random texts, tokenizers with a few merges, exact models.

A process gives every text over a small alphabet a probability.  A model of it predicts the next
token of a tokenizer exactly, by summing over all texts, so two models of one process agree about
everything that both can say.
"""

from collections import defaultdict
from itertools import pairwise

import numpy as np
import torch

from cases import table_of
from isogloss.nodes import Tables
from isogloss.spelling import translation_tables

EOS = "$"
ALPHABET = "abc"


class Tokenizer:
    """Byte-pair encoding with a list of merges, the first of which is done first.

    No text is cut into the tokens `unwritten`; "b_" has the bytes of "b".
    """

    def __init__(self, *merges, unwritten=()):
        self.rank = {pair: number for number, pair in enumerate(merges)}
        merged = dict.fromkeys(left + right for left, right in merges)
        self.vocab = [*ALPHABET, *merged, *unwritten, EOS]
        self.id = {token: number for number, token in enumerate(self.vocab)}

    def __call__(self, text):
        tokens = list(text)
        while True:
            pairs = [pair for pair in pairwise(tokens) if pair in self.rank]
            if not pairs:
                return tokens
            best = min(pairs, key=self.rank.__getitem__)
            merged = []
            for token in tokens:
                if merged and (merged[-1], token) == best:
                    merged[-1] += token
                else:
                    merged.append(token)
            tokens = merged


def text_of(token):
    return token.rstrip("_")


def process(length, order, seed):
    """Return {text: probability} of a Markov process, cut at a length, with a memory of `order`."""
    random = np.random.default_rng(seed)
    rows = defaultdict(lambda: random.dirichlet(np.full(len(ALPHABET) + 1, 0.7)))
    texts = defaultdict(float)

    def extend(text, probability):
        if len(text) == length:
            texts[text] += probability
            return
        row = rows[text[len(text) - order:] if order else ""]
        texts[text] += probability * row[-1]
        for letter, share in zip(ALPHABET, row):
            extend(text + letter, probability * share)

    extend("", 1.0)
    return texts


def exact_model(texts, tokenizer):
    """Return {tokens so far: (vocabulary,) probability of them and the next token}."""
    joint = defaultdict(lambda: np.zeros(len(tokenizer.vocab)))
    for text, probability in texts.items():
        tokens = [*tokenizer(text), EOS]
        for position, token in enumerate(tokens):
            joint[tuple(tokens[:position])][tokenizer.id[token]] += probability
    return joint


def logits_of(model, tokens):
    """Return (positions, vocabulary) log-probabilities of an exact model along a text."""
    rows = []
    for position in range(len(tokens)):
        joint = model[tuple(tokens[:position])]
        rows.append(np.log(np.maximum(joint / joint.sum(), 1e-300)))
    return torch.tensor(np.array(rows))


def tables_of(student, teacher):
    """Return the `Tables` of two toy tokenizers."""
    def spell(tokens, tokenizer):
        spelled = [[EOS] if token == EOS else tokenizer(text_of(token)) for token in tokens]
        return table_of([[tokenizer.id[part] for part in parts] for parts in spelled]).numpy()

    raw = [[b"" if token == EOS else text_of(token).encode() for token in side.vocab]
           for side in (student, teacher)]
    canonical = np.array([token != EOS and student(text_of(token)) == [token]
                          for token in student.vocab])
    unwritten = ~canonical & np.array([token != EOS for token in student.vocab])
    arrays = translation_tables(
        spell(teacher.vocab, student), spell(student.vocab, teacher), *raw, canonical,
        speller(student), unwritten_V=unwritten, teacher_spells=speller(teacher))
    return as_tables(arrays)


def speller(tokenizer):
    """Return a function: byte strings -> ids of each."""
    return lambda texts: [[tokenizer.id[token] for token in tokenizer(text.decode())]
                          for text in texts]


def as_tables(arrays):
    """Return the `Tables` of what `translation_tables` returns."""
    fields = {}
    for name, value in arrays.items():
        fields[name] = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    return Tables(**fields)
