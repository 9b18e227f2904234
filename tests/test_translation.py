"""translation.py: the nodes are fair questions, complete, and the same however a batch is cut."""

from functools import partial
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch

import oracle
import toys
from isogloss import losses
from isogloss.config import Config
from isogloss.losses import find_chunks
from isogloss.nodes import list_nodes, nodes_of_chunks, rows_that_go_on, tokens_that_ended
from isogloss.objective import loss_table
from isogloss.tile_plan import SubTile
from isogloss.translation import cell_coverage, translated
from toys import EOS, Tokenizer

FINE = Tokenizer(("a", "b"))
COARSE = Tokenizer(("a", "b"), ("ab", "c"), ("b", "a"), ("c", "c"))
CROSSING = Tokenizer(("b", "c"), ("c", "a"), ("a", "a"))
# "c_" is what a byte token is beside a letter, "ca" what no text is cut into
UNWRITTEN = dict(unwritten=("c_", "ab_", "ca"))
# (student, teacher), one made of the other's tokens, and cut whatever follows
NESTED = {"finer student": (FINE, COARSE), "coarser student": (COARSE, FINE),
          "equal": (COARSE, COARSE),
          "finer, unwritten": (Tokenizer(("a", "b"), **UNWRITTEN), COARSE),
          "coarser, unwritten": (Tokenizer(*COARSE.rank, **UNWRITTEN), FINE),
          "letters": (Tokenizer(("a", "b"), ("ab", "c"), ("c", "c")), Tokenizer())}
ALL_PAIRS = [*NESTED.values(), (CROSSING, COARSE), (COARSE, CROSSING)]
DIVERGENCES = {
    "forward_kl": losses.forward_kl,
    "reverse_kl": losses.reverse_kl,
    "jsd": losses.generalized_jsd,
    "skew": partial(losses.skew_forward_kl, skew=0.1),
    "adaptive_kl": losses.adaptive_kl,
    "total_variation": losses.total_variation,
    "top_k": partial(losses.forward_kl, top_k=2),
    "top_k of the student": partial(losses.reverse_kl, top_k=2, support="student"),
}


class Toy:
    """All texts of a process as one batch, with exact models of two tokenizers.

    Attributes:
        weight_BS: probability of the text.
        x, y: logits of the exact student and teacher.
        ids: arguments of list_nodes.
        history_BS: number of the tokens so far.
    """

    def __init__(self, student, teacher, order, length=5, seed=1):
        texts = toys.process(length, order, seed)
        self.tables = toys.tables_of(student, teacher)
        sides = []
        for tokenizer in (student, teacher):
            sides.append([[*tokenizer(text), EOS] for text in texts])
        chunks = [oracle.merge(*pair) for pair in zip(*sides)]
        read, next_S, chunk_S, self.x = padded(student, sides[0], chunks, 0, texts)
        _, next_T, chunk_T, self.y = padded(teacher, sides[1], chunks, 1, texts)
        self.ids = read, next_S, next_T, chunk_S, chunk_T, self.tables
        probability = torch.tensor(list(texts.values()), dtype=torch.float64)
        self.weight_BS = probability[:, None].expand(next_S.shape)
        numbers = {}
        self.history_BS = torch.zeros_like(next_S)
        for b, tokens in enumerate(sides[0]):
            for position in range(len(tokens)):
                number = numbers.setdefault(tuple(tokens[:position]), len(numbers))
                self.history_BS[b, position] = number

    def loss(self, x, y, divergence, **options):
        """Return what `translated` makes of some logits."""
        return translated(
            x, y, list_nodes(*self.ids), self.tables, divergence=divergence, **options)

    def gradient(self, divergence, **options):
        """Return (mean of |expected gradient|, value) at the exact student."""
        x = self.x.clone().requires_grad_()
        value, _ = self.loss(x, self.y, divergence, weight_BS=self.weight_BS, **options)
        value.backward()
        of_histories = torch.zeros_like(x.grad.flatten(0, 1))
        of_histories.index_add_(0, self.history_BS.flatten(), x.grad.flatten(0, 1))
        mass = self.weight_BS[self.ids[3] >= 0].sum()
        return float(of_histories.abs().sum() / mass), value.item()


