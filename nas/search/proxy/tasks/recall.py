"""Associative recall with a pair in one position (Schlag et al. 2021, Linear Transformers Are Secretly Fast Weight Programmers)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from nas.core.errors import InvalidInput
from nas.core.task import IGNORE, Batch


@dataclass(frozen=True)
class Recall:
    """Positions with a key and its value at once, then keys alone in random order, each to be answered with its value.

    So a value need not be bound to the symbol before it, which layouts learn suddenly and late (`mqar`): what counts is
    what a mixer finds again. An example has 1, 2, 4, ... or `pairs` pairs, all numbers equally likely. Those of few are
    learned first and lead to those of many; the score, their mean, grows with what a state can hold.

    Args:
        pairs: most pairs of an example, which are its first positions; an example of fewer repeats them there.
        keys: symbols.
        values: symbols; the values of an example are drawn from them independently.
        length: T, of which all positions after the first `pairs` have labels.
    """

    pairs: int = 16
    keys: int = 16
    values: int = 16
    length: int = 64

    def __post_init__(self) -> None:
        if not 1 <= self.pairs <= self.keys:
            raise InvalidInput(f"recall: pairs must be between 1 and keys ({self.keys}), not {self.pairs}")
        if self.values < 2:
            raise InvalidInput("recall needs at least 2 values")
        if self.length < 2 * self.pairs:
            raise InvalidInput(f"recall: length must be at least 2 x pairs = {2 * self.pairs}, not {self.length}")

    @property
    def vocab(self) -> int:
        """Number of keys and values, and the symbol beside a key that is asked."""
        return self.keys + self.values + 1

    @property
    def chance_nats(self) -> float:
        """Entropy of a uniform value."""
        return math.log(self.values)

    def batch(self, generator: np.random.Generator, size: int) -> Batch:
        """Returns inputs [size, length, 2], of key and value or blank, and labels [size, length]."""
        keys = generator.random((size, self.keys)).argsort(1)[:, : self.pairs]
        values = generator.integers(self.keys, self.keys + self.values, (size, self.pairs))
        doublings = generator.integers(0, math.ceil(math.log2(self.pairs)) + 1, (size, 1))
        count = np.minimum(2**doublings, self.pairs)
        rounds = [generator.random((size, self.pairs)).argsort(1) for _ in range(-(-self.length // self.pairs))]
        order = np.concatenate(rounds, axis=1)[:, : self.length] % count
        x = np.stack([np.take_along_axis(keys, order, 1), np.take_along_axis(values, order, 1)], axis=2)
        y = x[:, :, 1].copy()
        y[:, : self.pairs] = IGNORE
        x[:, self.pairs :, 1] = self.keys + self.values
        return x, y
