"""Where in the depth which kind of block stands: on the front, above what all trials have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from markupsafe import Markup

from nas.dashboard.pictures.strip import hue
from nas.dashboard.pictures.svg import Element, element, picture, titled

WIDTH, _LEFT, _BAR, _GAP, _FOOT = 640.0, 84.0, 72.0, 14.0, 22.0
_BETWEEN = 2.0

Shares = Mapping[str, Sequence[float]]


def depth_shares(rows: Mapping[str, Shares], nothing: str, label: str) -> Markup:
    """Stacked shares of kinds of blocks, one column for each part of the depth, one row for each set of layouts.

    Args:
        rows: what the layouts are -> kind of block -> its share of each part, input first.
        nothing: the kind that stands for no block: it is left open.
        label: what it shows, in words.
    """
    shapes: list[Element] = []
    for place, (name, shares) in enumerate(rows.items()):
        top = place * (_BAR + _GAP)
        shapes.append(element("text", text=name, x=_LEFT - 8, y=top + _BAR / 2 + 4, text_anchor="end"))
        shapes += _row(name, shares, nothing, top)
    foot = len(rows) * (_BAR + _GAP) + 4
    for text, x, anchor in (("first layers", _LEFT, "start"), ("last layers", WIDTH, "end")):
        shapes.append(element("text", text=text, x=x, y=foot, text_anchor=anchor, class_="label"))
    return picture("depth", label, WIDTH, foot + _FOOT - 14, shapes)


def _row(name: str, shares: Shares, nothing: str, top: float) -> list[Element]:
    parts = max(map(len, shares.values()))
    width = (WIDTH - _LEFT) / parts
    shapes = []
    for part in range(parts):
        at = top
        for kind, column in shares.items():
            height = _BAR * column[part]
            if height:
                bar = element(
                    "rect", x=_LEFT + part * width, y=at, width=width - _BETWEEN, height=height,
                    class_="nothing" if kind == nothing else f"block hue-{hue(kind)}",
                )  # fmt: skip
                told = f"{kind}: {column[part]:.0%} of the depth from {part / parts:.0%} to {(part + 1) / parts:.0%}"
                shapes.append(titled(bar, f"{name}: {told}"))
            at += height
    return shapes