def padded(tokenizer, texts, chunks, side, probabilities):
    """Return (ids read, ids predicted, chunks, exact logits) of texts, in rows that are padded."""
    model = toys.exact_model(probabilities, tokenizer)
    shape = len(texts), max(map(len, texts))
    predicted = torch.zeros(shape, dtype=torch.long)
    chunk = torch.full(shape, -1)
    logits = torch.zeros(*shape, len(tokenizer.vocab), dtype=torch.float64)
    for b, tokens in enumerate(texts):
        size = len(tokens)
        predicted[b, :size] = torch.tensor([tokenizer.id[token] for token in tokens])
        chunk[b, :size] = torch.tensor(chunks[b][side])
        logits[b, :size] = toys.logits_of(model, tokens)
    read = torch.cat([torch.full((shape[0], 1), -1), predicted[:, :-1]], 1)
    return read, predicted, chunk, logits


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("name", NESTED)
def test_an_exact_student_has_nothing_to_learn(name, order):
    toy = Toy(*NESTED[name], order)
    # at another temperature where all agree in every history: whatever came before does not matter
    temperatures = (1.0,) if order else (1.0, 0.5, 20.0)
    for divergence_name, divergence in DIVERGENCES.items():
        for temperature in temperatures:
            gradient, value = toy.gradient(divergence, temperature=temperature)
            assert abs(value) < 1e-9
            # nor does the text say anything else
            with_text, _ = toy.gradient(divergence, temperature=temperature, text_weight=1.0)
            gradient = max(gradient, with_text)
            if divergence_name != "total_variation":  # whose gradient jumps there
                assert gradient < 1e-9


@pytest.fixture
def one_text(monkeypatch):
    return text_of(monkeypatch, CROSSING, COARSE)


def text_of(monkeypatch, student, teacher, b=None):
    """Return (sub-tile of a text, x, y, tables); loss_table builds losses of such a pair.

    Args:
        b: the number of the text; None: the longest one.
    """
    toy = Toy(student, teacher, 1)
    *ids, tables = toy.ids
    b = int(((ids[3] >= 0).sum(1)).argmax()) if b is None else b
    ids = [side_ids[b : b + 1] for side_ids in ids]
    names = "student_labels", "teacher_labels", "student_chunk", "teacher_chunk"
    of_text = {name: side_ids[0] for name, side_ids in zip(names, ids[1:])}
    sub_tile = SubTile(*[None] * len(SubTile._fields))._replace(
        terms=list_nodes(*ids, tables), on_policy=False, **of_text)
    monkeypatch.setattr(loss_table, "cached_translation", lambda pair: tables._asdict())
    x, y = [logits[b].double() for logits in random_logits(toy, 0, 2)]
    return sub_tile, x.requires_grad_(), y, tables


def value_of_run(one_text, **flags):
    """Return the loss of a run with some flags."""
    sub_tile, x, y, _ = one_text
    cfg = Config(student="s", teacher="t", data="d", **flags)
    pair = SimpleNamespace(fingerprints=("one tokenizer", "another"))
    return loss_table.LOSSES[cfg.loss].build(cfg, pair, "cpu").loss_fn(x, y, sub_tile)


@pytest.mark.parametrize("side", ["teacher", "student"])
def test_a_run_keeps_the_likely_cells_of_either_side(side, one_text):
    """--loss_topk and topk_of with two tokenizers; one cell and the rest still teach."""
    sub_tile, x, y, tables = one_text

    def loss(**options):
        return translated(x[None], y[None], sub_tile.terms, tables,
                          divergence=losses.reverse_kl, **options)[0]

    for top_k in (1, 2):
        value = value_of_run(one_text, loss="reverse_kl", loss_topk=top_k,
                             loss_options={"topk_of": side})
        assert abs(value - loss(top_k=top_k, support=side)) < 1e-12
        assert 0 < value < loss() - 1e-3
        assert torch.autograd.grad(value, x)[0].abs().max() > 1e-3


@pytest.mark.parametrize(("ce_weight", "on_policy", "text_weight"), [
    (1.0, False, 0.0), (0.0, False, 1.0), (0.0, True, 0.0)])
def test_the_text_teaches_what_is_left_open_where_no_cross_entropy_does(
        ce_weight, on_policy, text_weight, one_text):
    """Not one that the student wrote."""
    sub_tile, x, y, tables = one_text
    sub_tile = sub_tile._replace(on_policy=on_policy)
    value = value_of_run((sub_tile, x, y, tables), ce_weight=ce_weight)
    expected = [translated(x[None], y[None], sub_tile.terms, tables, text_weight=weight)[0]
                for weight in (text_weight, 1 - text_weight)]
    assert abs(value - expected[0]) < 1e-12 < abs(value - expected[1])


