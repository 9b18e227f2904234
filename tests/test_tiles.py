"""tiles.py: the same loss and gradient as the plain path, in bounded memory."""

import itertools
import math
import weakref
from contextlib import nullcontext
from functools import cache

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cases import Calls, Case, Ids, NoWait, close, on_meta
from every_loss import CHUNK_LOSSES, LossTables
from isogloss import losses, tiles as tiles_module
from isogloss.tile_plan import GPU_SUB_TILES, plan_tiles
from isogloss.tiles import (
    Head,
    HiddenLogits,
    OnePart,
    SelectedColumns,
    ShardedLogits,
    StoredLogits,
    TeacherBlocks,
    tiled_loss,
    tiled_losses,
)

H = 6
STUDENT_PADDING = 2  # rows of the head that are no token
TEACHER_PADDING = 3
LOSSES = "alm", "projection_kl", "projection_kl, kept", "gold", "h_kl", "uld"
KINDS = "plain", "bias", "capped", "adapter", "frozen"  # of heads


class Models:
    """Hold hidden states and padded heads of both models for the texts of a Case.

    kind: what is special about the student's head: plain, bias, capped, adapter or frozen.
    """

    def __init__(self, seed, dtype=torch.float64, samples=3, kind="plain"):
        self.case = Case(seed, samples=samples)
        self.tables = LossTables.of(self.case)
        V, W = self.vocab_sizes = self.case.x.shape[-1], self.case.y.shape[-1]
        torch.manual_seed(seed)

        def tensor(*shape):
            return torch.randn(*shape, dtype=torch.float64).to(dtype)

        self.hidden = tensor(*self.case.x.shape[:2], H).requires_grad_()
        self.head = Head(tensor(V + STUDENT_PADDING, H).requires_grad_(), vocab=V)
        more = {"bias": {"bias_V": (V + STUDENT_PADDING,)},
                "adapter": {"down_RH": (2, H), "up_VR": (V + STUDENT_PADDING, 2)}}
        for field, shape in more.get(kind, {}).items():
            self.head = self.head._replace(**{field: tensor(*shape).requires_grad_()})
        if kind == "capped":
            self.head = self.head._replace(scale=0.7, softcap=3.0)
        if kind in ("adapter", "frozen"):
            self.head.weight_VH.requires_grad_(False)

        B, T = self.case.y.shape[:2]
        hidden_TH = tensor(B * T, H)
        teacher_head = Head(tensor(W + TEACHER_PADDING, H), vocab=W)
        hidden_logits = HiddenLogits(hidden_TH, teacher_head)
        with torch.no_grad():
            self.teacher_logits = hidden_logits(torch.arange(B * T))
        stored_logits = StoredLogits(self.teacher_logits)
        self.teacher = {"hidden": hidden_logits, "logits": stored_logits}

        ids = self.case.ids
        self.labels = torch.where(ids.chunk_S >= 0, ids.next_S, -100)
        self.labels[0, 0] = -100  # a chunk that is no text to learn
        self.chunk = [chunk.clone() for chunk in ids[2:]]
        self.chunk[0][-1][:2] = -1  # text without a chunk

    @property
    def inputs(self):
        """List what gets a gradient."""
        tensors = [self.hidden, *self.head.tensors]
        return [x for x in tensors if x is not None and x.requires_grad]

    def tiles(self, memory_mib, name="alm"):
        """Plan tiles with the terms of a loss of every_loss.py."""
        ids = self.case.ids
        tiles = plan_tiles(self.labels, self.chunk[0], ids.next_T, self.chunk[1], self.vocab_sizes,
                           memory_mib, sub_tiles=GPU_SUB_TILES)

        def with_terms(sub_tile):
            terms = CHUNK_LOSSES[name].list_terms(ids_of(sub_tile), self.tables)
            return sub_tile._replace(terms=terms)

        return [tile._replace(sub_tiles=tuple(map(with_terms, tile.sub_tiles))) for tile in tiles]

    def loss(self, name, tables=None):
        """Return a tile loss: (x (n, V), y (m, W), sub_tile) -> sums of cross-entropy and loss."""
        def compute(x, y, sub_tile):
            return CHUNK_LOSSES[name].compute(
                x[None], y[None], ids_of(sub_tile), sub_tile.terms, tables or self.tables)[0]

        return with_cross_entropy(compute)

    def tiled(self, name, memory_mib=0.002, weights=(1.0, 1.0), source="hidden"):
        """Compute the tiled loss of cross-entropy and another loss, by default from hidden states.

        Returns:
            (value, sums).
        """
        return tiled_loss(self.hidden, self.head, self.teacher[source], self.loss(name),
                          self.tiles(memory_mib, name), weights)

    def plain(self, name, weights=(1.0, 1.0)):
        """Compute the logits of everything, one tile, autograd."""
        return self.plain_of(self.loss(name), self.tiles(math.inf, name), weights)

    def plain_of(self, tile_loss, tiles, weights):
        [tile] = tiles
        [sub_tile] = tile.sub_tiles
        logits = self.head.finish(self.head.linear(self.hidden.flatten(0, 1)))
        x = logits[tile.student_positions]
        y = self.teacher_logits[sub_tile.teacher_positions]
        sums = tile_loss(x, y, sub_tile)
        return (sums * torch.tensor(weights)).sum(), sums


