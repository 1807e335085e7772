"""Models with towers: an encoder of something other than text, a connector, and a layout as the language model.

    inputs -> encoder -> features [N, F] -> connector -> embeddings [N, D], which replace those of placeholder tokens
    tokens -> backbone.embed -------------------------^ -> backbone -> logits

A tower is a subclass of `Tower`: that of images is `nas.train.towers.vision.VisionTower`, that of sound
`nas.train.towers.audio.AudioTower`. What a model answers comes from the backbone's own output head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.model.nn.model import Model
from nas.model.nn.tower import Connector


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
