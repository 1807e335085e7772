"""Sizes as families are named by: '350M', '1.2B', or '8B-A1B' for 8B weights of which one token passes through 1B."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nas.core.errors import InvalidInput
from nas.core.layout import Params
from nas.core.units import parse_count, show_count

TOLERANCE = 0.08
"""Share that all weights may be off the named size: LFM2-700M has 742M weights, LFM2-8B-A1B 8.34B."""

_DENSE = re.compile(r"(\d+(?:\.\d+)?[MB])(?:-A(\d+(?:\.\d+)?)([MB]))?")


@dataclass(frozen=True, slots=True)
class Size:
    """One size that a family is built at.

    Args:
        name: as it was asked for.
        total: weights, the goal.
        active: least and most weights that one token passes through; None: the size is dense.
    """

    name: str
    total: int
    active: tuple[int, int] | None = None

    @property
    def active_goal(self) -> int:
        """Weights that one token should pass through: the middle of what is allowed, or all."""
        return sum(self.active) // 2 if self.active else self.total

    def admits(self, params: Params) -> bool:
        """Whether a layout with these weights may be called this size."""
        near = abs(params.total / self.total - 1) <= TOLERANCE
        return near and (self.active is None or self.active[0] <= params.active <= self.active[1])

    def budget(self) -> str:
        """In words."""
        low, high = (show_count(self.total * (1 + sign * TOLERANCE)) for sign in (-1, 1))
        active = f", {show_count(self.active[0])} to {show_count(self.active[1])} active" if self.active else ""
        return f"{low} to {high} weights{active}"


def parse_size(text: str) -> Size:
    """The size that `text` names.

    Names cut the active count where they end (LFM2-8B-A1B has 1.56B active weights, Qwen3-30B-A3B 3.3B), so 'A1B'
    stands for 1B up to 2B and 'A1.5B' for 1.5B up to 1.6B, with the tolerance of the total around what is written.

    Raises:
        InvalidInput: it is no size, or more weights are active than there are.
    """
    match = _DENSE.fullmatch(text)
    if match is None or float(match[1][:-1]) == 0:
        raise InvalidInput(
            f"{text!r} is no size; write '350M', '1.2B', or '8B-A1B' with the active weights", where="--sizes"
        )
    total = parse_count(match[1])
    if match[2] is None:
        return Size(text, total)
    unit, digits = parse_count(f"1{match[3]}"), len(match[2].partition(".")[2])
    named = round(float(match[2]) * unit)
    if not 0 < named < total:
        raise InvalidInput(
            f"{text!r}: {show_count(named)} active of {show_count(total)} weights; a mixture of experts has fewer "
            "active weights than it has at all, and at least some",
            where="--sizes",
        )
    last = unit / 10**digits
    return Size(text, total, (round(named * (1 - TOLERANCE)), round(max(named * (1 + TOLERANCE), named + last))))


def parse_sizes(text: str) -> tuple[Size, ...]:
    """Sizes between commas, smallest first.

    Raises:
        InvalidInput: one is no size, or stands twice.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InvalidInput("no size is named; write '350M,700M'", where="--sizes")
    if twice := {name for name in names if names.count(name) > 1}:
        raise InvalidInput(f"{', '.join(sorted(twice))} stands twice", where="--sizes")
    return tuple(sorted(map(parse_size, names), key=lambda size: (size.total, size.active_goal, size.name)))
