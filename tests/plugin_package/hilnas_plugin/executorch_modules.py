"""What is lowered."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from nas.measure.runtimes.executorch.modules import Outputs, ProgramModule, linear_attention


class S4D(ProgramModule):
    """x, residual [1, S, D], memory [D, N, 1] -> the same.

    The recurrence is that of the runner's linear attention: a channel is a head whose value is one number, and its
    states are the numbers of a key.
    """

    def forward(self, x: Tensor, residual: Tensor, memory: Tensor) -> Outputs:
        h, shape = self.norm(x), (x.shape[1], self.program.size("d_model"), self.program.size("state"))
        rate = self.number("rate")
        decay = (F.softplus(self.number("step")) * rate).exp()
        read = self.number("read") * (decay - self.number("one")) / rate * math.sqrt(shape[2])
        y, after = linear_attention(
            read.unsqueeze(0).expand(shape),
            self.number("one").view(1, 1, 1).expand(shape),
            h.view(shape[0], shape[1], 1),
            decay.unsqueeze(0).expand(shape),
            memory,
        )
        g = F.gelu(y.view(1, *shape[:2]) + h * self.number("skip"))
        return residual + self.linear("out", g) * torch.sigmoid(self.linear("gate", g)), after


class ReGLU(ProgramModule):
    """x [1, S, D] -> x + ffn(norm(x))."""

    def forward(self, x: Tensor) -> Outputs:
        h = self.norm(x)
        return (x + self.linear("down", F.relu(self.linear("gate", h)) * self.linear("up", h)),)
