"""Every loss, how it is called, and its definition: one table, of which tests state properties.

A loss of one vocabulary compares the positions of a `LogitsCase`; one of two vocabularies reads the
ids and tables of a `cases.Case`.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

import oracle
from cases import F64, Case, Ids, common_of, table_of
from isogloss import losses
from isogloss.nodes import Tables, list_nodes
from isogloss.spelling import translation_tables
from isogloss.translation import CellColumns, translated
from toys import as_tables

ALL = slice(None)


class Problem(NamedTuple):
    """A loss of a random batch.

    x, y: logits of the student, with a gradient, and of the teacher, float64.
    reads: (B, S) and (B, T) bool, the rows of either side that may be read.
    compute: (x, y, samples, **options) -> (sum, count); options are weight_BS and reduction.
    definition: (limit of a term before tau^2, infinity unless given) -> (sum, count) by the oracle.
    """

    x: torch.Tensor
    y: torch.Tensor
    reads: tuple
    compute: Callable
    definition: Callable

    def loss(self, x=None, y=None, samples=ALL, **options):
        """Return (sum, count) of the case's logits, or of others."""
        x = self.x if x is None else x
        y = self.y if y is None else y
        return self.compute(x, y, samples, **options)


def summed(terms, limit=math.inf):
    """Return (sum, count) of terms, each of which counts as the limit at most."""
    return sum((term if term <= limit else limit for term in terms), oracle.ZERO), len(terms)


# --- one vocabulary -------------------------------------------------------------------------------

COEFFICIENTS = {  # by divergence: its parameter
    "forward_kl": {},
    "reverse_kl": {},
    "generalized_jsd": {"beta": 0.3},
    "skew_forward_kl": {"skew": 0.2},
    "skew_reverse_kl": {"skew": 0.1},
    "adaptive_kl": {"alpha": 0.5},
    "total_variation": {},
}
SELECTIONS = {
    "": {},
    ", another temperature": {"teacher_temperature": 1.5},
    ", top_k": {"top_k": 3},
    ", top_k without tail": {"top_k": 3, "tail": False},
    ", student's top_k": {"top_k": 3, "support": "student", "teacher_temperature": 1.5},
}


class LogitsCase:
    """Random logits of B samples, S positions, V tokens, and which positions count."""

    def __init__(self, seed, B=2, S=4, V=9):
        torch.manual_seed(seed)
        self.x = (2 * torch.randn(B, S, V, dtype=F64)).requires_grad_()
        self.y = 2 * torch.randn(B, S, V, dtype=F64)
        self.mask = torch.rand(B, S) < 0.7
        self.mask[0, 0] = True
        self.next = torch.randint(V, (B, S))

    def problem(self, compute, definition):
        return Problem(self.x, self.y, (self.mask, self.mask), compute, definition)


def divergence_problem(name, selection, parameters, seed, tau=1.0, samples=2, equal=True):
    case = LogitsCase(seed, samples)

    def compute(x, y, samples, **options):
        return getattr(losses, name)(
            x, y, case.mask[samples], temperature=tau, **parameters, **options, **selection)

    def definition(limit=math.inf):
        options = dict(selection)
        teacher_tau = options.pop("teacher_temperature", None)
        coefficient = next(iter(parameters.values()), 0.0)
        terms = oracle.positions(name, case.x, case.y, case.mask, tau, teacher_tau,
                                 coefficient=coefficient, **options)
        return summed([term for _, _, term in terms], limit * tau**2)

    return case.problem(compute, definition)


def cross_entropy_problem(seed, tau=1.0, samples=2, equal=True):
    case = LogitsCase(seed, samples)
    labels = torch.where(case.mask, case.next, -100)

    def compute(x, y, samples, **options):
        return losses.next_token_cross_entropy(x, labels[samples], **options)

    problem = case.problem(compute, lambda: oracle.cross_entropy(case.x, labels))
    return problem._replace(reads=(case.mask, torch.zeros_like(case.mask)))


