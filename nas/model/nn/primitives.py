"""Modules that own weights, and draw their start values from a generator.

Values are uniform, not normal: a uniform float is exact bit arithmetic on the generator's integers, so a seed gives the
same weights on every machine, while normal values depend on the platform's logarithm and cosine.

Sizes: rows of the embedding have norm 1, so embeddings have standard deviation 1 / sqrt(D) and first logits 1. Outputs
of blocks are smaller than the embedding by sqrt(2 depth): their sum is as large as the embedding at any depth and
width. Measured files with random weights have other values (`nas.measure.runtimes`).

Several models of one layout train in one pass (`nas.model.nn.seeds`): their parameters are stacked along a new first
dimension S, and a batch holds the examples of the first seed, then those of the second, and so on. Only modules with
parameters differ; everything else sees a larger batch.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nas.model.nn.base import Padding

_MOST_SHIFTS = 8
"""Shifting and adding beats `F.conv1d` with one group per channel on a CPU up to about this many taps."""


@torch.no_grad()
def draw_uniform(weight: Tensor, std: float, rng: torch.Generator) -> None:
    """Fills `weight` with uniform values of zero mean and deviation `std`; `rng` lives on the CPU."""
    bound = math.sqrt(3.0) * std
    weight.copy_(torch.empty(weight.shape).uniform_(-bound, bound, generator=rng))


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Maps [B, ..., inputs] -> [B, ..., outputs] by `weight` [outputs, inputs], or stacked [S, outputs, inputs]."""
    if weight.dim() == 2:
        return F.linear(x, weight)
    return torch.bmm(x.reshape(len(weight), -1, x.shape[-1]), weight.mT).view(*x.shape[:-1], -1)


def bounded(x: Tensor, bound: float) -> Tensor:
    """Returns bound tanh(x / bound), as Gemma 2 bounds logits and attention's scores; x where the bound is 0."""
    return torch.tanh(x / bound) * bound if bound else x


