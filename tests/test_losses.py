"""losses.py against the definitions, and against public implementations."""

import random
import shutil
import subprocess
import sys

import oracle
import pytest
import torch
from conftest import GOLDEN, ROOT

import losses
from losses import (Spelling, next_token_cross_entropy, piece_kl, piece_terms, projection_kl,
                    teacher_importance)
from projection_tools.spell import events, prefix_ranges

F64 = torch.float64


# --- random cases: two vocabularies over the letters a, b, c, and texts in both ---


def spelling_of(A, B):
    """Spelling from lists of ids."""
    def table(rows):
        width = max(len(row) for row in rows)
        return torch.tensor([row + [-1] * (width - len(row)) for row in rows])

    pieces_W, pieces_V = table(A), table(B)
    event_V, event_W, count = events(pieces_W.numpy(), pieces_V.numpy())
    ranges = [[torch.from_numpy(x).long() for x in prefix_ranges(p.numpy())] for p in (pieces_W, pieces_V)]
    first = torch.from_numpy(event_V), torch.from_numpy(event_W), count
    return Spelling(*first, pieces_W, *ranges[0], pieces_V, *ranges[1])


def greedy(text, vocab):
    ids = []
    while text:
        best = max((t for t in vocab if text.startswith(t)), key=len)
        ids.append(vocab.index(best))
        text = text[len(best) :]
    return ids


class Case:
    """A batch of texts with logits, tables and chunk ids, shifted already: entry t is the predicted token."""

    def __init__(self, seed, samples=2, length=14, sizes=(9, 12), dtype=F64):
        rng = random.Random(seed)
        torch.manual_seed(seed)

        def vocabulary(size):
            vocab = ["a", "b", "c"]
            while len(vocab) < size:
                token = "".join(rng.choice("abc") for _ in range(rng.randint(2, 4)))
                vocab += [token] * (token not in vocab)
            return vocab

        V, W = vocabulary(sizes[0]), vocabulary(sizes[1])
        texts = ["".join(rng.choice("abc") for _ in range(rng.randint(1, length))) for _ in range(samples)]
        sides = [[greedy(text, vocab) for text in texts] for vocab in (V, W)]
        chunks = [oracle.merge([V[i] for i in s], [W[i] for i in t]) for s, t in zip(*sides)]
        self.next = [self.pad(side, 0) for side in sides]
        self.chunk = [self.pad([c[i] for c in chunks], -1) for i in (0, 1)]
        self.A, self.B = [greedy(w, V) for w in W], [greedy(v, W) for v in V]
        self.spelling = spelling_of(self.A, self.B)
        self.x = (2 * torch.randn(*self.next[0].shape, len(V))).to(dtype).requires_grad_()
        self.y = (2 * torch.randn(*self.next[1].shape, len(W))).to(dtype)
        indices = [list(dict.fromkeys(b))[:3] for b in self.B]
        self.indices = torch.tensor([i + [-1] * (3 - len(i)) for i in indices])
        weights = torch.where(self.indices >= 0, torch.tensor([0.9, 0.09, 0.009], dtype=dtype), 0)
        self.likelihoods = weights / weights.sum(1, keepdim=True)

    @staticmethod
    def pad(rows, fill):
        width = max(map(len, rows)) + 1  # at least one position of padding
        return torch.tensor([row + [fill] * (width - len(row)) for row in rows])

    def piece(self, tau=1.0, x=None, y=None):
        terms = piece_terms(*self.next, *self.chunk, self.spelling)
        x, y = self.x if x is None else x, self.y if y is None else y
        return piece_kl(x, y, *self.next, terms, self.spelling, tau)

    def projection(self, tau=1.0, x=None, y=None, kept=None):
        x, y = self.x if x is None else x, self.y if y is None else y
        return projection_kl(x, y, *self.chunk, self.indices, self.likelihoods, kept, tau)


def gradient(value, x):
    return torch.autograd.grad(value, x)[0]


def close(a, b, tolerance):
    return (a - b).norm() <= tolerance * max(float(b.norm()), 1e-30)


@pytest.mark.parametrize("tau", [0.5, 1.0, 2.0])
def test_piece_kl_equals_brute_force(tau):
    kinds = set()
    for seed in range(40):
        case = Case(seed, sizes=random.Random(seed).choice([(9, 12), (12, 7), (5, 14), (14, 4)]))
        case.x.requires_grad_(seed % 4 == 0)
        terms = piece_terms(*case.next, *case.chunk, case.spelling)
        kinds |= {name for name in ("inside_teacher", "inside_student") if len(getattr(terms, name).low)}
        kinds |= {"many"} if terms.count_many else set()
        value, count = case.piece(tau)
        ids = *case.next, *case.chunk
        expected, expected_count = oracle.piece_kl(case.x, case.y, *ids, case.A, case.B, tau)
        assert count == expected_count
        assert abs(value - expected) <= 1e-12 * expected
        if case.x.requires_grad:
            assert close(gradient(value, case.x), gradient(expected, case.x), 1e-11)
    assert kinds == {"inside_teacher", "inside_student", "many"}  # the cases do exercise every part


