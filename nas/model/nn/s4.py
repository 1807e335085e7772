"""S4 in its diagonal form, S4D (Gu et al. 2022), and Liquid-S4 (Hasani et al. 2022).

S4's own A is diagonal plus low rank (DPLR). Any A that can be diagonalised over the complex numbers has the kernels of
a diagonal one (Gupta et al. 2022, "Diagonal State Spaces are as Effective as Structured State Spaces", proposition 1),
and S4D performs as S4 does in almost all of its authors' settings. DPLR would add to each step a product of low rank,
and a kernel of its own, for no further map from inputs to outputs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nas.core.block import Block
from nas.model.nn.base import Padding, State
from nas.model.nn.convolved import ConvolvedInput, reference_input
from nas.model.nn.diagonal import complex_of, diagonal_scan
from nas.model.nn.mamba2 import draw_steps
from nas.model.nn.primitives import Linear, Weights, draw_uniform, for_examples
from nas.model.nn.ssd import float32_at_least


class StateSpace(ConvolvedInput, Weights):
    """A state space with the layer of S4's experiments around it: out = W_out gelu(y) * sigmoid(W_gate gelu(y)).

    y = SSM(u) + D u. Further weights: D [D]; gate.weight, out.weight [D, D].
    """

    def __init__(self, block: Block, d_model: int) -> None:
        super().__init__(block, d_model)
        self.states = self.block.int("state")
        self.D = nn.Parameter(torch.empty(d_model))
        self.gate = Linear(d_model, d_model)
        self.out = Linear(d_model, d_model, residual=True)

    def output(self, y: Tensor, u: Tensor) -> Tensor:
        """Maps what is read from the states, and the input, both [B, T, D], to the output."""
        h = F.gelu(y + u * for_examples(self.D, u))
        out: Tensor = self.out(h) * torch.sigmoid(self.gate(h))
        return out


@torch.no_grad()
def draw_rates(a_log: Tensor, a_imag: Tensor) -> None:
    """Sets rates to -1/2 + pi n i for n = 0, 1, ... (S4D-Lin)."""
    a_log.fill_(0.5).log_()
    a_imag.copy_(torch.pi * torch.arange(a_imag.shape[-1], dtype=torch.float64))


def discrete(a_log: Tensor, a_imag: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the logarithm of a state's decay and what its input is multiplied by, complex.

    The continuous system m' = a m + u with a = -exp(a_log) + i a_imag by zero-order hold: m_t = exp(step a) m_{t-1} +
    (exp(step a) - 1) / a u_t, step = softplus(dt_bias).
    """
    a_log, a_imag, dt_bias = float32_at_least(a_log, a_imag, dt_bias)
    rate = torch.complex(-a_log.exp(), a_imag)
    log_decay = F.softplus(dt_bias) * rate
    return log_decay, torch.expm1(log_decay) / rate


class S4(StateSpace):
    """Every channel has N complex states of its own (`discrete`), of which it reads y = 2 Re(sum_n C_n m_n).

    With liquid=1 the input acts on the decays, too (Liquid-S4, section 3): m_t = (exp(step a) + w u_t) m_{t-1} + w
    u_t, w = (exp(step a) - 1) / a; the paper has the bilinear transform in place of zero-order hold. That is computed
    token by token, and is no convolution: the paper's kernels are the first terms of its series. A state
    grows while |exp(step a) + w u_t| is above 1.

    Memory: real and imaginary parts [B, D, N, 2]. Further weights: A_log, A_imag [D, N]; C [D, 2N], real parts, then
    imaginary ones; dt_bias [D].
    """

    def __init__(self, block: Block, d_model: int) -> None:
        super().__init__(block, d_model)
        self.A_log, self.A_imag = (nn.Parameter(torch.empty(d_model, self.states)) for _ in range(2))
        self.C = nn.Parameter(torch.empty(d_model, 2 * self.states))
        self.dt_bias = nn.Parameter(torch.empty(d_model))

    @torch.no_grad()
    def draw(self, rng: torch.Generator, depth: int) -> None:
        """Sets rates to those of S4D-Lin and D to one; draws C, and step sizes log-uniform."""
        draw_rates(self.A_log, self.A_imag)
        draw_steps(self.dt_bias, rng)
        draw_uniform(self.C, 0.5**0.5, rng)
        self.D.fill_(1.0)

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (*self.window_shapes(), (self.d_model, self.states, 2))

    def mix(self, x: Tensor, state: State, padding: Padding | None) -> tuple[Tensor, State]:
        u, window = self.convolved(x, state, padding)
        log_decay, write = discrete(self.A_log, self.A_imag, self.dt_bias[..., None])
        read = 2 * complex_of(self.C)
        if self.block.get("liquid"):
            y, memory = liquid_scan(u, log_decay.exp(), write, read, state[-1], padding)
        else:
            y, memory = diagonal_scan(u[..., None], log_decay, write[..., None], read[..., None], state[-1], padding)
            y = y[..., 0]
        return self.output(y, u), (*window, memory)


