"""In-context language learning: the language of each example is a new random automaton (Akyurek et al. 2024, ICLL)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nas.core.errors import InvalidInput
from nas.core.task import Batch

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Automata:
    """A walk through a random automaton, in which every state has `branches` edges with different symbols.

    Each step takes one of the state's edges with equal chance and emits its symbol, so a layout that has inferred the
    automaton loses log(branches) nats per symbol. Within an example, states, edges and symbols stay the same; each
    example has an automaton of its own. Every position has a label, the next symbol: the loss falls steadily, while
    tasks of pure recall are learned suddenly.
    """

    states: int = 6
    branches: int = 2
    symbols: int = 12
    length: int = 128

    def __post_init__(self) -> None:
        if self.states < 2 or self.symbols < 2:
            raise InvalidInput("automata needs at least 2 states and 2 symbols")
        if not 1 <= self.branches < self.symbols:
            raise InvalidInput(f"automata: branches must be at least 1 and below symbols, not {self.branches}")
        if self.length < 2:
            raise InvalidInput(f"automata: length must be at least 2, not {self.length}")

    @property
    def vocab(self) -> int:
        """Number of symbols."""
        return self.symbols

    @property
    def chance_nats(self) -> float:
        """Entropy of a uniform symbol: automata are drawn alike for all symbols."""
        return math.log(self.symbols)

    def batch(self, generator: np.random.Generator, size: int) -> Batch:
        """Returns inputs and labels, [size, length]."""
        follower = generator.integers(0, self.states, (size, self.branches, self.states))
        symbol = generator.random((size, self.states, self.symbols)).argsort(2)[:, :, : self.branches]
        chosen = generator.integers(0, self.branches, (size, self.length + 1))
        start = generator.integers(0, self.states, (size, 1))
        rows = np.arange(size)[:, None]
        moved = _composed(follower[rows, chosen[:, :-1]])
        before = np.concatenate([start, moved[rows, np.arange(self.length), start]], axis=1)
        walk = symbol[rows, before, chosen].astype(np.int64)
        return walk[:, :-1].copy(), walk[:, 1:].copy()


def _composed(maps: Ints) -> Ints:
    """Returns the composition of each map with all before it, by doubling: log2(T) gathers instead of T.

    Args:
        maps: [B, T, S], the state after a step from each state before it.
    """
    composed, reach = maps.copy(), 1
    while reach < maps.shape[1]:
        composed[:, reach:] = np.take_along_axis(composed[:, reach:], composed[:, :-reach], axis=2)
        reach *= 2
    return composed
