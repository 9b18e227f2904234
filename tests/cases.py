"""Random cases and comparisons that several test files use.

`Case` is a batch of texts over the letters a, b, c in two random vocabularies, with random logits.
"""

import itertools
import random
from typing import NamedTuple

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import oracle
from examples.vocab_parallel import on_whole_rows

F64 = torch.float64


def gradient(value, x):
    """Return d value / d x."""
    return torch.autograd.grad(value, x)[0]


def close(a, b, tolerance):
    """Compare two tensors by the norm of their difference, relative to the second."""
    return (a - b).norm() <= tolerance * max(float(b.norm()), 1e-30)


def check_wrong_input(function, arguments, names):
    """See that a loss refuses, in one line that names it, each argument of another kind or shape.

    Logits and rows of logits that are integers, masks that are no bool, ids that are floats, and
    everything that describes positions cut by one column (or the only axis).

    Args:
        arguments: {name: value} of a call that is right.
        names: of tensors that describe no position.
    """
    function(**arguments)
    tried = 0
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor) or name in names:
            continue
        wrong = []
        if "logits" in name or name in ("student_NV", "teacher_MW", "teacher_MV"):
            wrong.append(value.detach().long())
        else:
            wrong.append(value[..., :-1])
            if "weight" not in name and "logp" not in name:
                wrong.append(value.long() if "mask" in name else value.float())
        for other in wrong:
            with pytest.raises(ValueError) as refused:
                function(**arguments | {name: other})
            message = str(refused.value)
            side = name.split("_")[0]
            assert (name in message or side in message) and "\n" not in message, message
            tried += 1
    assert tried


class NoWait(TorchFunctionMode):
    """Refuse what lets a host wait for its GPU: a copy from the host's memory, or one to it.

    Numbers that are written where a tensor says come from such a copy.  What reads a number back
    fails on the meta device by itself.
    """

    COPIES = torch.tensor, torch.as_tensor, torch.Tensor.new_tensor

    def __torch_function__(self, function, types, args=(), kwargs=None):
        assert function not in self.COPIES, f"{function} copies to the device"
        if function is torch.Tensor.__setitem__ and not isinstance(args[2], torch.Tensor):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            assert not any(isinstance(part, torch.Tensor) for part in index), (
                "a number, written where a tensor says, is copied to the device")
        return function(*args, **(kwargs or {}))


class Calls(TorchDispatchMode):
    """Count the calls of operators of which `is_counted` is true."""

    def __init__(self, is_counted):
        super().__init__()
        self.is_counted = is_counted
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += self.is_counted(function)
        return function(*args, **(kwargs or {}))


