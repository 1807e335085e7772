"""What reads images or sound in front of a language model: an encoder by transformers, and a connector.

That of images is SigLIP2's, with PixelUnshuffle behind it. Positions are interpolated, so that frames have any number
of patches and any aspect. Each square of `factor` x `factor` patches becomes one feature, and one token of the language
model (LFM2 report, section 5.1.1). That of sound is Parakeet's, of which 8 features become one token (section 6.1.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nas.core.errors import InfrastructureFailed
from nas.core.tower import KERNEL, POSITIONS, SUBSAMPLING, ImageTower, SoundTower, Tower
from nas.model.nn.primitives import Linear, draw_weights

SHAPE_IN_ALL = {"num_channels": 3, "hidden_act": "gelu_pytorch_tanh", "vision_use_head": False}
"""Arguments of the encoder's configuration that are the same for all."""


class Connector(nn.Module):
    """LayerNorm, linear, GELU, linear: features [N, F] -> embeddings [N, D] (LFM2 report, sections 5.1.1 and 6.1.1).

    Tensors have the names and shapes of transformers' Lfm2VlMultiModalProjector.

    Args:
        inputs: F.
        hidden: width between the two linear maps.
        outputs: D.
        norm: whether there is a LayerNorm.
        bias: whether the linear maps have biases.
    """

    def __init__(self, inputs: int, hidden: int, outputs: int, *, norm: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(inputs) if norm else nn.Identity()
        self.linear_1 = Linear(inputs, hidden, bias=bias)
        self.linear_2 = Linear(hidden, outputs, bias=bias)

    def forward(self, features: Tensor) -> Tensor:
        hidden: Tensor = self.linear_1(self.layer_norm(features))
        embeddings: Tensor = self.linear_2(F.gelu(hidden))
        return embeddings

    @torch.no_grad()
    def draw(self, seed: int, like: Tensor) -> None:
        """Fills the linear maps with start values that give embeddings as large as the rows `like`, [V, D]."""
        draw_weights(self, seed, 1)
        self.linear_2.weight.mul_(like.square().mean().sqrt())


SOUND_IN_ALL = {
    "hidden_act": "silu",
    "subsampling_conv_kernel_size": 3,
    "subsampling_conv_stride": 2,
    **dict.fromkeys(("dropout", "dropout_positions", "activation_dropout", "attention_dropout", "layerdrop"), 0.0),
}
"""The same of encoders of sound."""


def open_tower(tower: Tower, d_model: int, seed: int) -> PictureTower | SoundReader:
    """Returns the tower of a layout, for batches of a task; those of files are in `nas.train.towers`.

    Args:
        tower: its shape.
        d_model: width of the language model.
        seed: of the encoder's start values; the connector's are drawn with `Connector.draw`.

    Raises:
        InfrastructureFailed: transformers is not installed.
    """
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        extra = "vision" if tower.media == "images" else "audio"
        raise InfrastructureFailed(
            f"models that read {tower.media} need transformers: install the extra `{extra}`"
        ) from error
    if isinstance(tower, ImageTower):
        return PictureTower(tower, d_model, seed)
    assert isinstance(tower, SoundTower)
    return SoundReader(tower, d_model, seed)


class PictureTower(nn.Module):
    """The tower of a layout, for batches of pictures of one size."""

    def __init__(self, tower: ImageTower, d_model: int, seed: int) -> None:
        super().__init__()
        from transformers import Siglip2VisionConfig
        from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionModel

        self._tower = tower
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            self.encoder = Siglip2VisionModel(
                Siglip2VisionConfig(
                    hidden_size=tower.width,
                    intermediate_size=tower.ffn,
                    num_hidden_layers=tower.layers,
                    num_attention_heads=tower.heads,
                    patch_size=tower.patch,
                    num_patches=POSITIONS,
                    **SHAPE_IN_ALL,
                )
            )
        self.connector = Connector(tower.width * tower.factor**2, tower.connector, d_model)

    def forward(self, numbers: Tensor) -> Tensor:
        """Returns embeddings [B, N, D] of pixels 0xRRGGBB [B, H, W], scaled to as many tokens as the tower gives."""
        tower, batch = self._tower, len(numbers)
        pixels = numbers[..., None] >> torch.tensor([16, 8, 0], device=numbers.device) & 255
        rows, columns = (tokens * tower.factor for tokens in tower.grid(*numbers.shape[1:]))
        size = rows * tower.patch, columns * tower.patch
        images = pixels.permute(0, 3, 1, 2).float() / 127.5 - 1
        if images.shape[2:] != size:
            images = F.interpolate(images, size, mode="bilinear", align_corners=False, antialias=True)
        patches = images.view(batch, 3, rows, tower.patch, columns, tower.patch).permute(0, 2, 4, 3, 5, 1)
        patches = patches.reshape(batch, rows * columns, -1)
        sizes = torch.tensor([[rows, columns]], device=pixels.device).expand(batch, 2)
        mask = torch.ones(batch, rows * columns, dtype=torch.int64, device=pixels.device)
        states = self.encoder(patches, pixel_attention_mask=mask, spatial_shapes=sizes).last_hidden_state
        features = unshuffled(states.view(batch, rows, columns, -1), tower.factor)
        embeddings: Tensor = self.connector(features.flatten(1, 2))
        return embeddings


class SoundReader(nn.Module):
    """The tower of a layout, for batches of sounds of one length.

    Convolutions start with He's deviation and biases with 0: of PyTorch's start values, biases are so much larger than
    what is heard that of the variance of the embeddings 0.05 % is of the sound, and a training of seconds learns
    nothing.
    """

    def __init__(self, tower: SoundTower, d_model: int, seed: int) -> None:
        super().__init__()
        sizes = {
            "hidden_size": tower.width,
            "intermediate_size": tower.ffn,
            "num_hidden_layers": tower.layers,
            "num_attention_heads": tower.heads,
            "conv_kernel_size": KERNEL,
            "subsampling_conv_channels": tower.channels,
            "subsampling_factor": SUBSAMPLING,
            "num_mel_bins": tower.bands,
        }
        self.encoder = sound_encoder({**sizes, **SOUND_IN_ALL}, seed)
        generator = torch.Generator().manual_seed(seed)
        for module in self.encoder.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu", generator=generator)
            if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d) and module.bias is not None:
                nn.init.zeros_(module.bias)
        self.connector = Connector(tower.width, tower.connector, d_model)
        self.train()

    def train(self, mode: bool = True) -> Self:
        """Sets the mode of training; a BatchNorm keeps its statistics, see `keep_statistics`."""
        super().train(mode)
        keep_statistics(self)
        return self

    def forward(self, numbers: Tensor) -> Tensor:
        """Returns embeddings [B, N, D] of features in thousandths [B, T, bands]; a row of zeros ends each sound."""
        states = self.encoder(F.pad(numbers / 1000, (0, 0, 0, 1))).last_hidden_state
        embeddings: Tensor = self.connector(states)
        return embeddings


def sound_encoder(config: Mapping[str, Any], seed: int) -> nn.Module:
    """Returns an encoder of sound, of a configuration of transformers' Parakeet, with start values.

    These are PyTorch's: drawn with transformers' deviation of 0.02, the convolutions let 1e-5 of the features pass.
    """
    from transformers import ParakeetEncoder, ParakeetEncoderConfig

    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        encoder: nn.Module = ParakeetEncoder(ParakeetEncoderConfig(**config))
        for module in encoder.modules():
            if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d):
                module.reset_parameters()
    return encoder


def keep_statistics(module: nn.Module) -> None:
    """Lets each BatchNorm in training keep its statistics, so that a batch changes no other."""
    for part in module.modules():
        if isinstance(part, nn.BatchNorm1d):
            part.eval()


def unshuffled(rows: Tensor, factor: int) -> Tensor:
    """Joins the channels of each square of `factor` x `factor`: [..., H, W, C] -> [..., H/f, W/f, f f C]."""
    *batch, height, width, channels = rows.shape
    squares = rows.reshape(*batch, height // factor, factor, width // factor, factor, channels)
    return squares.transpose(-4, -3).flatten(-3)
