"""tiles.py: the same loss and gradient as the plain path, in bounded memory."""

import math
import shutil
import subprocess
import sys
import weakref
from contextlib import nullcontext

import pytest
import torch
from cases import Case, common_of
from conftest import ROOT

import losses
from tiles import GPU_SUB_TILES, Head, HiddenLogits, StoredLogits, TeacherBlocks, TopKLogits, plan_tiles, tiled_loss

H = 6
LOSSES = "ce", "piece_kl", "projection_kl", "kept", "gold", "h_kl", "uld", "alm"


class Models:
    """Hidden states and heads of both sides for the texts of a Case; both heads are padded."""

    def __init__(self, seed, dtype=torch.float64, samples=3, kind="plain"):
        self.case = Case(seed, samples=samples)
        case, V, W = self.case, self.case.x.shape[-1], self.case.y.shape[-1]
        torch.manual_seed(seed)

        def tensor(*shape):
            return torch.randn(*shape, dtype=torch.float64).to(dtype)

        self.hidden = tensor(*case.x.shape[:2], H).requires_grad_()
        own = [tensor(V + 2, H).requires_grad_(), None, None, None]
        how = {"plain": {}, "bias": {}, "capped": {"scale": 0.7, "softcap": 3.0}, "adapter": {}, "frozen": {}}
        if kind == "bias":
            own[1] = tensor(V + 2).requires_grad_()
        if kind == "adapter":
            own[2:] = tensor(2, H).requires_grad_(), tensor(V + 2, 2).requires_grad_()
        if kind in ("adapter", "frozen"):
            own[0].requires_grad_(False)
        self.head = Head(*own, vocab=V, **how[kind])
        teacher = HiddenLogits(tensor(case.y.shape[0] * case.y.shape[1], H), Head(tensor(W + 3, H), vocab=W))
        with torch.no_grad():
            self.y = teacher(torch.arange(len(teacher.hidden_TH))).view(*case.y.shape[:2], W)
        self.teacher = {"hidden": teacher, "logits": StoredLogits(self.y.flatten(0, 1))}
        self.labels = torch.where(case.chunk[0] >= 0, case.next[0], -100)
        self.labels[0, 0] = -100  # a chunk that is no text to learn
        self.chunk = [c.clone() for c in case.chunk]
        self.chunk[0][-1][:2] = -1  # text without a chunk

    @property
    def inputs(self):
        return [x for x in (self.hidden, *self.head[:4]) if x is not None and x.requires_grad]

    @property
    def sizes(self):
        return self.case.x.shape[-1], self.case.y.shape[-1]

    def tiles(self, memory_mib):
        ids = self.labels, self.chunk[0], self.case.next[1], self.chunk[1]
        planned = plan_tiles(*ids, self.sizes, memory_mib, GPU_SUB_TILES)
        return [tile._replace(parts=tuple(
            part._replace(terms=losses.piece_terms(*one(part), self.case.spelling)) for part in tile.parts))
            for tile in planned]


def one(part):
    """A part as a batch of one sample: student and teacher tokens, and chunks."""
    ids = part.labels.clamp(min=0), part.teacher_next, part.student_chunk, part.teacher_chunk
    return [x[None] for x in ids]


def loss_of(name, case):
    """(x (n, V), y (m, W), part) -> sum."""
    common, projection = common_of(case), (case.indices, case.likelihoods)
    kept = torch.tensor([0, 3, 7])

    def compute(x, y, part):
        x, y, ids = x[None], y[None], one(part)
        if name == "ce":
            return losses.next_token_cross_entropy(x, part.labels[None])[0]
        if name == "piece_kl":
            return losses.piece_kl(x, y, *ids[:2], part.terms, case.spelling, 2.0)[0]
        if name in ("projection_kl", "kept"):
            return losses.projection_kl(x, y, *ids[2:], *projection, kept if name == "kept" else None)[0]
        if name == "gold":
            return losses.gold(x, y, *ids[2:], *common, 2.0)[0]
        if name == "h_kl":
            return losses.h_kl(x, y, *ids[2:], *projection)[0]
        return getattr(losses, name)(x, y, *ids)[0]

    return compute