# --- two vocabularies -----------------------------------------------------------------------------


class LossTables(NamedTuple):
    """What the losses of a `Case` know of its vocabularies."""

    translation: Tables
    cells: CellColumns
    indices: torch.Tensor
    likelihoods: torch.Tensor
    kept: torch.Tensor
    entries: losses.Entries
    kept_entries: losses.Entries
    common: tuple
    relaxed: tuple

    @classmethod
    def of(cls, case):
        projection = case.indices, case.likelihoods
        W = len(case.A)
        kept = torch.arange(W - 3)
        tables = translation_of(case)
        return cls(
            tables, CellColumns.of(tables), *projection, kept,
            losses.projection_entries(*projection, W),
            losses.projection_entries(*projection, W, kept),
            tuple(common_of(case)), losses.common_tokens(*projection, relaxed=True))


def translation_of(case):
    """Return `nodes.Tables` of the case's spellings, of a student that joins nothing."""
    spellings = [table_of(spelled).numpy() for spelled in (case.A, case.B)]
    no_bytes = [[b""] * len(side) for side in (case.B, case.A)]
    nothing = np.zeros(len(case.B), bool)
    arrays = translation_tables(*spellings, *no_bytes, nothing, lambda texts: [])
    return as_tables(arrays)


class ChunkLoss(NamedTuple):
    """A loss of two vocabularies.

    compute: (x, y, ids, terms, tables, **options) -> (sum, count).
    definition: (case, tables, tau, limit) -> (sum, count).
    list_terms: (ids, tables) -> what is known before any forward pass.
    """

    compute: Callable
    definition: Callable
    list_terms: Callable = lambda ids, tables: losses.find_chunks(ids.chunk_S, ids.chunk_T)


def of_chunks(function, definition, arguments=lambda tables: {}, reads_next=False, **parameters):
    """Return the ChunkLoss of a function that compares whole chunks.

    Args:
        definition: (case, tables, tau) -> terms.
        arguments: tables -> further arguments of the function.
    """
    def compute(x, y, ids, terms, tables, **options):
        ids = ids if reads_next else ids[2:]
        return function(x, y, *ids, chunks=terms, **arguments(tables), **parameters, **options)

    def total(case, tables, tau, limit):
        factor = 1 if reads_next else tau**2  # what reads the text's tokens has no tau^2
        return summed(definition(case, tables, tau), limit * factor)

    return ChunkLoss(compute, total)


def projection_loss(kept=False, **parameters):
    def arguments(tables):
        given = dict(indices_VK=tables.indices, likelihoods_VK=tables.likelihoods)
        if kept:
            return given | dict(kept_K=tables.kept, entries=tables.kept_entries)
        return given | dict(entries=tables.entries)

    def definition(case, tables, tau):
        return oracle.projection_kl(
            case.x, case.y, *case.ids[2:], case.indices, case.likelihoods,
            tables.kept if kept else None, tau, **parameters)

    return of_chunks(losses.projection_kl, definition, arguments, **parameters)


def gold_loss(relaxed=False, **parameters):
    def common_ids(tables):
        return tables.relaxed if relaxed else tables.common

    def arguments(tables):
        return dict(zip(("common_V", "common_W"), common_ids(tables)))

    def definition(case, tables, tau):
        ids = [ids_N.tolist() for ids_N in common_ids(tables)]
        return oracle.gold(case.x, case.y, *case.ids[2:], ids, tau, 3, **parameters)

    return of_chunks(losses.gold, definition, arguments, uncommon_topk=3, **parameters)


def hybrid_loss(matched_weight=None):
    def definition(case, tables, tau):
        common = [ids_N.tolist() for ids_N in tables.common]
        return oracle.hybrid_uld(case.x, case.y, *case.ids, common, matched_weight, tau)

    return of_chunks(losses.uld, definition, lambda tables: {"common": tables.common},
                     reads_next=True, matched_weight=matched_weight)


