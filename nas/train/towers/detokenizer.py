"""The detokenizer: frames of codes become sound of 24 kHz (LFM2 report, section 6.1.3; Vocos, Siuzdak 2023).

    codes [B, F, Q] -> summed embeddings [B, F, D] -> each repeated `upsampling` times -> a layout's layers
      -> log-magnitude and phase of each window [B, 6 F, fft / 2 + 1] -> inverse STFT -> samples [B, 1920 F]

The layers are those of `nas.model.nn.model.Model`; the rows of its embedding are those of the codebooks, one after
another. Everything is causal but the inverse STFT, whose windows reach 20 ms past the samples that they complete: so
codes may come in chunks of any number of frames.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.core.strict import StrictKeys
from nas.model.nn.model import Model, ModelState
from nas.model.nn.primitives import Linear, draw_weights

SPEECH_RATE = 24_000
"""Samples per second of what is spoken."""
FRAME_RATE = 12.5
"""Frames per second."""
_LOUDEST = 4.6
"""Largest log-magnitude, as in Vocos, whose magnitudes are at most 100."""
_LEAST_ENVELOPE = 1e-8


class Codebooks(StrictKeys):
    """Codes of a frame of 80 ms; defaults are those of Mimi in LFM2-Audio."""

    codebooks: int = Field(8, ge=1, le=32)
    entries: int = Field(2048, ge=2, le=65536, description="of each codebook")

    @property
    def books(self) -> tuple[int, int]:
        """Number of codebooks, and entries of each."""
        return self.codebooks, self.entries

    def layout(self, line: str, rows: int) -> Layout:
        """Returns a layout without its vocabulary, such as `d512 ffn=swiglu:1536 [C3*2]`, with `rows` of each codebook.

        Raises:
            InvalidInput: it is none, or has a vocabulary.
        """
        width, _, others = line.partition(" ")
        return Layout.parse(f"{width} v{self.codebooks * rows} {others}")

    def rows(self, codes: Tensor, rows: int) -> Tensor:
        """Returns the numbers of codes [..., Q'] of the first codebooks in a table of `rows` of each codebook."""
        return codes + torch.arange(codes.shape[-1], device=codes.device) * rows


class DetokenizerShape(Codebooks):
    """Shape of a detokenizer; the default has the report's eight layers and 35 million weights."""

    line: str = Field("d512 ffn=swiglu:1536 [C3*2 W8/4@30 C3*2 W8/4@30 C3 W8/4@30]", description="layout of the layers")
    upsampling: int = Field(6, ge=1, le=32, description="windows of a frame")
    fft: int = Field(1280, ge=4, le=8192, multiple_of=2, description="samples of a window")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        try:
            self.layout(self.line, self.entries)
        except InvalidInput as error:
            raise ValueError(f"line: {error.message}") from error
        if 1920 % self.upsampling or self.fft < 2 * self.hop or (self.fft - self.hop) % 2:
            raise ValueError("upsampling must divide 1,920, and two windows must overlap by an even number of samples")
        return self

    @property
    def hop(self) -> int:
        """Samples between windows."""
        return round(SPEECH_RATE / FRAME_RATE) // self.upsampling


class Overlap(NamedTuple):
    """Samples of an inverse STFT that later windows add to: their sums and the windows' squares, [B, fft - hop].

    Args:
        skipped: samples before the first of the sound that are still to be left out.
    """

    samples: Tensor
    squares: Tensor
    skipped: int


class InverseStft(nn.Module):
    """Samples of complex coefficients, by weighted overlap and addition of Hann windows.

    As in Vocos, a sound of N hops has N windows, and (fft - hop) / 2 samples of the first and last one are left out.

    Args:
        fft: samples of a window.
        hop: samples between windows.
    """

    def __init__(self, fft: int, hop: int) -> None:
        super().__init__()
        self.hop, self._rest = hop, fft - hop
        self.register_buffer("window", torch.hann_window(fft), persistent=False)

    def forward(self, spectrum: Tensor) -> Tensor:
        """Returns samples [B, N hop] of coefficients [B, N, fft / 2 + 1]."""
        samples, state = self.step(spectrum, None)
        return torch.cat([samples, self.last(state)], 1)

    def step(self, spectrum: Tensor, state: Overlap | None) -> tuple[Tensor, Overlap]:
        """Returns the samples that the next windows complete, and what comes after them."""
        window, count = self.get_buffer("window"), spectrum.shape[1]
        parts = torch.fft.irfft(spectrum, len(window)) * window
        length = count * self.hop + self._rest
        summed = _overlapped(parts, length, self.hop)
        squares = _overlapped(window.square().expand(1, count, -1), length, self.hop)
        skipped = self._rest // 2 if state is None else state.skipped
        if state is not None:
            summed = summed + F.pad(state.samples, (0, length - self._rest))
            squares = squares + F.pad(state.squares, (0, length - self._rest))
        done = count * self.hop
        samples = (summed / squares.clamp(min=_LEAST_ENVELOPE))[:, min(skipped, done) : done]
        return samples, Overlap(summed[:, done:], squares[:, done:], max(0, skipped - done))

    def last(self, state: Overlap) -> Tensor:
        """Returns the samples behind those of the last window's hop."""
        rest = state.samples / state.squares.clamp(min=_LEAST_ENVELOPE)
        return rest[:, state.skipped : self._rest - self._rest // 2]


def _overlapped(parts: Tensor, length: int, hop: int) -> Tensor:
    """Returns the sum [B, length] of windows [B, N, fft], each `hop` behind the one before."""
    summed = F.fold(parts.mT, (1, length), (1, parts.shape[2]), stride=(1, hop))
    return summed[:, 0, 0]


class SpeechState(NamedTuple):
    """What a detokenizer remembers of the frames before."""

    layers: ModelState | None
    overlap: Overlap | None


class Detokenizer(nn.Module):
    """Frames of codes as sound.

    Args:
        shape: of the layers and windows.
        seed: of start values; None: weights are left as allocated.
    """

    def __init__(self, shape: DetokenizerShape, seed: int | None = 0) -> None:
        super().__init__()
        self.shape = shape
        self.layers = Model(shape.layout(shape.line, shape.entries), seed)
        self.output = Linear(self.layers.layout.d_model, shape.fft + 2, bias=True)
        if seed is not None:
            draw_weights(self.output, seed, 1)
        self.inverse = InverseStft(shape.fft, shape.hop)

    def embeddings(self, codes: Tensor) -> Tensor:
        """Returns the summed embeddings [B, F, D] of codes [B, F, Q]."""
        embedded: Tensor = self.layers.embed(self.shape.rows(codes, self.shape.entries))
        return embedded.sum(-2)

    def forward(self, codes: Tensor) -> Tensor:
        """Returns samples [B, 1920 F] of codes [B, F, Q], or of embeddings [B, F, D]."""
        samples, state = self.step(codes, SpeechState(None, None))
        return torch.cat([samples, self.last(state)], 1)

    def step(self, codes: Tensor, state: SpeechState) -> tuple[Tensor, SpeechState]:
        """Returns the samples that the next frames complete, and the state after them."""
        embedded = codes if codes.is_floating_point() else self.embeddings(codes)
        repeated = embedded.repeat_interleave(self.shape.upsampling, 1)
        features, layers = self.layers.read(repeated, state.layers)
        samples, overlap = self.inverse.step(self.spectrum(features), state.overlap)
        return samples, SpeechState(layers, overlap)

    def last(self, state: SpeechState) -> Tensor:
        """Returns the samples that are still to come after the last frame."""
        assert state.overlap is not None
        return self.inverse.last(state.overlap)

    def spectrum(self, features: Tensor) -> Tensor:
        """Returns complex coefficients [B, N, fft / 2 + 1] of the layers' features [B, N, D]."""
        magnitude, phase = self.output(features).float().chunk(2, -1)
        return torch.polar(magnitude.clamp(max=_LOUDEST).exp(), phase)
