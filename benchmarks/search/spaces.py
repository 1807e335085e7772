"""The search spaces of the problems: small models of many sorts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nas.core.space import SearchSpace

PROMPT, CONTEXT = 512, 4096

AXES: Mapping[str, Mapping[str, str]] = {
    "quality": {"metric": "quality"},
    "decode": {"metric": "decode_p50", "workload": "chat"},
    "memory": {"metric": "peak_rss", "workload": "chat"},
    "ttft": {"metric": "ttft", "workload": "chat"},
    "size": {"metric": "file_size"},
}
"""Objective -> its definition in a space. There are budgets on ttft, decode and memory."""

CONV = {"kernel": {"choices": [3, 5, 7], "scope": "layer"}}
GQA = {"heads": 16, "kv_heads": {"choices": [2, 4, 8, 16], "scope": "layer"}}
SWIGLU = {"width": {"choices": [768, 1152, 1536, 2048], "scope": "layer"}}
MOE = {"experts": [4, 8], "top_k": 2, "width": [192, 256, 384]}
HYBRID: Mapping[str, Any] = {
    "model": {
        "d_model": [384, 512, 640],
        "depth": {"min": 8, "max": 14},
        "vocab": 8192,
        "params": {"total": {"min": "18M", "max": "60M"}},
        "leading_dense": [1, 2],
    },
    "mixers": {"conv": CONV, "gqa": GQA},
    "ffn": {"swiglu": SWIGLU, "moe": MOE},
}
"""Convolutions and attention, dense or with experts: what most problems search."""

MANY: Mapping[str, Any] = {
    "model": {**HYBRID["model"], "ffn_scope": "layer", "leading_dense": 1},
    "mixers": {
        "conv": {"kernel": [3, 5]},
        "gqa": GQA,
        "swa": {
            "heads": 16,
            "kv_heads": {"choices": [2, 4, 8], "scope": "layer"},
            "window": [128, 512],
            "sink": [0, 1],
        },
        "mamba2": {"state": {"choices": [32, 64, 128], "scope": "layer"}},
    },
    "ffn": {
        "swiglu": SWIGLU,
        "moe": {"experts": [4, 8], "top_k": [1, 2], "width": {"choices": [192, 256, 384], "scope": "layer"}},
    },
    "limits": {"gqa": {"min": 1}},
}
"""Four mixers and two feed-forwards, each layer for itself, with knobs that only some of them have."""

ATTENTION: Mapping[str, Any] = {
    "model": {"d_model": [384, 512], "depth": 10, "vocab": 8192},
    "mixers": {"gqa": GQA},
    "ffn": {"swiglu": {"width": {"choices": [512, 768, 1152, 1536, 2048], "scope": "layer"}}},
}
"""One mixer, one feed-forward, one depth: only arguments vary."""

PERIODIC: Mapping[str, Any] = {
    **HYBRID,
    "pattern": {"period": [2, 3, 4]},
    "ffn": {"swiglu": {"expansion": {"choices": [1.5, 2, 3, 4], "scope": "layer"}}},
}
"""Stacks that repeat after a few layers: few choices, each with a large effect."""


def synthetic_space(name: str, parts: Mapping[str, Any], axes: Sequence[str], pool: int | None = None) -> SearchSpace:
    """Returns a space of `parts` with objectives `axes`; `pool` candidates a proposal instead of the default."""
    data: dict[str, Any] = {
        "name": name,
        "runtimes": [{"name": "none", "quantisation": "none"}],
        "workloads": {"chat": {"prompt": PROMPT, "gen": 64, "context": CONTEXT}},
        "budgets": [
            {"metric": metric, "max": "1x", "workload": "chat"} for metric in ("ttft", "decode_p50", "peak_rss")
        ],
        "objectives": [{"name": axis, **AXES[axis]} for axis in axes],
        "references": {
            "published": "d512 v8192 ffn=swiglu:1536 [C3*2 A16/8 C3*2 A16/8 C3*2 A16/8 C3]",
            "attention": "d512 v8192 ffn=swiglu:1536 [A16/8*10]",
        },
        "search": {} if pool is None else {"pool": pool},
    }
    return SearchSpace.model_validate(data | dict(parts))
