"""The losses once more, as loops over their definitions in float64.  Slow and obvious; nothing is shared."""

import torch

ZERO = torch.zeros((), dtype=torch.float64)


def softmax(row, tau=1.0):
    return (row.double() / tau).softmax(-1)


def cross_entropy(logits, labels):
    """(sum, count) of -log p(label) over labels other than -100."""
    total, count = 0.0, 0
    for b in range(labels.shape[0]):
        for t in range(labels.shape[1]):
            if labels[b, t] != -100:
                total = total - softmax(logits[b, t])[labels[b, t]].log()
                count += 1
    return total, count


def chunks(student_chunk, teacher_chunk):
    """[(sample, student positions, teacher positions)] of every chunk that has both."""
    found = []
    for b in range(student_chunk.shape[0]):
        for c in sorted(set(student_chunk[b].tolist()) - {-1}):
            s = [t for t, chunk in enumerate(student_chunk[b].tolist()) if chunk == c]
            t = [t for t, chunk in enumerate(teacher_chunk[b].tolist()) if chunk == c]
            if s and t:
                found.append((b, s, t))
    return found


def kl(q, p):
    """KL(q || p) of two lists of probabilities (0-dim tensors), over q > 0."""
    return sum((a * (a.log() - b.log()) for a, b in zip(q, p, strict=True) if a > 0), ZERO)


def projection_kl(x, y, student_chunk, teacher_chunk, indices, likelihoods, kept=None, tau=1.0):
    W = y.shape[-1]
    kept = list(range(W)) if kept is None else kept.tolist()
    total, count = 0.0, 0
    for b, s, t in chunks(student_chunk, teacher_chunk):
        mapped = [ZERO for _ in range(W)]
        for position in s:
            p = softmax(x[b, position], tau)
            for v in range(x.shape[-1]):
                for w, weight in zip(indices[v].tolist(), likelihoods[v].double()):
                    if w >= 0:
                        mapped[w] = mapped[w] + p[v] * weight / len(s)
        mapped = [mapped[w] + 1e-10 for w in kept]
        target = sum(softmax(y[b, position, kept], tau) for position in t) / len(t)
        total = total + tau**2 * kl(list(target), [m / sum(mapped) for m in mapped])
        count += 1
    return total, count


def components(A, B):
    """Event of every student and teacher token: connected components of w -- A[w][0] and v -- B[v][0]."""
    label = {("s", v): ("s", v) for v in range(len(B))} | {("t", w): ("t", w) for w in range(len(A))}
    links = [(("t", w), ("s", A[w][0])) for w in range(len(A)) if A[w]]
    links += [(("s", v), ("t", B[v][0])) for v in range(len(B)) if B[v]]
    touched = {node for link in links for node in link}
    changed = True
    while changed:
        changed = False
        for a, b in links:
            low = min(label[a], label[b])
            if label[a] != low or label[b] != low:
                label[a] = label[b] = low
                changed = True
    return {node: label[node] for node in touched}


def piece_kl(x, y, student_next, teacher_next, student_chunk, teacher_chunk, A, B, tau=1.0):
    """A[w], B[v]: lists of ids, [] where a token has no spelling."""
    event = components(A, B)
    names = sorted(set(event.values()))
    total, count = ZERO, 0
    for b, s, t in chunks(student_chunk, teacher_chunk):
        p = [softmax(x[b, i], tau) for i in s]
        q = [softmax(y[b, i], tau) for i in t]
        ids_s, ids_t = [int(student_next[b, i]) for i in s], [int(teacher_next[b, i]) for i in t]
        p_event = [sum(p[0][v] for v in range(len(B)) if event.get(("s", v)) == e) for e in names]
        q_event = [sum(q[0][w] for w in range(len(A)) if event.get(("t", w)) == e) for e in names]
        total = total + kl([m / sum(q_event) for m in q_event], [m / sum(p_event) for m in p_event])
        count += 1
        if len(t) == 1:
            for k in range(1, len(s)):
                if A[ids_t[0]][: k + 1] != ids_s[: k + 1]:
                    break
                goes_on = [w for w in range(len(A)) if A[w][:k] == ids_s[:k] and len(A[w]) > k]
                mass = [sum((q[0][w] for w in goes_on if A[w][k] == v), ZERO) for v in range(len(B))]
                total = total + kl([m / sum(mass) for m in mass], list(p[k]))
                count += 1
        elif len(s) == 1:
            for k in range(1, len(t)):
                if B[ids_s[0]][: k + 1] != ids_t[: k + 1]:
                    break
                mass = {}
                for v in range(len(B)):
                    if B[v][:k] == ids_t[:k] and len(B[v]) > k:
                        mass[B[v][k]] = mass.get(B[v][k], 0.0) + p[0][v]
                teacher = [q[k][w] for w in mass]
                student = list(mass.values())
                total = total + kl([m / sum(teacher) for m in teacher], [m / sum(student) for m in student])
        else:
            log_p = sum(p[k][ids_s[k]].log() for k in range(len(s)))
            log_q = sum(q[k][ids_t[k]].log() for k in range(len(t)))
            a, b_ = log_q.exp(), log_p.exp()
            total = total + a * (a / b_).log() + (1 - a) * ((1 - a) / (1 - b_)).log()
            count += 1
    return tau**2 * total, count


def merge(student_bytes, teacher_bytes):
    """Chunk of every token, by comparing every boundary with every other."""
    def ends(pieces):
        return [sum(len(p) for p in pieces[: i + 1]) for i in range(len(pieces))]

    common = sorted(set(ends(student_bytes)) & set(ends(teacher_bytes)))
    return [[next(i for i, end in enumerate(common) if e <= end) for e in ends(side)]
            for side in (student_bytes, teacher_bytes)]




