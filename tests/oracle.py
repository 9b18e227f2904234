"""Compute the losses once more, as loops over their definitions in float64: slow and obvious.

Nothing is shared with losses.py.  Probabilities are lists of 0-dim tensors, so that autograd gives
the gradients.
"""

import math

import torch

ZERO = torch.zeros((), dtype=torch.float64)
LOG_ZERO = math.log(2.0**-126)  # nats, of the smallest normal float32


def softmax(logits, tau=1.0):
    return (logits.double() / tau).softmax(-1)


def kl(q, p):
    """Return KL(q || p) of two lists of probabilities, over q > 0."""
    result = ZERO
    for q_i, p_i in zip(q, p, strict=True):
        if q_i > 0:
            result = result + q_i * (q_i.log() - p_i.log())
    return result


def normalized(masses):
    total = sum(masses)
    return [mass / total for mass in masses]


def softened(masses, tau):
    """Return masses to the power 1 / tau, normalized; 0 stays 0."""
    return normalized([mass ** (1 / tau) if mass > 0 else mass for mass in masses])


def cross_entropy(logits, labels):
    """Return (sum, count) of -log p(label) over labels other than -100."""
    result = 0.0
    count = 0
    for b in range(labels.shape[0]):
        for t in range(labels.shape[1]):
            if labels[b, t] != -100:
                p = softmax(logits[b, t])
                result = result - p[labels[b, t]].log()
                count += 1
    return result, count


# --- chunks ---------------------------------------------------------------------------------------


def merge(student_bytes, teacher_bytes):
    """Return the chunk of every token, by comparing every boundary with every other."""
    student_ends = token_ends(student_bytes)
    teacher_ends = token_ends(teacher_bytes)
    common = sorted(set(student_ends) & set(teacher_ends))
    return [chunks_of_ends(ends, common) for ends in (student_ends, teacher_ends)]


def token_ends(pieces):
    ends = []
    length = 0
    for piece in pieces:
        length += len(piece)
        ends.append(length)
    return ends


def chunks_of_ends(ends, common):
    """Return the number of the first common boundary at or after each end."""
    numbers = []
    for end in ends:
        reached = [i for i, boundary in enumerate(common) if end <= boundary]
        numbers.append(reached[0])
    return numbers


def chunks(student_chunk, teacher_chunk):
    """Return [(sample, student positions, teacher positions)] of every chunk that has both."""
    result = []
    for b in range(student_chunk.shape[0]):
        student_ids = student_chunk[b].tolist()
        teacher_ids = teacher_chunk[b].tolist()
        for c in sorted(set(student_ids) - {-1}):
            student_positions = [t for t, chunk in enumerate(student_ids) if chunk == c]
            teacher_positions = [t for t, chunk in enumerate(teacher_ids) if chunk == c]
            if student_positions and teacher_positions:
                result.append((b, student_positions, teacher_positions))
    return result


def chunk_logp(logits, next_ids, b, positions, tau=1.0):
    """Return log p of the tokens that these positions of a sample predict."""
    result = ZERO
    for t in positions:
        p = softmax(logits[b, t], tau)
        result = result + p[int(next_ids[b, t])].log()
    return result


# --- projection -----------------------------------------------------------------------------------


def project(p, indices, likelihoods, num_teacher_tokens):
    """Return p @ W for one position, as a list of masses."""
    mapped = [ZERO] * num_teacher_tokens
    for v in range(len(p)):
        for w, weight in zip(indices[v].tolist(), likelihoods[v].double()):
            if w >= 0:
                mapped[w] = mapped[w] + p[v] * weight
    return mapped


def projection_kl(
    x, y, student_chunk, teacher_chunk, indices, likelihoods, kept=None, tau=1.0, reverse=False,
    chunk_average="p",
):
    """Return [term] per chunk."""
    num_teacher_tokens = y.shape[-1]
    kept = list(range(num_teacher_tokens)) if kept is None else kept.tolist()
    terms = []
    for b, student_positions, teacher_positions in chunks(student_chunk, teacher_chunk):
        mean = [ZERO] * len(kept)
        for t in student_positions:
            mapped = project(softmax(x[b, t], tau), indices, likelihoods, num_teacher_tokens)
            masses = [mapped[w] for w in kept]
            if chunk_average == "p":  # of the projected token, given that it is kept
                masses = [mass / (sum(masses) + 1e-10) for mass in masses]
            mean = [old + new / len(student_positions) for old, new in zip(mean, masses)]
        if chunk_average == "logp":
            mean = [mass / (sum(mean) + 1e-10) for mass in mean]
        r = [mass + 1e-10 for mass in mean]
        target = chunk_mean(y[..., kept], b, teacher_positions, tau, chunk_average)
        terms.append(tau**2 * (kl(r, target) if reverse else kl(target, r)))
    return terms


