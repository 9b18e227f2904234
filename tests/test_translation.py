"""translation.py: the nodes are fair questions, complete, and the same however a batch is cut."""

from functools import partial
from itertools import combinations

import pytest
import torch

import losses
import toys
from toys import EOS, Tokenizer
from translation import (
    choice_question,
    inside_question,
    list_nodes,
    root_question,
    root_target,
    translated,
)

FINE = Tokenizer(("a", "b"))
COARSE = Tokenizer(("a", "b"), ("ab", "c"), ("b", "a"), ("c", "c"))
CROSSING = Tokenizer(("b", "c"), ("c", "a"), ("a", "a"))
# (student, teacher), one made of the other's tokens, and cut whatever follows
NESTED = {"finer student": (FINE, COARSE), "coarser student": (COARSE, FINE),
          "equal": (COARSE, COARSE),
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
}


class Toy:
    """All texts of a process as one batch, with exact models of two tokenizers.

    Attributes:
        weight_BS: probability of the text.
        x, y: logits of the exact student and teacher.
        ids: arguments of list_nodes.
        histories: {tokens so far: positions in x}.
    """

    def __init__(self, student, teacher, order, length=5, seed=1):
        texts = toys.process(length, order, seed)
        self.tables = toys.tables_of(student, teacher)
        sides = []
        for tokenizer in (student, teacher):
            sides.append([[*tokenizer(text), EOS] for text in texts])
        chunks = [toys.chunks_of(*pair) for pair in zip(*sides)]
        read, next_S, chunk_S, self.x = padded(student, sides[0], chunks, 0, texts)
        _, next_T, chunk_T, self.y = padded(teacher, sides[1], chunks, 1, texts)
        self.ids = read, next_S, next_T, chunk_S, chunk_T, self.tables
        probability = torch.tensor(list(texts.values()), dtype=torch.float64)
        self.weight_BS = probability[:, None].expand(next_S.shape)
        self.histories = {}
        for b, tokens in enumerate(sides[0]):
            for position in range(len(tokens)):
                history = tuple(tokens[:position])
                self.histories.setdefault(history, []).append((b, position))

    def loss(self, x, y, divergence, **options):
        """Return what `translated` makes of some logits."""
        return translated(x, y, *self.ids[1:3], list_nodes(*self.ids), self.tables, divergence,
                          **options)

    def gradient(self, divergence):
        """Return (mean of |expected gradient|, value) at the exact student."""
        x = self.x.clone().requires_grad_()
        value, _ = self.loss(x, self.y, divergence, weight_BS=self.weight_BS)
        value.backward()
        total = 0.0
        mass = 0.0
        for places in self.histories.values():
            total += sum(x.grad[place] for place in places).abs().sum()
            mass += sum(self.weight_BS[place] for place in places)
        return float(total / mass), value.item()


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
        chunk[b, :size] = chunks[b][side]
        logits[b, :size] = toys.logits_of(model, tokens)
    read = torch.cat([torch.full((shape[0], 1), -1), predicted[:, :-1]], 1)
    return read, predicted, chunk, logits


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("name", NESTED)
def test_an_exact_student_has_nothing_to_learn(name, order):
    toy = Toy(*NESTED[name], order)
    for divergence_name, divergence in DIVERGENCES.items():
        gradient, value = toy.gradient(divergence)
        assert abs(value) < 1e-9
        if divergence_name != "total_variation":  # whose gradient jumps there
            assert gradient < 1e-9


@pytest.mark.parametrize(("student", "teacher", "bias"), [
    (CROSSING, COARSE, 0.11), (COARSE, CROSSING, 0.14),
    # nested, but "ba" is joined unless "b" follows, which no row of the teacher tells in time
    (COARSE, Tokenizer(), 0.1)])
def test_the_bias_where_tokens_cross_is_known(student, teacher, bias):
    # dense toys: of three letters, with a merge that crosses one of the other side in most texts
    gradients = [Toy(student, teacher, order).gradient(losses.forward_kl)[0]
                 for order in (0, 1, 2)]
    assert max(gradients) < bias


@pytest.mark.parametrize(("student", "teacher"), ALL_PAIRS)
def test_any_two_tokens_are_told_apart(student, teacher):
    toy = Toy(student, teacher, 1)
    num_tokens = len(student.vocab)
    # one student whatever came before, who knows nothing
    x = torch.zeros(num_tokens, dtype=torch.float64)
    rows = torch.autograd.functional.hessian(
        lambda x: toy.loss(x.expand(toy.x.shape), toy.y, losses.forward_kl)[0], x)
    for v, other in combinations(range(num_tokens), 2):
        # the curvature along "more of one, less of the other"
        assert rows[v, v] + rows[other, other] - 2 * rows[v, other] > 1e-6


@pytest.mark.parametrize(("student", "teacher"), ALL_PAIRS)
def test_targets_are_distributions_and_divergences_are_not_negative(student, teacher):
    toy = Toy(student, teacher, 2)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(toy.x.shape, generator=generator).double()
    y = 3 * torch.randn(toy.y.shape, generator=generator).double()
    nodes = list_nodes(*toy.ids)
    rows = y.flatten(0, 1)
    target = root_target(rows, nodes.roots, toy.tables)
    x_root = x.flatten(0, 1)[nodes.roots.row_S]
    x_inside = x.flatten(0, 1)[nodes.insides.row_S]
    questions = [
        root_question(x_root, target, toy.tables),
        choice_question(x_root[nodes.choices.root], rows, target, nodes, toy.tables),
        inside_question(x_inside, rows[nodes.insides.row_T], nodes.insides, toy.tables)]
    for question in questions:
        assert (question.target_KG >= 0).all()
        sums = question.target_KG.sum(1)
        torch.testing.assert_close(sums, torch.ones_like(sums))
    for divergence in DIVERGENCES.values():
        values, _ = toy.loss(x, y, divergence, reduction="none")
        assert (values > -1e-12).all()


@pytest.mark.parametrize("divergence", DIVERGENCES.values(), ids=DIVERGENCES)
def test_equal_tokenizers_give_the_plain_divergence(divergence):
    toy = Toy(COARSE, COARSE, 1)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, *toy.x.shape, generator=generator).double()
    # what no text holds would be masked, which a plain divergence does not know
    toy.tables.join_start_V.zero_()
    ours, count = toy.loss(x, y, divergence, temperature=2.0)
    plain, positions = divergence(x, y, toy.ids[3] >= 0, temperature=2.0)
    torch.testing.assert_close(ours, plain)
    assert count == positions
