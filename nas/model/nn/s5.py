"""S5 (Smith et al. 2022, "Simplified State Space Layers for Sequence Modeling")."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from nas.core.block import Block
from nas.model.nn.base import Padding, State
from nas.model.nn.convolved import reference_input
from nas.model.nn.diagonal import diagonal_scan
from nas.model.nn.mamba2 import draw_steps
from nas.model.nn.primitives import Linear
from nas.model.nn.s4 import (
    StateSpace,
    discrete,
    discrete_in_real_numbers,
    draw_rates,
    reference_output,
)


class S5(StateSpace):
    """All channels write to P complex states (`discrete` in `nas.model.nn.s4`) B u, and read y = 2 Re(C m).

    Rates start as S4D-Lin's, which are near the paper's: those of the normal part of HiPPO-LegS.

    Memory: real and imaginary parts [B, P, 1, 2]. Further weights: B.weight [2P, D], rows real parts, then imaginary
    ones; C.weight [D, 2P], columns twice the real parts of C, then minus twice the imaginary ones; A_log, A_imag,
    dt_bias [P].
    """

    def __init__(self, block: Block, d_model: int) -> None:
        super().__init__(block, d_model)
        self.A_log, self.A_imag, self.dt_bias = (nn.Parameter(torch.empty(self.states)) for _ in range(3))
        self.B = Linear(d_model, 2 * self.states)
        self.C = Linear(2 * self.states, d_model)

    @torch.no_grad()
    def draw(self, rng: torch.Generator, depth: int) -> None:
        """Sets rates to those of S4D-Lin and D to one; draws step sizes log-uniform."""
        draw_rates(self.A_log, self.A_imag)
        draw_steps(self.dt_bias, rng)
        self.D.fill_(1.0)

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (*self.window_shapes(), (self.states, 1, 2))

    def mix(self, x: Tensor, state: State, padding: Padding | None) -> tuple[Tensor, State]:
        u, window = self.convolved(x, state, padding)
        log_decay, write = (z[..., None] for z in discrete(self.A_log, self.A_imag, self.dt_bias))
        turns = torch.tensor([1, 1j], dtype=write.dtype, device=x.device)
        written = torch.unflatten(self.B(u), -1, (2, -1)).mT  # [B, T, P, 2]
        # Two real inputs and outputs of each state are its complex ones.
        read = turns.conj().expand(*write.shape, 2)
        y, memory = diagonal_scan(written, log_decay, write[..., None] * turns, read, state[-1], padding)
        return self.output(self.C(y.mT.flatten(-2)), u), (*window, memory)


def reference_s5(block: Block, weights: Mapping[str, Tensor], h: Tensor) -> Tensor:
    """Computes the recurrence of the paper's section 3 in real numbers, one token at a time, by zero-order hold.

    h and the output: one sequence [T, D]; `weights`: the module's state dict.
    """
    u = reference_input(block, weights, h)
    step = torch.log1p(torch.exp(weights["dt_bias"]))
    decay, decay_imag, write, write_imag = discrete_in_real_numbers(
        -torch.exp(weights["A_log"]), weights["A_imag"], step
    )
    b, b_imag = weights["B.weight"].chunk(2)
    y, real, imag = torch.zeros_like(u), torch.zeros_like(step), torch.zeros_like(step)
    for t, x in enumerate(u):
        p, q = b @ x, b_imag @ x
        real, imag = (
            decay * real - decay_imag * imag + write * p - write_imag * q,
            decay * imag + decay_imag * real + write * q + write_imag * p,
        )
        y[t] = weights["C.weight"] @ torch.cat([real, imag])
    return reference_output(weights, y, u)
