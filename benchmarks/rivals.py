"""Losses of other systems, written anew from their papers and code, for comparisons.

benchmarks/square.py trains with them: `add()` puts them into the table of losses.  They loop over
chunks on the CPU, so their seconds say nothing of their authors' code.  p is the student's belief,
q the teacher's; a chunk is text between two borders that both tokenizers share.

simct, simct_fkl   SimCT (arXiv:2605.07711, github.com/sunjie279/SimCT- at 4dae6fc): at the first
    position of a chunk the logits of all tokens that both vocabularies have, and for a chunk of
    several tokens the mean of its realized logits; KL(p || q) of their softmax, or KL(q || p).
csd   The partition KL of NeMo RL's branch xtoken-v6-loss at a84de17, whose formulas are those of
    Common-Support Distillation (arXiv:2610.28895): tokens that both have, and one event for the
    rest; in a chunk of one token against several, the tokens that are written with the realized
    ones but the last; of several against several the chunk's probability.  Its positions are taken
    as unshifted; no filter of unlikely chunks.
bpm, bpm_fkl   Byte-Prefix Marginalization (arXiv:2607.22334, github.com/K1XE/BPM at 55093cf): a
    teacher token gives its mass to the longest student token that its bytes begin with; inside a
    teacher token those that begin with what was read; student tokens that are longer than the
    teacher's on the realized bytes take the chain product from it.  Tokens without a target are
    one event.  bpm is the authors' default: the Jensen-Shannon divergence of weight 0.5, -log p
    where one token is certain, and no rows whose next student token is spaces and tabs alone.  It
    refuses tokenizers that are not byte-level BPE; here it does not.  bpm_fkl: KL(q || p) of all.
no_teacher   The baseline of arXiv:2608.31046 for what a student has written: a fixed negative
    advantage on tokens that the student found unlikely, so log p where p < UNLIKELY, and 0
    elsewhere.  The paper's threshold is not in its abstract.
piece_kl_even      Ours, where choices weigh as much as their roots.
same_token, total_variation_common   What square.py measures of a student, not losses.

Tests: tests/test_rivals.py.
"""

from bisect import bisect_left
from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from isogloss import losses
from isogloss.losses import find_chunks
from isogloss.objective.loss_table import LOSSES, DistillationLoss, LossSpec
from isogloss.spelling import spell

TINY = 1e-12  # the least mass of a rest
UNLIKELY = 0.1  # the probability below which no_teacher pushes a token down; not tuned
AGREEMENT = "same_token", "total_variation_common"
SPAN = 8  # longest student token that bpm follows, in teacher tokens


def add():
    """Put the losses into the table."""
    for name, loss in {"simct": partial(Simct, reverse=True), "simct_fkl": Simct, "csd": Csd,
                       "bpm": partial(Bpm, beta=0.5, masks_space=True), "bpm_fkl": Bpm,
                       "no_teacher": NoTeacher, **{name: partial(Agreement, measure=name)
                                                   for name in AGREEMENT}}.items():
        LOSSES[name] = LossSpec(partial(build, loss), "chunks")
    ours = LOSSES["piece_kl"]
    LOSSES["piece_kl_even"] = replace(ours, options=ours.options | {"choice_weight": 1.0})


def build(loss, cfg, pair, device, has_rest=False):
    """Build a loss: `loss(pair)` takes both models' logits and next tokens, and the chunks."""
    with torch.device(device):  # that of all tensors that are made
        of_pair = loss(pair)

    def loss_fn(student_logits, teacher_logits, sub_tile):
        chunks = sub_tile.terms
        with student_logits.device:
            if chunks is None:
                chunks = find_chunks(sub_tile.student_chunk[None], sub_tile.teacher_chunk[None])
            value_C = of_pair(student_logits.float(), teacher_logits.detach().float(),
                              sub_tile.student_labels, sub_tile.teacher_labels, chunks)
        return value_C.sum()

    return DistillationLoss(loss_fn)


