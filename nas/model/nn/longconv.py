"""Long convolution with an implicit filter (Poli et al. 2023, "Hyena Hierarchy"), of order 2."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nas.core.block import Block
from nas.model.nn.base import Padding, State
from nas.model.nn.convolved import Convolved
from nas.model.nn.diagonal import reordered, text_first
from nas.model.nn.primitives import Linear, Weights, for_examples, reference_conv
from nas.model.nn.ssd import float32_at_least, in_chunks

_CHUNK = 64
_RATES = (math.log(100) / 1.5, math.log(100) / 0.3)
"""Ends of the rates at which channels' filters fade: to a hundredth after 1.5 and after 0.3 of the reach."""


class LongConvolution(Convolved, Weights):
    """p, q, v = conv(W_in x); out = W_out (p * (h * (q v) + D q v)), where h * is a causal convolution over all tokens.

    The filter of a lag t is h(t) = exp(-exp(A_log) t / L) W_filter sin(W_hidden sin(W_features f(t))) / sqrt(L), L the
    reach, with biases, of features f(t): t / L, and cosine and sine of 2 pi k t / L for k = 1 .. F. The division, which
    the paper has not, makes what a random filter answers as large as its input. A token reads all inputs before it:
    there is no step of constant cost. The convolution is computed by products with blocks of its Toeplitz matrix,
    with work as the square of the length: by FFT, later tokens would change earlier ones' last digits.

    State: (window [B, K - 1, 3D], if there is a short convolution; inputs q v of all tokens so far [B, S, D]).

    Weights: in_proj.weight [3D, D], rows p, q, v; conv.weight [3D, K]; features.weight [U, 1 + 2F], features.bias [U];
    hidden.weight [U, U], hidden.bias [U]; filter.weight [D, U]; A_log, D [D]; out.weight [D, D].
    """

    def __init__(self, block: Block, d_model: int) -> None:
        super().__init__(block, d_model)
        self.reach, self.bands, units = (self.block.int(name) for name in ("reach", "bands", "units"))
        self.in_proj = Linear(d_model, 3 * d_model)
        self.add_taps(3 * d_model)
        self.features = Linear(1 + 2 * self.bands, units, bias=True)
        self.hidden = Linear(units, units, bias=True)
        self.filter = Linear(units, d_model)
        self.A_log = nn.Parameter(torch.empty(d_model))
        self.D = nn.Parameter(torch.empty(d_model))
        self.out = Linear(d_model, d_model, residual=True)

    @torch.no_grad()
    def draw(self, rng: torch.Generator, depth: int) -> None:
        """Spreads rates evenly over the paper's, and sets D to one."""
        self.A_log.copy_(torch.linspace(*_RATES, self.d_model, dtype=torch.float64).log())
        self.D.fill_(1.0)

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (*self.window_shapes(), (0, self.d_model))

    def mix(self, x: Tensor, state: State, padding: Padding | None) -> tuple[Tensor, State]:
        mixed, window = self.convolved(self.in_proj(x), state, padding)
        p, q, v = mixed.chunk(3, -1)
        u = q * v
        past = torch.cat([state[-1].to(u.dtype), u], 1)
        if padding is None:
            y = long_convolution(past, self.lags(past), x.shape[1])
        else:
            order, _ = text_first(padding, past.shape[1])
            y = long_convolution(reordered(past, order), self.lags(past), past.shape[1])
            y = reordered(y, order.argsort(1))[:, -x.shape[1] :]
        out: Tensor = self.out(p * (y + u * for_examples(self.D, u)))
        return out, (*window, past)

    def lags(self, x: Tensor) -> Tensor:
        """Returns the filter of each lag up to the length of x [B, L, D]: [S, L, D], S seeds; one if not stacked."""
        rates = self.A_log.view(-1, 1, self.d_model).exp()
        place = torch.arange(x.shape[1], dtype=rates.dtype, device=x.device)[:, None] / self.reach
        turns = 2 * torch.pi * place * torch.arange(1, self.bands + 1, device=x.device)
        features = torch.cat([place, turns.cos(), turns.sin()], -1).expand(len(rates), -1, -1)
        taps = self.filter(torch.sin(self.hidden(torch.sin(self.features(features)))))
        filters: Tensor = taps * (-rates * place).exp() * self.reach**-0.5
        return filters


def long_convolution(u: Tensor, filters: Tensor, last: int) -> Tensor:
    """Convolves causally by channel: y_t = sum_s filter_{t-s} u_s, in float32 at least.

    Args:
        u: [B, L, D].
        filters: of each lag [S, L, D], S seeds whose examples follow each other.
        last: number of tokens, from the end, whose y is returned.

    Returns:
        y [B, last, D], of u's type.
    """
    kind, length = u.dtype, u.shape[1]
    with torch.autocast(u.device.type, enabled=False):
        u, filters = float32_at_least(u, filters)
        seeds = len(filters)
        if last == 1:
            products: Tensor = torch.unflatten(u, 0, (seeds, -1)) * filters.flip(1)[:, None]
            return products.sum(2).flatten(0, 1)[:, None].to(kind)
        chunk = min(_CHUNK, length)
        chunks = in_chunks(u, chunk)
        count = chunks.shape[1]
        columns = torch.unflatten(chunks, 0, (seeds, -1)).permute(0, 4, 3, 2, 1)  # [S, D, Q, chunks, B]
        now = torch.arange(chunk, device=u.device)
        lag = now[:, None] - now
        taps = F.pad(filters, (0, 0, chunk, count * chunk - length)).mT  # lag t in place Q + t
        y = torch.zeros_like(columns)
        for i in range(count):
            block = taps[..., chunk * (i + 1) + lag]  # [S, D, Q, Q], to the chunk i chunks behind
            added = block @ columns[..., : count - i, :].flatten(3)
            y = y + F.pad(torch.unflatten(added, -1, (count - i, -1)), (0, 0, i, 0))
        y = y.permute(0, 4, 3, 2, 1).flatten(0, 1).flatten(1, 2)[:, length - last : length]
    return y.to(kind)


def reference_longconv(block: Block, weights: Mapping[str, Tensor], h: Tensor) -> Tensor:
    """Computes the Hyena recurrence of order 2 (definition 3.1 of the paper), one token and one lag at a time.

    h and the output: one sequence [T, D]; `weights`: the module's state dict.
    """
    mixed = h @ weights["in_proj.weight"].T
    if block.int("conv"):
        mixed = reference_conv(weights["conv.weight"], mixed)
    p, q, v = mixed.chunk(3, -1)
    filters = []
    for lag in range(len(h)):
        place = lag / block.int("reach")
        turns = [2 * math.pi * band * place for band in range(1, block.int("bands") + 1)]
        z = h.new_tensor([place, *map(math.cos, turns), *map(math.sin, turns)])
        for name in ("features", "hidden"):
            z = torch.sin(weights[f"{name}.weight"] @ z + weights[f"{name}.bias"])
        filters.append(
            weights["filter.weight"] @ z * torch.exp(-torch.exp(weights["A_log"]) * place) / block.int("reach") ** 0.5
        )
    y = weights["D"] * q * v
    for t in range(len(h)):
        for s in range(t + 1):
            y[t] += filters[t - s] * q[s] * v[s]
    return (p * y) @ weights["out.weight"].T
