"""Selective copy: repeat a few symbols that are scattered in noise (Gu and Dao 2023, Mamba, section 3.1)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nas.core.errors import InvalidInput
from nas.core.task import IGNORE, Batch

_NOISE = 0
_SEPARATOR = 1
_FIRST = 2
"""Of the symbols that are copied."""


@dataclass(frozen=True)
class SelectiveCopy:
    """Up to `items` of `symbols` at random places in noise; after the separator they are repeated in order.

    A fixed-lag convolution cannot solve it: the distance from a symbol to its copy is random. Each example has at least
    one item: short examples are learned first, which makes progress steadier than one sudden step at full length.
    """

    items: int = 3
    symbols: int = 8
    length: int = 20

    def __post_init__(self) -> None:
        if self.items < 1 or self.symbols < 2:
            raise InvalidInput("selcopy needs at least 1 item and 2 symbols")
        if self.length < 2 * self.items + 1:
            raise InvalidInput(f"selcopy: length {self.length} cannot hold {self.items} items and their copy")

    @property
    def vocab(self) -> int:
        """Number of symbols, with noise and separator."""
        return _FIRST + self.symbols

    @property
    def chance_nats(self) -> float:
        """Entropy of a uniform symbol."""
        return math.log(self.symbols)

    def batch(self, generator: np.random.Generator, size: int) -> Batch:
        """Returns inputs and labels, [size, length]; labels begin at the separator."""
        head = self.length - 1 - self.items
        counts = generator.integers(1, self.items + 1, (size, 1))
        used = np.arange(self.items) < counts
        items = np.where(used, generator.integers(_FIRST, self.vocab, (size, self.items)), _NOISE)
        places = generator.random((size, head)).argsort(1)[:, : self.items]
        x = np.full((size, self.length), _NOISE, dtype=np.int64)
        np.put_along_axis(x, _sorted_front(places, counts), items, axis=1)
        x[:, head] = _SEPARATOR
        x[:, head + 1 :] = items
        y = np.full_like(x, IGNORE)
        y[:, head:-1] = np.where(used, items, IGNORE)
        return x, y


def _sorted_front(places: NDArray[np.intp], counts: NDArray[np.int64]) -> NDArray[np.intp]:
    """Sorts the first `counts` entries of each row; the rest, which get noise, stay after them."""
    unused = np.arange(places.shape[1]) >= counts
    beyond = places.max() + 1
    order = np.where(unused, places + beyond, places).argsort(1)
    return np.take_along_axis(places, order, 1)
