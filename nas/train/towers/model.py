"""Models with towers: an encoder of something other than text, a connector, and a layout as the language model.

    inputs -> encoder -> features [N, F] -> connector -> embeddings [N, D], which replace those of placeholder tokens
    tokens -> backbone.embed -------------------------^ -> backbone -> logits
    codes  -> head.embeddings ------------------------^             -> head -> logits of codes, if the model speaks

A tower is a subclass of `Tower`: that of images is `nas.train.towers.vision.VisionTower`, that of sound
`nas.train.towers.audio.AudioTower`. Text comes from the backbone's own output head, sound from a
`nas.train.towers.speech.SpeechHead`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.measure.runtimes.dialogue import draw
from nas.model.nn.model import Model
from nas.model.nn.tower import Connector
from nas.train.towers.speech import Mode, SpeechHead, Turn


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
        head: with which it speaks; None: it does not.
    """

    def __init__(
        self, layout: Layout, tower: Tower, placeholder: int, seed: int | None = None, head: SpeechHead | None = None
    ) -> None:
        super().__init__()
        self.tower, self.backbone, self.placeholder, self.head = tower, Model(layout, seed), placeholder, head

    def embeddings(self, tokens: Tensor, *inputs: Tensor, codes: Tensor | None = None) -> Tensor:
        """Returns the embeddings [B, T, D] of token ids [B, T], those of placeholders from the tower and the head.

        inputs: of the tower, in the order of the placeholders; of all rows together.
        codes: frames [N, Q], likewise.

        Raises:
            InvalidInput: there are more placeholders than embeddings of the tower or frames, or fewer.
        """
        embedded: Tensor = self.backbone.embed(tokens)
        rows = self.tower(*inputs) if inputs and len(inputs[0]) else embedded[:0, 0]
        embedded = _placed(embedded, tokens == self.placeholder, rows)
        if self.head is None or codes is None:
            return embedded
        return _placed(embedded, tokens == self.head.tokens.frame, self.head.embeddings(codes))

    def forward(self, tokens: Tensor, *inputs: Tensor) -> Tensor:
        """Returns logits [B, T, V]."""
        logits: Tensor = self.backbone(self.embeddings(tokens, *inputs))
        return logits

    @torch.no_grad()
    def spoken(
        self,
        question: Tensor,
        most: int,
        ends: Collection[int],
        mode: Mode,
        *,
        temperature: float = 0.0,
        seed: int = 0,
        seconds: dict[str, float] | None = None,
    ) -> Iterator[int | Tensor]:
        """Yields an answer in text and sound: tokens, and frames [Q], as they are computed.

        Args:
            question: ids [1, T] or embeddings [1, T, D].
            most: tokens and frames.
            ends: tokens after which the answer is over.
            mode: in which text and sound follow each other.
            temperature: of sampling; 0: the likeliest token or code each time.
            seed: of sampling.
            seconds: takes those of `backbone`, its output head included, and of `RQ head`.
        """
        assert self.head is not None
        rng, turn = np.random.default_rng(seed), Turn(mode, self.head.tokens)
        spent = dict[str, float]() if seconds is None else seconds

        def pick(logits: Tensor) -> int:
            return draw(logits.double().numpy(), temperature, rng)

        inputs, state = question, None
        for _ in range(most):
            with timed(spent, "backbone"):
                features, state = self.backbone.read(inputs, state)
            if turn.speaking:
                with timed(spent, "RQ head"):
                    codes = self.head.frame(features[0, -1], pick)
                    inputs = self.head.embeddings(codes)[None, None]
                yield codes
                turn.sound(end=int(codes[0]) == self.head.end)
            else:
                with timed(spent, "backbone"):
                    token = pick(self.backbone.logits(features[0, -1]))
                yield token
                if token in ends:
                    return
                turn.say(token)
                inputs = torch.tensor([[token]])


@contextmanager
def timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    """Adds the seconds that the block takes to those of a part."""
    start = time.perf_counter()
    yield
    seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - start


def _placed(embedded: Tensor, places: Tensor, rows: Tensor) -> Tensor:
    """Returns embeddings [B, T, D] with rows [N, D] at the places [B, T]."""
    if len(rows) != (count := int(places.sum())):
        raise InvalidInput(f"{count:,} placeholders for {len(rows):,} embeddings")
    return embedded.masked_scatter(places[..., None], rows.to(embedded.dtype))