def ids_of(sub_tile):
    """Return a sub-tile as a batch of one sample."""
    return Ids(sub_tile.student_labels.clamp(min=0)[None], sub_tile.teacher_labels[None],
               sub_tile.student_chunk[None], sub_tile.teacher_chunk[None])


def with_cross_entropy(loss):
    """Return a tile loss: the cross-entropy of a sub-tile, and `loss`."""

    def compute(x, y, sub_tile):
        ce, _ = losses.next_token_cross_entropy(
            x[None], sub_tile.student_labels[None], select=False)
        return torch.stack([ce, loss(x, y, sub_tile).to(ce)])

    return compute


def kl_of_tile(x, y, sub_tile):
    """Sum the forward KL over positions of models with one vocabulary."""
    return losses.forward_kl(x[None], y[None], None)[0][None]


def one_vocabulary(n, V, memory_mib):
    """Return tiles of n positions, each a chunk."""
    chunk = torch.arange(n)[None]
    return plan_tiles(chunk, chunk, chunk, chunk, (V, V), memory_mib)


def gradients(value, inputs):
    return torch.autograd.grad(value, inputs)


def check_gradients(values, inputs, tolerance):
    """Compare the gradients of two values by the same inputs."""
    for ours, expected in zip(*[gradients(value, inputs) for value in values]):
        assert ours.dtype == expected.dtype
        assert close(ours.double(), expected.double(), tolerance)


@pytest.mark.parametrize(("name", "kind"), [
    *zip(LOSSES, KINDS * 2), *itertools.product(["alm", "gold"], KINDS)])
def test_equals_the_plain_path(name, kind):
    """Tiles of one chunk, of some chunks, one for all; from hidden states and from logits."""
    counts = set()
    weights = [0.3, 2.0]
    for seed in range(4):
        models = Models(seed, kind=kind)
        plain_value, plain_sums = models.plain(name, weights)
        expected = gradients(3 * plain_value, models.inputs)
        for memory, source in itertools.product((0.0, 0.001, 0.01, math.inf), models.teacher):
            tiles = models.tiles(memory)
            counts |= {len(tiles), len(tiles[0].sub_tiles)}
            value, sums = models.tiled(name, memory, weights, source)
            assert abs(value - plain_value) <= 1e-6 * abs(plain_value)
            assert torch.allclose(sums.double(), plain_sums, rtol=1e-6)
            for a, b in zip(gradients(3 * value, models.inputs), expected):
                assert close(a, b, 1e-6), (seed, memory)
    assert 1 in counts and len(counts) > 4 and max(counts) > 10


