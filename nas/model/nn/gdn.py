"""Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule")."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nas.core.block import Block
from nas.model.nn.base import Padding, State, without_padding
from nas.model.nn.convolved import Convolved
from nas.model.nn.mamba2 import draw_decays
from nas.model.nn.primitives import Linear, RMSNorm, Weights, for_examples, reference_conv
from nas.model.nn.ssd import float32_at_least, in_chunks

_CHUNK = 64
_EPS = 1e-6
"""Added to the squared length of queries and keys."""


class GatedDeltaNet(Convolved, Weights):
    """q, k, v = silu(conv(W_qkv h)); out = W_out (norm(delta(q, k, v, decay, beta)) * silu(W_gate h)).

    Queries and keys have length 1; queries are divided by sqrt(N). beta = sigmoid(W_beta h) is how much of what a
    memory has for a key is replaced, exp(-softplus(W_step h + dt_bias) exp(A_log)) how much of a memory is kept. Head h
    takes query and key head h modulo their number.

    State: (window [B, K - 1, C], if there is a convolution; memory [B, H, N, N]): its last inputs, oldest first, and
    what the heads remember, from keys to values; H heads of N numbers, C channels of queries, keys and values, K taps.

    Weights, with G heads of queries and keys, C = (2G + H)N: qkv.weight [C, D], rows queries, keys, values;
    conv.weight [C, K]; gate.weight [HN, D]; beta.weight, step_size.weight [H, D]; dt_bias, A_log [H]; norm.weight [N];
    out.weight [D, HN].
    """

    def __init__(self, block: Block, d_model: int) -> None:
        super().__init__(block, d_model)
        self.heads, self.size = self.block.int("heads"), self.block.int("head_dim")
        keys, values = self.block.int("key_heads") * self.size, self.heads * self.size
        self.widths = [keys, keys, values]
        self.qkv = Linear(d_model, sum(self.widths))
        self.add_taps(sum(self.widths))
        self.beta = Linear(d_model, self.heads)
        self.step_size = Linear(d_model, self.heads)
        self.dt_bias = nn.Parameter(torch.empty(self.heads))
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.gate = Linear(d_model, values)
        self.norm = RMSNorm(self.size, float(self.block.get("norm_eps") or 0))
        self.out = Linear(values, d_model, residual=True)

    def draw(self, rng: torch.Generator, depth: int) -> None:
        """Draws step sizes and decay rates as Mamba-2 does."""
        draw_decays(self.dt_bias, self.A_log, rng)

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (*self.window_shapes(), (self.heads, self.size, self.size))

    def mix(self, x: Tensor, state: State, padding: Padding | None) -> tuple[Tensor, State]:
        mixed, window = self.convolved(self.qkv(x), state, padding)
        parts = torch.split(F.silu(mixed), self.widths, -1)
        q, k, v = (torch.unflatten(part, -1, (-1, self.size)) for part in parts)
        q, k = (unit_length(part).repeat(1, 1, self.heads // part.shape[2], 1) for part in (q, k))
        step = self.step_size(x)
        step = F.softplus(step + for_examples(self.dt_bias, step)) * for_examples(self.A_log.exp(), step)
        # Padding: nothing decays, nothing is replaced.
        log_decay, beta = without_padding(-step, padding), without_padding(self.beta(x).sigmoid(), padding)
        y, memory = delta_rule(q * self.size**-0.5, k, v, log_decay, beta, state[-1])
        out: Tensor = self.out((self.norm(y) * F.silu(torch.unflatten(self.gate(x), -1, (-1, self.size)))).flatten(2))
        return out, (*window, memory)


def unit_length(x: Tensor) -> Tensor:
    """Scales the last dimension to length 1; zeros stay zeros."""
    if x.dtype == torch.float16:  # whose range squares exceed
        return unit_length(x.float()).half()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """Runs the gated delta rule over a sequence, in chunks (section 3.3 and appendix A of the paper).

        S <- exp(log_decay) S       S <- S + beta k (v - S^T k)^T       y = S^T q

    What the tokens of a chunk write depends on what earlier ones of it have written: a triangular system, which is
    solved for all chunks at once. The rest is masked attention within a chunk, and the memory from chunk to chunk.
    Computed in float32 at least.

    Args:
        q: [B, T, H, N].
        k: of length 1 at most [B, T, H, N].
        v: [B, T, H, P].
        log_decay: at most 0 [B, T, H].
        beta: between 0 and 1 [B, T, H].
        memory: S before the first token [B, H, N, P].

    Returns:
        y [B, T, H, P], of q's type, and the memory after the last token, float32 at least.
    """
    kind, length = q.dtype, q.shape[1]
    with torch.autocast(q.device.type, enabled=False):
        *parts, memory = float32_at_least(q, k, v, log_decay, beta, memory)
        chunk = min(_CHUNK, length)
        # [B, chunks, H, Q, ...]
        q, k, v, log_decay, beta = (in_chunks(x, chunk).transpose(2, 3) for x in parts)
        total = log_decay.cumsum(-1)
        spans = total[..., :, None] - total[..., None, :]
        later = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
        spans = spans.masked_fill(later, -torch.inf).exp()
        written = k * beta[..., None]
        system = (written @ k.mT) * spans
        terms = torch.cat([v * beta[..., None], written * total.exp()[..., None]], -1)
        solved = torch.linalg.solve_triangular(system, terms, upper=False, unitriangular=True)
        new, read = torch.split(solved, [v.shape[-1], k.shape[-1]], -1)

        within = (q @ k.mT) * spans
        across = q * total.exp()[..., None]
        remaining = k * (total[..., -1:] - total).exp()[..., None]
        decays = total[..., -1].exp()[..., None, None]
        out = []
        for i in range(q.shape[1]):
            value = new[:, i] - read[:, i] @ memory
            out.append(across[:, i] @ memory + within[:, i] @ value)
            memory = decays[:, i] * memory + remaining[:, i].mT @ value
        y = torch.stack(out, 1).transpose(2, 3).flatten(1, 2)[:, :length]
    return y.to(kind), memory


def reference_gdn(block: Block, weights: Mapping[str, Tensor], h: Tensor) -> Tensor:
    """Computes equation 10 of the paper, one token and one head at a time, with the layer of its section 3.4.

    h and the output: one sequence [T, D]; `weights`: the module's state dict.
    """
    heads, key_heads, size = (block.int(name) for name in ("heads", "key_heads", "head_dim"))
    mixed = h @ weights["qkv.weight"].T
    if block.int("conv"):
        mixed = reference_conv(weights["conv.weight"], mixed)
    mixed = (mixed * torch.sigmoid(mixed)).view(len(h), -1, size)
    beta = torch.sigmoid(h @ weights["beta.weight"].T)
    step = torch.log1p(torch.exp(h @ weights["step_size.weight"].T + weights["dt_bias"]))
    alpha = torch.exp(-step * torch.exp(weights["A_log"]))
    gate = (h @ weights["gate.weight"].T).view(len(h), heads, size)
    y = torch.zeros(len(h), heads, size, dtype=h.dtype)
    for head in range(heads):
        memory = torch.zeros(size, size, dtype=h.dtype)  # values by keys
        for t in range(len(h)):
            q, k = (mixed[t, head % key_heads + first] for first in (0, key_heads))
            v = mixed[t, 2 * key_heads + head]
            q, k = (part / (part @ part + 1e-6).sqrt() for part in (q, k))
            erased = torch.eye(size, dtype=h.dtype) - beta[t, head] * torch.outer(k, k)
            memory = alpha[t, head] * memory @ erased + beta[t, head] * torch.outer(v, k)
            y[t, head] = memory @ q / size**0.5
    normed = y / (y.pow(2).mean(-1, keepdim=True) + float(block.get("norm_eps") or 0)).sqrt() * weights["norm.weight"]
    return (normed * gate * torch.sigmoid(gate)).flatten(1) @ weights["out.weight"].T
