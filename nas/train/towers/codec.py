"""Codecs: sound of 24 kHz as 12.5 frames of codes a second, and back by the detokenizer.

    config.json          model_type `hilnas_codec`, and the shape
    model.safetensors    detokenizer.*, and of an own codec encoder.* and quantiser.*

Codes are those of Mimi (Défossez et al. 2024), by transformers from a folder of it, or of an encoder that is trained
with the detokenizer: log-mel features, a layout's layers, the mean over each frame, and residual vector quantisation
with factorised codebooks (Kumar et al. 2023). Such codes have no semantic codebook, as Mimi's first one is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field, field_validator
from torch import Tensor, nn
from transformers.audio_utils import mel_filter_bank

from nas.core.durable import write_durably
from nas.core.errors import InvalidInput, Unsupported
from nas.core.layout import Layout
from nas.model.nn.model import Model
from nas.model.nn.primitives import Embedding, Linear, draw_weights
from nas.train.release.huggingface import write_float32
from nas.train.release.model_tokenizer import MODEL
from nas.train.release.shards import SINGLE, Shards, read_json
from nas.train.release.tokenizer import json_bytes
from nas.train.towers.detokenizer import SPEECH_RATE, Detokenizer, DetokenizerShape
from nas.train.towers.modality import checked
from nas.train.towers.release import check_part, load_part

FRAME_SAMPLES = 1920
CODEC_TYPE = "hilnas_codec"
_LEAST_POWER = 1e-5
_COMMITMENT = 0.25


class CodecShape(DetokenizerShape):
    """Shape of a codec."""

    source: Literal["own", "mimi"] = Field("own", description="of the codes")
    encoder: str = Field("d512 ffn=swiglu:1536 [C3*2 W8/4@30 C3]", description="layout of an own encoder's layers")
    bands: int = Field(80, ge=8, le=512, description="mel bands of an own encoder, and of the loss")
    code_width: int = Field(8, ge=1, le=512, description="of an own codebook's entries")

    @field_validator("encoder")
    @classmethod
    def _is_layout(cls, line: str) -> str:
        try:
            encoder_layout(line)
        except InvalidInput as error:
            raise ValueError(error.message) from error
        return line


def encoder_layout(line: str) -> Layout:
    """Returns the layout of an encoder's layers, which read no tokens; raises `InvalidInput`."""
    width, _, others = line.partition(" ")
    return Layout.parse(f"{width} v32 {others}")