def both(loss):
    """The loss and the cross-entropy of a part."""
    def compute(x, y, part):
        ce = losses.next_token_cross_entropy(x[None], part.labels[None])[0]
        return torch.stack([ce, loss(x, y, part).to(ce)])

    return compute


def plain(models, loss, weights):
    """Logits of everything, one tile, autograd."""
    [tile] = models.tiles(math.inf)
    x = models.head.finish(models.head.linear(models.hidden.flatten(0, 1)))[tile.student_rows]
    [part] = tile.parts
    sums = both(loss)(x, models.y.flatten(0, 1)[part.fetch], part)
    return (sums * torch.tensor(weights)).sum(), sums


def gradients(value, inputs):
    return torch.autograd.grad(value, inputs)


def close(a, b, tolerance):
    return (a - b).norm() <= tolerance * b.norm().clamp(min=1e-9)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("kind", ["plain", "bias", "capped", "adapter", "frozen"])
def test_equals_the_plain_path(name, kind):
    """Tiles of one chunk, of some chunks, one for all; from hidden states and from logits."""
    counts = set()
    for seed in range(4):
        models, weights = Models(seed, kind=kind), [0.3, 2.0]
        loss = loss_of(name, models.case)
        value, sums = plain(models, loss, weights)
        expected = gradients(3 * value, models.inputs)
        for memory in (0.0, 0.001, 0.01, math.inf):
            for rows in models.teacher.values():
                tiles = models.tiles(memory)
                counts |= {len(tiles), len(tiles[0].parts)}
                how = models.head, rows, both(loss), tiles, weights
                found, each = tiled_loss(models.hidden, *how)
                assert abs(found - value) <= 1e-6 * abs(value)
                assert torch.allclose(each.double(), sums, rtol=1e-6)
                for a, b in zip(gradients(3 * found, models.inputs), expected):
                    assert close(a, b, 1e-6), (seed, memory)
    assert 1 in counts and len(counts) > 4 and max(counts) > 10


def test_every_row_and_every_chunk_is_in_one_part():
    for seed in range(20):
        models = Models(seed)
        [whole] = models.tiles(math.inf)
        found, wanted = losses.find_chunks(*one(whole.parts[0])[2:]), losses.find_chunks(*models.chunk)
        assert len(found.first_S) == len(wanted.first_S)
        for memory in (0.0, 0.002, 0.01):
            tiles, blocks = models.tiles(memory), []
            parts = [part for tile in tiles for part in tile.parts]
            for part in parts:
                blocks += [] if part.fetch is None else [[]]
                blocks[-1].append(part)
            for name, groups, rows, all_rows in (
                    ("student", [tile.parts for tile in tiles], [tile.student_rows for tile in tiles],
                     whole.student_rows),
                    ("teacher", blocks, [block[0].fetch for block in blocks], whole.parts[0].fetch)):
                assert sorted(torch.cat(rows).tolist()) == all_rows.tolist()
                for group, own in zip(groups, rows):  # the parts are the tile, or all that was fetched
                    cuts = [getattr(part, name) for part in group]
                    assert [c.start for c in cuts] + [len(own)] == [0] + [c.stop for c in cuts]
            most = [0.0, 0.0]
            for side, groups in enumerate(([tile.parts for tile in tiles], blocks)):
                for group in groups:
                    if sum(units(part) for part in group) > 1 and (side == 0 or len(group) > 1):
                        most[side] = max(most[side], mib(group, models.sizes, side))
            assert sum(most) <= memory / 2 + 1e-9
            for part in parts:
                assert mib([part], models.sizes) <= memory / 16 + 1e-9 or units(part) == 1
            assert sum(int(part.terms.count_all) for part in parts) == int(whole.parts[0].terms.count_all)


def mib(parts, sizes, side=slice(None)):
    """MiB of both sides' logits, or of one."""
    costs = torch.tensor([[len(part.labels), len(part.teacher_next)] for part in parts]) * torch.tensor(sizes)
    return 4 * float(costs[:, side].sum()) / 2**20


def units(part):
    """Chunks and positions outside of chunks."""
    chunk = part.student_chunk
    return len(set(chunk[chunk >= 0].tolist())) + int((chunk < 0).sum())


