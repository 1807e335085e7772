"""Shared parts of the kinds of softmax attention: heads, QK-norm, RoPE, Canon, and how heads become fewer in a proxy.

Canon (Allen-Zhu 2025, "Physics of Language Models: Part 4.1", Canon-A): h + conv(h) in place of h, a causal depthwise
convolution of a few taps, such as Mamba-2 and gated convolutions have built in.
"""

from __future__ import annotations

import math

from nas.core.block import Arg, Block, BlockKind, Caches, Count, Scalar
from nas.core.errors import InvalidInput

MAX_GROUP = 8
"""Query heads to a key-value head up to which `scale` keeps the number of these: as in Llama 3 70B."""

_LEAST_HEAD = 8
_GOOD_HEAD = 16
"""Head sizes of proxies, see `narrow_heads`."""

HEAD_ARGS = (
    Arg("heads", int, "query heads", required=True, low=1, high=1024),
    Arg("kv_heads", int, "key-value heads; divides heads", required=True, low=1, high=1024, same_as="heads"),
    Arg("head_dim", int, "head size; d_model / heads unless given", low=2, high=1024),
    Arg("qk_norm", bool, "RMSNorm on each query and key head", default=True),
    Arg("qk_norm_wide", bool, "QK-norm over all heads together, as in OLMo 2, not one by one", default=False),
    Arg("qkv_bias", bool, "biases on queries, keys and values, as in Qwen2", default=False),
    Arg("rope_theta", float, "RoPE base, at least 1; 0: no positions", default=1e6, low=0, high=1e12),
    Arg("rope_factor", float, "what RoPE's angles are divided by; see rope_tokens", default=1.0, low=1, high=1e4),
    Arg(
        "rope_tokens",
        int,
        "tokens of a text before rope_factor: only pairs that turn less than four times within them are slowed, as in"
        " Llama 3.1; 0: all are",
        default=0,
        low=0,
        high=1 << 24,
    ),
    Arg("rope_yarn", bool, "rope_tokens as in YaRN: pairs that turn less than 32 times within them", default=False),
    Arg(
        "rope_long",
        int,
        "tokens up to which RoPE's angles are divided by one set of numbers, beyond them by another; both come with"
        " the weights, as in LongRoPE; 0: none",
        default=0,
        low=0,
        high=1 << 24,
    ),
    Arg("softcap", float, "bound b of scores: b tanh(score / b), as in Gemma 2; 0: none", default=0.0, low=0, high=1e9),
    Arg("gate", bool, "each head times a sigmoid of the input, as in LFM3", default=False),
    Arg("gate_wide", bool, "each number of a head times one of its own, as in Qwen3.5", default=False),
    Arg("rope_dim", int, "numbers of a head that RoPE turns, its first ones; 0: all", default=0, low=0, high=1024),
    Arg(
        "canon",
        int,
        "taps of a causal depthwise convolution in front, added to its input; 0: none",
        default=0,
        low=0,
        high=64,
    ),
)


ROPE_ARGS = ("rope_theta", "rope_factor", "rope_tokens", "rope_yarn", "rope_long", "rope_dim")
"""Those that say what RoPE does."""