@pytest.mark.parametrize(("name", "kind"), [*zip(LOSSES, KINDS * 2)])
def test_rows_begin_at_multiples_where_a_device_wants_them(name, kind, monkeypatch):
    """Its matmuls are slow on rows of 151,646 numbers, so these take 151,680: the same values."""
    models = Models(5, kind=kind)
    assert all(size % 8 for size in models.vocab_sizes)
    expected = models.tiled(name)
    monkeypatch.setitem(tiles_module.ROW_MULTIPLES, "cpu", 8)
    loss = models.loss(name)
    num_tiles = 0

    def compute(x, y, sub_tile):
        nonlocal num_tiles
        num_tiles += 1
        for logits in (x, y):
            # a head with scale and soft-cap makes a tensor of its own
            if kind != "capped" or logits is y:
                assert logits.stride(0) % 8 == 0 and logits.data_ptr() % 64 == 0
        return loss(x, y, sub_tile)

    value, sums = tiled_loss(models.hidden, models.head, models.teacher["hidden"], compute,
                             models.tiles(0.002, name), (1.0, 1.0))
    assert num_tiles > 2 and torch.equal(sums, expected[1])
    check_gradients((value, expected[0]), models.inputs, 1e-12)


def test_memory_is_bounded():
    """A part is for the logits, another for those of a sub-tile with all of its copies."""
    for_sub_tile = GPU_SUB_TILES.memory_fraction
    for seed, memory in itertools.product(range(20), (0.0, 0.002, 0.01)):
        models = Models(seed)
        V, W = models.vocab_sizes
        tiles = models.tiles(memory)
        largest_tile = largest_block = 0.0
        block = []  # the sub-tiles that read one fetch of teacher logits
        for tile in tiles:
            assert tile.largest_fetch == max(map(len, tile.fetches), default=0)
            if sum(map(units, tile.sub_tiles)) > 1:
                of_tile = logits_mib([sub_tile.student_labels for sub_tile in tile.sub_tiles], V)
                largest_tile = max(largest_tile, of_tile)
            for sub_tile in tile.sub_tiles:
                if sub_tile.teacher_positions is not None:
                    block = []
                block.append(sub_tile.teacher_labels)
                if len(block) > 1:  # it has at least one sub-tile, however large
                    largest_block = max(largest_block, logits_mib(block, W))
                both = (logits_mib([sub_tile.student_labels], V)
                        + logits_mib([sub_tile.teacher_labels], W))
                most = memory * for_sub_tile / GPU_SUB_TILES.live_copies
                assert both <= most + 1e-9 or units(sub_tile) == 1
        assert largest_tile + largest_block <= memory * (1 - for_sub_tile) + 1e-9


def logits_mib(ids_of_sub_tiles, vocab):
    """Return the MiB of float32 logits."""
    return 4 * vocab * sum(map(len, ids_of_sub_tiles)) / 2**20


def units(sub_tile):
    """Count the chunks and the positions outside of chunks."""
    chunk = sub_tile.student_chunk
    return len(set(chunk[chunk >= 0].tolist())) + int((chunk < 0).sum())


def test_nothing_waits_for_the_device(monkeypatch):
    """The meta device has no numbers, so whatever reads one back (sizes, masks) fails there.

    tests/test_losses.py sees this of every loss.
    """
    # autocast does not know this device
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    models = Models(3)
    hidden, head, source, tables = on_meta(
        [models.hidden, models.head, models.teacher["hidden"], models.tables])
    tile_loss = models.loss("alm", tables)
    tiles = on_meta(models.tiles(0.01))
    with NoWait():
        value, _ = tiled_loss(hidden, head, source, tile_loss, tiles, [1.0, 1.0])
        value.backward()
    assert hidden.grad.shape == hidden.shape and head.weight_VH.grad is not None


# calls that start none
NO_KERNELS = {"view", "_unsafe_view", "slice", "expand", "t", "transpose", "detach", "alias",
              "unsqueeze", "squeeze", "select", "split", "as_strided", "permute", "unbind",
              "split_with_sizes", "empty", "empty_like", "new_empty", "promote_types"}


def is_launch(function):
    """Tell whether an operator would start a kernel on a GPU."""
    return function.__name__.partition(".")[0] not in NO_KERNELS


