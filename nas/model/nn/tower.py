"""What reads images in front of a language model: SigLIP2's encoder, by transformers, PixelUnshuffle and a connector.

Positions are interpolated, so that frames have any number of patches and any aspect. Each square of `factor` x `factor`
patches becomes one feature, and one token of the language model (LFM2 report, section 5.1.1).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nas.core.errors import InfrastructureFailed
from nas.core.tower import POSITIONS, Tower
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


class PictureTower(nn.Module):
    """The tower of a layout, for batches of pictures of one size; those of files are in `nas.train.towers`.

    Args:
        tower: its shape.
        d_model: width of the language model.
        seed: of the encoder's start values; the connector's are drawn with `Connector.draw`.

    Raises:
        InfrastructureFailed: transformers is not installed.
    """

    def __init__(self, tower: Tower, d_model: int, seed: int) -> None:
        super().__init__()
        try:
            from transformers import Siglip2VisionConfig
            from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionModel
        except ImportError as error:
            raise InfrastructureFailed(
                "models that read images need transformers: install the extra `vision`"
            ) from error
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

    def forward(self, pixels: Tensor) -> Tensor:
        """Returns embeddings [B, N, D] of pictures, uint8 [B, H, W, 3], scaled to as many tokens as the tower gives."""
        tower, batch = self._tower, len(pixels)
        rows, columns = (tokens * tower.factor for tokens in tower.grid(*pixels.shape[1:3]))
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


def unshuffled(rows: Tensor, factor: int) -> Tensor:
    """Joins the channels of each square of `factor` x `factor`: [..., H, W, C] -> [..., H/f, W/f, f f C]."""
    *batch, height, width, channels = rows.shape
    squares = rows.reshape(*batch, height // factor, factor, width // factor, factor, channels)
    return squares.transpose(-4, -3).flatten(-3)
