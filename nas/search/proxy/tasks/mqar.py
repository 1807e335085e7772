"""Multi-query associative recall (Arora et al. 2023, Zoology, section 3)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from nas.core.errors import InvalidInput
from nas.core.task import IGNORE, Batch


@dataclass(frozen=True)
class AssociativeRecall:
    """`pairs` of key and value, then the keys again in random order, each to be answered with its value.

    Every key is asked once before any is asked twice. Layouts learn the task suddenly and late: compare losses over
    three seeds or more, never a single accuracy.
    """

    pairs: int = 4
    keys: int = 16
    values: int = 16
    length: int = 36

    def __post_init__(self) -> None:
        if not 1 <= self.pairs <= self.keys:
            raise InvalidInput(f"mqar: pairs must be between 1 and keys ({self.keys}), not {self.pairs}")
        if self.values < 2:
            raise InvalidInput("mqar needs at least 2 values")
        if self.length % 2 or self.length < 4 * self.pairs:
            raise InvalidInput(f"mqar: length must be even and at least 4 x pairs = {4 * self.pairs}")

    @property
    def vocab(self) -> int:
        """Number of keys and values."""
        return self.keys + self.values

    @property
    def chance_nats(self) -> float:
        """Entropy of a uniform value."""
        return math.log(self.values)

    def batch(self, generator: np.random.Generator, size: int) -> Batch:
        """Returns inputs and labels, [size, length]; the keys of the queries have labels."""
        keys = generator.random((size, self.keys)).argsort(1)[:, : self.pairs]
        values = generator.integers(self.keys, self.vocab, (size, self.pairs))
        queries = self.length // 2 - self.pairs
        # Each round asks for every pair once.
        rounds = [generator.random((size, self.pairs)).argsort(1) for _ in range(-(-queries // self.pairs))]
        pairs = np.concatenate(rounds, axis=1)[:, :queries]
        x = np.empty((size, self.length), dtype=np.int64)
        x[:, 0::2] = np.concatenate([keys, np.take_along_axis(keys, pairs, 1)], axis=1)
        x[:, 1::2] = np.concatenate([values, np.take_along_axis(values, pairs, 1)], axis=1)
        y = np.full_like(x, IGNORE)
        y[:, 2 * self.pairs :: 2] = np.take_along_axis(values, pairs, 1)
        return x, y
