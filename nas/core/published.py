"""Published models as layouts: the LFM2 family (report, Table 1; layer order from the configurations), and others.

Factors of scores, embeddings and residuals, which cost no time, are left out.
"""

from __future__ import annotations

import re

from nas.core.errors import UnknownName
from nas.core.layout import Layout

_NAME = re.compile(r"[\w./-]+")
"""No layout: those have brackets."""

_ORDER_16 = "C3*2 A{a} C3*2 A{a} C3*2 A{a} C3 A{a} C3 A{a} C3 A{a} C3"

LFM2: dict[str, str] = {
    "LFM2-350M": f"d1024 v65536 ffn=swiglu:4608 [{_ORDER_16.format(a='16/8')}]",
    "LFM2-700M": f"d1536 v65536 ffn=swiglu:6912 [{_ORDER_16.format(a='24/8')}]",
    "LFM2-1.2B": f"d2048 v65536 ffn=swiglu:8192 [{_ORDER_16.format(a='32/8')}]",
    "LFM2-2.6B": (
        "d2048 v65536 ffn=swiglu:10752 [C3*2 A32/8 C3*2 A32/8 C3*3 A32/8 C3*3 A32/8 C3*3 A32/8 C3*3 A32/8 C3*3 A32/8"
        " C3*2 A32/8 C3]"
    ),
    "LFM2-8B-A1B": (
        "d2048 v65536 ffn=moe:32x4:1792 [C3+swiglu:7168*2 A32/8 C3*3 A32/8 C3*3 A32/8 C3*3 A32/8 C3*3 A32/8 C3*2 A32/8"
        " C3*2]"
    ),
}
"""Name -> one-line string, as `Layout.parse` reads it."""

_LFM3 = ("C7", "A16/4(gate=1,rope_dim=64,rope_theta=1000)", "W16/4@256(gate=1,rope_theta=10000)")
LFM3 = (
    "d2048 v128000 norms=both ffn=swiglu:7680"
    f" [{' '.join(_LFM3[1 if i % 4 == 2 else 2 if i % 4 == 0 and i else 0] for i in range(24))}]"
)
"""LFM3-1.7B (transformers' default Lfm3Config). Of a head's 64 pairs the first 32 turn, as with base 1,000,000."""

_QWEN3_5 = "{delta}:128(norm_eps=1e-06)*3 {attention}:256(gate=1,gate_wide=1,rope_dim=64,rope_theta=10000000)"


def _qwen3_5(d_model: int, ffn: int, fours: int, delta: str, attention: str) -> str:
    layers = " ".join([_QWEN3_5.format(delta=delta, attention=attention)] * fours)
    return f"d{d_model} v248320 ffn=swiglu:{ffn} [{layers}]"


QWEN3_5: dict[str, str] = {
    "Qwen3.5-0.8B": _qwen3_5(1024, 3584, 6, "D16", "A8/2"),
    "Qwen3.5-2B": _qwen3_5(2048, 6144, 6, "D16", "A8/2"),
    "Qwen3.5-4B": _qwen3_5(2560, 9216, 8, "D32/16", "A16/4"),
}
"""Qwen3.5 (Qwen, 2026), its text part, without the layers that predict further tokens."""

OTHERS: dict[str, str] = {
    "MiniCPM5-1B": "d1536 v130560 untied ffn=swiglu:4608 [A16/2:128(qk_norm=0)*24]",
    "Falcon-H1-0.5B": (
        "d1024 v32784 untied ffn=swiglu:2048 [M(inner=1536,norm=0)&A8/2:64(qk_norm=0,rope_theta=100000000000)*36]"
    ),
}
"""MiniCPM5 (OpenBMB, 2026), a Llama; Falcon-H1 (arXiv:2507.22448): attention and Mamba-2 beside each other."""

PLM = "d2048 v151936 ffn=relu2:8192 [L16/512(rope_theta=100000)*32]"
"""PLM-1.8B (arXiv:2503.12167, Table 1; queries are not compressed, section 2.1)."""


def _zebra(depth: int, d_model: int, latent: str, mamba: str, attention: tuple[int, ...]) -> str:
    return f"d{d_model} v128256 ffn=swiglu:8192 [{' '.join(latent if i in attention else mamba for i in range(depth))}]"


_ZEBRA_1B = (16, 2048, "L32/128(nope_dim=32,query=1344,rope_theta=500000)", "M64(expand=1,groups=8)")
_ZEBRA_3B = (28, 3072, "L24/128(nope_dim=64,query=1536,rope_theta=500000)", "M128(expand=1,groups=8)")

ZEBRA_LLAMA: dict[str, str] = {
    "Zebra-Llama-1B-8MLA": _zebra(*_ZEBRA_1B, (0, 2, 4, 6, 8, 10, 12, 14)),
    "Zebra-Llama-1B-6MLA": _zebra(*_ZEBRA_1B, (0, 2, 5, 8, 11, 14)),
    "Zebra-Llama-1B-4MLA": _zebra(*_ZEBRA_1B, (0, 5, 10, 14)),
    "Zebra-Llama-3B-14MLA": _zebra(*_ZEBRA_3B, (0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 27)),
    "Zebra-Llama-3B-8MLA": _zebra(*_ZEBRA_3B, (0, 4, 8, 12, 16, 20, 24, 27)),
    "Zebra-Llama-3B-6MLA": _zebra(*_ZEBRA_3B, (0, 5, 11, 17, 22, 27)),
}
"""Zebra-Llama (arXiv:2505.17272, Table 5 and appendix B): name -> one-line string.

Two parts of the paper have no argument of ours: up-projections there make the keys and values of 8 heads, here those of
all, and readers C of its Mamba-2 layers are per query head, here per group. Counts of weights agree with the paper's to
1 %, bytes of cache exactly.
"""

MODELS: dict[str, str] = {**LFM2, "LFM3-1.7B": LFM3, **QWEN3_5, **OTHERS, "PLM-1.8B-latent": PLM, **ZEBRA_LLAMA}
"""All of them: name -> one-line string."""


def named_layout(text: str, what: str = "published layout") -> Layout:
    """Returns the layout of a published model's name or of a layout string; `what` it can be beside the latter.

    Raises:
        UnknownName: a name of no published model.
        InvalidInput: no layout.
    """
    text = text.strip()
    if text not in MODELS and _NAME.fullmatch(text):
        raise UnknownName(what, text, MODELS)
    return Layout.parse(MODELS.get(text, text))
