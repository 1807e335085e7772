"""Questions about generated pictures: what is where, in which colour, and how many are of a colour."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from nas.core.errors import InvalidInput
from nas.core.task import Exhibit
from nas.search.proxy.tasks.scenes import Scenes, Sizes

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
class Pictures(Scenes):
    """A picture of `cells` x `cells` objects, then `questions` questions, each with its answer behind it.

    An object is a shape or a digit of one of `colours`, of some size somewhere in its cell, over noise.
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
    def sizes(self) -> Sizes:
        return Sizes(self.cells**2, self.objects, self.colours)

    def show(
        self, things: NDArray[np.int64], looks: NDArray[np.int64], generator: np.random.Generator
    ) -> NDArray[np.int64]:
        """Returns pixels 0xRRGGBB, [side, side]."""
        pixels: NDArray[np.int64] = (self._picture(things, looks, generator).astype(np.int64) << (16, 8, 0)).sum(-1)
        return pixels

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
