"""RTF, rational transfer functions (Parnichkun et al. 2024, "State-Free Inference of State-Space Models")."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from nas.core.block import Block
from nas.model.nn.base import Padding, State
from nas.model.nn.convolved import reference_input
from nas.model.nn.diagonal import reordered, text_first
from nas.model.nn.primitives import draw_uniform
from nas.model.nn.s4 import StateSpace, reference_output
from nas.model.nn.ssd import float32_at_least, in_chunks

_CHUNK = 64


class RTF(StateSpace):
    """Each channel is a filter D + (b_1 z^-1 + ... + b_N z^-N) / (1 + a_1 z^-1 + ... + a_N z^-N).

    Its companion form remembers the last N numbers w_t = u_t - a_1 w_{t-1} - ... - a_N w_{t-N}, of which it reads y_t =
    b_1 w_{t-1} + ... + b_N w_{t-N}. Coefficients are free, as in the paper: nothing but training, which starts with a =
    0, holds the poles inside the unit circle. The paper trains by FFT, which folds what a filter answers after the
    sequence back to its begin; here the filter is exact for any length.

    Memory: w, oldest first [B, N, D]. Further weights: a, b [D, N].
    """

    def __init__(self, block: Block, d_model: int) -> None:
        super().__init__(block, d_model)
        self.a, self.b = (nn.Parameter(torch.empty(d_model, self.states)) for _ in range(2))

    @torch.no_grad()
    def draw(self, rng: torch.Generator, depth: int) -> None:
        """Sets a to zero and D to one; draws b."""
        self.a.zero_()
        self.D.fill_(1.0)
        draw_uniform(self.b, self.states**-0.5, rng)

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (*self.window_shapes(), (self.states, self.d_model))

    def mix(self, x: Tensor, state: State, padding: Padding | None) -> tuple[Tensor, State]:
        u, window = self.convolved(x, state, padding)
        y, memory = rational_filter(u, self.a, self.b, state[-1], padding)
        return self.output(y, u), (*window, memory)


def rational_filter(u: Tensor, a: Tensor, b: Tensor, memory: Tensor, padding: Padding | None) -> tuple[Tensor, Tensor]:
    """Runs w_t = u_t - sum_i a_i w_{t-i}, y_t = sum_i b_i w_{t-i} over a sequence, in chunks.

    Within a chunk w solves a triangular system, which is the same for all chunks; the last N numbers are handed on.
    Computed in float32 at least.

    Args:
        u: [B, T, D].
        a: [D, N], or stacked [S, D, N].
        b: of this shape.
        memory: w before the first token, oldest first [B, N, D].
        padding: tokens that are left out.

    Returns:
        y [B, T, D], of u's type, anything at padding, and the last N numbers w, float32 at least.
    """
    kind, length = u.dtype, u.shape[1]
    with torch.autocast(u.device.type, enabled=False):
        u, a, b, memory = float32_at_least(u, a, b, memory)
        a, b = (x.view(-1, *x.shape[-2:]) for x in (a, b))
        seeds, _, order = a.shape
        tokens = torch.full((len(u),), length, device=u.device)
        if padding is not None:
            places, tokens = text_first(padding, length)
            u = reordered(u, places)
        chunks = in_chunks(u, min(_CHUNK, length))
        count, chunk = chunks.shape[1:3]
        columns = torch.unflatten(chunks, 0, (seeds, -1)).permute(0, 4, 3, 1, 2).flatten(3)  # [S, D, Q, B chunks]
        past = torch.unflatten(memory, 0, (seeds, -1)).permute(0, 3, 2, 1)  # [S, D, N, B]
        inside, across = _lagged(a, chunk)
        solved = torch.linalg.solve_triangular(
            inside, torch.cat([columns, across], -1), upper=False, unitriangular=True
        )
        w, answer = solved.split([columns.shape[-1], order], -1)
        w = torch.unflatten(w, -1, (-1, count))
        rows, before = [], []
        for i in range(count):
            before.append(past)
            rows.append(w[..., i] - answer @ past)
            past = torch.cat([past, rows[-1]], 2)[..., -order:, :]
        inside, across = _lagged(b, chunk)
        y = inside @ torch.stack(rows, -1).flatten(3) + across @ torch.stack(before, -1).flatten(3)
        y = torch.unflatten(y, -1, (-1, count)).permute(0, 3, 4, 2, 1).flatten(0, 1).flatten(1, 2)[:, :length]
        whole = torch.cat([before[0], *rows], 2).permute(0, 3, 2, 1).flatten(0, 1)  # [B, N + chunks Q, D]
        ends = tokens[:, None] + torch.arange(order, device=u.device)
        memory = whole.take_along_dim(ends[..., None], 1)
        if padding is not None:
            y = reordered(y, places.argsort(1))
    return y.to(kind), memory


def _lagged(coefficients: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Returns the matrices of sum_i c_i w_{t-i} over a chunk: on its own numbers, and on the N before it, oldest first.

    [..., N] -> [..., Q, Q] and [..., Q, N].
    """
    order = coefficients.shape[-1]
    now = torch.arange(chunk, device=coefficients.device)[:, None]
    lag = now + order - torch.arange(order + chunk, device=coefficients.device)  # [Q, N + Q]
    taps = coefficients[..., (lag - 1).clamp(0, order - 1)] * ((lag > 0) & (lag <= order))
    return taps[..., order:], taps[..., :order]


def reference_rtf(block: Block, weights: Mapping[str, Tensor], h: Tensor) -> Tensor:
    """Computes the companion form of the paper's section 3, one token at a time, in the layer of S4's experiments.

    h and the output: one sequence [T, D]; `weights`: the module's state dict.
    """
    u = reference_input(block, weights, h)
    x, y = torch.zeros_like(weights["a"]), torch.zeros_like(u)  # x: w of the last tokens, the last one first
    for t, now in enumerate(u):
        y[t] = (weights["b"] * x).sum(1)
        x = torch.cat([(now - (weights["a"] * x).sum(1))[:, None], x[:, :-1]], 1)
    return reference_output(weights, y, u)