@pytest.mark.parametrize("tau", [0.5, 1.0, 2.0])
def test_projection_kl_equals_brute_force(tau):
    for seed in range(25):
        case = Case(seed)
        case.x.requires_grad_(seed % 5 < 2)
        kept = None if seed % 2 else torch.tensor(sorted(random.Random(seed).sample(range(12), 6)))
        value, count = case.projection(tau, kept=kept)
        projection = case.indices, case.likelihoods
        expected, expected_count = oracle.projection_kl(case.x, case.y, *case.chunk, *projection, kept, tau)
        assert count == expected_count
        assert abs(value - expected) <= 1e-12 * expected
        if case.x.requires_grad:
            assert close(gradient(value, case.x), gradient(expected, case.x), 1e-10)


def test_cross_entropy_equals_brute_force():
    for seed in range(10):
        case = Case(seed)
        labels = torch.where(case.chunk[0] >= 0, case.next[0], -100)
        value, count = next_token_cross_entropy(case.x, labels)
        expected, expected_count = oracle.cross_entropy(case.x, labels)
        assert count == expected_count and abs(value - expected) <= 1e-12 * expected
        assert close(gradient(value, case.x), gradient(expected, case.x), 1e-12)


def test_gradcheck():
    for seed in range(4):
        case = Case(seed, samples=1, length=8)
        for tau in (1.0, 2.0):
            for loss in (case.piece, case.projection):
                assert torch.autograd.gradcheck(lambda x, loss=loss: loss(tau, x)[0], case.x, fast_mode=True)


def test_equal_tokenizers_give_forward_kl_and_zero_at_agreement():
    torch.manual_seed(0)
    V, next_ids, chunk = 11, torch.randint(11, (2, 6)), torch.arange(6).expand(2, 6)
    spelling = spelling_of([[i] for i in range(V)], [[i] for i in range(V)])
    terms = piece_terms(next_ids, next_ids, chunk, chunk, spelling)
    x, y = torch.randn(2, 6, V, dtype=F64), torch.randn(2, 6, V, dtype=F64)
    value, count = piece_kl(x, y, next_ids, next_ids, terms, spelling)
    forward = (y.softmax(-1) * (y.log_softmax(-1) - x.log_softmax(-1))).sum()
    assert count == 12 and abs(value - forward) < 1e-12 * forward
    assert abs(piece_kl(y, y, next_ids, next_ids, terms, spelling)[0]) < 1e-12
    identity = torch.arange(V)[:, None], torch.ones(V, 1, dtype=F64)
    assert abs(projection_kl(y, y, chunk, chunk, *identity)[0]) < 1e-7
    assert abs(projection_kl(x, y, chunk, chunk, *identity)[0] - forward) < 1e-7


def test_never_negative():
    for seed in range(30):
        case = Case(seed, dtype=torch.float32)
        assert case.piece()[0] >= -1e-5 and case.projection()[0] >= -1e-5


def test_padding_may_hold_anything():
    """One side at a time: NaN where no chunk is must reach neither the value nor the gradient."""
    for loss in ("piece", "projection"):
        for side in (0, 1):
            case = Case(3)
            expected = getattr(case, loss)()[0]
            logits = [case.x, case.y]
            logits[side] = torch.where((case.chunk[side] >= 0)[..., None], logits[side], torch.nan)
            value = getattr(case, loss)(1.0, *logits)[0]
            assert value == expected
            assert torch.equal(gradient(value, case.x), gradient(expected, case.x))
    case = Case(3)
    labels = torch.where(case.chunk[0] >= 0, case.next[0], -100)
    x = torch.where((labels >= 0)[..., None], case.x, torch.nan)
    assert gradient(next_token_cross_entropy(x, labels)[0], case.x).isfinite().all()


def test_every_row_is_read_by_the_right_position():
    """Swap two predictor rows: only a loss that reads position t for chunk t can tell."""
    for loss in ("piece", "projection"):
        for side in (0, 1):
            case = Case(5)
            logits = [case.x.detach(), case.y]
            logits[side] = logits[side][:, [1, 0, *range(2, logits[side].shape[1])]]
            assert abs(getattr(case, loss)(1.0, *logits)[0] - getattr(case, loss)()[0]) > 1e-3