# --- one vocabulary -------------------------------------------------------------------------------


def log_mean(p, q, share_q):
    return [share_q * b + (1 - share_q) * a for a, b in zip(p, q)]


def divergence(name, p, q, coefficient=0.0):
    """D(q, p) of two lists of probabilities."""
    if name == "generalized_jsd" and coefficient in (0, 1):
        name = "reverse_kl" if coefficient else "forward_kl"
    if name == "forward_kl":
        return kl(q, p)
    if name == "reverse_kl":
        return kl(p, q)
    if name == "generalized_jsd":
        m = log_mean(p, q, coefficient)
        return coefficient * kl(q, m) + (1 - coefficient) * kl(p, m)
    if name == "skew_forward_kl":
        return kl(q, log_mean(p, q, coefficient))
    if name == "skew_reverse_kl":
        return kl(p, log_mean(q, p, coefficient))
    if name == "total_variation":
        return sum(abs(a - b) for a, b in zip(p, q)) / 2
    assert name == "adaptive_kl"
    head, total, mass = 0.0, 0.0, 0.0
    for i in sorted(range(len(q)), key=lambda i: float(q[i])):
        mass += float(q[i])
        gap = abs(float(q[i]) - float(p[i]))
        total, head = total + gap, head + (gap if mass >= coefficient else 0.0)
    return head / total * kl(q, p) + (1 - head / total) * kl(p, q)


def buckets(p, ids, tail):
    kept = [p[i] for i in ids]
    if tail:
        return [*kept, sum((p[i] for i in range(len(p)) if i not in ids), ZERO)]
    return [x / sum(kept) for x in kept]


def positions(name, x, y, mask, tau=1.0, teacher_tau=None, top_k=0, support="teacher", tail=True,
              coefficient=0.0):
    """[(sample, position, term)] of every position that counts."""
    found = []
    for b in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            if not mask[b, t]:
                continue
            p, q = list(softmax(x[b, t], tau)), list(softmax(y[b, t], teacher_tau or tau))
            if isinstance(support, torch.Tensor):
                ids = support[b, t].tolist()
            else:
                judge = [float(v.detach()) for v in (q if support == "teacher" else p)]
                ids = sorted(range(len(p)), key=lambda i: -judge[i])[:top_k]
            if top_k:
                p, q = buckets(p, ids, tail), buckets(q, ids, tail)
            found.append((b, t, tau**2 * divergence(name, p, q, coefficient)))
    return found


# --- two vocabularies -----------------------------------------------------------------------------


def sorted_distance(p, q, most=None):
    width = max(len(p), len(q))
    p, q = [sorted(side, key=lambda v: -float(v)) + [ZERO] * (width - len(side)) for side in (p, q)]
    return sum((abs(a - b) for a, b in list(zip(p, q))[:most]), ZERO)


def gold(x, y, student_chunk, teacher_chunk, common, tau=1.0, most=8192, average="p", reverse=False):
    """[term] per chunk; common: (student ids, teacher ids)."""
    found = []
    for b, s, t in chunks(student_chunk, teacher_chunk):
        sides = []
        for logits, places, ids in ((x, s, common[0]), (y, t, common[1])):
            rows = [softmax(logits[b, i], tau) for i in places]
            if average == "logp":
                mean = [sum(row[i].log() for row in rows) / len(rows) for i in range(len(rows[0]))]
                mean = [m.exp() for m in mean]
            else:
                mean = [sum(row[i] for row in rows) / len(rows) for i in range(len(rows[0]))]
            rest = [mean[i] for i in range(len(mean)) if i not in ids]
            sides.append(([mean[i] for i in ids] + ([sum(rest)] if average == "p" else []), rest))
        (p, p_rest), (q, q_rest) = sides
        most_here = min(most, len(p_rest), len(q_rest))
        divergence_ = kl(p, q) if reverse else kl(q, p)
        found.append(tau**2 * (divergence_ + sorted_distance(p_rest, q_rest, most_here)))
    return found


def chunk_logp(logits, next_ids, b, places, tau=1.0):
    return sum(softmax(logits[b, i], tau)[int(next_ids[b, i])].log() for i in places)


def uld(x, y, student_next, teacher_next, student_chunk, teacher_chunk, tau=1.0):
    found = []
    for b, s, t in chunks(student_chunk, teacher_chunk):
        sides = []
        for logits, ids, places in ((x, student_next, s), (y, teacher_next, t)):
            before = chunk_logp(logits, ids, b, places[:-1], tau)
            sides.append([p * torch.as_tensor(before).exp() for p in softmax(logits[b, places[-1]], tau)])
        found.append(sorted_distance(*sides))
    return found


def alm(x, y, student_next, teacher_next, student_chunk, teacher_chunk, tau=1.0, mode="binary_kl"):
    found = []
    for b, s, t in chunks(student_chunk, teacher_chunk):
        a, c = chunk_logp(x, student_next, b, s), chunk_logp(y, teacher_next, b, t)
        p, q = (a / tau - 1e-6).exp(), (c / tau - 1e-6).exp()
        found.append({
            "binary_kl": lambda: kl([q, 1 - q], [p, 1 - p]),
            "binary_kl_reverse": lambda: kl([p, 1 - p], [q, 1 - q]),
            "binary_ce": lambda: -q * p.log() - (1 - q) * (1 - p).log(),
            "temperature_limit": lambda: (c - a) + c * (a / c).log(),
            "squared": lambda: (a - c) ** 2, "absolute": lambda: abs(a - c)}[mode]())
    return found