@pytest.mark.parametrize(("name", "most"), [
    ("translated, forward_kl", 300), ("projection_kl", 95), ("gold", 130),
    ("uld", 110), ("alm", 100),
    ("forward_kl", 60), ("reverse_kl", 60), ("generalized_jsd", 60), ("total_variation", 60)])
def test_a_sub_tile_launches_few_kernels(name, most, monkeypatch):
    """In plain torch, with its gradient: what a GPU waits for where sub-tiles are small."""
    monkeypatch.setattr(losses, "ORDERED_DEVICES", ())  # sums as a GPU has them
    models = Models(3)
    head, teacher = models.head, models.teacher["hidden"]
    if name in CHUNK_LOSSES:
        loss, tiles = models.loss(name), models.tiles(math.inf, name)
    else:
        loss = with_cross_entropy(
            lambda x, y, _: getattr(losses, name)(x[None], y[None], None)[0])
        teacher = HiddenLogits(models.hidden.detach().flatten(0, 1), head)
        tiles = one_vocabulary(head.vocab, head.vocab, math.inf)  # labels that are tokens
    with Calls(is_launch) as launches:
        value, _ = tiled_loss(models.hidden, head, teacher, loss, tiles, (1.0, 1.0))
        value.backward()
    assert 0.8 * most < launches.count <= most


def test_sub_tiles_without_a_term_get_no_gradient():
    """Nor does a batch without tiles."""
    models = Models(6)
    tiles = models.tiles(0.01)
    tile_loss = models.loss("alm")

    def loss(x, y, sub_tile):  # the first sub-tile of every tile has no term
        return tile_loss(x, y, sub_tile) if sub_tile.student_slice.start else x.new_zeros(2)

    source = models.teacher["hidden"]
    value, _ = tiled_loss(models.hidden, models.head, source, loss, tiles, [1.0, 1.0])
    d_hidden = gradients(value, models.inputs)[0].flatten(0, 1)
    is_skipped = torch.zeros(len(d_hidden), dtype=torch.bool)
    for tile in tiles:
        is_skipped[tile.student_positions[tile.sub_tiles[0].student_slice]] = True
    assert is_skipped.any() and (d_hidden[is_skipped] == 0).all()
    assert (d_hidden[~is_skipped] != 0).any()
    models.labels.fill_(-100)
    models.chunk[0].fill_(-1)
    value, sums = models.tiled("alm", 1.0)
    assert value == 0 and sums.tolist() == [0, 0]
    assert not any(gradient.any() for gradient in gradients(value, models.inputs))


@pytest.mark.parametrize(("dtype", "autocast", "tolerance"), [
    (torch.float32, False, 1e-6), (torch.float32, True, 0.02), (torch.bfloat16, False, 0.02)])