def liquid_scan(
    u: Tensor, decay: Tensor, write: Tensor, read: Tensor, memory: Tensor, padding: Padding | None
) -> tuple[Tensor, Tensor]:
    """Runs m <- (decay + write u) m + write u, y = Re(sum_n read_n m_n) token by token; see `diagonal_scan`.

    Args:
        u: [B, T, D].
        decay: complex [D, N], or stacked [S, D, N].
        write: of this shape.
        read: of this shape.
        memory: before the first token, real and imaginary parts [B, D, N, 2].
        padding: tokens at which the memory stays.

    Returns:
        y [B, T, D], of u's type, and the memory after the last token, float32 at least.
    """
    kind = u.dtype
    with torch.autocast(u.device.type, enabled=False):
        u, memory = float32_at_least(u, memory)
        decay, write, read = (x.view(-1, *x.shape[-2:])[:, None] for x in (decay, write, read))  # [S, 1, D, N]
        inputs = torch.unflatten(u, 0, (len(decay), -1))[..., None]  # [S, B, T, D, 1]
        now = torch.unflatten(torch.view_as_complex(memory.contiguous()), 0, (len(decay), -1))
        text = None if padding is None else padding.text[:, -u.shape[1] :].view(*inputs.shape[:3], 1, 1)
        outputs = []
        for t in range(u.shape[1]):
            entry = write * inputs[:, :, t]
            after = (decay + entry) * now + entry
            now = after if text is None else torch.where(text[:, :, t], after, now)
            outputs.append((read * now).real.sum(-1))
        y = torch.stack(outputs, 2).flatten(0, 1)
        memory = torch.view_as_real(now.flatten(0, 1))
    return y.to(kind), memory


def reference_s4(block: Block, weights: Mapping[str, Tensor], h: Tensor) -> Tensor:
    """Computes the recurrence in real numbers, one token at a time, with the layer of S4's experiments.

    Gu et al. 2022, section 2, by zero-order hold; with liquid=1 Hasani et al. 2022, section 3, discretised alike.
    h and the output: one sequence [T, D]; `weights`: the module's state dict.
    """
    u = reference_input(block, weights, h)
    step = torch.log1p(torch.exp(weights["dt_bias"]))[:, None]
    a, b, c, d = discrete_in_real_numbers(-torch.exp(weights["A_log"]), weights["A_imag"], step)
    read, read_imag = weights["C"].chunk(2, 1)
    y, real, imag = torch.zeros_like(u), torch.zeros_like(a), torch.zeros_like(a)
    for t, now in enumerate(u):
        x = now[:, None]
        turn, turn_imag = (a + c * x, b + d * x) if block.get("liquid") else (a, b)
        real, imag = turn * real - turn_imag * imag + c * x, turn * imag + turn_imag * real + d * x
        y[t] = 2 * (read * real - read_imag * imag).sum(1)
    return reference_output(weights, y, u)


def discrete_in_real_numbers(rate: Tensor, rate_imag: Tensor, step: Tensor) -> tuple[Tensor, ...]:
    """Returns real and imaginary parts of exp(step a) and of (exp(step a) - 1) / a."""
    size, angle = torch.exp(step * rate), step * rate_imag
    decay, decay_imag = size * torch.cos(angle), size * torch.sin(angle)
    square = rate * rate + rate_imag * rate_imag
    write = ((decay - 1) * rate + decay_imag * rate_imag) / square
    write_imag = (decay_imag * rate - (decay - 1) * rate_imag) / square
    return decay, decay_imag, write, write_imag


def reference_output(weights: Mapping[str, Tensor], y: Tensor, u: Tensor) -> Tensor:
    """Returns the layer's output of what is read from the states, and of the input [T, D]."""
    y = y + weights["D"] * u
    g = y * (1 + torch.erf(y / 2**0.5)) / 2
    return (g @ weights["out.weight"].T) * torch.sigmoid(g @ weights["gate.weight"].T)
