"""Questions about generated sounds: which tone came when, how it moved, and how many moved so."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from nas.core.errors import InvalidInput
from nas.core.task import Exhibit
from nas.core.tower import PROXY_BANDS
from nas.search.proxy.tasks.scenes import Scenes, Sizes

MOVES = ("steady", "rising", "falling", "pulsed")
"""What a tone may do while it sounds."""
LOWEST, HIGHEST = 300.0, 3200.0
"""Pitches, in Hz, between which those of a task are spread."""
_RATE, _HOP, _FFT = 16_000, 160, 512
_NOISE, _GLIDE, _DETUNED = 0.05, 0.35, 0.03
_LEAST_POWER, _LEAST_DEVIATION = 2.0**-24, 1e-5


@dataclass(frozen=True)
class Sounds(Scenes):
    """A sound of `places` tones after each other, then `questions` questions, each with its answer behind it.

    A tone has one of `pitches` with an overtone, one of `moves`, some length somewhere in its place, over noise.
    Features are like those of models that read sound, with 16 bands: logarithms of power, each band with mean 0 and
    deviation 1.
    """

    frames: int = 64
    places: int = 2
    pitches: int = 6
    moves: int = 3
    questions: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.places <= 16 or self.frames < 16 * self.places or self.frames > 4096:
            raise InvalidInput("sounds: 1 to 16 places of 16 frames or more, 4096 frames at most")
        if not 2 <= self.pitches <= 16 or not 2 <= self.moves <= len(MOVES):
            raise InvalidInput(f"sounds: 2 to 16 pitches and 2 to {len(MOVES)} moves")
        if not 1 <= self.questions <= 64:
            raise InvalidInput(f"sounds: 1 to 64 questions, not {self.questions}")

    @property
    def media(self) -> Exhibit:
        """Features."""
        return Exhibit("sounds", self.frames, PROXY_BANDS)

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.places, self.pitches, self.moves)

    def show(
        self, things: NDArray[np.int64], looks: NDArray[np.int64], generator: np.random.Generator
    ) -> NDArray[np.int64]:
        """Returns features in thousandths, [frames, 16]."""
        samples = generator.normal(0, _NOISE, self.frames * _HOP)
        place = len(samples) // self.places
        ratio = (HIGHEST / LOWEST) ** (1 / (self.pitches - 1))
        for number, (pitch, move) in enumerate(zip(things.tolist(), looks.tolist(), strict=True)):
            length = int(generator.integers(place * 3 // 4, place + 1))
            start = number * place + int(generator.integers(0, place - length + 1))
            hertz = LOWEST * ratio**pitch * (1 + generator.uniform(-_DETUNED, _DETUNED))
            samples[start : start + length] += generator.uniform(0.2, 0.5) * tone(hertz, MOVES[move], length, ratio)
        return np.rint(1000 * features(samples)).astype(np.int64)


def tone(hertz: float, move: str, length: int, ratio: float) -> NDArray[np.float64]:
    """Returns samples of a tone that moves within its pitch, which others are further away from by `ratio`."""
    part = np.linspace(-0.5, 0.5, length)
    glide = _GLIDE * {"rising": 1.0, "falling": -1.0}.get(move, 0.0)
    phase = 2 * math.pi * np.cumsum(hertz * ratio ** (glide * part)) / _RATE
    wave = np.sin(phase) + 0.5 * np.sin(2 * phase)
    pulses = np.sin(np.arange(length) * (2 * math.pi * 25 / _RATE)) > 0
    return wave * np.hanning(length) ** 0.25 * (pulses if move == "pulsed" else 1.0)


def features(samples: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns [T / 160, bands] features of samples [T] at 16 kHz."""
    padded = np.pad(samples, (_FFT // 2, _FFT // 2))
    windows = sliding_window_view(padded, _FFT)[: len(samples) : _HOP] * np.hanning(_FFT)
    power = np.abs(np.fft.rfft(windows)) ** 2
    rows = np.log(power @ _bands().T + _LEAST_POWER)
    normalised: NDArray[np.float64] = (rows - rows.mean(0)) / (rows.std(0) + _LEAST_DEVIATION)
    return normalised


@lru_cache
def _bands() -> NDArray[np.float64]:
    """Returns triangular filters whose centres are spread evenly over mels, [bands, 257]."""
    mels = np.linspace(0, 2595 * math.log10(1 + _RATE / 2 / 700), PROXY_BANDS + 2)
    edges = 700 * (10 ** (mels / 2595) - 1)
    hertz = np.arange(_FFT // 2 + 1) * _RATE / _FFT
    rising = (hertz - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - hertz) / (edges[2:] - edges[1:-1])[:, None]
    return np.minimum(rising, falling).clip(0)