@pytest.mark.parametrize("choice_weight", [None, 0.0, 2.0])
def test_choices_weigh_what_a_run_says(choice_weight, monkeypatch):
    """By default 0.3 times as much as their roots, for any divergence."""
    texts = (text_of(monkeypatch, COARSE, FINE, b) for b in range(100))
    one_text = next(text for text in texts if len(text[0].terms.choices.level) > 1)
    sub_tile, x, y, tables = one_text
    for name in ("piece_kl", "total_variation"):
        options = {} if choice_weight is None else {"choice_weight": choice_weight}
        value = value_of_run(one_text, loss=name, loss_options=options)
        divergence = losses.forward_kl if name == "piece_kl" else losses.total_variation
        alone, with_choices = [
            translated(x[None], y[None], sub_tile.terms, tables, divergence=divergence,
                       choice_weight=weight)[0] for weight in (0.0, 1.0)]
        expected = 0.3 if choice_weight is None else choice_weight
        assert with_choices - alone > 1e-3
        assert abs(value - alone - expected * (with_choices - alone)) < 1e-12


@pytest.mark.parametrize(("student", "teacher", "bias"), [
    (CROSSING, COARSE, 0.11), (COARSE, CROSSING, 0.11),
    # nested, but "ba" is joined unless "b" follows, which no row of the teacher tells in time
    (COARSE, Tokenizer(), 0.18),
    # the worst of some hundred random pairs
    (Tokenizer(("b", "a"), ("b", "ba"), ("b", "bba"), ("c", "c")), Tokenizer(), 0.8)])
def test_the_bias_where_tokens_cross_is_known(student, teacher, bias):
    # dense toys: of three letters, with a merge that crosses one of the other side in most texts
    for order in (0, 1, 2):
        toy = Toy(student, teacher, order)
        as_is, even = [toy.gradient(losses.forward_kl, **options)[0]
                       for options in ({}, {"choice_weight": 1.0})]
        assert as_is <= even + 1e-12 and even < bias


@pytest.mark.parametrize(("student", "teacher"), ALL_PAIRS)
def test_any_two_tokens_are_told_apart(student, teacher):
    toy = Toy(student, teacher, 1)
    num_tokens = len(student.vocab)
    # one student whatever came before, who knows nothing
    x = torch.zeros(num_tokens, dtype=torch.float64)
    rows = torch.autograd.functional.hessian(
        lambda x: toy.loss(
            x.expand(toy.x.shape), toy.y, losses.forward_kl, text_weight=1.0)[0], x)
    for v, other in combinations(range(num_tokens), 2):
        # the curvature along "more of one, less of the other"
        assert rows[v, v] + rows[other, other] - 2 * rows[v, other] > 1e-6


# --- which nodes there are ------------------------------------------------------------------------


class Rows:
    """Hold ids of made-up rows, one text in each.

    Args:
        written, said: for each text the student's and the teacher's tokens, all of one length.
        chunks: for each text the chunks of both.
    """

    def __init__(self, student, teacher, written, said, chunks):
        self.tables = toys.tables_of(student, teacher)
        self.next_S, self.next_T = [
            torch.tensor([[side.id[token] for token in text] for text in texts])
            for side, texts in ((student, written), (teacher, said))]
        self.chunks = [torch.tensor(side) for side in zip(*chunks)]
        before = torch.full((len(written), 1), -1)
        self.read = torch.cat([before, self.next_S[:, :-1]], 1)

    def nodes(self):
        return list_nodes(self.read, self.next_S, self.next_T, *self.chunks, self.tables)


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("pair", [*NESTED.values(), (CROSSING, COARSE), (FINE, CROSSING)])
def test_parts_of_a_batch_have_the_nodes_that_they_have_alone(pair, order):
    """Each order of the tokens looks at every third text from another one on."""
    *ids, tables = Toy(*pair, order).ids
    read, next_S, next_T, *chunks = ids
    texts = [torch.arange(len(side))[:, None].expand_as(side) for side in chunks]
    follows = next_T >= 0
    follows[:, :1] = False
    together = nodes_of_chunks(
        find_chunks(*chunks), read.flatten(), next_S.flatten().clamp(min=0),
        next_T.flatten().clamp(min=0), tables,
        teacher_ended=tokens_that_ended(
            next_S, next_T, *chunks, tables, student_text_BS=texts[0],
            teacher_text_BT=texts[1]).flatten(),
        teacher_follows=follows.flatten(),
        first_S=torch.arange(len(read) + 1) * next_S.shape[1],
        first_T=torch.arange(len(read) + 1) * next_T.shape[1])
    assert len(together) == len(read) > 1
    for b in range(order, len(read), 3):
        alone = list_nodes(*[side[b : b + 1] for side in ids], tables)
        torch.testing.assert_close(together[b], alone, rtol=0, atol=0)