def test_float32_bfloat16_and_autocast(dtype, autocast, tolerance):
    models = Models(1, dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plain_value, _ = models.plain("alm")
        value, _ = models.tiled("alm")
    assert abs(value - plain_value) <= tolerance * abs(plain_value)
    check_gradients((value, plain_value), models.inputs, tolerance)


def test_float16_under_a_loss_scale():
    """Small weights do not push the gradient of the logits below what float16 holds."""
    torch.manual_seed(0)
    V, H, n = 2000, 16, 8
    loss_scale = 2.0**16
    hidden = torch.randn(n, H)
    weight = torch.randn(V, H) * 0.3
    y = torch.randn(n, V)
    tiles = one_vocabulary(n, V, 0.1)

    def gradients_in(dtype):
        inputs = [x.to(dtype).requires_grad_() for x in (hidden, weight)]
        value, _ = tiled_loss(
            inputs[0], Head(inputs[1]), StoredLogits(y), kl_of_tile, tiles, [1e-7])
        return gradients(loss_scale * value, inputs)

    for a, b in zip(gradients_in(torch.float16), gradients_in(torch.float32)):
        assert (a.float() - b).norm() < 5e-3 * b.norm()


def test_gradient_checkpointing_and_evaluation():
    models = Models(3)
    tile_loss = models.loss("gold")
    tiles = models.tiles(0.002, "gold")

    def run(hidden):
        source = models.teacher["hidden"]
        return tiled_loss(hidden, models.head, source, tile_loss, tiles, [1.0, 1.0])[0]

    expected = gradients(run(models.hidden), models.inputs)
    for reentrant in (True, False):
        value = torch.utils.checkpoint.checkpoint(run, models.hidden, use_reentrant=reentrant)
        for x in models.inputs:
            x.grad = None
        value.backward()
        assert all(close(x.grad, d, 1e-9) for x, d in zip(models.inputs, expected))
    with torch.no_grad():
        evaluated = run(models.hidden)
    assert evaluated == value and not evaluated.requires_grad


@pytest.mark.parametrize("kind", KINDS[1:])
def test_parts_add_up_to_the_sum_of_their_losses(kind):
    """Of several teachers, one of which weighs little, and one nothing."""
    models = Models(2, kind=kind)
    weight = models.case.likelihoods.clone().requires_grad_()

    def of_projection(x, y, sub_tile):  # whose weights are trained
        chunks = ids_of(sub_tile)[2:]
        return losses.projection_kl(x[None], y[None], *chunks, models.case.indices, weight)[0]

    other_hidden = (models.hidden.detach() * 2).requires_grad_()
    source = models.teacher["hidden"]
    parts = [
        OnePart(models.hidden, source, models.loss("gold"), models.tiles(0.002, "gold"),
                 [0.3, 2.0]),
        OnePart(other_hidden, source, with_cross_entropy(of_projection), models.tiles(0.01),
                 [0.0, 1e-4]),
        OnePart(models.hidden, source, models.loss("uld"), models.tiles(0.01, "uld"), [0.0, 0.0])]
    inputs = [*models.inputs, other_hidden, weight]
    value, sums = tiled_losses(models.head, parts, [weight])
    expected = 0.0
    for part, name, of_part in zip(parts, ("gold", "alm", "uld"), sums, strict=True):
        models.hidden = part.student_hidden
        part_value, part_sums = models.plain_of(part.tile_loss, models.tiles(math.inf, name),
                                                part.weights)
        assert torch.allclose(of_part.double(), part_sums, rtol=1e-6)
        expected = expected + part_value
    assert torch.allclose(value.double(), expected)
    check_gradients((3 * value, 3 * expected), inputs, 1e-6)


class MixedMatmuls(TorchDispatchMode):
    """Multiply half precision into float32, as a GPU does; note which products are written.

    Attributes:
        betas: by what was there already, for every product: 0 (nothing is read) or 1.
    """

    def __init__(self):
        super().__init__()
        self.betas = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is not torch.ops.aten.addmm.dtype_out:
            return function(*args, **kwargs)
        total, a, b, _ = args
        result = kwargs["out"]
        assert a.dtype == b.dtype == torch.bfloat16 and total is result
        self.betas.append(kwargs.get("beta", 1))
        product = kwargs.get("alpha", 1) * (a.float() @ b.float())
        result.copy_(product if self.betas[-1] == 0 else total + product)
        return result


@pytest.mark.parametrize("num_teachers", [1, 3])
@pytest.mark.parametrize(
    "error", [None, TypeError("no out_dtype"), RuntimeError("self has to be half")])
def test_the_matmuls_add_to_one_gradient_of_the_head(num_teachers, error, monkeypatch):
    """On a GPU the first tile writes both pieces of it, and every other one adds to them.

    A torch that knows no such matmul, which is tried once, adds products in half precision.
    """
    monkeypatch.setattr(tiles_module, "MIXED_MATMULS", ("cpu",))
    try_it = cache(tiles_module._try_mixed_matmul.__wrapped__)
    monkeypatch.setattr(tiles_module, "_try_mixed_matmul", try_it)
    tries = []

    def refuse(*args, **kwargs):
        tries.append(kwargs["out_dtype"])
        raise error

    if error:
        monkeypatch.setattr(torch, "addmm", refuse)
    torch.manual_seed(0)
    V, n, width = 300, 12, 16
    tiles = one_vocabulary(n, V, 0.02)
    assert len(tiles) > 2
    teacher_rows = [torch.randn(n, V) for _ in range(num_teachers)]
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        torch.manual_seed(1)
        hidden, weight = [torch.randn(size, width).bfloat16().to(dtype) for size in (n, V + 3)]
        inputs = [hidden.requires_grad_(), weight.requires_grad_()]
        parts = []
        for number, y in enumerate(teacher_rows):
            parts.append(OnePart(hidden, StoredLogits(y), kl_of_tile, tiles, [0.5**number]))
        with MixedMatmuls() as matmuls:
            value, _ = tiled_losses(Head(weight, vocab=V), parts)
        results.append(gradients(value, inputs))
        if dtype == torch.bfloat16 and not error:
            num_products = 2 * num_teachers * len(tiles)
            # one before them may be to see whether this torch can
            assert matmuls.betas[-num_products:] == [0, 0] + [1] * (num_products - 2)
    for a, b in zip(*results):
        assert a.dtype == torch.bfloat16
        assert (a[V:] == 0).all() or len(a) == n
        assert close(a.float(), b, 0.02)
    assert tries == ([torch.float32] if error else [])


def test_a_second_backward_is_rejected():
    models = Models(3)
    value, _ = models.tiled("uld")
    torch.autograd.grad(value, models.inputs, retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        torch.autograd.grad(value, models.inputs)


def test_only_gradients_are_kept_for_backward():
    """And no logits, however many positions there are."""
    models = Models(4, samples=6)
    saved_tensors = weakref.WeakSet()

    class Saved:
        def __init__(self, x):
            self.x = x
            saved_tensors.add(self)

    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.x):
        value, _ = models.tiled("alm")
        assert not saved_tensors  # those of the tiles are gone
        plain_value, _ = models.plain("alm")
    kept = [g for g in value.grad_fn.gradients if g is not None]
    kept_bytes = sum(piece.nbytes for g in kept for piece in getattr(g, "pieces", [g]))
    assert kept_bytes == sum(x.nbytes for x in models.inputs)
    plain_bytes = {saved.x.data_ptr(): saved.x.nbytes for saved in saved_tensors}
    assert sum(plain_bytes.values()) > 2 * kept_bytes and plain_value > 0


def test_one_block_of_the_teacher_exists_at_a_time():
    models = Models(6)
    alive = []

    def counted(positions):
        assert not any(block() is not None for block in alive)
        logits = models.teacher["logits"](positions)
        alive.append(weakref.ref(logits))
        return logits

    tiles = models.tiles(0.001)
    blocks = TeacherBlocks(models.teacher["hidden"], tiles)
    counting = TeacherBlocks(counted, tiles)
    positions = None
    buffers = set()
    for sub_tile in itertools.chain(*[tile.sub_tiles for tile in tiles]):
        if sub_tile.teacher_positions is not None:
            positions = sub_tile.teacher_positions
        expected = models.teacher["logits"](positions)[sub_tile.teacher_slice]
        assert torch.allclose(blocks(sub_tile), expected)
        assert torch.equal(counting(sub_tile), expected)
        buffers.add(blocks.block.data_ptr())
    assert len(alive) == len(blocks.fetches) > 2
    assert len(buffers) == 1


def test_sources_of_kept_columns():
    models = Models(5)
    positions = torch.tensor([3, 1])
    unsorted_ids = torch.tensor([4, 0, 6])
    for source in models.teacher.values():
        columns = source.columns(unsorted_ids)
        assert torch.allclose(columns(positions), source(positions)[:, unsorted_ids])
    ids = torch.tensor([0, 4, 6])
    logits = models.teacher_logits
    sharded = ShardedLogits((logits[:, :4], logits[:, 4:5], logits[:, 5:]))
    assert torch.equal(sharded.columns(ids)(positions), sharded(positions)[:, ids])
    fewer = sharded.columns(ids).columns(torch.tensor([1, 2]))
    assert isinstance(fewer, SelectedColumns)
    assert torch.equal(fewer(positions), sharded(positions)[:, [4, 6]])
