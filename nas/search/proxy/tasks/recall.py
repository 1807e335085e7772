"""Associative recall that attention learns in 100 to 200 steps: few pairs and many, a value beside its key."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from nas.core.errors import InvalidInput
from nas.core.task import IGNORE, Batch


@dataclass(frozen=True)
class Recall:
    """Keys, each followed by itself with its value; a key that comes again is to be answered with its value.

    `mqar` (Arora et al. 2023, Zoology) with two differences, each of which can be turned off.

    Args:
        pairs: most pairs of an example; one of fewer repeats them in its first 2 x `pairs` positions.
        keys: symbols.
        values: symbols; the values of an example are drawn from them independently.
        length: T; every pair is asked once before any is asked twice.
        fewer: an example has 1, 2, 4, ... or `pairs` pairs, all numbers equally likely: those of few are learned first
            and lead to those of many. Otherwise all have `pairs`.
        beside: a value stands beside its key, as in Schlag et al. 2021 ("Linear Transformers Are Secretly Fast Weight
            Programmers"), so a layout without a short convolution need not learn first to look one position back.
            Otherwise it stands alone.
    """

    pairs: int = 8
    keys: int = 16
    values: int = 16
    length: int = 64
    fewer: bool = True
    beside: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.pairs <= self.keys:
            raise InvalidInput(f"recall: pairs must be between 1 and keys ({self.keys}), not {self.pairs}")
        if self.values < 2:
            raise InvalidInput("recall needs at least 2 values")
        if self.length % 2 or self.length < 4 * self.pairs:
            raise InvalidInput(f"recall: length must be even and at least 4 x pairs = {4 * self.pairs}")

    @property
    def vocab(self) -> int:
        """Number of symbols: keys, values, and one that pads a position with a single symbol."""
        return self.keys + self.values + 1

    @property
    def chance_nats(self) -> float:
        """Entropy of a uniform value."""
        return math.log(self.values)

    def batch(self, generator: np.random.Generator, size: int) -> Batch:
        """Returns inputs [size, length, 2], of key and value, and labels [size, length] of the keys that are asked."""
        keys = generator.random((size, self.keys)).argsort(1)[:, : self.pairs]
        values = generator.integers(self.keys, self.keys + self.values, (size, self.pairs))
        doublings = math.ceil(math.log2(self.pairs))
        least = 0 if self.fewer else doublings
        count = np.minimum(2 ** generator.integers(least, doublings + 1, (size, 1)), self.pairs)
        slots = self.length // 2
        rounds = [generator.random((size, self.pairs)).argsort(1) for _ in range(-(-slots // self.pairs))]
        order = np.concatenate(rounds, axis=1)[:, :slots] % count
        x = np.full((size, self.length, 2), self.vocab - 1)
        x[:, :, 0] = np.take_along_axis(keys, order, 1).repeat(2, axis=1)
        answers = np.take_along_axis(values, order, 1)
        x[:, 1::2, 1 if self.beside else 0] = answers
        y = np.full((size, self.length), IGNORE)
        y[:, 2 * self.pairs :: 2] = answers[:, self.pairs :]
        return x, y
