"""Compute the losses once more, as loops over their definitions in float64: slow and obvious.

Nothing is shared with losses.py.  Probabilities are lists of 0-dim tensors, so that autograd gives
the gradients.
"""

import torch

ZERO = torch.zeros((), dtype=torch.float64)


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
    x, y, student_chunk, teacher_chunk, indices, likelihoods, kept=None, tau=1.0
):
    num_teacher_tokens = y.shape[-1]
    kept = list(range(num_teacher_tokens)) if kept is None else kept.tolist()
    result = 0.0
    count = 0
    for b, student_positions, teacher_positions in chunks(student_chunk, teacher_chunk):
        mapped = [ZERO] * num_teacher_tokens
        for t in student_positions:
            masses = project(softmax(x[b, t], tau), indices, likelihoods, num_teacher_tokens)
            mapped = [old + new for old, new in zip(mapped, masses)]
        # the conditional distribution of the student's projected token, given that it is kept
        mean = [mapped[w] / len(student_positions) for w in kept]
        r = [mass / (sum(mean) + 1e-10) + 1e-10 for mass in mean]
        target = ZERO
        for t in teacher_positions:
            target = target + softmax(y[b, t, kept], tau) / len(teacher_positions)
        result = result + tau**2 * kl(list(target), r)
        count += 1
    return result, count


# --- pieces ---------------------------------------------------------------------------------------


def components(A, B):
    """Return the event of every token: connected components of w -- A[w][0] and v -- B[v][0].

    Tokens are ("s", id) of the student and ("t", id) of the teacher; those of no link are left out.
    """
    links = []
    for w, spelled in enumerate(A):
        if spelled:
            links.append((("t", w), ("s", spelled[0])))
    for v, spelled in enumerate(B):
        if spelled:
            links.append((("s", v), ("t", spelled[0])))
    label = {}
    for a, b in links:
        label[a] = a
        label[b] = b
    changed = True
    while changed:
        changed = False
        for a, b in links:
            low = min(label[a], label[b])
            if label[a] != low or label[b] != low:
                label[a] = low
                label[b] = low
                changed = True
    return label


def event_masses(p, side, event, names):
    """Return the mass of every event under one side's distribution."""
    masses = []
    for name in names:
        members = [i for i in range(len(p)) if event.get((side, i)) == name]
        masses.append(sum(p[i] for i in members))
    return masses


def start_term(p, q, event):
    names = sorted(set(event.values()))
    q_events = normalized(event_masses(q, "t", event, names))
    p_events = normalized(event_masses(p, "s", event, names))
    return kl(q_events, p_events)


def continuation_mass(p, spellings, seen):
    """Return {next id: mass} of the tokens whose spelling begins with `seen` and goes on."""
    mass = {}
    k = len(seen)
    for token, spelled in enumerate(spellings):
        if spelled[:k] == seen and len(spelled) > k:
            mass[spelled[k]] = mass.get(spelled[k], ZERO) + p[token]
    return mass


def inside_teacher_terms(p, q, student_ids, spelled, A):
    """Return KL(T_k || p_k) for every k inside one teacher token, which A spells as `spelled`."""
    terms = []
    for k in range(1, len(student_ids)):
        if spelled[: k + 1] != student_ids[: k + 1]:
            break
        mass = continuation_mass(q[0], A, student_ids[:k])
        target = normalized([mass.get(v, ZERO) for v in range(len(p[k]))])
        terms.append(kl(target, list(p[k])))
    return terms


def inside_student_terms(p, q, teacher_ids, spelled, B):
    """Return KL(q_k || S_k) for every k inside one student token, which B spells as `spelled`."""
    terms = []
    for k in range(1, len(teacher_ids)):
        if spelled[: k + 1] != teacher_ids[: k + 1]:
            break
        mass = continuation_mass(p[0], B, teacher_ids[:k])
        teacher = normalized([q[k][w] for w in mass])
        terms.append(kl(teacher, normalized(list(mass.values()))))
    return terms