class AttentionKind(BlockKind):
    """A kind with the arguments `HEAD_ARGS`; subclasses say what is attended to."""

    role = "mixer"

    def derived(self, block: Block, d_model: int) -> dict[str, Scalar]:
        heads = block.int("heads")
        return {"head_dim": d_model // heads} if d_model % heads == 0 else {}

    def check(self, block: Block, d_model: int) -> None:
        heads, kv_heads = block.int("heads"), block.int("kv_heads")
        if heads % kv_heads:
            raise InvalidInput(f"{self.name}: {kv_heads} key-value heads do not divide {heads} heads")
        head_dim = block.get("head_dim")
        if head_dim is None:
            raise InvalidInput(f"{self.name}: {heads} heads do not divide d_model {d_model}; give the head size")
        if int(head_dim) % 2:
            raise InvalidInput(f"{self.name}: head size {head_dim} is odd; RoPE turns pairs")
        if block.get("qk_norm_wide") and not block.get("qk_norm"):
            raise InvalidInput(f"{self.name}: qk_norm_wide says how qk_norm is computed, which is 0")
        if block.get("gate_wide") and not block.get("gate"):
            raise InvalidInput(f"{self.name}: gate_wide says what gate multiplies, which is 0")
        theta = float(block.get("rope_theta") or 0)
        if 0 < theta < 1:
            raise InvalidInput(f"{self.name}: rope_theta {theta} must be 0 (no positions) or at least 1")
        scaled = float(block.get("rope_factor") or 1) != 1
        if scaled and not theta:
            raise InvalidInput(f"{self.name}: rope_factor scales positions, of which rope_theta=0 has none")
        if block.int("rope_tokens") and not scaled:
            raise InvalidInput(f"{self.name}: rope_tokens needs a rope_factor above 1")
        if block.get("rope_yarn") and not block.int("rope_tokens"):
            raise InvalidInput(f"{self.name}: rope_yarn says how rope_tokens scale RoPE, which is 0")
        if block.get("rope_yarn") and theta <= 1:
            raise InvalidInput(f"{self.name}: rope_yarn needs a rope_theta above 1")
        if block.int("rope_long") and (scaled or not theta):
            raise InvalidInput(f"{self.name}: rope_long scales positions (rope_theta) in place of rope_factor")
        part = block.int("rope_dim")
        if part and (part % 2 or part >= int(head_dim)):
            raise InvalidInput(f"{self.name}: rope_dim {part} must be even and below the head size {head_dim}; 0: all")
        if part and not theta:
            raise InvalidInput(f"{self.name}: rope_dim turns numbers by position, of which rope_theta=0 has none")
        if block.int("canon") == 1:
            raise InvalidInput(f"{self.name}: canon must be 0 (no convolution) or at least 2 taps")

    def state_bytes(self, block: Block, d_model: int) -> float:
        return 4.0 * max(0, block.int("canon") - 1) * d_model

    def narrow(self, block: Block, d_model: int, to: int) -> Block:
        if to == d_model:
            return block
        full = block.resolve(d_model)
        heads, kv_heads, head_dim = narrow_heads(
            full.int("heads"), full.int("kv_heads"), full.int("head_dim"), d_model, to
        )
        if part := full.int("rope_dim"):
            pairs = round(part / full.int("head_dim") * head_dim / 2)
            block = block.replace(rope_dim=2 * min(max(pairs, 1), head_dim // 2 - 1))
        return block.replace(heads=heads, kv_heads=kv_heads, head_dim=head_dim, rope_long=0)

    def shorten(self, block: Block, d_model: int, context: int, length: int) -> Block:
        """RoPE's base, such that the same share of frequencies turns by a radian or more within a sequence.

        Of n frequencies base^(-i / n), the share log(length) / log(base) does. The tokens before scaling stay the same
        share of the sequence.
        """
        base = float(block.get("rope_theta") or 0.0)
        if not base:
            return block
        if tokens := dict(block.args).get("rope_tokens"):
            block = block.replace(rope_tokens=max(1, round(tokens * length / context)))
        return block.replace(rope_theta=float(f"{base ** (math.log(length) / math.log(context)):.3g}"))

    def scale(self, block: Block, d_model: int, to: int, caches: Caches) -> Block:
        """Heads keep their size, so that their number changes."""
        full = block.resolve(d_model)
        heads, kv_heads = full.int("heads"), full.int("kv_heads")
        group = heads // kv_heads
        scaled_heads = max(1, round(heads * to / d_model))
        groups = divisors(scaled_heads)
        if caches == "heads" and to > d_model:
            allowed = [size for size in groups if size <= max(MAX_GROUP, group)]
            group = min(allowed, key=lambda size: abs(math.log(scaled_heads / size / kv_heads)))
        else:
            group = min(groups, key=lambda size: (abs(math.log(size / group)), -size))
        return block.replace(heads=scaled_heads, kv_heads=scaled_heads // group, head_dim=full.int("head_dim"))

    def width_step(self, block: Block) -> int:
        """Returns the head size."""
        return block.int("head_dim")

    def strain(self, block: Block, scaled: Block, caches: Caches) -> float:
        """Returns the distance of key-value heads where those are kept, else of the ratio of heads."""
        if caches == "heads" and scaled.int("heads") > block.int("heads"):
            return abs(math.log(scaled.int("kv_heads") / block.int("kv_heads")))
        before, now = (attention.int("heads") / attention.int("kv_heads") for attention in (block, scaled))
        return abs(math.log(now / before))


def attention_count(block: Block, d_model: int, *, own_kv: bool = True) -> Count:
    """Returns weights of projections and norms of a resolved block; without keys and values unless `own_kv`."""
    head_dim = block.int("head_dim")
    q = block.int("heads") * head_dim
    kv = block.int("kv_heads") * head_dim if own_kv else 0
    norms = head_dim * (1 + own_kv) if block.get("qk_norm") else 0
    norms = q + kv if block.get("qk_norm_wide") else norms
    biases = q + 2 * kv if block.get("qkv_bias") else 0
    gates = (q if block.get("gate_wide") else block.int("heads")) * d_model if block.get("gate") else 0
    weights = 2 * d_model * q + 2 * d_model * kv + norms + biases + gates + block.int("canon") * d_model
    return Count(weights, weights)


def attention_flops(block: Block, tokens: int) -> float:
    """Returns multiply-adds x 2 of one token's scores and weighted sum over so many tokens; the block is resolved."""
    return 4.0 * block.int("heads") * block.int("head_dim") * tokens


def cache_bytes(block: Block, tokens: int, element: float) -> float:
    """Returns bytes of keys and values of `tokens` tokens; the block is resolved."""
    return 2.0 * block.int("kv_heads") * block.int("head_dim") * tokens * element


def narrow_heads(heads: int, kv_heads: int, head_dim: int, d_model: int, to: int) -> tuple[int, int, int]:
    """Returns query heads, key-value heads and head size of an attention at width `to`.

    The head size is scaled, but is at least 16, for which it may be twice what the scale says, and at least 8 in any
    case: RoPE and QK-norm mean little on fewer numbers, so there are fewer heads instead. It is no more than twice, so
    that one, two and four key-value heads stay different. Attention as wide as the model stays as wide as the model,
    and the width of all heads stays a multiple of 32. The new cache shape (kv_heads, head_dim) follows from the old one
    alone, so that a layer that reads another's cache still can, and the head size from that of the layout, so that
    layers of one head size keep one.
    """
    scaled = head_dim * to / d_model
    target = max(scaled, min(_GOOD_HEAD, 2 * scaled), _LEAST_HEAD)
    size = nearest(target, [n for n in divisors(to) if n >= _LEAST_HEAD and n % 2 == 0])
    kv = nearest(kv_heads * head_dim * to / d_model / size, divisors(to // size))
    step = math.lcm(kv, 32 // math.gcd(32, size))
    return step * max(1, round(heads * head_dim * to / d_model / size / step)), kv, size


def divisors(n: int) -> list[int]:
    """Returns all divisors of `n`, ascending."""
    return [i for i in range(1, n + 1) if n % i == 0]


def nearest(target: float, choices: list[int]) -> int:
    """Returns the choice with the least distance from `target`, the first of several."""
    return min(choices, key=lambda n: abs(n - target))
