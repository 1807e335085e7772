"""Block kind -> torch module. Names are those of `nas.core.block.BLOCKS`."""

from __future__ import annotations

from nas.core.registry import Registry
from nas.nn.base import FeedForward, Mixer

MODULES: Registry[type[Mixer] | type[FeedForward]] = Registry(
    "module of block kind",
    "nas.modules",
    {
        "conv": "nas.nn.conv:GatedShortConv",
        "gqa": "nas.nn.gqa:GroupedQueryAttention",
        "swa": "nas.nn.swa:SlidingWindowAttention",
        "mamba2": "nas.nn.mamba2:Mamba2",
        "swiglu": "nas.nn.swiglu:SwiGLU",
        "moe": "nas.nn.moe:MixtureOfExperts",
    },
)
