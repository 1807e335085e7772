"""Models with towers: an encoder of something other than text, a connector, and a layout as the language model.

    inputs -> encoder -> features [N, F] -> connector -> embeddings [N, D], which replace those of placeholder tokens
    tokens -> backbone.embed -------------------------^ -> backbone -> logits

A tower is a subclass of `Tower`: that of images is `nas.train.towers.vision.VisionTower`, that of sound
`nas.train.towers.audio.AudioTower`. What a model answers comes from the backbone's own output head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.model.nn.model import Model
from nas.model.nn.primitives import Linear, draw_weights


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


class Tower(nn.Module, ABC):
    """An encoder with its connector.

    Attributes:
        encoder: any module.
        connector: maps its features to embeddings.
    """

    encoder: nn.Module
    connector: Connector

    @abstractmethod
    def features(self, *inputs: Tensor) -> Tensor:
        """Returns the encoder's features of all inputs, one after another, [N, F]."""

    def forward(self, *inputs: Tensor) -> Tensor:
        """Returns embeddings [N, D]."""
        embeddings: Tensor = self.connector(self.features(*inputs))
        return embeddings


class TowerModel(nn.Module):
    """A language model that reads what a tower encodes.

    Args:
        layout: of the language model.
        tower: with embeddings of the layout's width.
        placeholder: id of the token that stands for one embedding of the tower.
        seed: of the language model's start values; None: weights are left as allocated.
    """

    def __init__(self, layout: Layout, tower: Tower, placeholder: int, seed: int | None = None) -> None:
        super().__init__()
        self.tower, self.backbone, self.placeholder = tower, Model(layout, seed), placeholder

    def embeddings(self, tokens: Tensor, *inputs: Tensor) -> Tensor:
        """Returns the embeddings [B, T, D] of token ids [B, T], those of placeholders from the tower.

        inputs: of the tower, in the order of the placeholders; of all rows together.

        Raises:
            InvalidInput: there are more placeholders than embeddings of the tower, or fewer.
        """
        embedded: Tensor = self.backbone.embed(tokens)
        places = tokens == self.placeholder
        rows = self.tower(*inputs) if inputs and len(inputs[0]) else embedded[:0, 0]
        if len(rows) != (count := int(places.sum())):
            raise InvalidInput(f"{count:,} placeholders for {len(rows):,} embeddings")
        return embedded.masked_scatter(places[..., None], rows.to(embedded.dtype))

    def forward(self, tokens: Tensor, *inputs: Tensor) -> Tensor:
        """Returns logits [B, T, V]."""
        logits: Tensor = self.backbone(self.embeddings(tokens, *inputs))
        return logits