def test_nothing_to_learn():
    models = Models(0)
    models.labels.fill_(-100)
    models.chunk[0].fill_(-1)
    how = models.head, models.teacher["hidden"], both(None), models.tiles(1.0), [1.0, 1.0]
    found, sums = tiled_loss(models.hidden, *how)
    assert found == 0 and sums.tolist() == [0, 0]
    assert all((g == 0).all() for g in gradients(found, models.inputs))


def on_meta(value):
    if isinstance(value, torch.Tensor):
        return value.detach().to("meta").requires_grad_(value.requires_grad)
    if isinstance(value, (tuple, list)):
        moved = [on_meta(x) for x in value]
        return type(value)(*moved) if hasattr(value, "_fields") else tuple(moved)
    return value


@pytest.mark.parametrize(
    "name", ["piece_kl", "projection_kl", "kept", "gold", "uld", "hybrid", "alm", "jsd", "top_k"])
def test_nothing_waits_for_the_device(name, monkeypatch):
    """The meta device has no numbers, so whatever reads one back (sizes, masks, conditions) fails there."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)  # it does not know this device
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    models = Models(3)
    case, V, W = models.case, *models.sizes
    common, spelling = on_meta(common_of(case)), on_meta(case.spelling)
    kept = torch.tensor([0, 3, 7]) if name == "kept" else None
    tables = case.indices, case.likelihoods
    entries = on_meta(losses.projection_entries(*tables, W, kept))

    def loss(x, y, part):
        next_, chunks = (part.labels[None], part.teacher_next[None]), part.terms
        ids = part.student_chunk[None], part.teacher_chunk[None]
        if name == "piece_kl":
            value = losses.piece_kl(x[None], y[None], *next_, part.terms, spelling, 2.0)
        elif name in ("projection_kl", "kept"):
            how = dict(kept_K=on_meta(kept), entries=entries, chunks=chunks)
            value = losses.projection_kl(x[None], y[None], *ids, *on_meta(tables), **how)
        elif name == "gold":
            value = losses.gold(x[None], y[None], *ids, *common, 2.0, chunks=chunks)
        elif name in ("jsd", "top_k"):
            rows = [side.index_select(0, torch.zeros_like(chunks.first_S))[None, :, :V] for side in (x, y)]
            value = losses.generalized_jsd(*rows, None, top_k=3 * (name == "top_k"))
        else:
            how = {"common": common} if name == "hybrid" else {}
            function = losses.alm if name == "alm" else losses.uld
            value = function(x[None], y[None], *next_, *ids, chunks=chunks, **how)
        return torch.stack([torch.nn.functional.cross_entropy(x, part.labels, reduction="sum"), value[0]])

    tiles = models.tiles(0.01)
    if name != "piece_kl":
        tiles = [tile._replace(parts=tuple(part._replace(terms=losses.find_chunks(*one(part)[2:]))
                                           for part in tile.parts)) for tile in tiles]
    hidden, head, rows = on_meta((models.hidden, models.head, models.teacher["hidden"]))
    value, _ = tiled_loss(hidden, head, rows, loss, on_meta(tiles), [1.0, 1.0])
    value.backward()
    assert hidden.grad.shape == hidden.shape and head.weight_VH.grad is not None


def test_parts_without_a_term_get_no_gradient():
    models = Models(6)
    tiles, empty = models.tiles(0.01), []

    def loss(x, y, part):
        if part.student.start == 0:  # the first part of every tile
            empty.append(part)
            return x.new_zeros(1)
        return losses.next_token_cross_entropy(x[None], part.labels[None])[0][None]

    how = models.head, models.teacher["hidden"], loss, tiles, [1.0]
    found, _ = tiled_loss(models.hidden, *how)
    d_hidden = gradients(found, models.inputs)[0].flatten(0, 1)
    skipped = torch.cat([tile.student_rows[tile.parts[0].student] for tile in tiles])
    rest = torch.cat([tile.student_rows[len(tile.parts[0].labels) :] for tile in tiles])
    assert empty and len(rest) and (d_hidden[skipped] == 0).all() and (d_hidden[rest] != 0).any()


def test_float32_bfloat16_and_autocast():
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 0.02)):
        models, weights = Models(1, dtype), [1.0, 1.0]
        loss = loss_of("piece_kl", models.case)
        for autocast in (False, dtype == torch.float32):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                value, _ = plain(models, loss, weights)
                found, _ = tiled_loss(models.hidden, models.head, models.teacher["hidden"], both(loss),
                                      models.tiles(0.002), weights)
            worst = 0.02 if autocast else tolerance
            assert abs(found - value) <= worst * abs(value)
            for a, b in zip(gradients(found, models.inputs), gradients(value, models.inputs)):
                assert a.dtype == b.dtype and close(a.float(), b.float(), worst), (dtype, autocast)


def test_float16_under_a_loss_scale():
    """Small weights do not push the gradient of the logits below what float16 holds."""
    torch.manual_seed(0)
    V, H, n, scale = 2000, 16, 8, 2.0**16
    hidden, weight, y = torch.randn(n, H), torch.randn(V, H) * 0.3, torch.randn(n, V)
    chunk = torch.arange(n)[None]
    tiles = plan_tiles(chunk, chunk, chunk, chunk, (V, V), 0.1)
    found = {}
    for dtype in (torch.float32, torch.float16):
        inputs = [x.to(dtype).requires_grad_() for x in (hidden, weight)]

        def kl(x, y, part):
            return losses.forward_kl(x[None], y[None], None)[0][None]

        loss, _ = tiled_loss(inputs[0], Head(inputs[1]), StoredLogits(y), kl, tiles, [1e-7])
        found[dtype] = gradients(scale * loss, inputs)
    for a, b in zip(found[torch.float16], found[torch.float32]):
        assert (a.float() - b).norm() < 5e-3 * b.norm()


def test_a_learned_projection_gets_its_gradient():
    models = Models(2)
    case, weight = models.case, models.case.likelihoods.clone().requires_grad_()

    def loss(x, y, part):
        return losses.projection_kl(x[None], y[None], *one(part)[2:], case.indices, weight)[0]

    expected = gradients(plain(models, loss, [0.0, 1.0])[0], [weight, models.hidden])
    how = models.head, models.teacher["hidden"], both(loss), models.tiles(0.002), [0.0, 1.0], [weight]
    found, _ = tiled_loss(models.hidden, *how)
    for a, b in zip(gradients(found, [weight, models.hidden]), expected):
        assert close(a, b, 1e-6)


def test_gradient_checkpointing_and_evaluation():
    models = Models(3)
    loss = both(loss_of("gold", models.case))

    how = models.head, models.teacher["hidden"], loss, models.tiles(0.002), [1.0, 1.0]

    def run(hidden):
        return tiled_loss(hidden, *how)[0]

    expected = gradients(run(models.hidden), models.inputs)
    for reentrant in (True, False):
        value = torch.utils.checkpoint.checkpoint(run, models.hidden, use_reentrant=reentrant)
        for x in models.inputs:
            x.grad = None
        value.backward()
        assert all(close(x.grad, b, 1e-9) for x, b in zip(models.inputs, expected))
    with torch.no_grad():
        quiet = run(models.hidden)
    assert quiet == value and not quiet.requires_grad


def test_a_second_backward_is_refused():
    models = Models(3)
    loss = both(loss_of("alm", models.case))
    how = models.head, models.teacher["hidden"], loss, models.tiles(0.002), [1.0, 1.0]
    found, _ = tiled_loss(models.hidden, *how)
    torch.autograd.grad(found, models.inputs, retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        torch.autograd.grad(found, models.inputs)


def test_what_is_kept_for_backward_is_the_gradients():
    """And no logits, however many positions there are."""
    models, saved = Models(4, samples=6), weakref.WeakSet()

    class Saved:
        def __init__(self, x):
            self.x = x
            saved.add(self)

    loss = loss_of("piece_kl", models.case)
    how = models.head, models.teacher["hidden"], both(loss), models.tiles(0.002), [1.0, 1.0]
    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.x):
        found, _ = tiled_loss(models.hidden, *how)
        assert not saved  # those of the tiles are gone
        value, _ = plain(models, loss, [1.0, 1.0])
    kept = sum(g.nbytes for g in found.grad_fn.grads if g is not None)
    assert kept == sum(x.nbytes for x in models.inputs)
    assert sum({each.x.data_ptr(): each.x.nbytes for each in saved}.values()) > 2 * kept and value > 0


def test_one_block_of_the_teacher_exists_at_a_time():
    models, alive = Models(6), []

    def counted(rows):
        assert not any(block() is not None for block in alive)
        found = models.teacher["logits"](rows)
        alive.append(weakref.ref(found))
        return found

    tiles = models.tiles(0.001)
    blocks, counting = TeacherBlocks(models.teacher["hidden"], tiles), TeacherBlocks(counted, tiles)
    rows, places = None, set()
    for part in [part for tile in tiles for part in tile.parts]:
        rows = part.fetch if part.fetch is not None else rows
        wanted = models.teacher["logits"](rows)[part.teacher]
        assert torch.allclose(blocks(part), wanted) and torch.equal(counting(part), wanted)
        places.add(blocks.block.data_ptr())
    assert len(alive) == len(blocks.fetches) > 2 and len(places) == 1


def test_cached_top_k_of_a_teacher():
    torch.manual_seed(0)
    logp = torch.randn(5, 9).log_softmax(-1)
    top = logp.topk(3)
    rows = TopKLogits(top.indices, top.values, 9)(torch.tensor([4, 1])).softmax(-1)
    assert torch.allclose(rows.sum(1), torch.ones(2)) and torch.allclose(
        rows.gather(1, top.indices[[4, 1]]), top.values[[4, 1]].exp())
    rest = 1 - top.values[4].exp().sum()
    assert torch.allclose(rows[0].sort().values[:6], (rest / 6).expand(6), rtol=1e-5)


def test_heads_of_kept_columns():
    models, ids = Models(5), torch.tensor([4, 0, 6])
    for rows in models.teacher.values():
        some = torch.tensor([3, 1])
        assert torch.allclose(rows.columns(ids)(some), rows(some)[:, ids])


SHAPE = dict(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
             num_key_value_heads=1, max_position_embeddings=32, head_dim=8, pad_token_id=0, bos_token_id=1,
             eos_token_id=2, initializer_range=0.5)
ARCHITECTURES = {
    "llama": {}, "qwen2": {"tie_word_embeddings": True}, "qwen3": {}, "mistral": {}, "olmo2": {}, "gemma": {},
    "phi": {}, "phi3": {}, "gemma2": {"final_logit_softcapping": 2.0}, "granite": {"logits_scaling": 3.0},
    "cohere": {"logit_scale": 0.3}, "gpt_neox": {}, "gpt2": {"n_embd": 16, "n_head": 2, "n_layer": 1},
    "opt": {"word_embed_proj_dim": 8}, "gpt_neo": {"num_layers": 1, "attention_types": [[["global"], 1]]}}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_head_and_hidden_states_give_the_logits_of_the_model(architecture):
    from transformers import AutoConfig, AutoModelForCausalLM

    from isogloss.teachers import hidden_head_is_right, whole_teacher

    torch.manual_seed(0)
    how = SHAPE if architecture not in ("gpt2",) else {"vocab_size": 40}
    config = AutoConfig.for_model(architecture, **how | ARCHITECTURES[architecture])
    model = AutoModelForCausalLM.from_config(config).eval()
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        torch.nn.init.normal_(model.get_output_embeddings().bias)
    ids = torch.randint(40, (2, 7))
    logits = model(input_ids=ids).logits[..., :37].detach()
    for signal in ("hidden", "logits"):
        assert hidden_head_is_right(whole_teacher(model, 37).rows(ids, signal), logits)
    assert not hidden_head_is_right(whole_teacher(model, 37).rows(ids), logits * 1.01)


def test_the_file_works_alone(tmp_path):
    shutil.copy(ROOT / "tiles.py", tmp_path)
    code = "import sys, tiles; print([m for m in ('transformers', 'losses') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert found.stdout.strip() == "[]", found.stderr
