"""What is lowered."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nas.runtimes.executorch.modules import Outputs, ProgramModule
from nas.runtimes.executorch.programs import CHUNK, Program


class SquaredReLU(ProgramModule):
    """x [1, S, D] -> x + ffn(norm(x))."""

    def forward(self, x: Tensor) -> Outputs:
        hidden = F.relu(self.linear("up", self.norm(x)))
        return (x + self.linear("down", hidden * hidden),)


class DecayingSum(ProgramModule):
    """x, residual [1, S, D], sum [1, 1, D] -> the same."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        ago = torch.arange(CHUNK + 1, dtype=torch.float32)
        spans = ago[:, None] - ago[None]
        self.register_buffer("within", torch.where(spans >= 0, 0.5 ** spans.clamp(min=0), 0.0))
        self.register_buffer("left", 0.5 ** (ago[:, None] + 1))

    def forward(self, x: Tensor, residual: Tensor, before: Tensor) -> Outputs:
        length = x.shape[1]
        within = self.number("within").narrow(0, 0, length).narrow(1, 0, length)
        mixed = torch.matmul(within, self.linear("value", self.norm(x))[0]).unsqueeze(0)
        total = mixed + self.number("left").narrow(0, 0, length) * before
        return residual + self.linear("out", total), total.narrow(1, length - 1, 1)