def test_same_whatever_the_cut_of_the_batch():
    for loss in ("piece", "projection"):
        case = Case(7, samples=4)
        whole, count = getattr(case, loss)()
        parts, x, y, nexts, chunks = 0.0, case.x, case.y, case.next, case.chunk
        counts = 0
        for i in range(4):
            case.next, case.chunk = [n[i : i + 1] for n in nexts], [c[i : i + 1] for c in chunks]
            part, n = getattr(case, loss)(1.0, x[i : i + 1], y[i : i + 1])
            parts, counts = parts + part, counts + n
        assert counts == count and abs(parts - whole) < 1e-12 * whole
        assert close(gradient(parts, x), gradient(whole, x), 1e-12)


def test_no_chunk_at_all_still_has_a_gradient():
    case = Case(2)
    case.chunk = [torch.full_like(c, -1) for c in case.chunk]
    for loss in (case.piece, case.projection):
        value, count = loss()
        assert count == 0 and value == 0
        assert torch.equal(gradient(value, case.x), torch.zeros_like(case.x))


def test_a_peaky_student_keeps_its_gradient():
    """A logit gap of 100: the mass of the other events underflows in float32, its logarithm must not."""
    case = Case(1, dtype=torch.float32)
    peak = torch.zeros_like(case.x)
    peak[..., 0] = 100.0
    x = (case.x.detach() / 10 + peak).requires_grad_()
    x64 = x.detach().double().requires_grad_()
    value = case.piece(1.0, x)[0]
    expected = oracle.piece_kl(x64, case.y, *case.next, *case.chunk, case.A, case.B)[0]
    assert abs(value - expected) < 1e-4 * expected
    assert close(gradient(value, x).double(), gradient(expected, x64), 1e-4)


def test_low_precision_inputs_are_summed_in_float32():
    for loss in ("piece", "projection"):
        case = Case(4, dtype=torch.float32)
        x, y = case.x.detach().bfloat16().requires_grad_(), case.y.bfloat16()
        exact = getattr(case, loss)(1.0, x.detach().double(), y.double())[0]
        with torch.autocast("cpu", torch.bfloat16):
            value = getattr(case, loss)(1.0, x, y)[0]
        assert value.dtype == torch.float32 and abs(value - exact) < 1e-5 * exact
        assert gradient(value, x).dtype == torch.bfloat16


def test_importance_ignores_padding():
    case = Case(6)
    y = torch.where((case.chunk[1] >= 0)[..., None], case.y, torch.nan)
    assert torch.equal(teacher_importance(y, case.chunk[1]), case.y[case.chunk[1] >= 0].amax(0))
    assert teacher_importance(y, torch.full_like(case.chunk[1], -1)).max() == -torch.inf


def test_projection_kl_equals_the_public_implementation():
    """Values and gradients of NeMo-RL at commit 7ea279abf; its dynamic scaling comes with a later loss."""
    if not GOLDEN.exists():
        pytest.skip("the golden outputs are absent")
    golden = torch.load(GOLDEN / "projection_losses.pt", weights_only=True)
    data, checked = golden["inputs"], 0

    def shift(x):
        return torch.cat([x[:, 1:], torch.full_like(x[:, :1], -1)], 1)

    teacher = data["teacher_logits"][..., : data["teacher_vocab"]]
    for case in golden["cases"]:
        cfg = case["cfg"]
        if case["mode"] != "pkl" or cfg["dynamic_loss_scaling"]:
            continue
        valid = data["chunk_valid"] & (data["sample_mask"][:, None] > 0)
        valid = valid & data["chunk_exact"] if cfg["exact_token_match_only"] else valid
        chunks = [shift(data[f"{side}_chunk_id"]) for side in ("student", "teacher")]
        chunks = [torch.where((c >= 0) & valid.gather(1, c.clamp(min=0)), c, -1) for c in chunks]
        kept = teacher.amax((0, 1)).topk(min(cfg["vocab_topk"], teacher.shape[-1])).indices.sort().values
        x = data["student_logits"].clone().requires_grad_()
        how = kept, cfg["temperature"], "logp", cfg["reverse_kl"]
        kd, n = projection_kl(x, teacher, *chunks, *data["projection"].values(), *how)
        keep = shift(data["token_mask"]) * data["sample_mask"][:, None] > 0
        ce, m = next_token_cross_entropy(x, torch.where(keep, shift(data["input_ids"]), -100))
        loss = cfg["kl_loss_weight"] * kd / n + cfg["ce_loss_scale"] * ce / m
        assert abs(loss - case["loss"]) <= 1e-5 * abs(case["loss"])
        assert close(gradient(loss, x), case["grad"], 1e-5)
        checked += 1
    assert checked >= 8


def test_the_file_works_alone(tmp_path):
    shutil.copy(ROOT / "losses.py", tmp_path)
    code = ("import sys; sys.path.insert(0, '.'); import torch, losses; x = torch.zeros(1, 2, 3); "
            "print(losses.next_token_cross_entropy(x, torch.tensor([[1, -100]])))")
    found = subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert "1.0986" in found.stdout, found.stderr
    assert losses.__doc__
