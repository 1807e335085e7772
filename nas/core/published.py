"""The published LFM2 family as layouts (report, Table 1; layer order from the released configurations)."""

from __future__ import annotations

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
