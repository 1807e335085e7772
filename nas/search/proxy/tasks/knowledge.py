"""Knowledge capacity: facts that weights have to hold (Allen-Zhu and Li 2024, Physics of Language Models 3.3)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from nas.core.errors import InvalidInput
from nas.core.task import IGNORE, Batch

_SEED = 20240408
_DIGITS = 2


@dataclass(frozen=True)
class Knowledge:
    """`facts` that are the same in every example: a name of two symbols, then `fields` values to recite.

    Nothing in an example says the value of another one, so a layout can learn them by heart alone, in feed-forward
    layers and experts above all. A training that learned everything holds facts x fields x log2(values) bits.
    Each value of a field belongs to equally many facts: chance is exact.
    """

    facts: int = 1024
    fields: int = 2
    values: int = 16
    length: int = 128

    def __post_init__(self) -> None:
        if self.fields < 1 or self.values < 2:
            raise InvalidInput("knowledge needs at least 1 field and 2 values")
        if self.facts < self.values or self.facts % self.values:
            raise InvalidInput(f"knowledge: facts must be a multiple of values ({self.values}), not {self.facts}")
        if self.length < self._width or self.length % self._width:
            raise InvalidInput(f"knowledge: length must be a multiple of {self._width}, the tokens of one fact")

    @property
    def _width(self) -> int:
        return _DIGITS + self.fields

    @property
    def _names(self) -> int:
        """Symbols that names are made of."""
        return math.isqrt(self.facts - 1) + 1

    @property
    def vocab(self) -> int:
        """Number of symbols of names, and of values."""
        return self._names + self.values

    @property
    def chance_nats(self) -> float:
        """Entropy of a uniform value."""
        return math.log(self.values)

    def batch(self, generator: np.random.Generator, size: int) -> Batch:
        """Returns inputs and labels, [size, length]; the last symbol of a name and all values but the last have one."""
        table = _table(self.facts, self.fields, self.values, self._names)
        chosen = generator.integers(0, self.facts, (size, self.length // self._width))
        x = table[chosen].reshape(size, self.length)
        y = np.full((size, self.length // self._width, self._width), IGNORE, dtype=np.int64)
        y[:, :, _DIGITS - 1 : -1] = table[chosen][:, :, _DIGITS:]
        return x, y.reshape(size, self.length)


@lru_cache(maxsize=16)
def _table(facts: int, fields: int, values: int, names: int) -> NDArray[np.int64]:
    """Returns [facts, 2 + fields] the tokens of every fact."""
    generator = np.random.default_rng([_SEED, facts, fields, values])
    name = np.stack(np.divmod(np.arange(facts), names), axis=1)
    repeated = np.repeat(np.arange(values), facts // values)
    field = [names + generator.permutation(repeated) for _ in range(fields)]
    table = np.concatenate([name, np.stack(field, axis=1)], axis=1).astype(np.int64)
    table.setflags(write=False)
    return table
