"""The registry of block kinds' modules."""

from __future__ import annotations

from nas.core.registry import Registry
from nas.model.nn.base import FeedForward, Mixer

MODULES: Registry[type[Mixer] | type[FeedForward]] = Registry(
    "module of block kind",
    "nas.modules",
    {
        "conv": "nas.model.nn.conv:GatedShortConv",
        "gqa": "nas.model.nn.gqa:GroupedQueryAttention",
        "swa": "nas.model.nn.swa:SlidingWindowAttention",
        "mla": "nas.model.nn.mla:MultiHeadLatentAttention",
        "mamba2": "nas.model.nn.mamba2:Mamba2",
        "gdn": "nas.model.nn.gdn:GatedDeltaNet",
        "gla": "nas.model.nn.gla:GatedLinearAttention",
        "mlstm": "nas.model.nn.mlstm:MatrixLSTM",
        "linear": "nas.model.nn.linear:LinearAttention",
        "deltanet": "nas.model.nn.deltanet:DeltaNet",
        "mamba": "nas.model.nn.mamba:Mamba",
        "s4": "nas.model.nn.s4:S4",
        "s5": "nas.model.nn.s5:S5",
        "cfc": "nas.model.nn.cfc:CfC",
        "rtf": "nas.model.nn.rtf:RTF",
        "longconv": "nas.model.nn.longconv:LongConvolution",
        "swiglu": "nas.model.nn.swiglu:SwiGLU",
        "geglu": "nas.model.nn.geglu:GeGLU",
        "relu2": "nas.model.nn.relu2:SquaredReLU",
        "moe": "nas.model.nn.moe:MixtureOfExperts",
    },
)
"""Block kind -> torch module. Names are those of `nas.core.block.BLOCKS`."""