class LogMel(nn.Module):
    """Log-mel features [B, T / hop, bands] of samples [B, T]."""

    def __init__(self, shape: CodecShape) -> None:
        super().__init__()
        self._fft, self._hop = shape.fft, shape.hop
        filters = mel_filter_bank(shape.fft // 2 + 1, shape.bands, 0.0, SPEECH_RATE / 2, SPEECH_RATE, mel_scale="htk")
        self.register_buffer("filters", torch.from_numpy(filters).float(), persistent=False)
        self.register_buffer("window", torch.hann_window(shape.fft), persistent=False)

    def forward(self, samples: Tensor) -> Tensor:
        rest, window = (self._fft - self._hop) // 2, self.get_buffer("window")
        padded = F.pad(samples, (rest, rest))
        spectrum = torch.stft(padded, self._fft, self._hop, window=window, center=False, return_complex=True)
        return (spectrum.abs().mT @ self.get_buffer("filters")).clamp(min=_LEAST_POWER).log()


class Quantised(NamedTuple):
    """Frames as codes.

    Args:
        embeddings: of the frames, [B, F, D], through which gradients pass.
        codes: [B, F, Q].
        loss: that draws entries and features to each other.
    """

    embeddings: Tensor
    codes: Tensor
    loss: Tensor


class Quantiser(nn.Module):
    """Residual vector quantisation: each codebook quantises what those before it left.

    Args:
        inputs: width of what is quantised.
        outputs: width D of embeddings.
        shape: of the codebooks.
    """

    def __init__(self, inputs: int, outputs: int, shape: CodecShape) -> None:
        super().__init__()
        self.first = Linear(inputs, outputs)
        books = range(shape.codebooks)
        self.inward = nn.ModuleList(Linear(outputs, shape.code_width) for _ in books)
        self.entries = nn.ModuleList(Embedding(shape.entries, shape.code_width) for _ in books)
        self.outward = nn.ModuleList(Linear(shape.code_width, outputs) for _ in books)

    def forward(self, features: Tensor) -> Quantised:
        """Quantises features [B, F, inputs]."""
        rest = self.first(features)
        summed, loss, codes = torch.zeros_like(rest), rest.new_zeros(()), []
        for inward, entries, outward in zip(self.inward, self.entries, self.outward, strict=True):
            narrow = inward(rest)
            codes.append(
                (F.normalize(narrow, dim=-1) @ F.normalize(entries.get_parameter("weight"), dim=-1).T).argmax(-1)
            )
            nearest = entries(codes[-1])
            loss = loss + F.mse_loss(nearest, narrow.detach()) + _COMMITMENT * F.mse_loss(narrow, nearest.detach())
            embedded = outward(narrow + (nearest - narrow).detach())
            summed, rest = summed + embedded, rest - embedded
        return Quantised(summed, torch.stack(codes, -1), loss)

    def table(self) -> Tensor:
        """Returns the embeddings of all entries of all codebooks, one after another, [Q entries, D]."""
        return torch.cat([outward(entries.weight) for entries, outward in zip(self.entries, self.outward, strict=True)])


class Codec(nn.Module):
    """Sound as codes, and codes as sound.

    Args:
        shape: of the parts.
        seed: of start values.
        mimi: folder of Mimi, for codes of its; None: sound cannot be encoded.
    """

    def __init__(self, shape: CodecShape, seed: int | None = 0, mimi: Path | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.detokenizer = Detokenizer(shape, seed)
        self._mimi = [] if mimi is None or shape.source == "own" else [_mimi(mimi, shape)]  # no part of the module
        if shape.source == "mimi":
            return
        self.encoder = Model(encoder_layout(shape.encoder), seed)
        width = self.encoder.layout.d_model
        self.mel, self.inputs = LogMel(shape), Linear(shape.bands, width)
        self.quantiser = Quantiser(width, self.detokenizer.layers.layout.d_model, shape)
        if seed is not None:
            draw_weights(self.inputs, seed, 1)
            draw_weights(self.quantiser, seed, 1)

    def quantised(self, samples: Tensor) -> Quantised:
        """Returns codes and their embeddings of samples [B, 1920 F], of an own codec."""
        features = self.encoder.features(self.inputs(self.mel(samples)))
        quantised: Quantised = self.quantiser(torch.unflatten(features, 1, (-1, self.shape.upsampling)).mean(2))
        return quantised

    @torch.no_grad()
    def codes(self, samples: Tensor) -> Tensor:
        """Returns codes [B, F, Q] of samples [B, T] at 24 kHz; the last frame may be a part of one.

        Raises:
            InvalidInput: codes are those of Mimi, whose folder was not named.
        """
        padded = F.pad(samples, (0, -samples.shape[1] % FRAME_SAMPLES))
        if self.shape.source == "own":
            return self.quantised(padded).codes
        if not self._mimi:
            raise InvalidInput("its codes are those of Mimi: name a folder of it", where="--mimi")
        codes: Tensor = self._mimi[0].encode(padded[:, None], num_quantizers=self.shape.codebooks).audio_codes
        return codes.mT

    @torch.no_grad()
    def settle(self) -> None:
        """Lets the detokenizer read codes as it reads the embeddings of an own codec's quantiser."""
        if self.shape.source == "own":
            self.detokenizer.layers.embed.weight.copy_(self.quantiser.table())


def _mimi(folder: Path, shape: CodecShape) -> Any:
    """Returns Mimi in evaluation, read without running code of its folder.

    Raises:
        InvalidInput: it is none, or damaged.
        Unsupported: it has other frames or codebooks.
    """
    if not (folder / MODEL).is_file() or read_json(folder / MODEL).get("model_type") != "mimi":
        raise InvalidInput("is no folder of Mimi", where=str(folder))
    from transformers import MimiModel

    try:
        model = MimiModel.from_pretrained(str(folder), local_files_only=True, use_safetensors=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise InvalidInput(f"Mimi cannot be read: {str(error).splitlines()[0]}", where=str(folder)) from error
    config = model.config
    frames = config.sampling_rate / config.frame_rate
    if (frames, config.sampling_rate, config.codebook_size) != (FRAME_SAMPLES, SPEECH_RATE, shape.entries):
        about = f"{frames:g} samples of {config.sampling_rate} Hz a frame and {config.codebook_size} entries"
        raise Unsupported(f"has {about}, not {FRAME_SAMPLES}, {SPEECH_RATE} and {shape.entries}", where=str(folder))
    if config.num_quantizers < shape.codebooks:
        raise Unsupported(f"has {config.num_quantizers} codebooks, not {shape.codebooks}", where=str(folder))
    return model.eval().requires_grad_(False)


def write_codec(folder: Path, codec: Codec) -> None:
    """Writes a codec's folder, the configuration last; Mimi is not part of it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_float32(folder / SINGLE, codec.state_dict())
    write_durably(folder / MODEL, json_bytes({"model_type": CODEC_TYPE, **codec.shape.model_dump()}))


def copy_codec(source: Path, target: Path) -> None:
    """Copies a codec's folder without its record."""
    target.mkdir(parents=True, exist_ok=True)
    for name in (SINGLE, MODEL):
        write_durably(target / name, (source / name).read_bytes())


def read_codec(folder: Path, mimi: Path | None = None) -> Codec:
    """Reads a codec's folder.

    Raises:
        InvalidInput: it holds no codec, or is damaged.
    """
    config = read_json(folder / MODEL) if (folder / MODEL).is_file() else {}
    if config.get("model_type") != CODEC_TYPE:
        raise InvalidInput("holds no codec: `nas family codec` writes one", where=str(folder))
    shape = checked(CodecShape, config, str(folder / MODEL))
    with torch.device("meta"):  # a configuration may ask for more memory than there is
        check_part(Codec(shape, None), Shards(folder), "")
    codec = Codec(shape, None, mimi)
    load_part(codec, Shards(folder), "")
    return codec.eval().requires_grad_(False)
