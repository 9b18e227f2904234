"""losses.py gives what public implementations give: values and gradients, to 1e-5 relative."""

import pytest
import torch
from conftest import GOLDEN
from test_divergences import close, gradient

import losses


def golden(name):
    if not GOLDEN.exists():
        pytest.skip("the golden outputs are absent")
    return torch.load(GOLDEN / name, weights_only=True)


def near(value, expected):
    return abs(float(value) - float(expected)) <= 1e-5 * abs(float(expected))


def shift(x, fill=-1):
    return torch.cat([x[:, 1:], torch.full_like(x[:, :1], fill)], 1)


def nemo_rl(data, case, x):
    """Its P-KL, gold and H-KL from ours; what differs from our defaults is spelled out."""
    cfg, teacher = case["cfg"], data["teacher_logits"][..., : data["teacher_vocab"]]
    valid = data["chunk_valid"] & (data["sample_mask"][:, None] > 0)
    if case["mode"] == "pkl" and cfg["exact_token_match_only"]:
        valid = valid & data["chunk_exact"]
    chunks = [shift(data[f"{side}_chunk_id"]) for side in ("student", "teacher")]
    chunks = [torch.where((c >= 0) & valid.gather(1, c.clamp(min=0)), c, -1) for c in chunks]
    indices, likelihoods = data["projection"].values()
    tau, reverse = cfg["temperature"], cfg["reverse_kl"]
    if case["mode"] == "pkl":  # it lets padding vote for the kept columns, and averages log-probabilities
        kept = teacher.amax((0, 1)).topk(min(cfg["vocab_topk"], teacher.shape[-1])).indices.sort().values
        kd, n = losses.projection_kl(x, teacher, *chunks, indices, likelihoods, kept, tau, "logp", reverse)
    else:
        common = losses.common_tokens(indices, likelihoods, relaxed=case["mode"] == "xtoken")
        kd, n = losses.gold(x, teacher, *chunks, *common, tau, cfg["uncommon_topk"], "logp", reverse)
    keep = shift(data["token_mask"]) * data["sample_mask"][:, None] > 0
    ce, m = losses.next_token_cross_entropy(x, torch.where(keep, shift(data["input_ids"]), -100))
    kd, ce = kd / n, ce / m
    if cfg["dynamic_loss_scaling"]:
        return losses.dynamic_scale(ce, kd) * kd + ce
    return cfg["kl_loss_weight"] * kd + cfg["ce_loss_scale"] * ce


@pytest.mark.parametrize("mode", ["pkl", "gold", "xtoken"])
def test_nemo_rl(mode):
    found = golden("projection_losses.pt")
    cases = [case for case in found["cases"] if case["mode"] == mode]
    for case in cases:
        x = found["inputs"]["student_logits"].clone().requires_grad_()
        value = nemo_rl(found["inputs"], case, x)
        assert near(value.detach(), case["loss"]), case["cfg"]
        assert close(gradient(value, x), case["grad"], 1e-5), case["cfg"]
    assert len(cases) >= 16


def test_generalized_jsd_of_trl():
    data = golden("peers.pt")["generalized_jsd"]
    for beta, case in data["cases"].items():
        x = data["student_logits"].clone().requires_grad_()
        total, count = losses.generalized_jsd(x, data["teacher_logits"], data["labels"] != -100, beta)
        assert near((total / count).detach(), case["mean"]), beta
        assert close(gradient(total / count, x), case["grad"], 1e-5), beta


def test_divergences_of_dskd():
    data = golden("peers.pt")["divergences"]
    ours = {"js_divergence": losses.generalized_jsd, "skewed_forward_kl": losses.skew_forward_kl,
            "skewed_reverse_kl": losses.skew_reverse_kl}
    for name, case in data["cases"].items():
        x = data["student_logits"].clone().requires_grad_()
        loss = ours.get(name, getattr(losses, name, None))
        value = loss(x, data["teacher_logits"], data["labels"] != -100)[0]
        assert near(value.detach(), case["sum"]), name
        assert close(gradient(value, x), case["grad"], 1e-5), name


