"""Speech as the answer of a language model: a head that predicts frames of codes (LFM2 report, sections 6.1.2 to 6.3).

    backbone's features [N, D] -> project -> inputs [N, Q, d], to each of which the code before it is added
      -> a layout's layers, over the Q codebooks of the frame -> logits [N, Q, entries + 1]

and the frame's Q codes, embedded and summed, are the backbone's next input. The last entry of each codebook ends the
sound. A `Turn` says what comes next, text or sound: in generation, and in the sequences to train on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from nas.core.errors import InvalidInput
from nas.model.nn.model import Model, ModelState
from nas.model.nn.primitives import Embedding, Linear, draw_weights
from nas.train.towers.detokenizer import Codebooks

Mode = Literal["interleaved", "sequential"]

SPEECH_TOKENS = ("<|audio_start|>", "<|text_end|>", "<|audio_frame|>")
"""Special tokens in the order of `SpeechTokens`."""
TEXT_STEPS, SOUND_STEPS = 6, 12
_FIRST_WEIGHT = 100.0


class SpeechShape(Codebooks):
    """Shape of a head; the default has the report's 115 million weights with a language model of width 2048."""

    rq: str = Field("d1024 ffn=swiglu:3456 [A16/8*6]", description="layout of the layers over a frame's codebooks")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        try:
            layout = self.layout(self.rq, self.entries + 1)
        except InvalidInput as error:
            raise ValueError(f"rq: {error.message}") from error
        if not layout.tied:
            raise ValueError("rq: the layout's output head must be tied")
        return self


class SpeechTokens(NamedTuple):
    """Ids of special tokens.

    Args:
        start: after which sound follows, in sequential generation.
        text_end: after which no text follows, in interleaved generation.
        frame: stands for a frame of codes.
    """

    start: int
    text_end: int
    frame: int


class SpeechHead(nn.Module):
    """The head of a language model that speaks.

    Args:
        shape: of codebooks and layers.
        d_model: width of the language model, D.
        tokens: of the language model.
    """

    def __init__(self, shape: SpeechShape, d_model: int, tokens: SpeechTokens) -> None:
        super().__init__()
        self.shape, self.tokens, self.end = shape, tokens, shape.entries
        self.layers = Model(shape.layout(shape.rq, shape.entries + 1), None)
        self.embed = Embedding(self.layers.layout.vocab, d_model)
        self.project = Linear(d_model, shape.codebooks * self.layers.layout.d_model)

    @torch.no_grad()
    def draw(self, seed: int, like: Tensor) -> None:
        """Fills the head with start values whose summed embeddings are as large as the rows `like`, [V, D]."""
        draw_weights(self, seed, self.layers.layout.depth)
        size = self.shape.codebooks * self.embed.weight.square().mean()
        self.embed.weight.mul_(like.square().mean().div(size).sqrt())

    def embeddings(self, codes: Tensor) -> Tensor:
        """Returns the summed embeddings [..., D] of frames [..., Q]."""
        embedded: Tensor = self.embed(self._rows(codes))
        return embedded.sum(-2)

    def logits(self, features: Tensor, codes: Tensor) -> Tensor:
        """Returns logits [N, Q, entries + 1] of the codes of frames [N, Q], each from those before it."""
        inputs = self._inputs(features)
        before = F.pad(self.layers.embed(self._rows(codes[:, :-1])), (0, 0, 1, 0))
        return torch.einsum("nqd,qed->nqe", self.layers.features(inputs + before), self._entries())

    def nats(self, features: Tensor, codes: Tensor) -> Tensor:
        """Returns the weighted mean of the cross-entropies of each frame's codes, [N].

        Weights fall from 100 for the first codebook exponentially to 1 for the last (LFM2 report, section 6.3).
        """
        nats = F.cross_entropy(self.logits(features, codes).float().mT, codes, reduction="none")
        weights = _FIRST_WEIGHT ** torch.linspace(1, 0, codes.shape[1], device=nats.device)
        return (nats * weights).sum(-1) / weights.sum()

    def frame(self, features: Tensor, pick: Callable[[Tensor], int]) -> Tensor:
        """Returns the next frame [Q] behind features [D], Q steps of the layers; `pick` draws a code from logits.

        Whether the sound ends is the first code alone; then all are the end.
        """
        inputs, entries = self._inputs(features[None]), self._entries()
        codes: list[int] = []
        state: ModelState | None = None
        before: Tensor | float = 0.0
        for book in range(self.shape.codebooks):
            hidden, state = self.layers.read(inputs[:, book : book + 1] + before, state)
            logits = entries[book] @ hidden[0, 0]
            codes.append(pick(logits[: self.end] if book else logits))
            if codes[0] == self.end:
                return torch.full((self.shape.codebooks,), self.end)
            before = self.layers.embed(torch.tensor([[codes[-1] + book * (self.end + 1)]]))
        return torch.tensor(codes)

    def _rows(self, codes: Tensor) -> Tensor:
        return self.shape.rows(codes, self.end + 1)

    def _inputs(self, features: Tensor) -> Tensor:
        return torch.unflatten(self.project(features), -1, (self.shape.codebooks, -1))

    def _entries(self) -> Tensor:
        """Returns the rows of each codebook, [Q, entries + 1, d]; they are inputs and outputs of the layers."""
        return torch.unflatten(self.layers.embed.weight, 0, (self.shape.codebooks, -1))


@dataclass
class Turn:
    """Whether text or sound comes next in an answer.

    Interleaved: 6 tokens of text, 12 frames, and so on; behind `text_end` only frames until the sound ends, and then
    text, which is the end of the turn. Sequential: text; behind `start` frames until the sound ends, and then text.

    Attributes:
        speaking: whether a frame comes next.
    """

    mode: Mode
    tokens: SpeechTokens
    speaking: bool = False
    _steps_left: int = field(default=TEXT_STEPS, init=False)
    _text_over: bool = field(default=False, init=False)
    _sound_over: bool = field(default=False, init=False)

    def say(self, token: int) -> None:
        """Updates the state after a token of text."""
        if self.mode == "sequential":
            self.speaking = token == self.tokens.start
            return
        self._steps_left -= 1
        self._text_over |= token == self.tokens.text_end
        if (self._text_over or not self._steps_left) and not self._sound_over:
            self.speaking, self._steps_left = True, SOUND_STEPS

    def sound(self, *, end: bool) -> None:
        """Updates the state after a frame; `end`: its codes are those that end the sound."""
        self._steps_left -= 1
        self._sound_over |= end
        if end or (self.mode == "interleaved" and not self._steps_left and not self._text_over):
            self.speaking, self._steps_left = False, TEXT_STEPS


def woven(mode: Mode, tokens: SpeechTokens, text: Sequence[int], frames: int) -> list[int]:
    """Returns the ids of an answer with `tokens.frame` for each frame, without the token that ends the turn.

    Args:
        mode: of the generation that is trained.
        tokens: of the language model.
        text: of the answer.
        frames: of its sound, with that which ends it.
    """
    turn, ids, spoken = Turn(mode, tokens), list[int](), 0
    for token in (*text, tokens.start if mode == "sequential" else tokens.text_end):
        ids.append(token)
        turn.say(token)
        while turn.speaking:
            spoken += 1
            ids.append(tokens.frame)
            turn.sound(end=spoken == frames)
    return ids
