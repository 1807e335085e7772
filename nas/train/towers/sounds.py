"""Sound: WAV and FLAC files read by libsndfile within limits, and their log-mel features.

Features are those of transformers' ParakeetFeatureExtractor (LFM2 report, section 6.1.1): 16 kHz, one channel, a window
of 25 ms every 10 ms, mel bands, and each band of a sound with mean 0 and standard deviation 1 over the sound. One more
row, which is 0, ends a sound: the encoder reads it, as those of LFM2-Audio and llama.cpp do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray
from pydantic import Field
from scipy.signal import resample_poly  # type: ignore[import-untyped]
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers.audio_utils import mel_filter_bank

from nas.core.errors import InvalidInput, Unsupported
from nas.train.towers.modality import MediaFile, Processor, checked, require_file

SOUND = "<audio>"
"""Stands for one embedding of a sound, and for a whole sound in the text of a message."""
RATE = 16_000
"""Samples per second of what is encoded."""
MOST_SECONDS = 120
LEAST_SECONDS = 0.1
MOST_BYTES = 256 << 20
_RATES = (4_000, 192_000)
_MOST_CHANNELS = 16
_LARGEST = 2.0**16
_FORMATS = ("WAV", "WAVEX", "RF64", "FLAC")
_ENCODINGS = ("PCM_S8", "PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW")
_BLOCK = 1 << 16
"""Samples of a channel that are decoded at once."""
_REACH = 11
_SHORTENED = re.compile(r"^data : (\d+) \(should be (\d+)\)", re.MULTILINE)
_UNKNOWN = 1 << 30
"""Sizes from this one on stand for an unknown size in the header of what was written to a pipe."""

_HOP, _WINDOW, _FFT, _EMPHASIS = 160, 400, 512, 0.97
_LEAST_POWER, _LEAST_DEVIATION = 2.0**-24, 1e-5
_EXTRACTOR = {
    "feature_extractor_type": "ParakeetFeatureExtractor",
    "sampling_rate": RATE,
    "hop_length": _HOP,
    "win_length": _WINDOW,
    "n_fft": _FFT,
    "preemphasis": _EMPHASIS,
}


class Part(NamedTuple):
    """A part of a sound, in seconds."""

    start: float
    length: float


class SoundSettings(Processor):
    """How sounds become features."""

    feature_size: int = Field(128, ge=8, le=512, description="mel bands")
    subsampling_factor: int = Field(8, ge=2, le=16, description="features that become one token")

    @staticmethod
    def size_of(path: Path, place: str) -> tuple[int, ...]:
        return (len(read_samples(path, place)),)

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str) -> Self:
        settings = config.get("feature_extractor", config)
        if not isinstance(settings, dict):
            raise InvalidInput("feature_extractor holds no settings", where=where)
        for name, value in _EXTRACTOR.items():
            if settings.get(name, value) != value:
                raise Unsupported(f"{name} is {settings[name]}, not {value}", where=where)
        return checked(cls, settings, where)

    def config(self) -> dict[str, Any]:
        return {"feature_extractor": {**_EXTRACTOR, "padding_value": 0.0, **self.model_dump()}}

    def text(self, file: MediaFile) -> str:
        return SOUND * math.ceil((file.size[0] // _HOP + 1) / self.subsampling_factor)

    def inputs(self, files: Sequence[MediaFile]) -> tuple[Tensor, ...]:
        """Returns features [N, T, bands], padded with zeros, and the number of each sound's, [N]."""
        if not files:
            return torch.zeros(0, 1, self.feature_size), torch.zeros(0, dtype=torch.int64)
        features = [self._features(file) for file in files]
        return pad_sequence(features, True), torch.tensor([len(rows) for rows in features])

    def _features(self, sound: MediaFile) -> Tensor:
        samples = read_samples(sound.path, sound.place)
        if len(samples) != sound.size[0]:
            raise InvalidInput(f"{sound.path} has changed", where=sound.place)
        return features_of(torch.from_numpy(samples), self.feature_size)

    def samples(self, file: MediaFile, rate: int) -> Tensor:
        return torch.from_numpy(read_samples(file.path, file.place, rate))

    def seconds(self, file: MediaFile) -> float:
        return file.size[0] / RATE


