"""What the kinds compute."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nas.core.block import Block
from nas.model.nn.base import Mixer, Padding, State
from nas.model.nn.growth import BlockGrowth, CannotGrow
from nas.model.nn.primitives import Linear, Weights, draw_uniform
from nas.model.nn.ssd import float32_at_least
from nas.model.nn.swiglu import DenseFeedForward

_CHUNK = 64
"""Tokens that one Toeplitz matrix takes."""
_STEPS = (1e-3, 1e-1)
"""Range that step sizes start in: that of the paper."""


class S4D(Mixer, Weights):
    """y = SSM(x) + D x; out = W_out gelu(y) * sigmoid(W_gate gelu(y)).

    Each channel has N states with decays exp(A step), A = -exp(A_log) and step = softplus(dt_bias), which start as the
    paper's S4D-Real: A_n = -(n + 1). State: (what they remember [B, D, N],).
    """

    projection = "out"

    def __init__(self, block: Block, d_model: int) -> None:
        super().__init__(block, d_model)
        self.states = self.block.int("state")
        self.A_log = nn.Parameter(torch.empty(d_model, self.states))
        self.C = nn.Parameter(torch.empty(d_model, self.states))
        self.dt_bias = nn.Parameter(torch.empty(d_model))
        self.D = nn.Parameter(torch.empty(d_model))
        self.gate = Linear(d_model, d_model)
        self.out = Linear(d_model, d_model, residual=True)

    @torch.no_grad()
    def draw(self, rng: torch.Generator, depth: int) -> None:
        """Sets A to -1 .. -N and D to one; draws C, and step sizes log-uniform."""
        self.A_log.copy_(torch.arange(1, self.states + 1, dtype=torch.float64).log())
        self.D.fill_(1.0)
        draw_uniform(self.C, 1.0, rng)
        low, high = map(math.log, _STEPS)
        step = torch.empty(self.d_model, dtype=torch.float64).uniform_(low, high, generator=rng).exp()
        self.dt_bias.copy_(step.expm1().log())  # the inverse of softplus

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.d_model, self.states),)

    def mix(self, x: Tensor, state: State, padding: Padding | None) -> tuple[Tensor, State]:
        rate = -self.A_log.exp()
        log_decay = F.softplus(self.dt_bias)[:, None] * rate
        read = self.C * torch.expm1(log_decay) / rate
        memory, outputs = state[0], []
        # Nothing decays at padding, which is at other tokens in each row: one token at a time.
        for part in [x] if padding is None else x.split(1, 1):
            y, after = constant_scan(part, log_decay, read, memory)
            if padding is not None:
                text = padding.text[:, len(outputs) - x.shape[1]]
                after = torch.where(text[:, None, None], after, memory)
            memory = after
            outputs.append(y)
        h = F.gelu(torch.cat(outputs, 1) + self.D * x)
        return self.out(h) * torch.sigmoid(self.gate(h)), (memory,)

    @staticmethod
    def grow(growing: BlockGrowth) -> dict[str, Tensor]:
        """Channels are copied, with all that belongs to each."""
        small, width = growing.small, growing.width
        if growing.a.int("state") != growing.b.int("state"):
            raise CannotGrow("the number of states differs")
        channels = {name: small[name][width] for name in ("A_log", "C", "dt_bias", "D")}
        square = {name: growing.widened(name, outputs=width, inputs=width) for name in ("gate.weight", "out.weight")}
        return channels | square


def constant_scan(u: Tensor, log_decay: Tensor, read: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Runs memory_t = exp(log_decay) memory_{t-1} + u_t, y_t = sum_n read_n memory_tn over a sequence, in chunks.

    Within a chunk that is a convolution, whose kernel sum_n read_n exp(l log_decay_n) makes one Toeplitz matrix a
    channel for all chunks; from chunk to chunk only the memory is handed on. Computed in float32 at least.

    Args:
        u: [B, T, D].
        log_decay: below 0 [D, N].
        read: [D, N].
        memory: before the first token [B, D, N].

    Returns:
        y [B, T, D], of u's type, and the memory after the last token, float32 at least.
    """
    kind, whole = u.dtype, len(u[0]) // _CHUNK * _CHUNK
    out = []
    with torch.autocast(u.device.type, enabled=False):
        u, log_decay, read, memory = float32_at_least(u, log_decay, read, memory)
        for part in (u[:, :whole], u[:, whole:]):
            if length := part.shape[1]:
                chunks = torch.unflatten(part, 1, (-1, min(_CHUNK, length)))
                y, memory = _scan_chunks(chunks, log_decay, read, memory)
                out.append(y)
    return torch.cat(out, 1).to(kind), memory