def event_kl(
    x, y, student_next, teacher_next, student_chunk, teacher_chunk, A, B, tau=1.0
):
    """Return (sum, count); A[w], B[v]: lists of ids, [] where a token has no spelling."""
    event = components(A, B)
    result = ZERO
    count = 0
    for b, student_positions, teacher_positions in chunks(student_chunk, teacher_chunk):
        p = [softmax(x[b, t], tau) for t in student_positions]
        q = [softmax(y[b, t], tau) for t in teacher_positions]
        student_ids = student_next[b, student_positions].tolist()
        teacher_ids = teacher_next[b, teacher_positions].tolist()
        result = result + start_term(p[0], q[0], event)
        count += 1
        if len(teacher_ids) == 1:
            terms = inside_teacher_terms(p, q, student_ids, A[teacher_ids[0]], A)
            count += len(terms)
        elif len(student_ids) == 1:  # these terms belong to the start and are not counted
            terms = inside_student_terms(p, q, teacher_ids, B[student_ids[0]], B)
        else:
            p_chunk = chunk_logp(x, student_next, b, student_positions, tau).exp()
            q_chunk = chunk_logp(y, teacher_next, b, teacher_positions, tau).exp()
            terms = [kl([q_chunk, 1 - q_chunk], [p_chunk, 1 - p_chunk])]
            count += 1
        result = result + sum(terms)
    return tau**2 * result, count


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
    for i in sorted(range(len(q)), key=lambda i: q[i]):
        mass += q[i]
        gap = abs(q[i] - p[i])
        total_gap += gap
        if mass >= alpha:
            head += gap
    return head / total_gap


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
        if isinstance(support, torch.Tensor):
            ids = support[b, t].tolist()
        else:
            judge = values(q if support == "teacher" else p)
            ids = sorted(range(len(p)), key=lambda i, judge=judge: -judge[i])[:top_k]
        if top_k:
            p = buckets(p, ids, tail)
            q = buckets(q, ids, tail)
        terms.append((b, t, tau**2 * divergence(name, p, q, coefficient)))
    return terms


def total(terms):
    """Return the sum of the terms of `positions`."""
    return sum(term for _, _, term in terms)


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
    x, y, student_chunk, teacher_chunk, common, tau=1.0, most=8192, average="p", reverse=False
):
    """Return [term] per chunk; common: (student ids, teacher ids)."""
    student_ids, teacher_ids = common
    terms = []
    for b, student_positions, teacher_positions in chunks(student_chunk, teacher_chunk):
        p = chunk_mean(x, b, student_positions, tau, average)
        q = chunk_mean(y, b, teacher_positions, tau, average)
        p_others = [p[i] for i in range(len(p)) if i not in student_ids]
        q_others = [q[i] for i in range(len(q)) if i not in teacher_ids]
        p_common = [p[i] for i in student_ids]
        q_common = [q[i] for i in teacher_ids]
        if average == "p":
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


def uld(x, y, student_next, teacher_next, student_chunk, teacher_chunk, tau=1.0):
    """Return [term] per chunk."""
    terms = []
    for b, student_positions, teacher_positions in chunks(student_chunk, teacher_chunk):
        p = end_distribution(x, student_next, b, student_positions, tau)
        q = end_distribution(y, teacher_next, b, teacher_positions, tau)
        terms.append(sorted_distance(p, q))
    return terms


def alm_term(logp, logq, tau, mode):
    p = (logp / tau - 1e-6).exp()
    q = (logq / tau - 1e-6).exp()
    if mode == "binary_kl":
        return kl([q, 1 - q], [p, 1 - p])
    if mode == "binary_kl_reverse":
        return kl([p, 1 - p], [q, 1 - q])
    if mode == "binary_ce":
        return -q * p.log() - (1 - q) * (1 - p).log()
    if mode == "temperature_limit":
        return (logq - logp) + logq * (logp / logq).log()
    if mode == "squared":
        return (logp - logq) ** 2
    assert mode == "absolute"
    return abs(logp - logq)


def alm(
    x, y, student_next, teacher_next, student_chunk, teacher_chunk, tau=1.0, mode="binary_kl"
):
    """Return [term] per chunk."""
    terms = []
    for b, student_positions, teacher_positions in chunks(student_chunk, teacher_chunk):
        logp = chunk_logp(x, student_next, b, student_positions)
        logq = chunk_logp(y, teacher_next, b, teacher_positions)
        terms.append(alm_term(logp, logq, tau, mode))
    return terms