def read_samples(path: Path, place: str, target: int = RATE, part: Part | None = None) -> NDArray[np.float32]:
    """Reads a sound: the mean of its channels, at 16 kHz or `target` samples per second.

    Args:
        path: of the file.
        place: for messages.
        target: samples per second.
        part: which is read alone, its samples those of the whole; None: everything.

    Returns:
        Samples [T]; those of integers are in [-1, 1]. A part that reaches past the end has fewer.

    Raises:
        InvalidInput: the file is no WAV or FLAC, damaged, too long or too short, or holds no finite numbers.
    """
    try:
        require_file(path, place, MOST_BYTES)
        with path.open("rb") as stream:
            start = stream.read(12)
            if start[:4] != b"fLaC" and (start[:4] not in (b"RIFF", b"RF64") or start[8:] != b"WAVE"):
                raise InvalidInput(f"{path.name} is no WAV or FLAC file", where=place)
            stream.seek(0)
            with soundfile.SoundFile(stream) as sound:  # libsndfile closes a descriptor whose header it cannot read
                rate = sound.samplerate
                common = math.gcd(rate, target)
                up, down = target // common, rate // common
                first, skipped, count = (0, 0, None) if part is None else _span(part, target, up, down)
                if first:
                    sound.seek(first)
                samples = _decoded(sound, path.name, place, count)
    except OSError as error:
        raise InvalidInput(f"cannot read {path.name}: {error.strerror}", where=place) from error
    except soundfile.LibsndfileError as error:
        raise InvalidInput(f"{path.name} is damaged: {error.error_string}", where=place) from error
    if part is None and len(samples) < LEAST_SECONDS * rate:
        raise InvalidInput(f"{path.name} is shorter than {LEAST_SECONDS} s", where=place)
    if not np.abs(samples).max(initial=0) < _LARGEST:
        raise InvalidInput(f"{path.name} holds NaN or samples beyond {_LARGEST:,.0f}", where=place)
    resampled = samples if up == down else resample_poly(samples, up, down)
    end = None if part is None else skipped + round(part.length * target)
    return np.ascontiguousarray(resampled[skipped:end], np.float32)


def _span(part: Part, target: int, up: int, down: int) -> tuple[int, int, int]:
    """Returns the first sample to decode for a part, the resampled ones before the part, and how many to decode.

    Filters of `resample_poly` reach over 10 samples of the lower rate; the first sample is one that both rates have.
    """
    reach = math.ceil(_REACH * max(up, down) / (up * down))
    start = round(part.start * target)
    first = max(0, start // up - reach)
    skipped = start - first * up
    count = math.ceil((skipped + round(part.length * target)) * down / up) + reach * down
    return first * down, skipped, count


def _decoded(sound: soundfile.SoundFile, name: str, place: str, most: int | None) -> NDArray[np.float32]:
    """Returns the mean of the channels, [T], of `most` samples from where the file stands, or all."""
    if sound.format not in _FORMATS or sound.subtype not in _ENCODINGS:
        raise InvalidInput(f"{name} is encoded as {sound.format} {sound.subtype}, which is not read", where=place)
    if not _RATES[0] <= sound.samplerate <= _RATES[1] or sound.channels > _MOST_CHANNELS:
        about = f"{sound.samplerate:,} samples per second in {sound.channels} channels"
        raise InvalidInput(f"{name} has {about}, which are not read", where=place)
    if (sizes := _SHORTENED.search(sound.extra_info)) and int(sizes[2]) < int(sizes[1]) < _UNKNOWN:
        raise InvalidInput(f"{name} ends early: {int(sizes[2]):,} of {int(sizes[1]):,} bytes are there", where=place)
    blocks: list[NDArray[np.float32]] = []
    count = 0
    while len(
        block := sound.read(_BLOCK if most is None else min(_BLOCK, most - count), dtype="float32", always_2d=True)
    ):
        blocks.append(block.mean(1))
        count += len(block)
        if count > MOST_SECONDS * sound.samplerate:
            raise InvalidInput(f"{name} lasts longer than {MOST_SECONDS} s: cut it", where=place)
    return np.concatenate([np.zeros(0, np.float32), *blocks])


@lru_cache
def _bands(count: int) -> Tensor:
    """Returns the filters of mel bands, [count, 257]."""
    filters = mel_filter_bank(_FFT // 2 + 1, count, 0.0, RATE / 2, RATE, norm="slaney", mel_scale="slaney")
    return torch.from_numpy(filters.T.astype(np.float32)).contiguous()


def features_of(samples: Tensor, bands: int) -> Tensor:
    """Returns log-mel features [T / 160 + 1, bands] of samples [T] at 16 kHz; the last row is 0."""
    emphasised = torch.cat([samples[:1], samples[1:] - _EMPHASIS * samples[:-1]])
    window = torch.hann_window(_WINDOW, periodic=False)
    spectrum = torch.stft(emphasised, _FFT, _HOP, _WINDOW, window, pad_mode="constant", return_complex=True)
    power = spectrum.real.square() + spectrum.imag.square()
    rows = torch.log(_bands(bands) @ power + _LEAST_POWER).T[: len(samples) // _HOP]
    wide = rows.double()  # in single precision the mean of silence would not be its value
    normalised = (wide - wide.mean(0)) / (wide.std(0) + _LEAST_DEVIATION)
    return pad(normalised.float(), (0, 0, 0, 1))
