"""Spectra of synthetic sound from coarse codes: what a detokenizer of speech does (LFM2 report, section 6.1.3)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from nas.core.errors import InvalidInput
from nas.core.task import Batch

LEVELS = 32
"""Entries of a codebook; parameters that need fewer use the first."""
CODEBOOKS = 8
_PITCH = (math.log(3.0), math.log(8.0))
"""Logarithms of the least and greatest distance of harmonics, in bands."""
_HARMONIC_WIDTH = 0.8
_RESONANCE_WIDTH, _RESONANCE = 2.5, 2.0
_TIMBRE, _TIMBRES = 2.0, 3
"""Greatest magnitude of a timbre's number, in nepers, and how many it has."""
_COARSE = 3
"""Levels of the code of such a number."""
_BURSTS, _BURST, _DECAY = 0.3, 4.0, 2.5
"""Share of frames in which a burst begins, its magnitude in nepers, and the positions in which it loses one."""
_FLOOR = 0.1
_PERIODS = (3.0, 12.0)
"""Frames in which a glide repeats."""
_FIXED = 512
"""Examples from which medians and chance are computed."""

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Spectra:
    """Eight codes of each frame, at `upsampling` positions in a row, and the spectrum of each position.

    A spectrum is the log-magnitude of `bands` bands in nepers, less the band's median: harmonics of a gliding pitch
    under a gliding resonance and the timbre of one of the example's `sounds`, and bursts of noise that decay. A fixed
    code has the frame's means of loudness, pitch and resonance in 32 levels, its sound, and at which of its positions a
    burst begins. So what happens within a frame is told by how codes changed, and how many positions ago: by what is
    near. A sound's timbre is three numbers, of which a frame has three levels each, with another dither in every frame:
    they are told by all frames with the same sound, which a longer memory has to find and to average. Loss is the mean
    absolute error in nepers, and chance that of the medians. Phases are left out, and nothing is heard.
    """

    frames: int = 16
    sounds: int = 3
    upsampling: int = 6
    bands: int = 32

    def __post_init__(self) -> None:
        if not (1 <= self.frames <= 512 and 1 <= self.upsampling <= LEVELS - 1):
            raise InvalidInput(f"spectra: 1 to 512 frames, upsampling of 1 to {LEVELS - 1}")
        if not (1 <= self.sounds <= LEVELS and 4 <= self.bands <= 256):
            raise InvalidInput(f"spectra: 1 to {LEVELS} sounds, 4 to 256 bands")

    @property
    def vocab(self) -> int:
        """Entries of all codebooks."""
        return CODEBOOKS * LEVELS

    @property
    def length(self) -> int:
        """Positions."""
        return self.frames * self.upsampling

    @property
    def chance_nats(self) -> float:
        """Mean distance of a spectrum from the bands' medians, in nepers."""
        return _typical(self)[1]

    def batch(self, generator: np.random.Generator, size: int) -> Batch:
        """Returns codes [size, length, 8] and spectra [size, length, bands]."""
        codes, spectra = self._drawn(generator, size)
        return codes, spectra - _typical(self)[0]

    def _drawn(self, generator: np.random.Generator, size: int) -> tuple[NDArray[np.int64], Floats]:
        loudness, pitch, place = (self._glide(generator, size) for _ in range(3))
        sound = generator.integers(0, self.sounds, (size, self.frames))
        timbres = generator.uniform(-1, 1, (size, self.sounds, _TIMBRES)).astype(np.float32)
        timbre = np.take_along_axis(timbres, sound[..., None], 1)
        begins = generator.integers(0, self.upsampling, (size, self.frames))
        begins = np.where(generator.random(begins.shape) < _BURSTS, begins, -1)
        dithered = (timbre + 1) / 2 * (_COARSE - 1) + generator.random(timbre.shape)
        coarse = dithered.astype(np.int64).clip(0, _COARSE - 1)
        means = [glide.reshape(size, self.frames, -1).mean(-1) for glide in (loudness, pitch, place)]
        levels = [(mean * LEVELS).astype(np.int64).clip(0, LEVELS - 1) for mean in means]
        codes = np.stack([*levels, sound, begins + 1, *np.moveaxis(coarse, -1, 0)], -1)
        frames = codes + LEVELS * np.arange(CODEBOOKS)
        spectra = self._spectra(loudness, pitch, place, timbre.repeat(self.upsampling, 1), begins)
        return frames.repeat(self.upsampling, 1), spectra

    def _glide(self, generator: np.random.Generator, size: int) -> Floats:
        """Draws curves [size, length] between 0 and 1: two oscillations of some frames each."""
        periods = generator.uniform(*_PERIODS, (2, size, 1)) * self.upsampling
        angles = 2 * np.pi * (np.arange(self.length) / periods + generator.random((2, size, 1)))
        glide: Floats = (0.5 + np.sin(angles).sum(0) / 4).astype(np.float32)
        return glide

    def _spectra(
        self, loudness: Floats, pitch: Floats, place: Floats, timbre: Floats, begins: NDArray[np.int64]
    ) -> Floats:
        """Returns log-magnitudes [size, length, bands]."""
        band = np.arange(self.bands, dtype=np.float32)
        between = np.exp(_PITCH[0] + (_PITCH[1] - _PITCH[0]) * pitch)[..., None]
        sharpness = (between / (2 * np.pi * _HARMONIC_WIDTH)) ** 2
        harmonics = sharpness * (np.cos(2 * np.pi * band / between) - 1)
        resonance = _RESONANCE * np.exp(-0.5 * ((band - self.bands * place[..., None]) / _RESONANCE_WIDTH) ** 2)
        shapes = _TIMBRE * np.cos(np.pi * np.arange(1, _TIMBRES + 1)[:, None] * (band + 0.5) / self.bands)
        envelope = resonance + timbre @ shapes.astype(np.float32) + 2 * loudness[..., None] - 1
        noise = _BURST * band / self.bands - self._since(begins)[..., None] / _DECAY
        spectra: Floats = np.log(np.exp(harmonics + envelope) + np.exp(noise) + _FLOOR).astype(np.float32)
        return spectra

    def _since(self, begins: NDArray[np.int64]) -> Floats:
        """Returns the positions since the last burst began, [size, length]."""
        place = np.arange(self.length, dtype=np.float32)
        is_first = (begins[..., None] == np.arange(self.upsampling)).reshape(len(begins), -1)
        since: Floats = place - np.maximum.accumulate(np.where(is_first, place, np.float32(-self.length)), 1)
        return since


@lru_cache(maxsize=16)
def _typical(task: Spectra) -> tuple[Floats, float]:
    """Returns the bands' medians, and the mean distance from them, over fixed examples."""
    _, spectra = task._drawn(np.random.default_rng(0), _FIXED)
    medians = np.median(spectra, (0, 1))
    return medians, float(np.abs(spectra - medians).mean())
