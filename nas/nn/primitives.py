"""Modules that own weights. Each draws its own start values, from a generator that it is handed.

Values are uniform, not normal: a uniform float is exact bit arithmetic on the generator's integers, so a seed gives the
same weights on every machine, while normal values go through the platform's logarithm and cosine.

Sizes: rows of the embedding have norm 1, so a token's numbers have deviation 1 / sqrt(D) and first logits deviation 1;
what a block adds is smaller by sqrt(2 depth) than the embedding, so that all blocks together add as much as the token
itself at any depth and width, and no block at the bottom, such as attention that averages tokens, hides it. These are
start values of trainings; measured files with random weights hold others (`nas.runtimes`).
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_MOST_SHIFTS = 8
"""Shifting and adding beats `F.conv1d` with one group per channel on a CPU up to about this many taps."""


@torch.no_grad()
def draw_uniform(weight: Tensor, std: float, rng: torch.Generator) -> None:
    """Fills `weight` with uniform values of zero mean and deviation `std`; `rng` lives on the CPU."""
    bound = math.sqrt(3.0) * std
    weight.copy_(torch.empty(weight.shape).uniform_(-bound, bound, generator=rng))


class Weights(nn.Module, ABC):
    """A module that owns parameters, which nothing fills until `draw` or a checkpoint does."""

    @abstractmethod
    def draw(self, rng: torch.Generator, depth: int) -> None:
        """Fills the module's own parameters and buffers with start values.

        Args:
            rng: a CPU generator of this module's own.
            depth: layers of the model; see `Linear`.
        """


def draw_weights(module: nn.Module, seed: int, depth: int) -> None:
    """Fills all weights under `module`; each part's values follow from seed, the part's name, and `depth`."""
    for name, part in module.named_modules():
        if isinstance(part, Weights):
            part.draw(generator_of(seed, name), depth)


def generator_of(seed: int, name: str) -> torch.Generator:
    """Returns the generator of the part called `name`."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4]))


class Linear(Weights):
    """y = W x without bias; `weight` [outputs, inputs].

    Args:
        inputs: width of x.
        outputs: width of y.
        residual: whether y is added to the residual stream. Start values have deviation 1 / sqrt(inputs), and where
            y is added, over sqrt(2 depth outputs).
    """

    def __init__(self, inputs: int, outputs: int, *, residual: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., inputs] -> [..., outputs]."""
        return F.linear(x, self.weight)

    def draw(self, rng: torch.Generator, depth: int) -> None:
        draw_uniform(self.weight, _fan_in_std(self.weight, self.residual, depth), rng)


class ExpertLinear(Weights):
    """One linear map without bias per expert; `weight` [experts, outputs, inputs]."""

    def __init__(self, experts: int, inputs: int, outputs: int, *, residual: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))
        self.residual = residual

    def forward(self, x: Tensor, expert: int) -> Tensor:
        """Maps [..., inputs] -> [..., outputs] by one expert's map."""
        return F.linear(x, self.weight[expert])

    def draw(self, rng: torch.Generator, depth: int) -> None:
        draw_uniform(self.weight, _fan_in_std(self.weight, self.residual, depth), rng)


class DepthwiseConv(Weights):
    """Causal depthwise convolution; `weight` [D, K], whose last tap meets the current token, and `bias` [D] if asked.

    Args:
        channels: D.
        kernel: taps K.
        bias: whether each channel has one; it starts at zero.
    """

    def __init__(self, channels: int, kernel: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, kernel))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    @property
    def kernel(self) -> int:
        """Number of taps K."""
        return self.weight.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, K - 1 + T, D] -> [B, T, D]: x carries the K - 1 inputs before the chunk."""
        weight = self.weight.to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if self.kernel > _MOST_SHIFTS:
            return F.conv1d(x.transpose(1, 2), weight[:, None], bias, groups=len(weight)).transpose(1, 2)
        taps = weight.t().contiguous()
        length = x.shape[1] - self.kernel + 1
        first = x[:, :length]
        y = first * taps[0] if bias is None else torch.addcmul(bias, first, taps[0])
        for shift in range(1, self.kernel):
            y = torch.addcmul(y, x[:, shift : shift + length], taps[shift])
        return y

    def draw(self, rng: torch.Generator, depth: int) -> None:
        draw_uniform(self.weight, _fan_in_std(self.weight, False, depth), rng)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class RMSNorm(Weights):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019); `weight` [width].

    Args:
        width: of x.
        eps: added to the mean square.
        gain: start value of the weights.
    """

    def __init__(self, width: int, eps: float = 1e-5, *, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., width] -> [..., width], in the weight's precision: autocast hands over bfloat16 heads."""
        return F.rms_norm(x.to(self.weight.dtype), (x.shape[-1],), self.weight, self.eps)

    @torch.no_grad()
    def draw(self, rng: torch.Generator, depth: int) -> None:
        """Sets all to `gain`."""
        self.weight.fill_(self.gain)


class Embedding(Weights):
    """Rows of a table; `weight` [vocab, D]."""

    def __init__(self, vocab: int, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, d_model))

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps token ids [...] -> [..., D]."""
        return F.embedding(tokens, self.weight)

    def draw(self, rng: torch.Generator, depth: int) -> None:
        """Draws rows of norm 1."""
        draw_uniform(self.weight, _fan_in_std(self.weight, False, depth), rng)


def _fan_in_std(weight: Tensor, residual: bool, depth: int) -> float:
    std = 1.0 / math.sqrt(weight.shape[-1])
    return std / math.sqrt(2 * depth * weight.shape[-2]) if residual else std