# --- pieces ---------------------------------------------------------------------------------------


def continuation_mass(p, spellings, seen):
    """Return {next id: mass} of the tokens whose spelling begins with `seen` and goes on."""
    mass = {}
    k = len(seen)
    for token, spelled in enumerate(spellings):
        if spelled[:k] == seen and len(spelled) > k:
            mass[spelled[k]] = mass.get(spelled[k], ZERO) + p[token]
    return mass


class Translation:
    """Write the nodes of translation.py as loops over the tokens of both vocabularies.

    Args:
        A, B: lists of ids, [] for a token without a spelling; B of unwritten tokens does not count.
        unwritten: student tokens that no text has.
        joined: {student token: teacher tokens that its tokenizer would have joined to it}.
        raw: the bytes of both vocabularies' tokens, and a function of each tokenizer, by which
            choices are asked of closed tokens; (): of all.
        text_weight: (of `terms`) of the text's own part, see `translated`.
        top_k, support, tail: of the cells of a node, see `positions`; cells to which the supporting
            model gives nothing are in no top_k.
    """

    def __init__(self, A, B, unwritten, joined, *raw, top_k=0, support="teacher", tail=True):
        self.A = A
        self.B = [[] if v in unwritten else spelled for v, spelled in enumerate(B)]
        self.joined = joined
        self.top_k = top_k
        self.support = support
        self.tail = tail
        heads = {spelled[0] for spelled in self.B if spelled}
        self.cell_of_student = {v: spelled[0] for v, spelled in enumerate(self.B) if spelled}
        self.cell_of_student |= dict.fromkeys(unwritten, "unwritten")
        self.cell_of_teacher = {w: w for w in heads}
        self.longer = {}
        for w, spelled in enumerate(A):
            if w not in heads and spelled and spelled[0] in self.cell_of_student:
                self.cell_of_teacher[w] = self.cell_of_student[spelled[0]]
                self.longer[w] = spelled[0]
        self.raw = raw
        for w in sorted(heads):
            if A[w] and self.B[A[w][0]]:
                self.join(self.cell_of_teacher[w], self.cell_of_student[A[w][0]])

    def join(self, cell, other):
        """Make one cell of two."""
        for cells in (self.cell_of_student, self.cell_of_teacher):
            cells |= {token: other for token, own in cells.items() if own == cell}

    def is_closed(self, v, k):
        """Tell whether no token of the teacher behind k of B[v] crosses a student token's end."""
        if not self.raw:
            return True
        student_raw, teacher_raw, student_spell, teacher_spell = self.raw
        path = self.B[v][:k]
        scope = [u for u, spelled in enumerate(self.B) if spelled[:k] == path]
        begun = b"".join(teacher_raw[w] for w in path)
        for w, more in enumerate(teacher_raw):
            if len(scope) == 1 or any(self.B[u][k : k + 1] == [w] for u in scope):
                continue
            for rest in {student_raw[u][len(begun):] for u in scope}:
                if not rest or more == rest or not more.startswith(rest):
                    continue
                if teacher_spell([begun + more]) == [[*path, w]]:
                    [first, *_] = student_spell([begun + more])[0]
                    if len(student_raw[first]) > len(begun):
                        return False
        return True

    def compare(self, p, q):
        """Return the divergence of two dicts of masses with the same keys, in their scope."""
        p, q = [softened([side[cell] for cell in p], self.tau) for side in (p, q)]
        nothing = torch.tensor(LOG_ZERO, dtype=torch.float64).exp()
        q = [max(mass, nothing) for mass in q]
        if self.top_k:
            judge = q if self.support == "teacher" else p
            ids = [i for i in most_likely(judge, self.top_k) if judge[i] > nothing]
            p, q = buckets(p, ids, self.tail), buckets(q, ids, self.tail)
        return divergence(self.name, p, q, self.coefficient)

    def going_on(self, q, seen):
        """Return (lambda, {student token: its mass} of how tokens that begin so go on)."""
        alike = sum((q[w] for w, spelled in enumerate(self.A) if spelled[:len(seen)] == seen), ZERO)
        mass = continuation_mass(q, self.A, seen)
        return sum(mass.values(), ZERO) / alike, {v: one / alike for v, one in mass.items()}

    def possible(self, q, before, came):
        """Return {teacher token: its mass} of those that have a cell and that no join forbids."""
        out = self.joined.get(before, set()) - {came}
        return {w: ZERO if w in out else q[w] for w in self.cell_of_teacher}

    def root(self, p, q, going, goes_on):
        cells = sorted(set(self.cell_of_student.values()), key=str)
        student = dict.fromkeys(cells, ZERO)
        teacher = dict.fromkeys(cells, ZERO)
        for v, cell in self.cell_of_student.items():
            student[cell] = student[cell] + p[v]
        for w, cell in self.cell_of_teacher.items():
            teacher[cell] = teacher[cell] + (1 - going) * q[w]
        for v, mass in goes_on.items():
            if v in self.cell_of_student:
                cell = self.cell_of_student[v]
                teacher[cell] = teacher[cell] + mass
        return self.compare(student, teacher)

    def choices(self, p, q, rows, came, v, going, goes_on):
        """Return the terms inside of the cell of student token v.

        Args:
            q: of `possible`; rows: the teacher's distributions from the root on, in the same text;
            came: the tokens that these rows predict.
        """
        path = self.B[v]
        begun = path and self.longer.get(came[0]) is not None
        begun = begun and self.B[self.longer[came[0]]][:1] == path[:1]
        for k in range(1, len(path) + 1):
            scope = [u for u, spelled in enumerate(self.B) if spelled[:k] == path[:k]]
            along = came[:k] == path[:k] and k < len(rows)
            if len(scope) == 1 or not (along or begun) or not self.is_closed(v, k):
                continue
            cell_of = {u: tuple(self.B[u][k : k + 1]) for u in scope}
            longer = {w: u for w, u in self.longer.items() if u in scope}
            split = dict.fromkeys(cell_of.values(), ZERO)
            weight = sum((q[w] for w in longer), ZERO)
            if along:
                weight = weight + q[path[0]] * math.prod(rows[i][path[i]] for i in range(1, k))
                split |= {cell: rows[k][cell[0]] for cell in split if cell}
                if () in split:
                    split[()] = 1 - sum(mass for cell, mass in split.items() if cell)
            else:
                weight = weight + (q[path[0]] if k == 1 else 0)
                for w, u in longer.items():
                    split[cell_of[u]] = split[cell_of[u]] + q[w]
            total = sum(split.values())
            target = {cell: (1 - going) * weight * mass / total for cell, mass in split.items()}
            student = dict.fromkeys(split, ZERO)
            for u, cell in cell_of.items():
                student[cell] = student[cell] + p[u]
                target[cell] = target[cell] + goes_on.get(u, ZERO)
            yield self.compare(student, target)

    def insides(self, p, q, student_ids, spelled):
        """Yield the terms behind the first token of a chunk of one teacher token."""
        for k in range(1, len(student_ids)):
            if spelled[: k + 1] != student_ids[: k + 1]:
                return
            going, mass = self.going_on(q, student_ids[:k])
            student = {v: p[k][v] for v in mass}
            student["rest"] = 1 - sum(student.values())
            yield self.compare(student, mass | {"rest": 1 - going})

    def ended(self, student_next, teacher_next, found, b, positions):
        """Return the teacher token in front of a chunk, if the student knows its bytes, or None."""
        for other, before_S, before_T in found:
            adjacent = before_S[-1] + 1 == positions[0][0] and before_T[-1] + 1 == positions[1][0]
            if other == b and adjacent and len(before_T) == 1:
                u = int(teacher_next[b, before_T[0]])
                if student_next[b, before_S].tolist() == self.A[u]:
                    return u
        return None

    def terms(self, x, y, student_ids, student_next, teacher_next, student_chunk, teacher_chunk,
              name, tau=1.0, coefficient=0.0, text_weight=0.0, limit=math.inf, choice_weight=0.3):
        """Return [(sample, student position, counts, term)]; limit: of a position's divergence."""
        self.name, self.tau, self.coefficient = name, tau, coefficient
        found = chunks(student_chunk, teacher_chunk)
        terms, texts = [], []
        for b, rows_S, rows_T in found:
            p = [softmax(x[b, t]) for t in rows_S]
            # a row behind the last chunk tells how that goes on, unless the text is cut there
            end = min(last_position(teacher_chunk[b]) + 2, y.shape[1])
            asked = [t for t in range(rows_T[0], end) if teacher_next[b, t] >= 0]
            q = [softmax(y[b, t]) for t in asked]
            came = teacher_next[b, asked].tolist()
            written = student_next[b, rows_S].tolist()
            going, goes_on = ZERO, {}
            u = self.ended(student_next, teacher_next, found, b, (rows_S, rows_T))
            if u is not None:
                going, goes_on = self.going_on(softmax(y[b, rows_T[0] - 1]), self.A[u])
            possible = self.possible(q[0], int(student_ids[b, rows_S[0]]), came[0])
            terms.append((b, rows_S[0], 1, self.root(p[0], possible, going, goes_on)))
            for term in self.choices(p[0], possible, q, came, written[0], going, goes_on):
                terms.append((b, rows_S[0], 0, choice_weight * term))
            v = written[0]
            if text_weight and v in self.cell_of_student:
                alike = [u for u, cell in self.cell_of_student.items()
                         if cell == self.cell_of_student[v]]
                share = softmax(x[b, rows_S[0]])[alike]
                text = -(share[alike.index(v)] / share.sum()).log()
                texts.append((b, rows_S[0], 0, text_weight * text / tau**2))
            if len(rows_T) == 1:
                insides = self.insides(p, q[0], written, self.A[came[0]])
                terms.extend((b, rows_S[k], 1, term) for k, term in enumerate(insides, 1))
            elif len(rows_S) > 1 and text_weight:
                text = -chunk_logp(x, student_next, b, rows_S[1:])
                texts.append((b, rows_S[1], 1, text_weight * text / tau**2))
            elif len(rows_S) > 1:
                sides = [chunk_logp(*side).exp() for side in (
                    (x, student_next, b, rows_S), (y, teacher_next, b, rows_T))]
                p_all, q_all = [softened([mass, 1 - mass], tau) for mass in sides]
                terms.append((b, rows_S[1], 1, kl(q_all, p_all)))
        if limit < math.inf:
            terms = at_most(terms, limit)
        return [(b, t, counts, tau**2 * term) for b, t, counts, term in [*terms, *texts]]


