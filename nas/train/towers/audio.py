"""The tower of sound: FastConformer (Rekesh et al. 2023), by transformers (Parakeet), behind strided convolutions.

Eight features of 10 ms become one feature of the encoder, and one token of the language model: 12.5 a second (LFM2
report, section 6.1.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from nas.core.errors import InvalidInput
from nas.core.tower import SoundTower
from nas.model.nn.optimisers import Optimiser
from nas.model.nn.tower import SOUND_IN_ALL, keep_statistics, sound_encoder
from nas.train.towers.detokenizer import Codebooks
from nas.train.towers.modality import Modality, Shape
from nas.train.towers.model import Tower
from nas.train.towers.sounds import SOUND, SoundSettings
from nas.train.towers.speech import SpeechShape
from nas.train.towers.training import Stage, TowerSettings


class AudioShape(Shape):
    """Shape of a tower; names are those of transformers' ParakeetEncoderConfig, defaults those of LFM2-Audio."""

    hidden_size: int = Field(512, ge=2, le=8192, multiple_of=2, description="of the encoder")
    intermediate_size: int = Field(2048, ge=1, le=65536)
    num_hidden_layers: int = Field(17, ge=1, le=128)
    num_attention_heads: int = Field(8, ge=1, le=256)
    conv_kernel_size: int = Field(9, ge=1, le=127)
    subsampling_conv_channels: int = Field(256, ge=1, le=4096)
    subsampling_factor: int = Field(8, ge=2, le=16, description="features of 10 ms that become one token")
    num_mel_bins: int = Field(128, ge=8, le=512)
    attention_bias: bool = True
    convolution_bias: bool = True
    scale_input: bool = True

    fixed: ClassVar[Mapping[str, Any]] = SOUND_IN_ALL
    encoder_type: ClassVar[str] = "parakeet_encoder"
    last: ClassVar[str] = "subsampling.linear.weight"

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(f"{self.num_attention_heads} heads do not divide hidden_size, {self.hidden_size}")
        if self.conv_kernel_size % 2 == 0:
            raise ValueError(f"conv_kernel_size must be odd, not {self.conv_kernel_size}")
        if self.subsampling_factor.bit_count() != 1 or self.num_mel_bins % self.subsampling_factor:
            raise ValueError("subsampling_factor must be a power of 2 that divides num_mel_bins")
        return self

    @classmethod
    def problem(cls, encoder: Mapping[str, Any]) -> str | None:
        if encoder.get("model_type", cls.encoder_type) != cls.encoder_type:
            return "its encoder is no Parakeet"
        for name in ("hidden_act", "subsampling_conv_kernel_size", "subsampling_conv_stride"):
            if encoder.get(name, cls.fixed[name]) != cls.fixed[name]:
                return f"{name} of its encoder is not {cls.fixed[name]}"
        return None

    def processor(self) -> dict[str, Any]:
        return {"feature_size": self.num_mel_bins, "subsampling_factor": self.subsampling_factor}

    def layout(self) -> SoundTower:
        """Returns the shape as a layout names it.

        Raises:
            InvalidInput: no layout does.
        """
        return SoundTower.of(
            self.hidden_size,
            self.num_hidden_layers,
            heads=self.num_attention_heads,
            ffn=self.intermediate_size,
            connector=self.projector_hidden_size,
            channels=self.subsampling_conv_channels,
            bands=self.num_mel_bins,
        )

    def tower(self, d_model: int, seed: int = 0) -> Tower:
        return AudioTower(self, d_model, seed)


class AudioTower(Tower):
    """The tower of sound.

    Args:
        shape: of encoder and connector.
        d_model: width of the language model.
        seed: of the encoder's start values.
    """

    def __init__(self, shape: AudioShape, d_model: int, seed: int = 0) -> None:
        super().__init__()
        self.encoder = sound_encoder(shape.encoder(), seed)
        self.connector = shape.connected(shape.hidden_size, d_model)
        self.train()

    def train(self, mode: bool = True) -> Self:
        """Sets the mode of training; a BatchNorm keeps its statistics, see `keep_statistics`."""
        super().train(mode)
        keep_statistics(self)
        return self

    def features(self, *inputs: Tensor) -> Tensor:
        """Returns the features of sounds, one after another.

        inputs: see `SoundSettings.inputs`.
        """
        features, counts = inputs
        mask = torch.arange(features.shape[1], device=counts.device) < counts[:, None]
        encoded = self.encoder(features, attention_mask=mask)
        rows: Tensor = encoded.last_hidden_state[encoded.attention_mask.bool()]
        return rows


AUDIO = Modality(
    name="audio",
    kind="audio",
    noun="sound",
    keys=("audios", "audio", "file_name", "audio_filepath"),
    tokens=(SOUND,),
    own_type="hilnas_audio",
    stock=None,
    shape=AudioShape,
    processor=SoundSettings,
)
"""Models that read sound."""


class AudioSettings(TowerSettings):
    """Settings of a stage of a model that reads sound.

    The report has what each stage trains (section 6.3); it publishes no rates and no share of conversations without
    sound.
    """

    tower: AudioShape = AudioShape()
    speech: SpeechShape | None = Field(
        None, exclude_if=lambda shape: shape is None, description="head that speaks; none: the default of its codec"
    )
    head: float | None = Field(
        None,
        ge=0,
        exclude_if=lambda share: share is None,
        description="rate of the head that speaks; none: 0 in the stage connector, 1 in the others",
    )

    modality: ClassVar[Modality] = AUDIO
    stages: ClassVar[dict[Stage, dict[str, Any]]] = {
        "connector": {"lr": 1e-3, "encoder": 0.0, "backbone": 0.0, "text": 0.0},
        "mid": {"lr": 1e-4},
        "joint": {"lr": 3e-5, "context": 8192},
    }

    def optimiser(self) -> Optimiser:
        settings = super().optimiser()
        head = float(self.stage != "connector") if self.head is None else self.head
        return replace(settings, parts={**settings.parts, "head": head})

    def spoken(self, codebooks: Codebooks) -> SpeechShape:
        shape = self.speech or SpeechShape(codebooks=codebooks.codebooks, entries=codebooks.entries)
        if shape.books != codebooks.books:
            count, entries = codebooks.books
            raise InvalidInput(f"the codec has {count} codebooks of {entries} entries", where="speech")
        return shape
