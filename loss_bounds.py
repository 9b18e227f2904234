"""State what the parameters of the losses may be; the flags of a job follow from the same table.

Needs nothing.  Copy it beside cross_tokenizer.py.  License: Apache-2.0 (see LICENSE).
Tests: tests/test_cross_tokenizer.py.
"""

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, NamedTuple


class Bounds(NamedTuple):
    """Bound a number.

    low, high: the smallest and the largest one.
    is_whole: it has to be an integer.
    is_below: `high` itself is not taken.
    """

    low: float
    high: float
    is_whole: bool = False
    is_below: bool = False


NUMBERS = {
    "temperature": Bounds(1e-3, 1e3),  # below it logits / temperature leave float32
    "beta": Bounds(0, 1),
    "skew": Bounds(0, 1, is_below=True),  # at 1 the mixture would be the teacher itself
    "alpha": Bounds(0, 1),
    "choice_weight": Bounds(0, 1e6),
    "text_weight": Bounds(0, 1e6),
    "max_divergence": Bounds(0, 1e6),
    "top_k": Bounds(0, 2**20, is_whole=True),
    "uncommon_topk": Bounds(1, 2**20, is_whole=True),
    "max_length": Bounds(2, 2**31, is_whole=True),
}
CHOICES = {
    **dict.fromkeys(("support", "topk_of"), ("teacher", "student")),  # topk_of: of a job
    "chunk_average": ("p", "logp"),
    "reverse": (False, True),
}


def check_value(name: str, value: Any, numbers: Mapping[str, Bounds] = NUMBERS) -> None:
    """Raise a ValueError for a parameter that is none of its choices, or beyond its bounds."""
    if name in CHOICES:
        # 0 equals False
        if not any(type(value) is type(choice) and value == choice for choice in CHOICES[name]):
            raise ValueError(f"{name}={value!r:.80}: expected one of "
                             f"{', '.join(map(str, CHOICES[name]))}")
        return
    bounds = numbers[name]
    kind = Integral if bounds.is_whole else Real
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    if not is_number or not bounds.low <= value <= bounds.high or (
            bounds.is_below and value == bounds.high):
        noun = "an integer" if bounds.is_whole else "a number"
        end = f"below {bounds.high:g}" if bounds.is_below else f"at most {bounds.high:g}"
        raise ValueError(f"{name}={value!r:.80}: expected {noun}, {bounds.low:g} or more and {end}")
