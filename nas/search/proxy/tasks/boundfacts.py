"""Retrieval of facts: which document has a key beside a value, not only both of them somewhere."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nas.core.errors import InvalidInput
from nas.core.task import IGNORE, Batch


@dataclass(frozen=True)
class BoundFacts:
    """A query of `sought` facts, then the document that has them; other examples' documents do not.

    A document has `facts`: a key, up to `gap` symbols of filling, and its value, with more filling around; a query
    has some of them, without filling. Of `alike` examples in a row the documents have the same keys and the same
    values, but other values for each key. So single tokens leave all of these, and their vectors must say what stands
    before: near for convolutions, farther for attention.
    """

    facts: int = 4
    sought: int = 2
    alike: int = 4
    keys: int = 16
    values: int = 16
    filling: int = 4
    gap: int = 2
    query: int = 4
    length: int = 36

    def __post_init__(self) -> None:
        if not 1 <= self.sought <= self.facts <= min(self.keys, self.values):
            raise InvalidInput("boundfacts: sought <= facts <= keys and values")
        if not 1 <= self.alike <= self.facts:
            raise InvalidInput(f"boundfacts: alike must be between 1 and facts ({self.facts}), not {self.alike}")
        if min(self.filling, self.gap + 1) < 1 or self.query < 2 * self.sought:
            raise InvalidInput(
                f"boundfacts: filling of 1 or more, gap of 0 or more, query of {2 * self.sought} or more"
            )
        if self.length - self.query < self.facts * (2 + self.gap):
            least = self.query + self.facts * (2 + self.gap)
            raise InvalidInput(f"boundfacts: length must be {least} or more for these facts, not {self.length}")

    @property
    def vocab(self) -> int:
        """Number of symbols; the last one fills up queries."""
        return self.keys + self.values + self.filling + 1

    @property
    def chance_nats(self) -> float:
        """Nats of a guess among documents that are alike."""
        return math.log(self.alike)

    def batch(self, generator: np.random.Generator, size: int) -> Batch:
        """Returns inputs [size, length], and labels, of which there are none."""
        x = np.empty((size, self.length), np.int64)
        for first in range(0, size, self.alike):
            keys = generator.permutation(self.keys)[: self.facts]
            values = self.keys + generator.permutation(self.values)[: self.facts]
            shifts = generator.permutation(self.facts)[: self.alike]
            for row in range(first, min(first + self.alike, size)):
                # A shift of its own gives each document another value for every key.
                facts = np.stack([keys, np.roll(values, shifts[row - first])], axis=1)
                x[row, : self.query] = self._query(facts, generator)
                x[row, self.query :] = self._document(facts, generator)
        return x, np.full_like(x, IGNORE)

    def _query(self, facts: NDArray[np.int64], generator: np.random.Generator) -> NDArray[np.int64]:
        chosen = facts[generator.permutation(self.facts)[: self.sought]]
        return np.pad(chosen.ravel(), (0, self.query - chosen.size), constant_values=self.vocab - 1)

    def _document(self, facts: NDArray[np.int64], generator: np.random.Generator) -> NDArray[np.int64]:
        document = self.keys + self.values + generator.integers(0, self.filling, self.length - self.query)
        gaps = generator.integers(0, self.gap + 1, self.facts)
        # What is left is divided at random between the facts.
        room = len(document) - int(gaps.sum()) - 2 * self.facts
        before = np.sort(generator.integers(0, room + 1, self.facts))
        starts = before + np.concatenate([[0], np.cumsum(gaps + 2)[:-1]])
        order = generator.permutation(self.facts)
        document[starts], document[starts + gaps + 1] = facts[order].T
        return document
