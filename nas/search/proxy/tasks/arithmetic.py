"""Arithmetic: sums of two numbers, digit by digit (Lee et al. 2023, Teaching Arithmetic to Small Transformers)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from nas.core.errors import InvalidInput
from nas.core.task import IGNORE, Batch


@dataclass(frozen=True)
class Arithmetic:
    """Sums one after another, each as `a + b = c` with digits of a, b and c from the least to the most significant.

    A digit of the sum depends on a digit of each number, at equal distances in all examples, and on the carry, which
    follows from the digits before. The carry out of the last digit is left out: so each digit of a sum is uniform.

    Args:
        digits: of a, b and c.
        base: symbols of a digit.
        length: T, a multiple of the 3 x `digits` + 2 tokens of a sum.
    """

    digits: int = 2
    base: int = 10
    length: int = 64

    def __post_init__(self) -> None:
        if self.digits < 1 or self.base < 2:
            raise InvalidInput("arithmetic needs at least 1 digit and base 2")
        if self.digits * math.log2(self.base) > 62:
            raise InvalidInput(f"arithmetic: {self.digits} digits of base {self.base} are beyond 2^62")
        if self.length < self._width or self.length % self._width:
            raise InvalidInput(f"arithmetic: length must be a multiple of {self._width}, the tokens of one sum")

    @property
    def _width(self) -> int:
        return 3 * self.digits + 2

    @property
    def vocab(self) -> int:
        """Number of symbols: digits, plus and equals."""
        return self.base + 2

    @property
    def chance_nats(self) -> float:
        """Entropy of a uniform digit."""
        return math.log(self.base)

    def batch(self, generator: np.random.Generator, size: int) -> Batch:
        """Returns inputs and labels, [size, length]; the digits of sums have a label, at the token before each."""
        sums = self.length // self._width
        terms = generator.integers(0, self.base**self.digits, (2, size, sums))
        numbers = np.concatenate([terms, terms.sum(0, keepdims=True)])
        digits = numbers[..., None] // self.base ** np.arange(self.digits) % self.base  # [3, B, sums, digits]
        plus, equals = (np.full((size, sums, 1), self.base + sign) for sign in (0, 1))
        x = np.concatenate([digits[0], plus, digits[1], equals, digits[2]], axis=2)
        y = np.full_like(x, IGNORE)
        y[:, :, -self.digits - 1 : -1] = digits[2]
        return x.reshape(size, self.length), y.reshape(size, self.length)
