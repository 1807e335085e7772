"""Questions about generated sounds: where the resonances of each syllable are, and how they move."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nas.core.errors import InvalidInput
from nas.core.task import IGNORE, Batch, Exhibit
from nas.core.tower import PROXY_BANDS

MOVES = ("steady", "rising", "falling", "pulsed")
"""What the resonances of a syllable may do."""
_LOWER, _UPPER = (2.0, 7.0), (9.0, 14.0)
"""Bands between which the levels of the two resonances are spread."""
_WIDTH = 1.0
"""Of a resonance, in bands."""
_SPEAKER, _GLIDE = 0.4, 4.0
"""Bands by which a speaker's resonances are shifted at most, and by which those of a syllable move."""
_PEAK, _FLOOR = 4.0, 0.1
"""Power of a resonance and of silence."""
_LOUDNESS, _NOISE, _ECHO = 0.5, 0.4, 0.6
"""Nepers by which syllables differ at most, deviation of noise in nepers, and what remains of power after a feature."""
_PULSE = 4
"""Features after which a pulse comes again."""


@dataclass(frozen=True)
class Sounds:
    """A sound of `syllables`, then three questions about each: where its two resonances are, and how they move.

    A syllable takes `frames` features of 10 ms in 16 bands, logarithms of power. Each resonance has one of `levels`,
    both are a little higher or lower with each sound's speaker, and make one of `moves`. The room echoes, and all is
    under noise. A question is one symbol, and the sound decides its answer, so that the least loss is nearly 0.
    """

    syllables: int = 2
    frames: int = 16
    levels: int = 6
    moves: int = 4

    def __post_init__(self) -> None:
        if not (1 <= self.syllables <= 64 and 4 <= self.frames <= 64):
            raise InvalidInput("sounds: 1 to 64 syllables of 4 to 64 frames")
        if not (2 <= self.levels <= 8 and 2 <= self.moves <= len(MOVES)):
            raise InvalidInput(f"sounds: 2 to 8 levels and 2 to {len(MOVES)} moves")

    @property
    def media(self) -> Exhibit:
        """Features."""
        return Exhibit("sounds", self.syllables * self.frames, PROXY_BANDS)

    @property
    def vocab(self) -> int:
        """Questions, then answers of each kind."""
        return 3 * self.syllables + 2 * self.levels + self.moves

    @property
    def length(self) -> int:
        """Numbers of the features, then questions."""
        return self.media.amount + 3 * self.syllables

    @property
    def chance_nats(self) -> float:
        """Nats of a guess that sees the question alone."""
        return (2 * math.log(self.levels) + math.log(self.moves)) / 3

    def batch(self, generator: np.random.Generator, size: int) -> Batch:
        """Returns features in thousandths and questions [size, length], and the answer at each question."""
        levels = generator.integers(0, self.levels, (2, size, self.syllables))
        moves = generator.integers(0, self.moves, (size, self.syllables))
        features = np.rint(1000 * self._features(levels, moves, generator)).astype(np.int64).reshape(size, -1)
        first = 3 * self.syllables
        x = np.concatenate([features, np.broadcast_to(np.arange(first), (size, first))], 1)
        y = np.full_like(x, IGNORE)
        lower, upper = levels
        y[:, features.shape[1] :] = first + np.concatenate([lower, self.levels + upper, 2 * self.levels + moves], 1)
        return x, y

    def _features(
        self, levels: NDArray[np.int64], moves: NDArray[np.int64], generator: np.random.Generator
    ) -> NDArray[np.float64]:
        """Returns features [size, frames of all syllables, 16] with mean 0 and deviation 1 in each sound."""
        size = len(moves)
        time = (np.arange(self.frames) + 0.5) / self.frames - 0.5
        slopes = np.array([{"rising": _GLIDE, "falling": -_GLIDE}.get(move, 0.0) for move in MOVES])
        shift = generator.uniform(-_SPEAKER, _SPEAKER, (size, 1, 1)) + slopes[moves][..., None] * time
        power = np.zeros((size, self.syllables, self.frames, PROXY_BANDS))
        for (lowest, highest), level in zip((_LOWER, _UPPER), levels, strict=True):
            place = lowest + (highest - lowest) * level / (self.levels - 1)
            distance = np.arange(PROXY_BANDS) - (place[..., None] + shift)[..., None]
            power += _PEAK * np.exp(-0.5 * (distance / _WIDTH) ** 2)
        pulsed = np.arange(self.frames) % _PULSE >= _PULSE // 2
        power[moves == MOVES.index("pulsed")] *= pulsed[:, None]
        power *= np.exp(generator.uniform(-_LOUDNESS, _LOUDNESS, (size, self.syllables, 1, 1)))
        echoing = power.reshape(size, -1, PROXY_BANDS)
        for frame in range(1, echoing.shape[1]):
            echoing[:, frame] += _ECHO * echoing[:, frame - 1]
        rows = np.log(echoing + _FLOOR) + generator.normal(0, _NOISE, echoing.shape)
        normalised: NDArray[np.float64] = (rows - rows.mean((1, 2), keepdims=True)) / rows.std((1, 2), keepdims=True)
        return normalised
