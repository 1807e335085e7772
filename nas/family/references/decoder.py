"""What the reference models have in common: a decoder of equal layers, as llama.cpp names its keys and tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from nas.runtimes.llama_cpp.stock_model import StockModel, Value
from nas.runtimes.llama_cpp.tensors import Role, Tensor

Part = tuple[str, tuple[int, ...], Role]
"""A tensor of a layer: name without "blk.N.", shape with the slowest dimension first, role."""


@dataclass(frozen=True, kw_only=True)
class Decoder(ABC):
    """A decoder whose token embedding is its output matrix, too.

    Args:
        layers: depth.
        width: of the residual stream.
        vocab: tokens, padding included.
        context: tokens that it was trained for; llama.cpp only warns beyond.
        rms_eps: of the norms.
    """

    architecture: ClassVar[str]

    layers: int
    width: int
    vocab: int
    context: int
    rms_eps: float = 1e-5

    def model(self) -> StockModel:
        """The whole model."""
        return StockModel(self.architecture, self.metadata(), tuple(self._tensors()))

    def metadata(self) -> dict[str, Value]:
        """Keys without the architecture's prefix."""
        return {
            "vocab_size": self.vocab,
            "block_count": self.layers,
            "context_length": self.context,
            "embedding_length": self.width,
            "attention.layer_norm_rms_epsilon": self.rms_eps,
        }

    @abstractmethod
    def layer(self, index: int) -> Iterator[Part]:
        """The tensors of one layer."""

    def extra(self) -> Iterator[Tensor]:
        """Tensors besides the layers, the embedding and the last norm."""
        yield from ()

    def _tensors(self) -> Iterator[Tensor]:
        yield Tensor("token_embd.weight", (self.vocab, self.width))
        yield Tensor("output_norm.weight", (self.width,), "norm")
        yield from self.extra()
        for index in range(self.layers):
            for name, shape, role in self.layer(index):
                yield Tensor(f"blk.{index}.{name}", shape, role, index)


@dataclass(frozen=True, kw_only=True)
class Transformer(Decoder):
    """Grouped-query attention and SwiGLU in every layer.

    Args:
        heads: of queries.
        kv_heads: of keys and values.
        head_dim: numbers of a head.
        ffn: width of the feed-forward.
        rope_base: of the rotary positions.
    """

    qk_norm: ClassVar[bool] = False

    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    rope_base: float

    def metadata(self) -> dict[str, Value]:
        return super().metadata() | {
            "feed_forward_length": self.ffn,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "rope.dimension_count": self.head_dim,
            "rope.freq_base": self.rope_base,
        }

    def layer(self, index: int) -> Iterator[Part]:
        yield norm("attn_norm", self.width)
        yield from attention(self.width, self.heads, self.kv_heads, self.head_dim)
        if self.qk_norm:
            yield norm("attn_q_norm", self.head_dim)
            yield norm("attn_k_norm", self.head_dim)
        yield norm("ffn_norm", self.width)
        yield from swiglu(self.width, self.ffn)


def norm(name: str, size: int) -> Part:
    """The scales of a norm."""
    return f"{name}.weight", (size,), "norm"


def matrix(name: str, rows: int, columns: int) -> Part:
    """A matrix that is quantised."""
    return f"{name}.weight", (rows, columns), "matrix"


def attention(width: int, heads: int, kv_heads: int, head_dim: int) -> Iterator[Part]:
    """Projections of grouped-query attention."""
    yield matrix("attn_q", heads * head_dim, width)
    yield matrix("attn_k", kv_heads * head_dim, width)
    yield matrix("attn_v", kv_heads * head_dim, width)
    yield matrix("attn_output", width, heads * head_dim)


def swiglu(width: int, hidden: int, suffix: str = "") -> Iterator[Part]:
    """A gated feed-forward."""
    yield matrix(f"ffn_gate{suffix}", hidden, width)
    yield matrix(f"ffn_up{suffix}", hidden, width)
    yield matrix(f"ffn_down{suffix}", width, hidden)