def at_most(terms, limit):
    """Return terms of which those of one position are one, and no more than the limit."""
    by_position = {}
    for b, t, counts, term in terms:
        so_many, total = by_position.get((b, t), (0, ZERO))
        by_position[b, t] = so_many + counts, total + term
    return [(b, t, counts, total if total <= limit else ZERO + limit)
            for (b, t), (counts, total) in by_position.items()]


def last_position(chunk):
    """Return the last position of a text that has a chunk."""
    return max(t for t, number in enumerate(chunk.tolist()) if number >= 0)


# --- one vocabulary -------------------------------------------------------------------------------


def mixture(p, q, weight_q):
    return [weight_q * q_i + (1 - weight_q) * p_i for p_i, q_i in zip(p, q)]


def divergence(name, p, q, coefficient=0.0):
    """Return D(q, p) of two lists of probabilities."""
    if name == "generalized_jsd" and coefficient in (0, 1):
        name = "reverse_kl" if coefficient else "forward_kl"
    if name == "forward_kl":
        return kl(q, p)
    if name == "reverse_kl":
        return kl(p, q)
    if name == "generalized_jsd":
        m = mixture(p, q, coefficient)
        return coefficient * kl(q, m) + (1 - coefficient) * kl(p, m)
    if name == "skew_forward_kl":
        return kl(q, mixture(p, q, coefficient))
    if name == "skew_reverse_kl":
        return kl(p, mixture(q, p, coefficient))
    if name == "total_variation":
        return sum(abs(p_i - q_i) for p_i, q_i in zip(p, q)) / 2
    assert name == "adaptive_kl"
    h = likely_gap(values(p), values(q), coefficient)
    return h * kl(q, p) + (1 - h) * kl(p, q)


