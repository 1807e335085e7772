"""Induction: continue A B ... A with B (Olsson et al. 2022, In-context Learning and Induction Heads)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from nas.core.errors import InvalidInput
from nas.core.task import IGNORE, Batch


@dataclass(frozen=True)
class Induction:
    """A walk on one random cycle through all symbols, broken by jumps to a random symbol.

    The successor of a symbol is fixed within an example and differs between examples. One cycle through all symbols,
    instead of a random map, excludes short loops that a local mixer could copy; the jumps break its period. Positions
    have a label where the next step follows the cycle and has occurred before.
    """

    symbols: int = 8
    length: int = 36
    jump: float = 0.25

    def __post_init__(self) -> None:
        if self.symbols < 3:
            raise InvalidInput("induction needs at least 3 symbols")
        if self.length <= self.symbols:
            raise InvalidInput(f"induction: length {self.length} must exceed {self.symbols} symbols, or nothing recurs")
        if not 0 <= self.jump < 1:
            raise InvalidInput(f"induction: jump is a probability below 1, not {self.jump}")

    @property
    def vocab(self) -> int:
        """Number of symbols."""
        return self.symbols

    @property
    def chance_nats(self) -> float:
        """Entropy of a uniform symbol."""
        return math.log(self.symbols)

    def batch(self, generator: np.random.Generator, size: int) -> Batch:
        """Returns inputs and labels, [size, length]."""
        order = generator.random((size, self.symbols)).argsort(1)
        follower = np.empty_like(order)
        np.put_along_axis(follower, order, np.roll(order, -1, axis=1), axis=1)
        x = generator.integers(0, self.symbols, (size, self.length))
        follows = generator.random((size, self.length)) >= self.jump
        y = np.full_like(x, IGNORE)
        has_occurred = np.zeros((size, self.symbols), dtype=bool)
        rows = np.arange(size)
        for t in range(self.length - 1):
            symbol, step = x[:, t], follows[:, t]
            target = follower[rows, symbol]
            x[:, t + 1] = np.where(step, target, x[:, t + 1])
            y[:, t] = np.where(step & has_occurred[rows, symbol], target, IGNORE)
            has_occurred[rows, symbol] |= step
        return x, y
