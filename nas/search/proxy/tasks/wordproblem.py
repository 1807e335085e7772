"""State tracking: the word problem of a permutation group (Merrill et al. 2024, The Illusion of State)."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from nas.core.errors import InvalidInput
from nas.core.task import Batch

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class WordProblem:
    """Elements of a group of permutations; each position is to be labelled with the product of all up to there.

    Layers of attention or of diagonal state spaces need depth that grows with the length for groups that are not
    solvable, such as S5 and A5 (`points` = 5); S3 (`points` = 3) is solvable and the easiest.

    Args:
        points: permuted; the group has points! elements, or half of them.
        even: only even permutations, the alternating group.
        length: T.
    """

    points: int = 3
    even: bool = False
    length: int = 128

    def __post_init__(self) -> None:
        if not 2 <= self.points <= 5 or self.vocab < 2:
            raise InvalidInput("wordproblem: points must be 2 to 5, and 3 to 5 for even permutations")
        if self.length < 1:
            raise InvalidInput(f"wordproblem: length must be at least 1, not {self.length}")

    @property
    def vocab(self) -> int:
        """Number of the group's elements."""
        return math.factorial(self.points) // (2 if self.even else 1)

    @property
    def chance_nats(self) -> float:
        """Entropy of a uniform element."""
        return math.log(self.vocab)

    def batch(self, generator: np.random.Generator, size: int) -> Batch:
        """Returns inputs and labels, [size, length]."""
        product = _products(self.points, self.even)
        x = generator.integers(0, self.vocab, (size, self.length))
        y, reach = x.copy(), 1
        while reach < self.length:  # by doubling: log2(T) look-ups instead of T
            y[:, reach:] = product[y[:, :-reach], y[:, reach:]]
            reach *= 2
        return x, y


@lru_cache(maxsize=8)
def _products(points: int, even: bool) -> Ints:
    """Returns [G, G] the number of the element that is a, followed by b."""
    every = np.array(list(itertools.permutations(range(points))), dtype=np.int64)
    if even:
        pairs = list(itertools.combinations(range(points), 2))
        every = every[[sum(row[i] > row[j] for i, j in pairs) % 2 == 0 for row in every.tolist()]]
    place = {tuple(row): number for number, row in enumerate(every.tolist())}
    table = np.array([[place[tuple(b[a].tolist())] for b in every] for a in every], dtype=np.int64)
    table.setflags(write=False)
    return table
