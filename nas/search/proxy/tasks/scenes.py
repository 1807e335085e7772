"""What tasks of pictures and of sounds share: several things in places, and questions about them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nas.core.task import IGNORE, Batch, Exhibit


class Sizes(NamedTuple):
    """Of the scenes of a task.

    Args:
        places: of which each holds a thing.
        things: kinds of them.
        looks: what else differs between them.
    """

    places: int
    things: int
    looks: int


class Scenes(ABC):
    """A scene, then questions, each with its answer behind it.

    A question is two symbols: which thing is in a place, which look is there, or how many things have a look. The scene
    decides every answer, so that the least loss is 0; chance is that of the best answers without the scene.
    """

    questions: int

    @property
    @abstractmethod
    def sizes(self) -> Sizes:
        """Of a scene."""

    @property
    @abstractmethod
    def media(self) -> Exhibit:
        """The scene as numbers."""

    @abstractmethod
    def show(
        self, things: NDArray[np.int64], looks: NDArray[np.int64], generator: np.random.Generator
    ) -> NDArray[np.int64]:
        """Returns the numbers of a scene with these things, one for each place."""

    @property
    def _starts(self) -> tuple[int, int, int, int]:
        """First symbols of places, things, looks and counts; the three kinds of questions come first."""
        places, things, looks = self.sizes
        return 3, 3 + places, 3 + places + things, 3 + places + things + looks

    @property
    def vocab(self) -> int:
        """Number of symbols."""
        return self._starts[3] + self.sizes.places + 1

    @property
    def length(self) -> int:
        """Numbers of the scene, then symbols."""
        return self.media.amount + 3 * self.questions

    @property
    def chance_nats(self) -> float:
        """Nats of a guess that sees the question alone."""
        number, things, looks = self.sizes
        share = 1 / looks
        counts = [math.comb(number, n) * share**n * (1 - share) ** (number - n) for n in range(number + 1)]
        return (math.log(things) + math.log(looks) - sum(p * math.log(p) for p in counts)) / 3

    def batch(self, generator: np.random.Generator, size: int) -> Batch:
        """Returns scenes and questions with answers [size, length], and answers at the symbol before each."""
        front = self.media.amount
        x = np.empty((size, self.length), np.int64)
        y = np.full_like(x, IGNORE)
        places, kinds, variants = self.sizes
        for row in range(size):
            things = generator.integers(0, kinds, places)
            looks = generator.integers(0, variants, places)
            x[row, :front] = self.show(things, looks, generator).ravel()
            questions = np.array(list(self._questions(things, looks, generator)))
            x[row, front:] = questions.ravel()
            y[row, front + 1 :: 3] = questions[:, 2]
        return x, y

    def _questions(
        self, things: NDArray[np.int64], looks: NDArray[np.int64], generator: np.random.Generator
    ) -> Iterable[tuple[int, int, int]]:
        first_place, first_thing, first_look, first_count = self._starts
        numbers = Counter(looks.tolist())
        for kind in generator.integers(0, 3, self.questions).tolist():
            place = int(generator.integers(len(things)))
            if kind == 0:
                yield kind, first_place + place, first_thing + int(things[place])
            elif kind == 1:
                yield kind, first_place + place, first_look + int(looks[place])
            else:
                look = int(generator.integers(self.sizes.looks))
                yield kind, first_look + look, first_count + numbers[look]