def for_examples(parameter: Tensor, x: Tensor) -> Tensor:
    """Returns `parameter` [D], or stacked [S, D], in a shape that multiplies the examples x [B, ..., D]."""
    if parameter.dim() == 1:
        return parameter
    seeds, width = parameter.shape
    rows = parameter[:, None].expand(seeds, len(x) // seeds, width)
    return rows.reshape(len(x), *(1,) * (x.dim() - 2), width)


class Weights(nn.Module, ABC):
    """A module that owns parameters, which nothing fills until `draw` or a checkpoint does.

    Attributes:
        stackable: whether `forward` takes stacked parameters, too.
    """

    stackable: ClassVar[bool] = False

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


class Linear(nn.Linear, Weights):
    """y = W x, plus `bias` [outputs] if asked; `weight` [outputs, inputs].

    Quantisers and adapters look for `nn.Linear`.

    A matrix of a hidden layer: the optimiser may treat it otherwise than embeddings, gains and taps.

    Args:
        inputs: width of x.
        outputs: width of y.
        residual: whether y is added to the residual stream. Start values have deviation 1 / sqrt(inputs), and where
            y is added, over sqrt(2 depth outputs).
        bias: whether each output has one; it starts at zero.
    """

    stackable = True

    def __init__(self, inputs: int, outputs: int, *, residual: bool = False, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.residual = residual

    def reset_parameters(self) -> None:
        """Draws nothing: see `draw`."""

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., inputs] -> [..., outputs]."""
        y = linear(x, self.weight)
        return y if self.bias is None else y + for_examples(self.bias.to(y.dtype), y)

    def draw(self, rng: torch.Generator, depth: int) -> None:
        draw_uniform(self.weight, _fan_in_std(self.weight, self.residual, depth), rng)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class ExpertLinear(Weights):
    """One linear map without bias per expert; `weight` [experts, outputs, inputs]."""

    stackable = True

    def __init__(self, experts: int, inputs: int, outputs: int, *, residual: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))
        self.residual = residual

    def maps(self) -> tuple[Tensor, ...]:
        """Returns each expert's map [outputs, inputs]; those of stacked seeds are numbered through.

        All at once: the gradient of a single one is as large as `weight`, and mostly zeros.
        """
        return self.weight.flatten(0, -3).unbind()

    def draw(self, rng: torch.Generator, depth: int) -> None:
        draw_uniform(self.weight, _fan_in_std(self.weight, self.residual, depth), rng)


class DepthwiseConv(Weights):
    """Causal depthwise convolution; `weight` [D, K], whose last tap meets the current token, and `bias` [D] if asked.

    Args:
        channels: D.
        kernel: taps K.
        bias: whether each channel has one; it starts at zero.
    """

    stackable = True

    def __init__(self, channels: int, kernel: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, kernel))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    @property
    def kernel(self) -> int:
        """Number of taps K."""
        return self.weight.shape[-1]

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, K - 1 + T, D] -> [B, T, D]: x carries the K - 1 inputs before the chunk."""
        weight = self.weight.to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if self.kernel > _MOST_SHIFTS:
            return _grouped_conv(x, weight, bias)
        taps = [for_examples(tap, x) for tap in weight.movedim(-1, 0).contiguous().unbind()]
        length = x.shape[1] - self.kernel + 1
        first = x[:, :length]
        y = first * taps[0] if bias is None else torch.addcmul(for_examples(bias, x), first, taps[0])
        for shift in range(1, self.kernel):
            y = torch.addcmul(y, x[:, shift : shift + length], taps[shift])
        return y

    def last_rows(self, window: Tensor, padding: Padding | None) -> Tensor:
        """Returns the K - 1 inputs [B, K - 1, D] that the next chunk's convolution sees.

        Args:
            window: [B, K - 1 + T, D].
            padding: padding after the text of a row is left out.
        """
        length = window.shape[1] - self.kernel + 1
        if padding is None:
            return window[:, length:]
        steps = torch.arange(1, length + 1, device=window.device)
        ends = (padding.text[:, -length:] * steps).amax(1)
        rows = ends[:, None] + torch.arange(self.kernel - 1, device=window.device)
        return window.gather(1, rows[..., None].expand(-1, -1, window.shape[2]))

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

    stackable = True

    def __init__(self, width: int, eps: float = 1e-5, *, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., width] -> [..., width], in the weight's precision: autocast hands over bfloat16 heads."""
        x = x.to(self.weight.dtype)
        if self.weight.dim() == 1:
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        return F.rms_norm(x, (x.shape[-1],), eps=self.eps) * for_examples(self.weight, x)

    @torch.no_grad()
    def draw(self, rng: torch.Generator, depth: int) -> None:
        """Sets all to `gain`."""
        self.weight.fill_(self.gain)


class Embedding(Weights):
    """Rows of a table; `weight` [vocab, D]."""

    stackable = True

    def __init__(self, vocab: int, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, d_model))

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps token ids [...] -> [..., D]."""
        if self.weight.dim() == 2:
            return F.embedding(tokens, self.weight)
        seeds, vocab, _ = self.weight.shape
        first = torch.arange(seeds, device=tokens.device) * vocab
        offset = first.repeat_interleave(len(tokens) // seeds).view(-1, *(1,) * (tokens.dim() - 1))
        return F.embedding(tokens + offset, self.weight.flatten(0, 1))

    def draw(self, rng: torch.Generator, depth: int) -> None:
        """Draws rows of norm 1."""
        draw_uniform(self.weight, _fan_in_std(self.weight, False, depth), rng)


def reference_conv(taps: Tensor, x: Tensor) -> Tensor:
    """Computes a causal depthwise convolution, one token and one tap at a time: taps [D, K] over x [T, D] -> [T, D]."""
    kernel, y = taps.shape[1], torch.zeros_like(x)
    for t in range(len(x)):
        for lag in range(min(kernel, t + 1)):
            y[t] += taps[:, kernel - 1 - lag] * x[t - lag]
    return y


def _grouped_conv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes `DepthwiseConv` by the library, with the channels of all seeds side by side."""
    seeds = len(weight) if weight.dim() == 3 else 1
    channels = torch.unflatten(x, 0, (seeds, -1)).permute(1, 0, 3, 2).flatten(1, 2)  # [B, S D, K - 1 + T]
    taps = weight.reshape(channels.shape[1], 1, -1)
    y = F.conv1d(channels, taps, None if bias is None else bias.flatten(), groups=len(taps))
    return torch.unflatten(y, 1, (seeds, -1)).permute(1, 0, 3, 2).flatten(0, 1)


def _fan_in_std(weight: Tensor, residual: bool, depth: int) -> float:
    std = 1.0 / math.sqrt(weight.shape[-1])
    return std / math.sqrt(2 * depth * weight.shape[-2]) if residual else std