def _scan_chunks(u: Tensor, log_decay: Tensor, read: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Does so for u [B, chunks, Q, D]."""
    batch, count, length, _ = u.shape
    ago = torch.arange(length + 1, dtype=u.dtype, device=u.device)
    decays = (log_decay[..., None] * ago).exp()  # [D, N, Q + 1]
    kernel = (read[..., None] * decays[..., :-1]).sum(1)  # [D, Q]
    now = torch.arange(length, device=u.device)
    toeplitz = kernel[:, (now[:, None] - now).clamp(min=0)].tril()  # [D, Q, Q]

    columns = u.permute(3, 2, 0, 1).flatten(2)  # [D, Q, B chunks]
    added = torch.unflatten(decays[..., :-1].flip(-1) @ columns, -1, (batch, count))  # [D, N, B, chunks]
    carried, before = memory.permute(1, 2, 0), []
    for chunk in range(count):
        before.append(carried)
        carried = decays[..., -1:] * carried + added[..., chunk]
    across = (read[..., None] * decays[..., 1:]).mT @ torch.stack(before, -1).flatten(2)
    y = torch.unflatten(toeplitz @ columns + across, -1, (batch, count))  # [D, Q, B, chunks]
    return y.permute(2, 3, 1, 0).flatten(1, 2), carried.permute(2, 0, 1)


def reference_s4d(block: Block, weights: Mapping[str, Tensor], h: Tensor) -> Tensor:
    """Computes the paper's recurrence, one token and one channel at a time.

        x_k = A' x_{k-1} + B' u_k     y_k = C x_k + D u_k     A' = exp(step A)     B' = A^-1 (exp(step A) - 1) B

    The paper's discretisation by zero-order hold, with A diagonal, and B all ones, of which only the product with C
    matters. The layer around it is that of its experiments: GELU, then a gated linear unit.
    """
    rows = []
    memory = torch.zeros_like(weights["A_log"])
    for u in h:
        y = torch.zeros_like(u)
        for d, channel in enumerate(u):
            a, step = -torch.exp(weights["A_log"][d]), torch.log1p(torch.exp(weights["dt_bias"][d]))
            memory[d] = torch.exp(step * a) * memory[d] + (torch.exp(step * a) - 1) / a * channel
            y[d] = weights["C"][d] @ memory[d] + weights["D"][d] * channel
        g = y * (1 + torch.erf(y / 2**0.5)) / 2
        rows.append((weights["out.weight"] @ g) / (1 + torch.exp(-weights["gate.weight"] @ g)))
    return torch.stack(rows)


class ReGLU(DenseFeedForward):
    """W_down (relu(W_gate x) * W_up x)."""

    gated = True

    def hidden(self, x: Tensor) -> Tensor:
        return F.relu(self.gate(x)) * self.up(x)


def reference_reglu(block: Block, weights: Mapping[str, Tensor], h: Tensor) -> Tensor:
    """The formula, one token at a time."""
    rows = []
    for x in h:
        gate = (weights["gate.weight"] @ x).clamp_min(0)
        rows.append(weights["down.weight"] @ (gate * (weights["up.weight"] @ x)))
    return torch.stack(rows)