def values(p):
    """Return floats, without a gradient."""
    return [float(p_i.detach()) for p_i in p]


def likely_gap(p, q, alpha):
    """Return the fraction of sum |q - p| on the teacher's likely tokens."""
    head = 0.0
    total_gap = 0.0
    mass = 0.0
    order = sorted(range(len(q)), key=lambda i: q[i])
    for i in order:
        mass += q[i]
        gap = abs(q[i] - p[i])
        total_gap += gap
        if mass >= alpha or i == order[-1]:  # all add up to 1
            head += gap
    return head / total_gap


def most_likely(p, top_k):
    """Return the ids of the largest probabilities."""
    judge = values(p)
    return sorted(range(len(p)), key=lambda i: -judge[i])[:top_k]


def buckets(p, ids, tail):
    kept = [p[i] for i in ids]
    if not tail:
        return normalized(kept)
    others = [p[i] for i in range(len(p)) if i not in ids]
    return [*kept, sum(others, ZERO)]


def positions(
    name, x, y, mask, tau=1.0, teacher_tau=None, top_k=0, support="teacher", tail=True,
    coefficient=0.0,
):
    """Return [(sample, position, term)] of every position that counts."""
    terms = []
    for b, t in mask.nonzero().tolist():
        p = list(softmax(x[b, t], tau))
        q = list(softmax(y[b, t], teacher_tau or tau))
        if top_k:
            ids = most_likely(q if support == "teacher" else p, top_k)
            p = buckets(p, ids, tail)
            q = buckets(q, ids, tail)
        terms.append((b, t, tau**2 * divergence(name, p, q, coefficient)))
    return terms