def written_ids(pair, side):
    """Return {bytes: token} of one side; of tokens with equal bytes that which its texts have.

    As of "e" and <0x65>, where a tokenizer falls back to bytes.
    """
    table, tokenizer = pair.tables[side], pair.tokenizers[side]
    spelling_NP = spell(table, tokenizer, table)
    is_written = (spelling_NP[:, 0] == np.arange(len(table))) & (spelling_NP[:, 1:] < 0).all(1)
    ids = {}
    for token in np.argsort(~is_written, kind="stable").tolist():
        if table.lengths[token] > 0:
            ids.setdefault(table.bytes_of(token), token)
    return ids


def common_tokens(pair):
    """Return the ids of the tokens with the same bytes in both vocabularies, and of both ends."""
    ids = [written_ids(pair, side) for side in (0, 1)]
    both = [(ids[0][raw], ids[1][raw]) for raw in ids[0] if raw in ids[1]]
    both.append(tuple(table.eos for table in pair.tables))
    return torch.tensor(both).T


def spelled(pair, side):
    """Yield (token, its spelling by the other tokenizer) of the tokens of one side."""
    other = 1 - side
    spelling_NP = spell(pair.tables[side], pair.tokenizers[other], pair.tables[other])
    for token in sorted(written_ids(pair, side).values()):
        ids = [piece for piece in spelling_NP[token].tolist() if piece >= 0]
        if ids:
            yield token, tuple(ids)


def partition_kl(logp_E, logq_E, parts):
    """Return the (num,) KL(q || p) over the events of each part and one event for the rest."""
    p_K, q_K = parts.sum(logp_E.exp()), parts.sum(logq_E.exp())
    rest_p, rest_q = (1 - p_K).clamp(min=TINY), (1 - q_K).clamp(min=TINY)
    return parts.sum(logq_E.exp() * (logq_E - logp_E)) + rest_q * (rest_q / rest_p).log()


class Simct:
    """Compare common tokens and the chunk itself; see the module."""

    def __init__(self, pair, reverse=False):
        self.common_V, self.common_W = common_tokens(pair)
        self.reverse = reverse

    def __call__(self, x_NV, y_MW, next_S, next_T, chunks):
        is_span = (chunks.count_S > 1) | (chunks.count_T > 1)
        both = []
        for z, following, first, row, of, count, common in (
                (x_NV, next_S, chunks.first_S, chunks.row_S, chunks.of_S, chunks.count_S,
                 self.common_V),
                (y_MW, next_T, chunks.first_T, chunks.row_T, chunks.of_T, chunks.count_T,
                 self.common_W)):
            realized = z[row, following[row]]
            mean_C = z.new_zeros(len(first)).index_add(0, of, realized) / count
            span_C = torch.where(is_span, mean_C, -1e9)
            both.append(torch.cat([z[first][:, common], span_C[:, None]], 1).log_softmax(-1))
        logp, logq = both if not self.reverse else both[::-1]
        return (logq.exp() * (logq - logp)).sum(-1)


class Agreement:
    """Say of a chunk's first position whether both believe alike; no loss.

    same_token: of the tokens that both vocabularies have, both find the same one likeliest.
    total_variation_common: between the beliefs over those tokens.
    """

    def __init__(self, pair, measure):
        self.common_V, self.common_W = common_tokens(pair)
        self.measure = measure

    def __call__(self, x_NV, y_MW, next_S, next_T, chunks):
        x_CK, y_CK = x_NV[chunks.first_S][:, self.common_V], y_MW[chunks.first_T][:, self.common_W]
        if self.measure == "same_token":
            return (x_CK.argmax(-1) == y_CK.argmax(-1)).float()
        return (x_CK.softmax(-1) - y_CK.softmax(-1)).abs().sum(-1) / 2