@pytest.mark.parametrize(("text_S", "text_T", "chunk_S", "chunk_T", "is_known"), [
    ([0, 0], [0, 0], [0, 1], [0, 1], True),
    ([0, 1], [0, 0], [0, 1], [0, 1], False),
    ([0, 0], [0, 1], [0, 1], [0, 1], False),
    ([0, 0, 0], [0, 0], [0, -1, 1], [0, 1], False),
    ([0, 0], [0, 0, 0], [0, 1], [0, -1, 1], False)])
def test_a_token_ended_directly_in_front_in_the_same_text(
    text_S, text_T, chunk_S, chunk_T, is_known
):
    tables = toys.tables_of(FINE, COARSE)
    a = [torch.full((1, len(text)), 0) for text in (text_S, text_T)]
    ended = tokens_that_ended(
        *a, *[torch.tensor([side]) for side in (chunk_S, chunk_T)], tables,
        student_text_BS=torch.tensor([text_S]), teacher_text_BT=torch.tensor([text_T]))
    assert ended[0, -1] == (0 if is_known else -1)
    assert (ended[0, :-1] == -1).all()


def test_rows_of_another_text_neither_ended_nor_follow():
    """Texts that fill their rows: the first position of the next row is that of another text."""
    rows = Rows(COARSE, Tokenizer(), ["a", "b"], ["a", "b"], [([0], [0])] * 2)
    nodes = rows.nodes()
    assert (nodes.roots.ended_T == -1).all()
    assert not len(nodes.choices.level)  # whether "a" goes on as "ab" is asked behind it
    # the row behind the last token is one of the text
    rows = Rows(COARSE, Tokenizer(), ["aa", "bb"], ["aa", "bb"], [([0, -1], [0, -1])] * 2)
    choices = rows.nodes().choices
    assert choices.row_T[choices.roots.of_E == 0].tolist() == [1]


@pytest.mark.parametrize(("text_T", "chunk_S", "chunk_T", "expected"), [
    ([0, 0, 0], [0, 0, 1], [0, 0, 1], [False, True, True]),
    ([0, 0, 0], [0, -1, 1], [0, 0, 1], [False, True, False]),  # the student writes more between
    ([0, 0, 0], [0, 1, 1], [0, -1, 1], [False, False, False]),  # the teacher does
    ([0, 1, 1], [0, 0, 1], [0, 1, 1], [False, False, True]),
])
def test_a_row_goes_on_where_both_texts_do(text_T, chunk_S, chunk_T, expected):
    text_S = [text_T[chunk_T.index(chunk)] if chunk >= 0 else 0 for chunk in chunk_S]
    goes_on = rows_that_go_on(
        torch.tensor([chunk_S]), torch.tensor([chunk_T]),
        student_text_BS=torch.tensor([text_S]), teacher_text_BT=torch.tensor([text_T]))
    assert goes_on.tolist() == [expected]


