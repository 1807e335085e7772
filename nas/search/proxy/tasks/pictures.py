"""Questions about generated pictures: what is where, in which colour, and how many are of a colour."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from nas.core.errors import InvalidInput
from nas.core.task import IGNORE, Batch, Exhibit

COLOURS = ((230, 60, 60), (60, 200, 60), (70, 110, 250), (230, 210, 50), (220, 90, 220), (80, 210, 220))
_GLYPHS = {
    "0": (14, 17, 19, 21, 25, 17, 14),
    "1": (4, 12, 4, 4, 4, 4, 14),
    "4": (2, 6, 10, 18, 31, 2, 2),
    "7": (31, 1, 2, 4, 8, 8, 8),
}
"""Rows of five pixels, from the top, as bits."""
OBJECTS = ("disc", "square", "triangle", "cross", *_GLYPHS)
_DARK, _NOISE = 60, 25
"""Brightest background, and most that a pixel of anything differs from its colour."""


@dataclass(frozen=True)
class Pictures:
    """A picture of `cells` x `cells` objects, then `questions` questions, each with its answer behind it.

    An object is a shape or a digit of one of `colours`, of some size somewhere in its cell, over noise. A question is
    two symbols: which object is in a cell, which colour is there, or how many objects have a colour. The picture
    decides every answer, so that the least loss is 0; chance is that of the best answers without the picture.
    """

    side: int = 32
    cells: int = 1
    objects: int = 8
    colours: int = 4
    questions: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.cells <= 8 or self.side < 8 * self.cells or self.side > 512:
            raise InvalidInput("pictures: 1 to 8 cells of 8 pixels or more a side, side of 512 at most")
        if not 2 <= self.objects <= len(OBJECTS) or not 2 <= self.colours <= len(COLOURS):
            raise InvalidInput(f"pictures: 2 to {len(OBJECTS)} objects and 2 to {len(COLOURS)} colours")
        if not 1 <= self.questions <= 64:
            raise InvalidInput(f"pictures: 1 to 64 questions, not {self.questions}")

    @property
    def media(self) -> Exhibit:
        """Pixels."""
        return Exhibit("images", self.side, self.side)

    @property
    def _starts(self) -> tuple[int, int, int, int]:
        """First symbols of cells, objects, colours and counts; the three kinds of questions come first."""
        cells, objects = 3, 3 + self.cells**2
        return cells, objects, objects + self.objects, objects + self.objects + self.colours

    @property
    def vocab(self) -> int:
        """Number of symbols."""
        return self._starts[3] + self.cells**2 + 1

    @property
    def length(self) -> int:
        """Pixels, then symbols."""
        return self.media.amount + 3 * self.questions

    @property
    def chance_nats(self) -> float:
        """Nats of a guess that sees the question alone."""
        number, share = self.cells**2, 1 / self.colours
        counts = [math.comb(number, n) * share**n * (1 - share) ** (number - n) for n in range(number + 1)]
        return (math.log(self.objects) + math.log(self.colours) - sum(p * math.log(p) for p in counts)) / 3

    def batch(self, generator: np.random.Generator, size: int) -> Batch:
        """Returns pixels and questions with answers [size, length], and answers at the symbol before each."""
        x = np.empty((size, self.length), np.int64)
        y = np.full_like(x, IGNORE)
        for row in range(size):
            objects = generator.integers(0, self.objects, self.cells**2)
            colours = generator.integers(0, self.colours, self.cells**2)
            pixels = self._picture(objects, colours, generator)
            x[row, : self.media.amount] = (pixels.astype(np.int64) << (16, 8, 0)).sum(-1).ravel()
            questions = np.array(list(self._questions(objects, colours, generator)))
            x[row, self.media.amount :] = questions.ravel()
            y[row, self.media.amount + 1 :: 3] = questions[:, 2]
        return x, y

    def _questions(
        self, objects: NDArray[np.int64], colours: NDArray[np.int64], generator: np.random.Generator
    ) -> Iterable[tuple[int, int, int]]:
        cells, first_object, first_colour, first_count = self._starts
        numbers = Counter(colours.tolist())
        for kind in generator.integers(0, 3, self.questions).tolist():
            place = int(generator.integers(self.cells**2))
            if kind == 0:
                yield kind, cells + place, first_object + int(objects[place])
            elif kind == 1:
                yield kind, cells + place, first_colour + int(colours[place])
            else:
                colour = int(generator.integers(self.colours))
                yield kind, first_colour + colour, first_count + numbers[colour]

    def _picture(
        self, objects: NDArray[np.int64], colours: NDArray[np.int64], generator: np.random.Generator
    ) -> NDArray[np.uint8]:
        cell = self.side // self.cells
        picture = np.tile(generator.integers(0, _DARK, 3), (self.side, self.side, 1))
        for place, (kind, colour) in enumerate(zip(objects.tolist(), colours.tolist(), strict=True)):
            size = int(generator.integers(max(7, cell * 2 // 3), cell + 1))
            corner = cell * np.array(divmod(place, self.cells)) + generator.integers(0, cell - size + 1, 2)
            y, x = corner.tolist()
            picture[y : y + size, x : x + size][_stencil(OBJECTS[kind], size)] = COLOURS[colour]
        noisy = picture + generator.integers(-_NOISE, _NOISE + 1, picture.shape)
        return noisy.clip(0, 255).astype(np.uint8)


@lru_cache(maxsize=4096)
def _stencil(name: str, size: int) -> NDArray[np.bool_]:
    """Returns the pixels of an object in a square, bool [size, size]."""
    if name in _GLYPHS:
        bits = np.array([[row >> bit & 1 for bit in range(4, -1, -1)] for row in _GLYPHS[name]], bool)
        rows, columns = (np.arange(size) * count // size for count in bits.shape)
        return np.asarray(bits[np.ix_(rows, columns)])
    y, x = np.mgrid[:size, :size] / (size - 1) * 2 - 1
    inside = {
        "disc": x**2 + y**2 <= 1,
        "square": np.maximum(abs(x), abs(y)) <= 0.85,
        "triangle": abs(x) <= (y + 1) / 2,
        "cross": np.minimum(abs(x), abs(y)) <= 0.3,
    }
    return np.asarray(inside[name])