class Csd:
    """Compare common events and a rest, chunk by chunk; see the module."""

    def __init__(self, pair):
        self.common = common_tokens(pair)
        self.endings = []  # of either side: {other side's tokens but the last: [(token, last)]}
        for side in (0, 1):
            endings = defaultdict(dict)
            for token, ids in spelled(pair, side):
                if len(ids) > 1:
                    endings[ids[:-1]].setdefault(ids[-1], token)
            self.endings.append({key: [(token, last) for last, token in of.items()]
                                 for key, of in endings.items()})

    def __call__(self, x_NV, y_MW, next_S, next_T, chunks):
        logp, logq = x_NV.log_softmax(-1), y_MW.log_softmax(-1)
        sides = [(logp, next_S, chunks.first_S.tolist(), chunks.count_S.tolist()),
                 (logq, next_T, chunks.first_T.tolist(), chunks.count_T.tolist())]
        following = [side[1].tolist() for side in sides]
        whole = [], []  # rows with one token on both sides
        parts = []  # of the others, (rows, tokens) of the student's and the teacher's events
        paths = [], []  # (rows, tokens, number of the part): probabilities of what came before
        for number in range(len(sides[0][2])):
            row = [side[2][number] for side in sides]
            count = [side[3][number] for side in sides]
            if count == [1, 1]:
                for side in (0, 1):
                    whole[side].append(row[side])
                continue
            came = [following[side][row[side] : row[side] + count[side]] for side in (0, 1)]
            if min(count) == 1:
                short = count.index(1)
                events = self.endings[short].get(tuple(came[1 - short][:-1]), [])
                if len(events) < 2:
                    continue
                tokens = [None, None]
                tokens[short] = [token for token, _ in events]
                tokens[1 - short] = [last for _, last in events]
            else:
                tokens = [[came[0][-1]], [came[1][-1]]]
            for side in (0, 1):
                for k in range(count[side] - 1):
                    paths[side].append((row[side] + k, came[side][k], len(parts)))
            parts.append([[(row[side] + count[side] - 1, token) for token in tokens[side]]
                          for side in (0, 1)])
        values = [x_NV.new_zeros(0)]
        if whole[0]:
            values.append(self._common(logp, logq, whole))
        if parts:
            sizes = torch.tensor([len(part[0]) for part in parts])
            of_E = torch.repeat_interleave(sizes)
            logs = []
            for side, log in enumerate((logp, logq)):
                events = torch.tensor([event for part in parts for event in part[side]])
                value_E = log[events[:, 0], events[:, 1]]
                if paths[side]:
                    rows, tokens, number = torch.tensor(paths[side]).T
                    before = log.new_zeros(len(parts)).index_add(0, number, log[rows, tokens])
                    value_E = value_E + before[of_E]
                logs.append(value_E)
            values.append(partition_kl(*logs, losses.Segments.of(of_E, len(parts))))
        return torch.cat(values)

    def _common(self, logp, logq, rows):
        logp_NE = logp[torch.tensor(rows[0])][:, self.common[0]]
        logq_NE = logq[torch.tensor(rows[1])][:, self.common[1]]
        of_E = torch.arange(len(logp_NE)).repeat_interleave(logp_NE.shape[1])
        return partition_kl(logp_NE.flatten(), logq_NE.flatten(),
                            losses.Segments.of(of_E, len(logp_NE)))


def kl_of(q_NE, logp_NE):
    """Return the (N,) KL(q || p), where events without q count for nothing."""
    return (q_NE * (q_NE.clamp(min=TINY).log() - logp_NE)).sum(-1)


class Places(NamedTuple):
    """List where Bpm asks the student, and what gives its target there; numbers count the places.

    rows: of the student.
    at_border: (numbers, teacher rows) of places between two teacher tokens.
    inside: (number, teacher row, its tokens that go on, where each gives its mass) of the others.
    changes: (number, student token, mass) to add.
    """

    rows: list
    at_border: tuple
    inside: list
    changes: list


