"""The tower of images: SigLIP2 in its NaFlex variant (Tschannen et al. 2025), by transformers, and PixelUnshuffle.

Frames have any number of patches and any aspect: positions are interpolated. Each square of `factor` x `factor`
patches becomes one feature, and one token of the language model (LFM2 report, section 5.1.1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor
from transformers import Siglip2VisionConfig
from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionModel

from nas.core.tower import ImageTower
from nas.model.nn.tower import SHAPE_IN_ALL, unshuffled
from nas.train.towers.images import TOKENS, FrameSettings
from nas.train.towers.modality import Modality, Processor, Shape, checked
from nas.train.towers.model import Tower
from nas.train.towers.training import Stage, TowerSettings

_ACTIVATION = SHAPE_IN_ALL["hidden_act"]


class VisionShape(Shape):
    """Shape of a tower; names and defaults are those of transformers' Siglip2VisionConfig and Lfm2VlConfig."""

    hidden_size: int = Field(768, ge=1, le=8192, description="of the encoder")
    intermediate_size: int = Field(3072, ge=1, le=65536)
    num_hidden_layers: int = Field(12, ge=1, le=128)
    num_attention_heads: int = Field(12, ge=1, le=256)
    patch_size: int = Field(16, ge=1, le=64, description="pixels of a side of a patch")
    num_patches: int = Field(256, ge=1, le=16384, description="learnt positions, a square")
    layer_norm_eps: float = Field(1e-6, gt=0, lt=1)
    downsample_factor: int = Field(2, ge=1, le=8, description="patches of a side of what becomes one token")
    projector_hidden_size: int = Field(2560, ge=1, le=65536)

    apart: ClassVar[frozenset[str]] = Shape.apart | {"downsample_factor"}
    fixed: ClassVar[Mapping[str, Any]] = SHAPE_IN_ALL
    encoder_type: ClassVar[str] = "siglip2_vision_model"
    last: ClassVar[str] = "post_layernorm.weight"

    @model_validator(mode="after")
    def _fits(self) -> VisionShape:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(f"{self.num_attention_heads} heads do not divide hidden_size, {self.hidden_size}")
        if math.isqrt(self.num_patches) ** 2 != self.num_patches:
            raise ValueError(f"num_patches must be a square, not {self.num_patches}")
        return self

    @classmethod
    def problem(cls, encoder: Mapping[str, Any]) -> str | None:
        if encoder.get("model_type", cls.encoder_type) not in (cls.encoder_type, "siglip2"):
            return "its encoder is no SigLIP2"
        if encoder.get("hidden_act", _ACTIVATION) != _ACTIVATION:
            return "its encoder or connector has another activation"
        return (
            "its encoder reads other channels than red, green and blue" if encoder.get("num_channels", 3) != 3 else None
        )

    def processor(self) -> dict[str, Any]:
        return {"encoder_patch_size": self.patch_size, "downsample_factor": self.downsample_factor}

    def layout(self) -> ImageTower:
        """Returns the shape as a layout names it, with the usual limit of tokens."""
        return ImageTower(
            self.hidden_size,
            self.num_hidden_layers,
            self.num_attention_heads,
            self.intermediate_size,
            self.projector_hidden_size,
            self.patch_size,
            self.downsample_factor,
        )

    def tower(self, d_model: int, seed: int = 0) -> Tower:
        return VisionTower(self, d_model, seed)


class VisionTower(Tower):
    """The tower of images.

    Args:
        shape: of encoder and connector.
        d_model: width of the language model.
        seed: of the encoder's start values.
    """

    def __init__(self, shape: VisionShape, d_model: int, seed: int = 0) -> None:
        super().__init__()
        self._factor = shape.downsample_factor
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            self.encoder = Siglip2VisionModel(Siglip2VisionConfig(**shape.encoder()))
        self.connector = shape.connected(shape.hidden_size * self._factor**2, d_model)

    def features(self, *inputs: Tensor) -> Tensor:
        """Returns the features of frames, one after another, each from its top row down.

        inputs: see `FrameSettings.inputs`.
        """
        patches, sizes = inputs
        mask = torch.arange(patches.shape[1], device=sizes.device) < sizes.prod(1)[:, None]
        states = self.encoder(patches, pixel_attention_mask=mask.long(), spatial_shapes=sizes).last_hidden_state
        frames = (
            unshuffled(rows[: height * width].view(height, width, -1), self._factor)
            for rows, (height, width) in zip(states, sizes.tolist(), strict=True)
        )
        return torch.cat([frame.flatten(0, 1) for frame in frames])


VISION = Modality(
    name="vision",
    kind="image",
    noun="image",
    keys=("images", "image", "file_name"),
    tokens=TOKENS,
    own_type="hilnas_vl",
    stock=("lfm2_vl", "Lfm2VlForConditionalGeneration"),
    shape=VisionShape,
    processor=FrameSettings,
)
"""Models that read images."""

_SMALL_RATE = 0.2


class VisionSettings(TowerSettings):
    """Settings of a stage of a model that reads images.

    In `mid`, rates are 5:5:1 for language model, connector and encoder, there are no tiles, and the share of text falls
    from 1 to 0.3 over the first twentieth of the steps. The report has the rates' ratio, the weight decay and the
    shares of text; it does not publish the rates themselves, nor their ratio in the last stage.
    """

    tiles: int = Field(1, ge=1, le=10, description="most tiles of an image; 1: none")
    image_tokens: tuple[int, int] | None = Field(
        None, description="fewest and most tokens of a frame; none: as before, or 64 and 256"
    )
    tower: VisionShape = VisionShape()

    modality: ClassVar[Modality] = VISION
    stages: ClassVar[dict[Stage, dict[str, Any]]] = {
        "connector": {"lr": 1e-3, "encoder": 0.0, "backbone": 0.0, "text": 0.0, "tiles": 1},
        "mid": {"lr": 1e-4, "encoder": _SMALL_RATE, "weight_decay": 1e-6, "text_first": 1.0, "tiles": 1},
        "joint": {"lr": 3e-5, "encoder": _SMALL_RATE, "tiles": 10, "context": 8192},
    }

    def processor(self, before: Processor) -> FrameSettings:
        assert isinstance(before, FrameSettings)
        most = {"do_image_splitting": self.tiles > 1, "max_tiles": max(self.tiles, before.min_tiles)}
        tokens = dict(zip(("min_image_tokens", "max_image_tokens"), self.image_tokens or (), strict=False))
        return checked(FrameSettings, before.model_dump() | most | tokens, "image_tokens")
