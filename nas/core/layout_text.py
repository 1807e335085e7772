"""The one-line string of a layout: what people read, type and paste.

    d1024 v65536 ffn=swiglu:4608 [C3*2 A16/8 C3*2 A16/8 C3*2 A16/8 C3 A16/8 C3 A16/8 C3 A16/8 C3]

Header: width, vocabulary, `untied`, and the feed-forward that layers have unless they say otherwise. Then one item per
layer: mixers (several, joined by `&`, run in parallel; `-` is none), `+FFN` of its own (`+none` is none), `*count`.
`^3` is a second use of layer 3.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import groupby

from nas.core.block import Block
from nas.core.errors import InvalidInput
from nas.core.layout import Layer, Layout

_HEADER = re.compile(r"\s*d(\d{1,9})\s+v(\d{1,9})(\s+untied)?\s+ffn=(\S+)\s*\[([^\[\]]*)\]\s*")
_ITEM = re.compile(r"(?P<body>[^*]+?)(?:\*(?P<count>\d{1,4}))?")


def format_layout(layout: Layout) -> str:
    """The canonical one-line string."""
    default = _default_ffn(layout)
    items = [_format_layer(layer, default) for layer in layout.layers]
    runs = [(item, len(list(group))) for item, group in groupby(items)]
    body = " ".join(item if count == 1 else f"{item}*{count}" for item, count in runs)
    untied = "" if layout.tied else " untied"
    return f"d{layout.d_model} v{layout.vocab}{untied} ffn={_format_ffn(default)} [{body}]"


def parse_layout(text: str) -> Layout:
    """The layout a one-line string names.

    Raises:
        InvalidInput: the text is no layout; the message quotes the part that cannot be read.
    """
    match = _HEADER.fullmatch(text)
    if match is None:
        raise InvalidInput(f"cannot read layout {text!r}: expected 'dWIDTH vVOCAB [untied] ffn=KIND:... [LAYERS]'")
    width, vocab, untied, ffn, body = match.groups()
    default = _parse_ffn(ffn)
    layers = [layer for item in body.split() for layer in _parse_item(item, default)]
    return Layout.of(int(width), int(vocab), layers, tied=not untied)


def _default_ffn(layout: Layout) -> Block | None:
    """The commonest feed-forward, the first on a tie."""
    counts = Counter(layer.ffn for layer in layout.layers if layer.share is None)
    return max(counts, key=lambda ffn: counts[ffn]) if counts else None


def _format_ffn(ffn: Block | None) -> str:
    return ffn.format() if ffn else "none"


def _format_layer(layer: Layer, default: Block | None) -> str:
    if layer.share is not None:
        return f"^{layer.share}"
    mixers = "&".join(block.format() for block in layer.mixers) or "-"
    return mixers if layer.ffn == default else f"{mixers}+{_format_ffn(layer.ffn)}"


def _parse_item(item: str, default: Block | None) -> list[Layer]:
    match = _ITEM.fullmatch(item)
    if match is None or match["count"] == "0":
        raise InvalidInput(f"cannot read layer {item!r}: expected MIXER[+FFN][*COUNT] or ^LAYER")
    return [_parse_layer(match["body"], default)] * int(match["count"] or 1)


def _parse_layer(body: str, default: Block | None) -> Layer:
    if re.fullmatch(r"\^\d{1,4}", body):
        return Layer(share=int(body[1:]))
    mixers, plus, ffn = body.partition("+")
    blocks = () if mixers == "-" else tuple(Block.parse(part, "mixer") for part in mixers.split("&"))
    return Layer(blocks, _parse_ffn(ffn) if plus else default)


def _parse_ffn(text: str) -> Block | None:
    return None if text == "none" else Block.parse(text, "ffn")
