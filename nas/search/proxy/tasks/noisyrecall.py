"""Recall with noise between the pairs (Poli et al. 2024, MAD, noisy in-context recall)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from nas.core.errors import InvalidInput
from nas.core.task import IGNORE, Batch


@dataclass(frozen=True)
class NoisyRecall:
    """Pairs of key and value at random places in noise; a key that comes again is to be answered with its value.

    A value follows its key at once, and stays the same within an example. Noise has symbols of its own. Every key of an
    example is one of `pairs`, so most of them recur; positions have a label where the key was shown before.
    """

    pairs: int = 8
    keys: int = 16
    values: int = 16
    noise: int = 8
    length: int = 128
    share: float = 0.4

    def __post_init__(self) -> None:
        if not 1 <= self.pairs <= self.keys:
            raise InvalidInput(f"noisyrecall: pairs must be between 1 and keys ({self.keys}), not {self.pairs}")
        if self.values < 2 or self.noise < 1:
            raise InvalidInput("noisyrecall needs at least 2 values and 1 symbol of noise")
        if not 0 <= self.share < 1:
            raise InvalidInput(f"noisyrecall: share is that of noise, at least 0 and below 1, not {self.share}")
        if self._pair_count <= self.pairs:
            raise InvalidInput(f"noisyrecall: length {self.length} shows {self._pair_count} pairs: none comes again")

    @property
    def _pair_count(self) -> int:
        """Pairs in an example, repeated ones included."""
        return int(self.length * (1 - self.share)) // 2

    @property
    def vocab(self) -> int:
        """Number of keys, values and symbols of noise."""
        return self.keys + self.values + self.noise

    @property
    def chance_nats(self) -> float:
        """Entropy of a uniform value."""
        return math.log(self.values)

    def batch(self, generator: np.random.Generator, size: int) -> Batch:
        """Returns inputs and labels, [size, length]; keys that were shown before have labels."""
        count = self._pair_count
        keys = generator.random((size, self.keys)).argsort(1)[:, : self.pairs]
        values = generator.integers(self.keys, self.keys + self.values, (size, self.pairs))
        pairs = generator.integers(0, self.pairs, (size, count))
        later = (pairs[:, :, None] == pairs[:, None, :]) & (np.arange(count)[:, None] > np.arange(count))
        # Of length - count slots, each either noise or a pair, the pairs' slots are drawn; a slot of a pair is 2 wide.
        slots = np.sort(generator.random((size, self.length - count)).argsort(1)[:, :count], axis=1)
        places = slots + np.arange(count)
        x = generator.integers(self.keys + self.values, self.vocab, (size, self.length))
        answers = np.take_along_axis(values, pairs, 1)
        np.put_along_axis(x, places, np.take_along_axis(keys, pairs, 1), 1)
        np.put_along_axis(x, places + 1, answers, 1)
        y = np.full_like(x, IGNORE)
        np.put_along_axis(y, places, np.where(later.any(2), answers, IGNORE), 1)
        return x, y
