"""Gated linear attention (Yang et al. 2023, "Gated Linear Attention Transformers with Hardware-Efficient Training")."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nas.core.block import Block
from nas.model.nn.base import Mixer, Padding, State, without_padding
from nas.model.nn.primitives import Linear, RMSNorm, Weights, for_examples
from nas.model.nn.ssd import float32_at_least, in_chunks

_CHUNK = 64
_PART = 8
"""Tokens of a part of a chunk, within which decays are taken from token to token (section 4.3): an exponential for each
pair of tokens and number of a key, which on a CPU takes most of the time."""
_TEMPERATURE = 16.0
"""Decays are the 16th root of a sigmoid (section 4.4)."""


class GatedLinearAttention(Mixer, Weights):
    """q, k, v = W_qkv h; out = W_out (norm(attention(q, k, v, decay)) * silu(W_gate h)).

    Queries are divided by sqrt(N); decays of keys are sigmoid(W_up W_down h + decay_bias)^(1 / 16).

    State: (memory [B, H, N, N],): what the heads remember, from keys to values; H heads of N numbers.

    Weights, with decays of rank R: qkv.weight [3HN, D], rows queries, keys, values; decay_down.weight [R, D];
    decay_up.weight [HN, R]; decay_bias [HN]; gate.weight [HN, D]; norm.weight [N]; out.weight [D, HN].
    """

    projection = "out"
    stackable = True

    def __init__(self, block: Block, d_model: int) -> None:
        super().__init__(block, d_model)
        self.heads, self.size, rank = (self.block.int(name) for name in ("heads", "head_dim", "rank"))
        inner = self.heads * self.size
        self.qkv = Linear(d_model, 3 * inner)
        self.decay_down = Linear(d_model, rank)
        self.decay_up = Linear(rank, inner)
        self.decay_bias = nn.Parameter(torch.empty(inner))
        self.gate = Linear(d_model, inner)
        self.norm = RMSNorm(self.size)
        self.out = Linear(inner, d_model, residual=True)

    @torch.no_grad()
    def draw(self, rng: torch.Generator, depth: int) -> None:
        """Sets the biases of decays to zero."""
        self.decay_bias.zero_()

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.heads, self.size, self.size),)

    def mix(self, x: Tensor, state: State, padding: Padding | None) -> tuple[Tensor, State]:
        q, k, v = (torch.unflatten(part, -1, (-1, self.size)) for part in self.qkv(x).chunk(3, -1))
        decay = self.decay_up(self.decay_down(x))
        log_decay = F.logsigmoid(decay + for_examples(self.decay_bias, decay)) / _TEMPERATURE
        log_decay = torch.unflatten(without_padding(log_decay, padding), -1, (-1, self.size))
        y, memory = gated_linear_attention(q * self.size**-0.5, k, v, log_decay, state[0])
        out: Tensor = self.out((self.norm(y) * F.silu(torch.unflatten(self.gate(x), -1, (-1, self.size)))).flatten(2))
        return out, (memory,)


def gated_linear_attention(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Runs the recurrence over a sequence, in chunks of parts (section 4 of the paper).

        S <- diag(exp(log_decay)) S + k v^T       y = S^T q

    Scores from part to part of a chunk are products of queries, which decay since the part's begin, with keys, which
    decay until then: no exponent is positive. Within a part decays are taken from token to token. Computed in float32
    at least.

    Args:
        q: [B, T, H, N].
        k: [B, T, H, N].
        v: [B, T, H, P].
        log_decay: at most 0 [B, T, H, N].
        memory: S before the first token [B, H, N, P].

    Returns:
        y [B, T, H, P], of q's type, and the memory after the last token, float32 at least.
    """
    kind, length = q.dtype, q.shape[1]
    with torch.autocast(q.device.type, enabled=False):
        *parts, memory = float32_at_least(q, k, v, log_decay, memory)
        part = min(_PART, length)
        chunk = min(_CHUNK, -(-length // part) * part)
        # [B, chunks, H, Q, ...]
        q, k, v, log_decay = (in_chunks(x, chunk).transpose(2, 3) for x in parts)
        total = log_decay.cumsum(-2)
        across = q * total.exp()
        remaining = k * (total[..., -1:, :] - total).exp()
        decays = total[..., -1, :].exp()[..., None]
        within = _scores(q, k, total, log_decay, part) @ v
        out = []
        for i in range(q.shape[1]):
            out.append(across[:, i] @ memory + within[:, i])
            memory = decays[:, i] * memory + remaining[:, i].mT @ v[:, i]
        y = torch.stack(out, 1).transpose(2, 3).flatten(1, 2)[:, :length]
    return y.to(kind), memory


def _scores(q: Tensor, k: Tensor, total: Tensor, log_decay: Tensor, part: int) -> Tensor:
    """Computes sum_n q_in k_jn exp(total_in - total_jn) for j <= i: [..., Q, N] -> [..., Q, Q]."""
    length = q.shape[-2]
    q, k, total, log_decay = (torch.unflatten(x, -2, (-1, part)) for x in (q, k, total, log_decay))
    begin = total[..., :1, :] - log_decay[..., :1, :]  # before the part's first token
    later = torch.ones(part, part, dtype=torch.bool, device=q.device).triu(1)
    spans = (total[..., :, None, :] - total[..., None, :, :]).masked_fill(later[..., None], -torch.inf)
    diagonal = (q[..., :, None, :] * k[..., None, :, :] * spans.exp()).sum(-1)  # [..., parts, part, part]
    queries = q * (total - begin).exp()
    rows = []
    for i in range(q.shape[-3]):
        keys = k[..., :i, :, :] * (begin[..., i : i + 1, :, :] - total[..., :i, :, :]).exp()
        earlier = queries[..., i, :, :] @ keys.flatten(-3, -2).mT
        after = earlier.new_zeros(*earlier.shape[:-1], length - (i + 1) * part)
        rows.append(torch.cat([earlier, diagonal[..., i, :, :], after], -1))
    return torch.cat(rows, -2)


def reference_gla(block: Block, weights: Mapping[str, Tensor], h: Tensor) -> Tensor:
    """Computes equation 3 of the paper, one token and one head at a time, with the layer of its section 4.4.

    h and the output: one sequence [T, D]; `weights`: the module's state dict.
    """
    heads, size = block.int("heads"), block.int("head_dim")
    q, k, v = (h @ rows.T for rows in weights["qkv.weight"].chunk(3))
    low = h @ weights["decay_down.weight"].T
    alpha = torch.sigmoid(low @ weights["decay_up.weight"].T + weights["decay_bias"]) ** (1 / 16)
    gate = (h @ weights["gate.weight"].T).view(len(h), heads, size)
    y = torch.zeros(len(h), heads, size, dtype=h.dtype)
    for head in range(heads):
        rows = slice(head * size, (head + 1) * size)
        memory = torch.zeros(size, size, dtype=h.dtype)  # keys by values
        for t in range(len(h)):
            memory = torch.diag(alpha[t, rows]) @ memory + torch.outer(k[t, rows], v[t, rows])
            y[t, head] = q[t, rows] @ memory / size**0.5
    normed = y / (y.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weights["norm.weight"]
    return (normed * gate * torch.sigmoid(gate)).flatten(1) @ weights["out.weight"].T
