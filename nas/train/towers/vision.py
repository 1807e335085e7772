"""The tower of images: SigLIP2 in its NaFlex variant (Tschannen et al. 2025), by transformers, and PixelUnshuffle.

Frames have any number of patches and any aspect: positions are interpolated. Each square of `factor` x `factor`
patches becomes one feature, and one token of the language model (LFM2 report, section 5.1.1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Siglip2VisionConfig
from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionModel

from nas.train.towers.model import Connector, Tower

CHANNELS = 3


class VisionShape(BaseModel):
    """Shape of a tower; names and defaults are those of transformers' Siglip2VisionConfig and Lfm2VlConfig."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hidden_size: int = Field(768, ge=1, le=8192, description="of the encoder")
    intermediate_size: int = Field(3072, ge=1, le=65536)
    num_hidden_layers: int = Field(12, ge=1, le=128)
    num_attention_heads: int = Field(12, ge=1, le=256)
    patch_size: int = Field(16, ge=1, le=64, description="pixels of a side of a patch")
    num_patches: int = Field(256, ge=1, le=16384, description="learnt positions, a square")
    layer_norm_eps: float = Field(1e-6, gt=0, lt=1)
    downsample_factor: int = Field(2, ge=1, le=8, description="patches of a side of what becomes one token")
    projector_hidden_size: int = Field(2560, ge=1, le=65536)
    projector_bias: bool = True
    projector_use_layernorm: bool = True

    @model_validator(mode="after")
    def _fits(self) -> VisionShape:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(f"{self.num_attention_heads} heads do not divide hidden_size, {self.hidden_size}")
        if math.isqrt(self.num_patches) ** 2 != self.num_patches:
            raise ValueError(f"num_patches must be a square, not {self.num_patches}")
        return self

    def encoder(self) -> dict[str, Any]:
        """Returns the arguments of the encoder's configuration in transformers."""
        apart = {"downsample_factor", "projector_hidden_size", "projector_bias", "projector_use_layernorm"}
        fixed = {"num_channels": CHANNELS, "hidden_act": ACTIVATION, "vision_use_head": False}
        return self.model_dump(exclude=apart) | fixed


ACTIVATION = "gelu_pytorch_tanh"
"""Of the encoder, as every SigLIP2 has it."""


class VisionTower(Tower):
    """The tower of images.

    Args:
        shape: of encoder and connector.
        d_model: width of the language model.
        seed: of the encoder's start values.
    """

    def __init__(self, shape: VisionShape, d_model: int, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            self.encoder = Siglip2VisionModel(Siglip2VisionConfig(**shape.encoder()))
        self.connector = Connector(
            shape.hidden_size * shape.downsample_factor**2,
            shape.projector_hidden_size,
            d_model,
            norm=shape.projector_use_layernorm,
            bias=shape.projector_bias,
        )

    def features(self, *inputs: Tensor) -> Tensor:
        """Returns the features of frames, one after another, each from its top row down.

        inputs: see `stacked`.
        """
        patches, sizes = inputs
        mask = torch.arange(patches.shape[1], device=sizes.device) < sizes.prod(1)[:, None]
        states = self.encoder(patches, pixel_attention_mask=mask.long(), spatial_shapes=sizes).last_hidden_state
        frames = (
            unshuffled(rows[: height * width].view(height, width, -1), self.shape.downsample_factor)
            for rows, (height, width) in zip(states, sizes.tolist(), strict=True)
        )
        return torch.cat([frame.flatten(0, 1) for frame in frames])


def unshuffled(rows: Tensor, factor: int) -> Tensor:
    """Puts the channels of each square of `factor` x `factor` one after another: [H, W, C] -> [H/f, W/f, f f C]."""
    height, width, channels = rows.shape
    squares = rows.view(height // factor, factor, width // factor, factor, channels)
    return squares.transpose(1, 2).flatten(2)


def stacked(frames: Sequence[tuple[Tensor, tuple[int, int]]], patch: int) -> tuple[Tensor, Tensor]:
    """Returns frames as one batch: patches [N, P, patch patch 3], padded with zeros, and heights and widths [N, 2].

    Args:
        frames: patches of each, [H W, patch patch 3], with H and W.
        patch: pixels of a side of a patch.
    """
    if not frames:
        return torch.zeros(0, 1, patch * patch * CHANNELS), torch.zeros(0, 2, dtype=torch.int64)
    return pad_sequence([patches for patches, _ in frames], True), torch.tensor([size for _, size in frames])