def test_topk_tail_of_slime():
    data = golden("peers.pt")["topk_tail_reverse_kl"]
    mask = torch.ones(data["student_logits"].shape[:2], dtype=torch.bool)
    for (k, tail), case in data["cases"].items():
        x = data["student_logits"].clone().requires_grad_()
        value = losses.reverse_kl(x, data["teacher_logits"], mask, top_k=k, support="student", tail=tail,
                                  reduction="none")[0]
        expected = case["per_token"].flatten()
        assert torch.allclose(value, expected, rtol=1e-5, atol=1e-9), (k, tail)
        assert close(gradient(value.sum(), x), case["grad"], 1e-5), (k, tail)


def test_on_policy_topk_tail_of_slime():
    data = golden("peers.pt")["opd_topk_tail"]
    teacher = losses.average_teachers(data["teacher_logits"])
    tokens = torch.cat(data["tokens"])[None]
    weight, start = torch.zeros(tokens.shape), 0
    for total, response in zip(data["total_lengths"], data["response_lengths"]):
        weight[0, start + total - response - 1 : start + total - 1] = 1 / response  # a mean per response
        start += total
    for k, case in data["cases"].items():
        x = data["student_logits"].clone().requires_grad_()
        value = losses.topk_tail_policy_loss(x, teacher, shift(tokens), weight > 0, k, weight_BS=weight)[0]
        assert near(value.detach(), case["loss"]), k
        assert close(gradient(value, x), case["grad"], 1e-5), k


def test_uld_and_hybrid_of_trl():
    data = golden("peers.pt")["uld_and_hybrid"]
    names = [name for name in data["student_vocab"] if name in data["teacher_vocab"]]
    vocabs = data["student_vocab"], data["teacher_vocab"]
    common = [torch.tensor([vocab[name] for name in names]) for vocab in vocabs]
    nexts = [shift(data[f"{side}_ids"], 0) for side in ("student", "teacher")]
    groups = [torch.tensor([row]) for row in ([-1, 0, 0, 1, -1, -1], [-1, 0, 0, 1, 1, -1, -1])]
    places = [torch.tensor([row]) for row in ([-1, 0, 1, 2, -1, -1], [-1, 0, 1, 2, -1, -1, -1])]
    for (kind, unit), case in data["cases"].items():
        x = data["student_logits"].clone().requires_grad_()
        chunks, how = (groups if unit == "groups" else places), {"common": common} if kind == "hybrid" else {}
        total, count = losses.uld(x, data["teacher_logits"], *nexts, *chunks, **how)
        if unit == "positions":  # there no token's probability is multiplied in
            assert count == 3
        assert near((total / count).detach(), case["loss"]), (kind, unit)
        assert "grad" not in case or close(gradient(total / count, x), case["grad"], 1e-5), (kind, unit)


def test_alm_of_tokenkit():
    data = golden("peers.pt")["alm_binary_ce"]
    chunks = []
    for side, length in (("student", 8), ("teacher", 6)):
        rows = torch.full((2, length), -1)
        for b, spans in enumerate(data[f"{side}_chunks"]):
            for c, (start, end) in enumerate(spans):
                rows[b, start - 1 : end - 1] = c  # position t predicts t + 1
        chunks.append(rows)
    nexts = [shift(data[f"{side}_ids"], 0) for side in ("student", "teacher")]
    for tau, case in data["cases"].items():
        x = data["student_logits"].clone().requires_grad_()
        total, count = losses.alm(x, data["teacher_logits"], *nexts, *chunks, tau, "binary_ce")
        assert near((total / count).detach(), case["mean"]), tau
        assert close(gradient(total / count, x), case["grad"], 1e-5), tau