# --- two vocabularies -----------------------------------------------------------------------------


def descending(p, width):
    """Return the probabilities in falling order, with zeros up to a width."""
    ordered = sorted(p, key=lambda p_i: -float(p_i.detach()))
    return ordered + [ZERO] * (width - len(p))


def sorted_distance(p, q, most=None):
    width = max(len(p), len(q))
    pairs = zip(descending(p, width), descending(q, width))
    return sum((abs(p_i - q_i) for p_i, q_i in list(pairs)[:most]), ZERO)


def chunk_mean(logits, b, positions, tau, average):
    """Return the mean distribution of these positions; "logp": exp of the mean log-probability."""
    result = ZERO
    for t in positions:
        p = softmax(logits[b, t], tau)
        result = result + (p.log() if average == "logp" else p) / len(positions)
    return list(result.exp() if average == "logp" else result)


def gold(
    x, y, student_chunk, teacher_chunk, common, tau=1.0, most=8192, chunk_average="p", reverse=False
):
    """Return [term] per chunk; common: (student ids, teacher ids)."""
    student_ids, teacher_ids = common
    terms = []
    for b, student_positions, teacher_positions in chunks(student_chunk, teacher_chunk):
        p = chunk_mean(x, b, student_positions, tau, chunk_average)
        q = chunk_mean(y, b, teacher_positions, tau, chunk_average)
        p_others = [p[i] for i in range(len(p)) if i not in student_ids]
        q_others = [q[i] for i in range(len(q)) if i not in teacher_ids]
        p_common = [p[i] for i in student_ids]
        q_common = [q[i] for i in teacher_ids]
        if chunk_average == "p":
            p_common.append(sum(p_others))
            q_common.append(sum(q_others))
        matched = kl(p_common, q_common) if reverse else kl(q_common, p_common)
        num_compared = min(most, len(p_others), len(q_others))
        unmatched = sorted_distance(p_others, q_others, num_compared)
        terms.append(tau**2 * (matched + unmatched))
    return terms


def end_distribution(logits, next_ids, b, positions, tau):
    """Return p of the last position, times the probability of the tokens before it."""
    before = chunk_logp(logits, next_ids, b, positions[:-1], tau).exp()
    return [p_i * before for p_i in softmax(logits[b, positions[-1]], tau)]


def hybrid_uld(
    x, y, student_next, teacher_next, student_chunk, teacher_chunk, common, weight=None, tau=1.0
):
    """Return [term] per chunk; weight: of the common tokens, None: their part of the teacher's."""
    student_ids, teacher_ids = common
    weight = len(teacher_ids) / y.shape[-1] if weight is None else weight
    terms = []
    for b, student_positions, teacher_positions in chunks(student_chunk, teacher_chunk):
        p = end_distribution(x, student_next, b, student_positions, tau)
        q = end_distribution(y, teacher_next, b, teacher_positions, tau)
        jsd = divergence("generalized_jsd", [p[v] for v in student_ids],
                         [q[w] for w in teacher_ids], 0.5)
        p_others = [p[v] for v in range(len(p)) if v not in student_ids]
        q_others = [q[w] for w in range(len(q)) if w not in teacher_ids]
        terms.append(weight * jsd + (1 - weight) * sorted_distance(p_others, q_others))
    return terms


def uld(x, y, student_next, teacher_next, student_chunk, teacher_chunk, tau=1.0):
    """Return [term] per chunk: that of the hybrid where no token is common."""
    return hybrid_uld(x, y, student_next, teacher_next, student_chunk, teacher_chunk, ([], []),
                      weight=0.0, tau=tau)


def alm(x, y, student_next, teacher_next, student_chunk, teacher_chunk, tau=1.0):
    """Return [term] per chunk."""
    terms = []
    for b, student_positions, teacher_positions in chunks(student_chunk, teacher_chunk):
        p = (chunk_logp(x, student_next, b, student_positions) / tau - 1e-6).exp()
        q = (chunk_logp(y, teacher_next, b, teacher_positions) / tau - 1e-6).exp()
        terms.append(kl([q, 1 - q], [p, 1 - p]))
    return terms
