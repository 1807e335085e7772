"""From figures to places in a picture."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

_MOST_FINE = 7


@dataclass(frozen=True, slots=True)
class Scale:
    """A straight line from figures to coordinates; `start` may lie beyond `end`, as on an upright axis.

    Args:
        low: figure at `start`.
        high: figure at `end`; equal to `low` where there is only one figure, which then lies in the middle.
        start: coordinate.
        end: coordinate.
    """

    low: float
    high: float
    start: float
    end: float

    @staticmethod
    def over(figures: Iterable[float], start: float, end: float) -> Scale:
        """The scale on which the least and the greatest of `figures` lie at the ends; there must be one."""
        known = list(figures)
        return Scale(min(known), max(known), start, end)

    def __call__(self, figure: float) -> float:
        if self.high == self.low:
            return (self.start + self.end) / 2
        return self.start + (figure - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round figures on it."""
        return ticks(self.low, self.high)

    def inside(self, figure: float) -> bool:
        """Whether the figure has a place on the scale."""
        return self.low <= figure <= self.high


@dataclass(frozen=True, slots=True)
class LogScale(Scale):
    """Equal ratios are equal distances; figures are above 0."""

    def __call__(self, figure: float) -> float:
        if self.high == self.low:
            return (self.start + self.end) / 2
        share = math.log(figure / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Multiples of 1, 2 and 5 where they are few, else powers of ten; over less than a factor of 3 as elsewhere."""
        if self.high < 3 * self.low:
            return ticks(self.low, self.high)
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        fine = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
        inside = [figure for figure in fine if self.inside(figure)]
        return inside if len(inside) <= _MOST_FINE else [10.0**power for power in powers if self.inside(10.0**power)]


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round figures from `low` to `high`: multiples of 1, 2 or 5 times a power of ten, at most `most` of them."""
    if high <= low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if (high - low) / (power * factor) <= most - 1)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [index * step for index in range(first, last + 1)]


def shown(figure: float) -> str:
    """A figure as people read it: four digits, no exponent below a million."""
    return f"{figure:.4g}" if abs(figure) < 1e4 else f"{figure:,.0f}"
