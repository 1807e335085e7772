"""Scaled RoPE: what angles are divided by, for torch modules and for files; no torch here."""

from __future__ import annotations

import math

from nas.core.block import Block

_SLOW_TURNS, _FAST_TURNS = 1, 4
"""`low_freq_factor` and `high_freq_factor` of every release of Llama 3.1, 3.2 and 3.3."""
_YARN_TURNS = (32, 1)
"""`beta_fast` and `beta_slow`, as proposed."""


def turned_numbers(block: Block) -> int:
    """Returns how many numbers of a head RoPE turns, from its first one; the block is resolved."""
    return block.int("rope_dim") or block.int("head_dim")


def rope_divisors(block: Block) -> tuple[float, ...]:
    """Returns what the angle of each of a head's n pairs that turn is divided by, [n]; () where that is 1.

    With `rope_yarn` (Peng et al. 2023; "yarn" of modeling_rope_utils.py, whose factor of attention is part of weights)
    bounds are 32 turns and one, rounded to whole pairs, and speeds are mixed in proportion to the number of the pair.

    With `rope_tokens` (Llama 3.1, "llama3" of transformers' modeling_rope_utils.py) a pair that turns four times or
    more within that many tokens keeps its speed, one that turns once or less is slowed by `rope_factor`, and between
    them speeds are mixed in proportion to the turns. The block is resolved.
    """
    factor, tokens, half = float(block.get("rope_factor") or 1.0), block.int("rope_tokens"), turned_numbers(block) // 2
    if factor == 1.0:
        return ()
    if not tokens:
        return (factor,) * half
    theta = float(block.get("rope_theta") or 0.0)
    if block.get("rope_yarn"):
        low, high = (half * math.log(tokens / (turn * 2 * math.pi)) / math.log(theta) for turn in _YARN_TURNS)
        first, last = max(math.floor(low), 0), min(math.ceil(high), 2 * half - 1)
        span = last - first or 0.001
        ramp = (min(max((i - first) / span, 0.0), 1.0) for i in range(half))
        return tuple(1.0 / (1.0 - slowed + slowed / factor) for slowed in ramp)
    turns = (tokens * theta ** (-i / half) / (2 * math.pi) for i in range(half))
    shares = (min(max((turn - _SLOW_TURNS) / (_FAST_TURNS - _SLOW_TURNS), 0.0), 1.0) for turn in turns)
    return tuple(1.0 / (share + (1.0 - share) / factor) for share in shares)