def translated_loss(name, **top_k):
    parameters = COEFFICIENTS[name]

    def compute(x, y, ids, terms, tables, **options):
        return translated(x, y, terms, tables.translation, cells=tables.cells,
                          divergence=getattr(losses, name), **parameters, **top_k, **options)

    def definition(case, tables, tau, limit):
        nodes = oracle.Translation(case.A, case.B, set(), {}, **top_k)
        terms = nodes.terms(case.x, case.y, case.ids.next_S, *case.ids, name, tau,
                            next(iter(parameters.values()), 0.0), limit=limit)
        return sum(term for *_, term in terms), sum(counts for _, _, counts, _ in terms)

    # without joins, what was read does not matter
    return ChunkLoss(compute, definition,
                     lambda ids, tables: list_nodes(ids.next_S, *ids, tables.translation))


CHUNK_LOSSES = {
    "projection_kl": projection_loss(),
    "projection_kl, kept": projection_loss(kept=True),
    "projection_kl, reverse": projection_loss(reverse=True),
    "projection_kl, logp": projection_loss(kept=True, chunk_average="logp"),
    "gold": gold_loss(),
    "gold, logp": gold_loss(chunk_average="logp"),
    "gold, reverse": gold_loss(reverse=True),
    "h_kl": gold_loss(relaxed=True),
    "uld": of_chunks(
        losses.uld, lambda case, tables, tau: oracle.uld(case.x, case.y, *case.ids, tau),
        reads_next=True),
    "hybrid_uld": hybrid_loss(),
    "hybrid_uld, weight": hybrid_loss(matched_weight=0.8),
    "alm": of_chunks(
        losses.alm, lambda case, tables, tau: oracle.alm(case.x, case.y, *case.ids, tau),
        reads_next=True),
    **{f"translated, {name}": translated_loss(name) for name in COEFFICIENTS},
    "translated, forward_kl, top_k": translated_loss("forward_kl", top_k=2),
    "translated, reverse_kl, top_k of the student": translated_loss(
        "reverse_kl", top_k=2, support="student"),
    "translated, reverse_kl, top_k": translated_loss("reverse_kl", top_k=5),
    "translated, reverse_kl, top_k without tail": translated_loss(
        "reverse_kl", top_k=5, tail=False),
}


def chunk_problem(name, seed, tau=1.0, **shape):
    """Return the Problem of a loss of two vocabularies; shape: see `cases.Case`."""
    spec = CHUNK_LOSSES[name]
    case = Case(seed, **shape)
    tables = LossTables.of(case)

    def compute(x, y, samples, **options):
        ids = Ids(*[of_side[samples] for of_side in case.ids])
        terms = spec.list_terms(ids, tables)
        return spec.compute(x, y, ids, terms, tables, temperature=tau, **options)

    reads = [chunk >= 0 for chunk in case.ids[2:]]
    if name.startswith("translated"):  # a translation asks the row behind a text's last token, too
        reads[1] = reads[1] | reads[1].roll(1, 1)
    return Problem(case.x, case.y, tuple(reads), compute,
                   lambda limit=math.inf: spec.definition(case, tables, tau, limit))


PROBLEMS = {
    "cross_entropy": cross_entropy_problem,
    "generalized_jsd, beta 0": partial(divergence_problem, "generalized_jsd", {}, {"beta": 0}),
    "generalized_jsd, beta 1": partial(divergence_problem, "generalized_jsd", {}, {"beta": 1}),
}
for name, parameters in COEFFICIENTS.items():
    for suffix, selection in SELECTIONS.items():
        PROBLEMS[name + suffix] = partial(divergence_problem, name, selection, parameters)
for name in CHUNK_LOSSES:
    PROBLEMS[name] = partial(chunk_problem, name)