class Bpm:
    """Route the teacher's mass by bytes to student tokens; see the module.

    Args:
        beta: of the Jensen-Shannon divergence; 0: KL(q || p).
        masks_space: rows whose next token is spaces and tabs alone are left out.
    """

    def __init__(self, pair, beta=0.0, masks_space=False):
        self.beta, self.masks_space = beta, masks_space
        self.bytes = [[b"" if table.special[i] else table.bytes_of(i) for i in range(len(table))]
                      for table in pair.tables]
        self.is_space = torch.tensor([bool(raw) and not raw.strip(b" \t") for raw in self.bytes[0]])
        self.twins = defaultdict(list)  # teacher tokens by their bytes
        for token, raw in enumerate(self.bytes[1]):
            self.twins[raw].append(token)
        self.ids = written_ids(pair, 0)
        self.longest = max(map(len, self.ids))
        self.num = len(pair.tables[0])
        self.order = sorted(range(len(self.bytes[1])), key=lambda i: self.bytes[1][i])
        self.sorted = [self.bytes[1][i] for i in self.order]
        self.ends = [table.eos for table in pair.tables]
        self.routes = [self.route(token, None) for token in self.bytes[1]]
        self.routes[self.ends[1]] = self.ends[0]
        self.route_W = torch.tensor(self.routes)
        self.inside = {}

    def route(self, data, limit):
        """Return the longest student token that bytes begin with; V: none.

        Args:
            limit: its most bytes.
        """
        for size in range(min(len(data), self.longest, limit or len(data)), 0, -1):
            if data[:size] in self.ids:
                return self.ids[data[:size]]
        return self.num

    def range(self, prefix):
        """Return the range, in the sorted teacher tokens, of those that begin with a prefix."""
        return bisect_left(self.sorted, prefix), bisect_left(self.sorted, prefix + b"\xff" * 40)

    def tokens_behind(self, prefix, end):
        """Return (teacher tokens that begin with a prefix, where each gives its mass)."""
        key = prefix, end
        if key not in self.inside:
            low, high = self.range(prefix)
            tokens, routes = [], []
            for i in range(low, high):
                tokens.append(self.order[i])
                routes.append(self.route(self.sorted[i][len(prefix):], end))
            self.inside[key] = np.array(tokens), np.array(routes)
        return self.inside[key]

    def __call__(self, x_NV, y_MW, next_S, next_T, chunks):
        q_MW = y_MW.softmax(-1)
        places = self.places(q_MW, next_S.tolist(), next_T.tolist(), chunks)
        target = self.target(q_MW, places)
        rows = torch.tensor(places.rows, dtype=torch.long)
        if self.masks_space:
            is_read = ~self.is_space[next_S[rows]]
            target, rows = target[is_read], rows[is_read]
        logp = x_NV[rows].log_softmax(-1)
        is_target = target[:, :-1] > 0
        rest_p = torch.where(is_target, 0.0, logp.exp()).sum(-1, keepdim=True).clamp(min=TINY)
        logp = torch.cat([torch.where(is_target, logp, 0.0), rest_p.log()], 1)
        is_event = torch.nn.functional.pad(is_target, (0, 1), value=True)
        p = torch.where(is_event, logp.exp(), 0.0)
        forward = kl_of(target, logp)
        if not self.beta:
            return forward
        mean = (self.beta * target + (1 - self.beta) * p).clamp(min=TINY).log()
        jsd = self.beta * kl_of(target, mean) + (1 - self.beta) * (p * (logp - mean)).sum(-1)
        return torch.where((target > 0).sum(-1) == 1, forward, jsd)

    def places(self, q_MW, came_S, came_T, chunks):
        """List where the student is asked, and what gives its target; returns Places."""
        # sums of what is sorted, for the mass of all tokens that begin with some bytes
        q_MW = q_MW.cpu()
        sums = torch.nn.functional.pad(q_MW[:, self.order].double().cumsum(1), (1, 0)).numpy()
        q = q_MW.numpy()
        places = Places([], ([], []), [], [])
        number_of = zip(chunks.first_S.tolist(), chunks.first_T.tolist(), chunks.count_S.tolist(),
                        chunks.count_T.tolist())
        for first_S, first_T, count_S, count_T in number_of:
            pieces = [self.bytes[1][came_T[first_T + k]] for k in range(count_T)]
            starts = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])]).astype(int)
            data = b"".join(pieces)
            place = 0
            for k in range(count_S):
                governing = int(np.searchsorted(starts, place, "right")) - 1
                governing = min(governing, count_T - 1)
                row_T = first_T + governing
                read = data[starts[governing] : place]
                number = len(places.rows)
                total = 1.0
                if not read:
                    places.at_border[0].append(number)
                    places.at_border[1].append(row_T)
                    routed = self.routes[came_T[row_T]]
                else:
                    end = starts[governing + 1] - place
                    low, high = self.range(read)
                    total = max(sums[row_T, high] - sums[row_T, low], TINY)
                    places.inside.append((number, row_T, *self.tokens_behind(read, end)))
                    routed = self.route(data[place : starts[governing + 1]], end)
                places.rows.append(first_S + k)
                places.changes.extend(self.spans(number, data, place, starts, governing, first_T,
                                                 came_T, q, sums, total, routed))
                place += len(self.bytes[0][came_S[first_S + k]])
        return places

    def target(self, q_MW, places):
        """Return the (N, V + 1) target of each place, the mass without a token last."""
        target = q_MW.new_zeros(len(places.rows), self.num + 1)
        numbers, rows = places.at_border
        if numbers:
            of_border = q_MW.new_zeros(len(numbers), self.num + 1)
            of_border.index_add_(1, self.route_W, q_MW[torch.tensor(rows)])
            target[torch.tensor(numbers)] = of_border
        if places.inside:
            numbers, rows, tokens, routes = zip(*places.inside)
            sizes = list(map(len, tokens))
            number = torch.tensor(np.repeat(numbers, sizes))
            row = torch.tensor(np.repeat(rows, sizes))
            token = torch.tensor(np.concatenate(tokens))
            route = torch.tensor(np.concatenate(routes))
            target.view(-1).index_add_(0, number * (self.num + 1) + route, q_MW[row, token])
            which = torch.tensor(numbers)
            target[which] /= target[which].sum(1, keepdim=True).clamp(min=TINY)
        if places.changes:
            number, token, mass = zip(*places.changes)
            place = torch.tensor(number) * (self.num + 1) + torch.tensor(token)
            target.view(-1).index_add_(0, place, torch.tensor(mass, dtype=target.dtype))
        target = target.clamp(min=0.0)
        return target / target.sum(1, keepdim=True).clamp(min=TINY)

    def spans(self, number, data, place, starts, governing, first_T, came_T, q, sums, total,
              routed):
        """Return what student tokens that are longer than the governing teacher token change."""
        end = starts[governing + 1]
        chain = []
        for size in range(end - place + 1, min(len(data) - place, self.longest) + 1):
            token = self.ids.get(data[place : place + size])
            if token is None:
                continue
            last = int(np.searchsorted(starts, place + size, "right")) - 1
            if last - governing > SPAN:
                break
            mass = 1.0
            for k in range(governing, last):
                mass *= q[first_T + k, self.twins[self.bytes[1][came_T[first_T + k]]]].sum()
            remainder = data[starts[last] : place + size]
            if remainder:
                low, high = self.range(remainder)
                mass *= sums[first_T + last, high] - sums[first_T + last, low]
            chain.append((token, float(mass) / total))
        if not chain:
            return []
        changes = [(number, routed, -chain[0][1])]
        for (token, mass), (_, longer) in zip(chain, [*chain[1:], (None, 0.0)]):
            changes.append((number, token, mass - longer))
        return changes


class NoTeacher:
    """Push down tokens that the student found unlikely; the teacher is not asked."""

    def __init__(self, pair):
        del pair

    def __call__(self, x_NV, y_MW, next_S, next_T, chunks):
        logp_R = x_NV.log_softmax(-1)[chunks.row_S, next_S[chunks.row_S]]
        unlikely_R = torch.where(logp_R < np.log(UNLIKELY), logp_R, 0.0)
        return unlikely_R.new_zeros(len(chunks.first_S)).index_add(0, chunks.of_S, unlikely_R)
