"""Steps of a whole graph: the programs of an artifact with their state in buffers of the graph itself.

What a position means is worked out once a call (`Moment`). A call at position 0 starts a new text: it sees nothing of
what buffers hold, so nobody has to clear them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from nas.core.block import Block
from nas.runtimes.executorch.chain import Attend, Cache
from nas.runtimes.executorch.lowering import state_shape
from nas.runtimes.executorch.modules import Attention, ProgramModule
from nas.runtimes.executorch.programs import CHUNK

_NEVER = -1e30
"""What masks add to scores: lost beside any number, and no infinity whose difference with another is none."""


@dataclass(frozen=True)
class Moment:
    """What all steps of one call share.

    Args:
        at: position of the first token.
        begins: [1], whether that is the first of a text.
        turns: cosines and sines [1, S, 1, head_dim / 2] by RoPE base and head size.
        seen: rows to write [1, S] and masks [S, R] by window.
    """

    at: int
    begins: Tensor
    turns: dict[tuple[float, int], tuple[Tensor, Tensor]]
    seen: dict[int, tuple[Tensor, Tensor]]


class Rope(nn.Module):
    """Cosines and sines of RoPE: those of the runner, number for number."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, theta: float, head_dim: int, context: int) -> None:
        super().__init__()
        half = head_dim // 2
        frequencies = (theta ** (-np.arange(half, dtype=np.float64) / half)).astype(np.float32)
        angles = (np.arange(context, dtype=np.float32)[:, None] * frequencies).astype(np.float64)
        self.register_buffer("cosines", torch.from_numpy(np.cos(angles).astype(np.float32)))
        self.register_buffer("sines", torch.from_numpy(np.sin(angles).astype(np.float32)))

    def forward(self, at: int, length: int) -> tuple[Tensor, Tensor]:
        """See `Moment.turns`."""
        return self.cosines.narrow(0, at, length)[None, :, None], self.sines.narrow(0, at, length)[None, :, None]


class Window(nn.Module):
    """Which rows of a cache that is written round and round a token sees.

    Row r of R holds the newest token whose position is r modulo R. A window of W tokens needs R = W - 1 + CHUNK rows:
    the first token of a chunk still sees W - 1 before it when the last has been written.
    """

    rows: Tensor
    steps: Tensor

    def __init__(self, window: int, rows: int) -> None:
        super().__init__()
        self.window, self.count = window, rows
        self.register_buffer("rows", torch.arange(rows))
        self.register_buffer("steps", torch.arange(CHUNK))

    def forward(self, position: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """See `Moment.seen`."""
        positions = self.steps.narrow(0, 0, length) + position
        last = position + (length - 1)
        held = last - torch.remainder(last - self.rows, self.count)  # positions by row; negative: none yet
        ago = positions.unsqueeze(1) - held.unsqueeze(0)
        sees = torch.logical_and(torch.logical_and(ago >= 0, ago < self.window), held >= 0)
        return torch.remainder(positions, self.count).unsqueeze(0), torch.where(sees, 0.0, _NEVER)


class KeyValueCache(nn.Module):
    """Keys and values [1, R, KV, head_dim]; R tokens of context, or what `Window` says."""

    keys: Tensor
    values: Tensor

    def __init__(self, cache: Cache, context: int) -> None:
        super().__init__()
        self.window = cache.window if cache.window < context else 0
        self.count = min(context, self.window - 1 + CHUNK) if self.window else context
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, self.count, cache.kv_heads, cache.head_dim))

    def append(self, keys: Tensor, values: Tensor, moment: Moment) -> None:
        """Writes what a chunk adds, [1, S, KV, head_dim] each."""
        for new, rows in ((keys, self.keys), (values, self.values)):
            if self.window:
                torch.ops.llama.update_cache_with_indices(new, rows, 0, moment.seen[self.window][0])
            else:
                torch.ops.llama.update_cache(new, rows, moment.at)

    def attend(self, q: Tensor, moment: Moment) -> Tensor:
        """Q [1, S, H, head_dim] -> the same."""
        mask = moment.seen[self.window][1] if self.window else None
        mixed: Tensor = torch.ops.llama.custom_sdpa(q, self.keys, self.values, moment.at, mask, 0.0, mask is None)
        return mixed


class PlainStep(nn.Module):
    """A program whose state lies in buffers."""

    def __init__(self, program: ProgramModule) -> None:
        super().__init__()
        self.held, self.count = (program,), len(program.program.states)
        for i in range(self.count):
            self.register_buffer(f"state{i}", torch.zeros(state_shape(program.program, i)))

    def forward(self, x: Tensor, residual: Tensor, moment: Moment) -> Tensor:
        """The residual stream after the step."""
        (program,) = self.held
        if not self.count:
            y: Tensor = program(x)[0]
            return y
        states = [self.get_buffer(f"state{i}") for i in range(self.count)]
        y, *after = program(x, residual, *(torch.where(moment.begins, 0.0, state) for state in states))
        for state, new in zip(states, after, strict=True):
            state.copy_(new)
        return y


class AttentionStep(nn.Module):
    """Attention over a cache in the graph."""

    def __init__(self, program: Attention, attend: Attend, cache: KeyValueCache) -> None:
        super().__init__()
        self.held = (program, cache)
        self.turn = (attend.theta, program.program.size("head_dim")) if attend.theta else None

    def forward(self, x: Tensor, residual: Tensor, moment: Moment) -> Tensor:
        """The residual stream after the step."""
        program, cache = self.held
        h = program.norm(x)
        q = self._turned(program.heads(h, "q"), moment)
        if program.program.size("own"):
            cache.append(self._turned(program.heads(h, "k"), moment), program.heads(h, "v"), moment)
        mixed = cache.attend(q, moment)
        return residual + program.linear("o", mixed.view(1, q.shape[1], q.shape[2] * q.shape[3]))

    def _turned(self, x: Tensor, moment: Moment) -> Tensor:
        if self.turn is None:
            return x
        cos, sin = moment.turns[self.turn]
        half = x.shape[-1] // 2
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class MixtureStep(nn.Module):
    """Every expert for every token; those that were not chosen have weight zero."""

    bias: Tensor

    def __init__(self, router: ProgramModule, experts: Sequence[ProgramModule], moe: Block, bias: Tensor) -> None:
        super().__init__()
        self.held, self.top_k = (router, *experts), moe.int("top_k")
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor, residual: Tensor, moment: Moment) -> Tensor:
        """The residual stream after the step."""
        router, *experts = self.held
        h, logits = router(x)
        scores = torch.sigmoid(logits)
        chosen = torch.topk(scores + self.bias, self.top_k, -1).indices
        kept = torch.zeros_like(scores).scatter(-1, chosen, 1.0) * scores
        weights = kept / (kept.sum(-1, keepdim=True) + 1e-6)
        y = residual
        for e, expert in enumerate(experts):
            y = y + expert(h)[0] * weights.narrow(-1, e, 1)
        return y