def test_insides_end_with_their_chunk():
    """Where a chunk's bytes are not those of its token, the next chunk may seem to go on so."""
    teacher = Tokenizer(("a", "b"), ("ab", "c"))
    rows = Rows(Tokenizer(), teacher, ["abc"], [["abc", "a"]], [([0, 0, 1], [0, 1])])
    insides = rows.nodes().insides
    assert insides.row_S.tolist() == [1]


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_of_a_path_that_the_text_left_the_first_token_counts_alone(temperature):
    """The text has "aba", longer than the student's "ab", behind "c".

    "c" might have gone on as "cab" or "cabc", and as "cc" the student would have written two, so
    that the masses of a choice depend on how what can come is normalized, too.
    """
    student = Tokenizer(("a", "b"), ("ab", "c"), ("c", "c"))
    teacher = Tokenizer(("b", "a"), ("a", "ba"), ("c", "a"), ("ca", "b"), ("cab", "c"))
    rows = Rows(student, teacher, [["c", "ab", "a"]], [["c", "aba"]], [([0, 1, 1], [0, 1])])
    # asked of a text that the student wrote
    rows.tables = rows.tables._replace(closed_V=torch.full_like(rows.tables.closed_V, -1))
    nodes = rows.nodes()
    assert nodes.choices.level.tolist() == [1, 1, 2] and nodes.roots.ended_T.tolist()[1] >= 0
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 3, len(student.vocab), generator=generator).double().requires_grad_()
    y = torch.randn(1, 2, len(teacher.vocab), generator=generator).double()
    spelled = []
    for tokens, other in ((teacher.vocab, student), (student.vocab, teacher)):
        spelled.append([[other.id[piece] for piece in (other(token) if token != EOS else [EOS])]
                        for token in tokens])
    joined = {w for w, pieces in enumerate(spelled[0]) if pieces[0] == student.id["c"]}
    terms = oracle.Translation(*spelled, set(), {student.id["c"]: joined}).terms(
        x, y, rows.read, rows.next_S, rows.next_T, *rows.chunks, "forward_kl", temperature)
    expected = sum(term for _, _, _, term in terms)
    ours, _ = translated(x, y, nodes, rows.tables, temperature=temperature)
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=0)
    gradients = [torch.autograd.grad(value, x)[0] for value in (ours, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-12)


# --- float32 --------------------------------------------------------------------------------------


def value_and_gradient(toy, x, y, divergence, **options):
    """Return the loss and its gradient."""
    x = x.clone().requires_grad_()
    value, _ = toy.loss(x, y, divergence, **options)
    value.backward()
    return value.detach().double(), x.grad.double()


def check_equal(ours, expected, precision, where):
    """Compare values and gradients, relative to the largest there is."""
    value, d = ours
    expected_value, expected_d = expected
    assert abs(value - expected_value) <= precision * max(1, abs(expected_value)), where
    assert (d - expected_d).norm() <= 2 * precision * max(1, expected_d.norm()), where


def random_logits(toy, seed, spread):
    """Return float32 logits of both sides."""
    generator = torch.Generator().manual_seed(seed)
    return [spread * torch.randn(side.shape, generator=generator) for side in (toy.x, toy.y)]


@pytest.mark.parametrize("divergence", [losses.forward_kl, losses.reverse_kl])
def test_tokens_without_a_cell_are_left_out(divergence):
    """Also where they hold nearly all of the mass on one side."""
    toy = Toy(CROSSING, COARSE, 1)
    eos = len(CROSSING.vocab) - 1, len(COARSE.vocab) - 1
    for table, token in zip((toy.tables.cell_V, toy.tables.cell_W), eos):
        table[token] = toy.tables.num_cells
    for lift in ((0, 0), (25, 0), (0, 25), (25, 25)):
        x, y = random_logits(toy, 3, 2)
        x[..., eos[0]] += lift[0]
        y[..., eos[1]] += lift[1]
        results = [value_and_gradient(toy, x.to(dtype), y.to(dtype), divergence)
                   for dtype in (torch.float32, torch.float64)]
        # of a mass of 1e-11 few digits are left, in float32
        check_equal(*results, 1e-5 if any(lift) else 3e-6, lift)


# --- in a job -------------------------------------------------------------------------------------


def test_coverage_counts_what_has_a_cell_and_what_would_be_joined():
    letters = Tokenizer()
    toy = Toy(FINE, letters, order=1)  # the student writes "ab" as one token: no "b" behind "a"
    nodes = list_nodes(*toy.ids)
    covered, joined = cell_coverage(toy.y, nodes, toy.tables).values()
    num_roots = len(nodes.roots.row_S)
    assert covered == (pytest.approx(num_roots), num_roots)
    read = toy.ids[0].flatten()
    belief = toy.y.flatten(0, 1).softmax(-1)
    expected = 0.0
    for row_S, row_T in zip(nodes.roots.row_S.tolist(), nodes.roots.row_T.tolist()):
        if read[row_S] == FINE.id["a"]:
            expected += float(belief[row_T, letters.id["b"]])
    assert expected > 1
    assert joined == (pytest.approx(expected), num_roots)
