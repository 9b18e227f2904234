"""losses.py gives what public implementations give: values and gradients, to 1e-5 relative.

tests/golden/README.md describes the outputs, which are at fixed commits.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import oracle
import toys
from cases import close, gradient, table_of
from conftest import GOLDEN
from isogloss import losses
from isogloss.config import Config
from isogloss.nodes import list_nodes
from isogloss.objective import loss_table, projected
from isogloss.objective.objective import Part, TermSums
from isogloss.spelling import translation_tables
from isogloss.teachers import mixing as teacher_mixing
from isogloss.tile_plan import SubTile
from isogloss.translation import translated


def golden(name):
    return torch.load(GOLDEN / name, weights_only=True)


def leaf(data):
    return data["student_logits"].clone().requires_grad_()


def check(value, x, expected, grad, case):
    """Compare a value and its gradient, relative to theirs."""
    assert abs(float(value.detach()) - float(expected)) <= 1e-5 * abs(float(expected)), case
    assert grad is None or close(gradient(value, x), grad, 1e-5), case


def common_of(data):
    """Return the ids of the tokens that both vocabularies have."""
    names = [name for name in data["student_vocab"] if name in data["teacher_vocab"]]
    sides = data["student_vocab"], data["teacher_vocab"]
    return [torch.tensor([vocab[name] for name in names]) for vocab in sides]


def shift(x, fill=-1):
    return torch.cat([x[:, 1:], torch.full_like(x[:, :1], fill)], 1)


def where_valid(chunk, is_valid):
    """Return chunk ids, -1 for those that do not count."""
    return torch.where((chunk >= 0) & is_valid.gather(1, chunk.clamp(min=0)), chunk, -1)


def nemo_rl_chunks(data, exact_only):
    """Return (student, teacher) chunk ids, shifted, of the chunks that count there."""
    counts = data["chunk_valid"] & (data["sample_mask"][:, None] > 0)
    if exact_only:
        counts = counts & data["chunk_exact"]
    return [where_valid(shift(data[f"{side}_chunk_id"]), counts) for side in ("student", "teacher")]


def nemo_rl_config(case):
    """Return the Config of a run of their formulas."""
    cfg = case["cfg"]
    loss = {"pkl": "projection_kl", "gold": "gold", "xtoken": "h_kl"}[case["mode"]]
    options = {"chunk_average": "logp", "reverse": cfg["reverse_kl"]}
    if loss == "projection_kl":
        options["projection_topk"] = cfg["vocab_topk"]
    else:
        options["uncommon_topk"] = cfg["uncommon_topk"]
    return Config(student="s", teacher="t", data="d", loss=loss, loss_options=options,
                  temperature=cfg["temperature"])


def nemo_rl(data, case, x):
    """Return what a run of our job has of their P-KL, gold or H-KL: (loss, metrics)."""
    cfg = nemo_rl_config(case)
    theirs = case["cfg"]
    teacher = data["teacher_logits"][..., : data["teacher_vocab"]]
    exact_only = case["mode"] == "pkl" and theirs["exact_token_match_only"]
    chunks = nemo_rl_chunks(data, exact_only)
    is_labeled = shift(data["token_mask"]) * data["sample_mask"][:, None] > 0
    labels = torch.where(is_labeled, shift(data["input_ids"]), -100)
    tables = [range(x.shape[-1]), range(teacher.shape[-1])]
    pair = SimpleNamespace(tables=tables, tokenizers=(None, None))
    loss = loss_table.LOSSES[cfg.loss].build(cfg, pair, "cpu")
    loss_fn = loss.loss_fn
    if case["mode"] == "pkl":  # where we keep columns of a step, without the votes of padding
        num_kept = min(cfg.options_of_loss["projection_topk"], teacher.shape[-1])
        kept = teacher.amax((0, 1)).topk(num_kept).indices.sort().values
        loss_fn, _ = loss.for_columns(kept)
        teacher = teacher[..., kept]
    terms = losses.find_chunks(*chunks)
    flat = [side.flatten() for side in (labels, torch.zeros_like(chunks[1]), *chunks)]
    sub_tile = SubTile(slice(None), slice(None), *flat, terms)
    part = Part(loss_fn, is_observed=loss.is_observed, ce_weight=1.0, weight=1.0)
    sums = part.tile_loss(x.flatten(0, 1), teacher.flatten(0, 1), sub_tile)
    counted = TermSums(*sums.detach())
    sums = TermSums(*sums)
    num_tokens, num_chunks = is_labeled.sum(), len(terms.first_S)
    ce, kd = sums.ce / num_tokens, sums.kd / num_chunks
    metrics = {"accuracy": counted.correct / num_tokens,
               "proj_accuracy_t0": counted.agreed / num_chunks}
    if theirs["dynamic_loss_scaling"]:
        return teacher_mixing.dynamic_scale(ce, kd) * kd + ce, metrics
    return theirs["kl_loss_weight"] * kd + theirs["ce_loss_scale"] * ce, metrics


@pytest.mark.parametrize("mode", ["pkl", "gold", "xtoken"])
def test_nemo_rl(mode, monkeypatch):
    """`--chunk_average logp`, and the accuracies of a step."""
    data = golden("projection_losses.pt")
    inputs = data["inputs"]
    projection = inputs["projection"]["indices"], inputs["projection"]["likelihoods"]
    monkeypatch.setattr(projected, "_projection", lambda cfg, pair, device: projection)
    monkeypatch.setattr(projected, "unwritten_twins", lambda table, _: np.zeros(len(table), bool))
    cases = [case for case in data["cases"] if case["mode"] == mode]
    for case in cases:
        x = leaf(inputs)
        loss, metrics = nemo_rl(inputs, case, x)
        check(loss, x, case["loss"], case["grad"], case["cfg"])
        for name, value in metrics.items():
            assert abs(float(value) - case["metrics"][name]) < 1e-6, (name, case["cfg"])
    assert len(cases) >= 16


@pytest.mark.parametrize("data_of", ["generalised_jsd", "divergences"])
def test_divergences_of_trl_and_dskd(data_of):
    data = golden("peers.pt")[data_of]
    names = {
        "js_divergence": "generalized_jsd",
        "skewed_forward_kl": "skew_forward_kl",
        "skewed_reverse_kl": "skew_reverse_kl",
    }
    for key, case in data["cases"].items():
        x = leaf(data)
        name, beta = (key, {}) if isinstance(key, str) else ("generalized_jsd", {"beta": key})
        total, count = getattr(losses, names.get(name, name))(
            x, data["teacher_logits"], data["labels"] != -100, **beta)
        value = total if "sum" in case else total / count
        check(value, x, case["sum"] if "sum" in case else case["mean"], case["grad"], key)


def test_topk_tail_of_slime():
    data = golden("peers.pt")["topk_tail_reverse_kl"]
    mask = torch.ones(data["student_logits"].shape[:2], dtype=torch.bool)
    for (k, tail), case in data["cases"].items():
        x = leaf(data)
        value = losses.reverse_kl(
            x, data["teacher_logits"], mask,
            top_k=k, support="student", tail=tail, reduction="none",
        )[0]
        expected = case["per_token"].flatten()
        assert torch.allclose(value, expected, rtol=1e-5, atol=1e-9), (k, tail)
        assert close(gradient(value.sum(), x), case["grad"], 1e-5), (k, tail)


def test_on_policy_topk_tail_of_slime():
    """Its samples are fresh, so every ratio is 1; teachers are mixed in probability space."""
    data = golden("peers.pt")["opd_topk_tail"]
    logits = data["teacher_logits"]
    teacher = teacher_mixing.average_teachers(logits, torch.full((len(logits),), 1 / len(logits)))
    weight = torch.zeros(1, sum(map(len, data["tokens"])))
    start = 0
    for total, response in zip(data["total_lengths"], data["response_lengths"]):
        end = start + total
        # position t predicts token t + 1; a mean per response
        weight[0, end - response - 1 : end - 1] = 1 / response
        start = end
    for k, case in data["cases"].items():
        x = leaf(data)
        value, _ = losses.reverse_kl(
            x, teacher, weight > 0, top_k=k, support="student", weight_BS=weight)
        check(value, x, case["loss"], case["grad"], k)
    assert len(data["cases"]) == 3


def test_uld_and_hybrid_of_trl():
    data = golden("peers.pt")["uld_and_hybrid"]
    common = common_of(data)
    nexts = [shift(data[f"{side}_ids"], 0) for side in ("student", "teacher")]
    chunks = {
        "groups": ([[-1, 0, 0, 1, -1, -1]], [[-1, 0, 0, 1, 1, -1, -1]]),
        "positions": ([[-1, 0, 1, 2, -1, -1]], [[-1, 0, 1, 2, -1, -1, -1]]),
    }
    for (kind, unit), case in data["cases"].items():
        x = leaf(data)
        student_chunk, teacher_chunk = chunks[unit]
        total, count = losses.uld(
            x, data["teacher_logits"], *nexts,
            torch.tensor(student_chunk), torch.tensor(teacher_chunk),
            common=common if kind == "hybrid" else None,
        )
        if unit == "positions":  # there no token's probability is multiplied in
            assert count == 3
        check(total / count, x, case["loss"], case.get("grad"), (kind, unit))


def entropy_of_chunks(data, nexts, chunks, tau):
    """Return the mean entropy, in nats, of Bern(q) over the chunks of both samples."""
    logp = data["teacher_logits"].double().log_softmax(-1).gather(2, nexts[1][..., None])[..., 0]
    entropies = []
    for of_sample, of_student, of_teacher in zip(logp, *chunks):
        for c in set(of_student.tolist()) & set(of_teacher.tolist()) - {-1}:
            q = (of_sample[of_teacher == c].sum() / tau - 1e-6).exp()
            entropies.append(-q * q.log() - (1 - q) * (1 - q).log())
    return sum(entropies) / len(entropies)


def test_alm_of_tokenkit():
    """Its cross-entropy of two Bernoullis is our KL and an entropy, which has no gradient."""
    data = golden("peers.pt")["alm_binary_ce"]
    chunks = []
    for side, length in (("student", 8), ("teacher", 6)):
        chunk = torch.full((2, length), -1)
        for b, spans in enumerate(data[f"{side}_chunks"]):
            for c, (start, end) in enumerate(spans):
                chunk[b, start - 1 : end - 1] = c  # position t predicts token t + 1
        chunks.append(chunk)
    nexts = [shift(data[f"{side}_ids"], 0) for side in ("student", "teacher")]
    for tau, case in data["cases"].items():
        x = leaf(data)
        total, count = losses.alm(x, data["teacher_logits"], *nexts, *chunks, temperature=tau)
        value = total / count + entropy_of_chunks(data, nexts, chunks, tau)
        check(value, x, case["mean"], case["grad"], tau)


class Translated:
    """Hold a case of translation.pt, with what both sides of the comparison need."""

    def __init__(self, case):
        self.case = case
        raw, written, tokenizers = zip(*[self.side(role) for role in ("student", "teacher")])
        A = case["spell_teacher"]
        joined = {}
        for v in range(len(raw[0])):
            text = raw[0][v].decode()
            for cut in range(1, len(text) if case["canonical"][v] else 0):
                spelled = [written[0][token] for token in tokenizers[0](text[cut:])]
                if text[:cut] in written[0]:
                    joined.setdefault(written[0][text[:cut]], set()).update(
                        w for w, pieces in enumerate(A) if pieces[:len(spelled)] == spelled)

        def speller(side):
            return lambda texts: [[written[side][token] for token in tokenizers[side](one.decode())]
                                  for one in texts]

        unwritten = {v for v, flag in enumerate(case["unwritten"]) if flag}
        spellers = speller(0), speller(1)
        self.definition = A, case["spell_student"], unwritten, joined, *raw, *spellers
        arrays = translation_tables(
            table_of(A).numpy(), table_of(case["spell_student"]).numpy(),
            *raw, np.array(case["canonical"]), spellers[0], teacher_spells=spellers[1],
            unwritten_V=np.array(case["unwritten"]))
        self.tables = toys.as_tables(arrays)

    def side(self, role):
        """Return (bytes of the tokens, {text: token} of those that texts have, tokenizer)."""
        raw = [bytes.fromhex(token or "") for token in self.case[f"{role}_tokens"]]
        merges = [tuple(bytes.fromhex(token).decode() for token in pair)
                  for pair in self.case[f"{role}_merges"]]
        unwritten = self.case["unwritten"] if role == "student" else [False] * len(raw)
        written = {one.decode(): number for number, one in enumerate(raw)
                   if one and not unwritten[number]}
        return raw, written, toys.Tokenizer(*merges)

    def ours(self, dtype=torch.float64, text_weight=0.0):
        """Return (value, gradient, count)."""
        case = self.case
        x = case["student_logits"].to(dtype, copy=True).requires_grad_()
        ids = [case[name] for name in IDS]
        parameters = {"beta": case["beta"]} if case["divergence"] == "generalized_jsd" else {}
        value, count = translated(
            x, case["teacher_logits"].to(dtype), list_nodes(*ids, self.tables), self.tables,
            divergence=getattr(losses, case["divergence"]), temperature=case["temperature"],
            weight_BS=case["weight"], text_weight=text_weight, choice_weight=1.0, **parameters)
        return value.detach(), torch.autograd.grad(value, x)[0], count

    def by_definition(self, text_weight=0.0):
        """Return the same from the oracle."""
        case = self.case
        x = case["student_logits"].clone().requires_grad_()
        weight = case["weight"]
        terms = oracle.Translation(*self.definition).terms(
            x, case["teacher_logits"], *[case[name] for name in IDS], case["divergence"],
            case["temperature"], case["beta"], text_weight, choice_weight=1.0)
        weights = [1.0 if weight is None else weight[b, t] for b, t, _, _ in terms]
        value = sum(one * term for one, (_, _, _, term) in zip(weights, terms))
        count = sum(one * counts for one, (_, _, counts, _) in zip(weights, terms))
        return value.detach(), torch.autograd.grad(value, x)[0], count


IDS = "student_ids", "student_next", "teacher_next", "student_chunk", "teacher_chunk"


def equal(result, expected, precision=1e-8):
    """Compare (value, gradient, count), relative to the largest there is."""
    scales = [max(1.0, float(torch.as_tensor(side).abs().max())) for side in expected]
    return all(float((one - other).abs().max()) <= precision * scale if torch.is_tensor(one)
               else abs(one - other) <= precision * scale
               for one, other, scale in zip(result, expected, scales))


def test_translated_divergences_of_a_brute_force():
    """The text's part, which it does not have, is that of the oracle; float32 is near."""
    cases = golden("translation.pt")
    for number, case in enumerate(cases):
        both = Translated(case)
        ours = both.ours()
        assert equal(ours, [case[name] for name in ("value", "gradient", "count")]), number
        single = both.ours(torch.float32)
        # what a row leaves for the end of a token is 1 - sum, which float32 rounds
        assert equal([torch.as_tensor(side).double() for side in single], ours, 2e-3), number
        if number % 4 == 0:
            assert equal(ours, both.by_definition()), number
            assert equal(both.ours(text_weight=1.5), both.by_definition(1.5)), number
    kinds = {kind for case in cases for kind, value in case["values_by_kind"].items() if value}
    assert len(cases) == 120
    assert kinds == {"root", "choice", "choice longer", "inside", "rest"}