def on_meta(value):
    """Move all tensors inside of lists and (named) tuples to the meta device."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("meta").requires_grad_(value.requires_grad)
    if isinstance(value, (tuple, list)):
        moved = [on_meta(x) for x in value]
        return type(value)(*moved) if hasattr(value, "_fields") else tuple(moved)
    return value


# --- two vocabularies ---------------------------------------------------------------------------


def padded(rows, fill, width):
    """Return a tensor of lists of ids, filled up to one width."""
    return torch.tensor([row + [fill] * (width - len(row)) for row in rows])


def table_of(rows):
    """Return a table of lists of ids, as wide as the longest, padded with -1."""
    return padded(rows, -1, max(map(len, rows)))


def random_vocabulary(rng, size):
    """Return the letters a, b, c and random strings of two to four of them, `size` in all."""
    vocab = ["a", "b", "c"]
    while len(vocab) < size:
        token = "".join(rng.choice("abc") for _ in range(rng.randint(2, 4)))
        if token not in vocab:
            vocab.append(token)
    return vocab


def greedy(text, vocab):
    """Tokenize a text: always the longest token that fits."""
    ids = []
    while text:
        longest = max(filter(text.startswith, vocab), key=len)
        ids.append(vocab.index(longest))
        text = text[len(longest) :]
    return ids


class Ids(NamedTuple):
    """Tokens that the positions of both sides predict, and their chunks."""

    next_S: torch.Tensor
    next_T: torch.Tensor
    chunk_S: torch.Tensor
    chunk_T: torch.Tensor


class Case:
    """A batch of texts with logits, tables and chunk ids, shifted already.

    ids: see `Ids`.
    A, B: the student's tokens of every teacher token, the teacher's of every student token.
    x, y: logits of the student, with a gradient, and of the teacher.
    """

    def __init__(self, seed, samples=2, length=14, sizes=(9, 12), equal=False):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        V = random_vocabulary(rng, sizes[0])
        W = V if equal else random_vocabulary(rng, sizes[1])
        sides = [], [], [], []
        for _ in range(samples):
            text = "".join(rng.choice("abc") for _ in range(rng.randint(1, length)))
            student_ids = greedy(text, V)
            teacher_ids = greedy(text, W)
            chunks = oracle.merge([V[i] for i in student_ids], [W[i] for i in teacher_ids])
            for side, numbers in zip(sides, (student_ids, teacher_ids, *chunks)):
                side.append(numbers)
        fills = 0, 0, -1, -1
        self.ids = Ids(*[self.pad(side, fill) for side, fill in zip(sides, fills)])
        self.A = [greedy(w, V) for w in W]
        self.B = [greedy(v, W) for v in V]
        self.x = 2 * torch.randn(*self.ids.next_S.shape, len(V), dtype=F64)
        self.y = 2 * torch.randn(*self.ids.next_T.shape, len(W), dtype=F64)
        self.x.requires_grad_()
        # a projection: the first three different tokens of each spelling, with falling weights
        different = [list(dict.fromkeys(b))[:3] for b in self.B]
        self.indices = padded(different, -1, 3)
        weights = torch.tensor([0.9, 0.09, 0.009], dtype=F64)
        weights = torch.where(self.indices >= 0, weights, 0)
        self.likelihoods = weights / weights.sum(1, keepdim=True)

    @staticmethod
    def pad(rows, fill):
        """Return a tensor of lists of ids with at least one position of padding."""
        return padded(rows, fill, max(map(len, rows)) + 1)


def common_of(case):
    """Return (student ids, teacher ids) of the tokens that are the same letters on both sides."""
    student_ids = []
    teacher_ids = []
    for v, spelled in enumerate(case.B):
        if len(spelled) == 1 and case.A[spelled[0]] == [v]:
            student_ids.append(v)
            teacher_ids.append(spelled[0])
    return [torch.tensor(ids, dtype=torch.long) for ids in (student_ids, teacher_ids)]


# --- sharded columns ----------------------------------------------------------------------------


def shards(world, V):
    """Return (low, high) column bounds of all ranks, uneven: all but the first have two columns."""
    return list(itertools.pairwise([0, *range(V - 2 * (world - 1), V + 1, 2)]))


def shard_error(loss, sides, bounds, group):
    """Return the largest relative error of value and gradient when a rank has only some columns.

    Args:
        loss: (student logits, teacher logits, slice of samples) -> (sum, count).
        sides: logits of the student and the teacher, all columns.
        bounds: this rank's (low, high) of both sides.
    """
    x, y = sides
    (low, high), (teacher_low, teacher_high) = bounds
    local_x = x.detach()[..., low:high].clone().requires_grad_()
    local_y = y.detach()[..., teacher_low:teacher_high].clone()
    whole, count = loss(x, y, slice(None))
    sharded, sharded_count = on_whole_rows(loss, local_x, local_y, group)
    assert count == sharded_count
    expected = gradient(whole, x)
    error = gradient(sharded, local_x) - expected[..., low:high]
    gradient_error = error.norm() / expected.norm().clamp(min=1e-9)
    value_error = abs(sharded - whole).detach() / abs(whole).detach().clamp(min=1e-9)
    return max(float(gradient_error), float(value_error))
