"""Layouts as inline SVG: a strip of one layout layer by layer, and shares of block kinds by depth.

They have classes and no styles, so that `assets/plots.css` colours them, light or dark, under a strict
Content-Security-Policy. All text is escaped, and no script, link or foreign element is made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from xml.etree import ElementTree

from markupsafe import Markup

from nas.core.block import BLOCKS
from nas.core.layout import Layout
from nas.core.logs import visible
from nas.core.units import show_count, show_share
from nas.search.analysis.snapshot import NONE
from nas.serve.dashboard.filters import hue, show_bytes
from nas.serve.views.candidate import CandidateView, ComparisonView
from nas.serve.views.layout import BlockView, LayerView, layout_view
from nas.serve.views.study import ShareView

Element = ElementTree.Element

_COLUMN = 20.0
"""Width of a layer."""
_GAP = 3.0
_HEIGHT = 96.0
"""Of a strip, without letters."""
_LEAST = 2.0
_MIXER_SHARE = 0.5
_LETTERS = 14.0
_WIDTH = 640.0
"""Of a picture of shares by depth."""
_LEFT_MARGIN = 84.0
"""Room for the names of its rows."""
_BAR = 72.0
"""Height of a row."""
_ROW_GAP = 14.0
_FOOT = 22.0
_BETWEEN = 2.0

ROLES = {"mixer": "Mixers", "ffn": "Feed-forwards"}


def layout_strip(
    columns: Sequence[LayerView | None], label: str, *, most: int | None = None, marked: Sequence[int] = ()
) -> Markup:
    """Draws a column for each layer: mixers above the middle, parallel ones side by side, the feed-forward below.

    Areas are weights. Layers with shared weights are hollow; a gap is empty.

    None leaves a gap, where layouts are compared; `most` is the tallest block's weights where strips share a scale;
    `marked` has the positions of columns that differ from others.
    """
    most = most or tallest(columns)
    shapes = [
        _column(layer, index, index in marked, most) if layer else _gap(index) for index, layer in enumerate(columns)
    ]
    end = len(columns) * (_COLUMN + _GAP) + _GAP
    middle = _HEIGHT * _MIXER_SHARE + 0.5
    shapes.insert(0, _element("line", x1=0, x2=end, y1=middle, y2=middle, class_="middle"))
    return _picture("strip", label, end, _HEIGHT + _LETTERS, shapes)


def layout_thumbnail(text: str, most: int | None = None) -> Markup:
    """Draws a layout small, for lists: the strip without letters and without a text for each block.

    Args:
        text: the one-line string, which is the text alternative.
        most: as of `layout_strip`.
    """
    layers = _layers(text)
    most = most or tallest(layers)
    shapes = []
    for index, layer in enumerate(layers):
        for shape in _column(layer, index, False, most).iter("rect"):
            shape[:] = []
            shapes.append(shape)
    return _picture("thumbnail", text, len(layers) * (_COLUMN + _GAP) + _GAP, _HEIGHT, shapes)


def tallest(columns: Sequence[LayerView | None]) -> int:
    """Returns the weights of the largest mixer stack or feed-forward; at least 1."""
    stacks = [stack for layer in columns if layer for stack in (layer.mixers, (layer.ffn,) if layer.ffn else ())]
    return max([1, *(max(block.params for block in stack) * len(stack) for stack in stacks if stack)])


def tallest_of(texts: Iterable[str]) -> int:
    """Returns `tallest` of all these layouts, for a list of thumbnails on one scale."""
    return max([1, *(tallest(_layers(text)) for text in texts)])


def scale(most: int) -> str:
    """Returns the legend of a strip whose tallest block has `most` weights."""
    return f"mixers above the line, feed-forwards below; areas are weights, the tallest has {show_count(most)} weights."


@lru_cache(maxsize=4096)
def _layers(text: str) -> tuple[LayerView, ...]:
    return tuple(layout_view(Layout.parse(text), 0).layers)


def aligned_strips(view: ComparisonView) -> list[Markup]:
    """Draws a strip for each candidate, all on one scale, corresponding layers below each other.

    Marked are layers of other kinds than most of the layouts have there; of two, those of the second.
    """
    most = aligned_scale(view)
    drawn = []
    for number, candidate in enumerate(view.candidates):
        indices = [row.layers[number] for row in view.rows]
        columns = [None if index is None else candidate.layout.layers[index] for index in indices]
        marked = [
            place
            for place, kinds in enumerate(_kinds_by_row(view))
            if kinds[number] != Counter(kinds).most_common(1)[0][0]  # the first of equally frequent ones
        ]
        drawn.append(layout_strip(columns, f"{candidate.name}: {candidate.layout.text}", most=most, marked=marked))
    return drawn


def aligned_scale(view: ComparisonView) -> int:
    """Returns the weights of the tallest block of a comparison."""
    return max(tallest(candidate.layout.layers) for candidate in view.candidates)


def _kinds_by_row(view: ComparisonView) -> list[list[tuple[str, ...] | None]]:
    """Returns for each row the kinds of blocks that each candidate has there; None where it has no layer."""
    return [
        [
            None if index is None else tuple(block.kind for block in candidate.layout.layers[index].blocks)
            for candidate, index in zip(view.candidates, row.layers, strict=True)
        ]
        for row in view.rows
    ]


def layout_legend(*views: CandidateView) -> list[tuple[str, str]]:
    """Returns (kind of block, description) of every kind in the layouts, in order of appearance."""
    blocks = (block for view in views for layer in view.layout.layers for block in layer.blocks)
    return list({block.kind: (block.kind, block.doc) for block in blocks}.values())


def depth_shares(blocks: Sequence[ShareView], role: str) -> Markup:
    """Draws stacked shares of the block kinds of a role, a column per tenth of the depth: front above all trials."""
    of_role = [share for share in blocks if share.role == role]
    rows: dict[str, Mapping[str, Sequence[float]]] = {"all trials": {share.kind: share.all for share in of_role}}
    if of_role[0].front is not None:
        rows = {"front": {share.kind: share.front or [] for share in of_role}} | rows
    shapes: list[Element] = []
    for number, (name, shares) in enumerate(rows.items()):
        top = number * (_BAR + _ROW_GAP)
        shapes.append(_element("text", text=name, x=_LEFT_MARGIN - 8, y=top + _BAR / 2 + 4, text_anchor="end"))
        shapes += _shares(name, shares, top)
    foot = len(rows) * (_BAR + _ROW_GAP) + 4
    for text, x, anchor in (("first layers", _LEFT_MARGIN, "start"), ("last layers", _WIDTH, "end")):
        shapes.append(_element("text", text=text, x=x, y=foot, text_anchor=anchor, class_="label"))
    return _picture("depth", f"{ROLES[role]} by relative depth", _WIDTH, foot + _FOOT - 14, shapes)


def depth_legend(blocks: Sequence[ShareView], role: str) -> list[tuple[str, str]]:
    """Returns (kind of block, description) of a role's kinds."""
    return [(share.kind, BLOCKS[share.kind].doc) for share in blocks if share.role == role and share.kind != NONE]


def _shares(name: str, shares: Mapping[str, Sequence[float]], top: float) -> list[Element]:
    parts = max(map(len, shares.values()))
    width = (_WIDTH - _LEFT_MARGIN) / parts
    shapes = []
    for part in range(parts):
        at = top
        for kind, column in shares.items():
            height = _BAR * column[part]
            if height:
                bar = _element(
                    "rect",
                    x=_LEFT_MARGIN + part * width,
                    y=at,
                    width=width - _BETWEEN,
                    height=height,
                    class_="nothing" if kind == NONE else f"block hue-{hue(kind)}",
                )
                range_ = f"the depth from {show_share(part / parts)} to {show_share((part + 1) / parts)}"
                shapes.append(_titled(bar, f"{name}: {kind}: {show_share(column[part])} of {range_}"))
            at += height
    return shapes


def _column(layer: LayerView, index: int, marked: bool, most: int) -> Element:
    def height(params: float) -> float:
        return max(_LEAST, min(1.0, params / most) * _HEIGHT * _MIXER_SHARE)

    start, middle = _GAP + index * (_COLUMN + _GAP), _HEIGHT * _MIXER_SHARE
    width = _COLUMN / max(1, len(layer.mixers))
    shapes = []
    for number, mixer in enumerate(layer.mixers):
        # Higher by the number of mixers, because each is narrower by it.
        tall = height(mixer.params * len(layer.mixers))
        shapes.append(_block(mixer, layer, start + number * width, middle - tall, width, tall))
    if layer.ffn:
        shapes.append(_block(layer.ffn, layer, start, middle + 1, _COLUMN, height(layer.ffn.params) - 1))
    letters = "&".join(mixer.text[:1] for mixer in layer.mixers) or "-"
    text = letters if layer.share is None else f"^{layer.share}"
    shapes.append(_element("text", text=text, x=start + _COLUMN / 2, y=_HEIGHT + 10, text_anchor="middle"))
    return _element("g", *shapes, class_="layer marked" if marked else "layer")


def _block(block: BlockView, layer: LayerView, x: float, y: float, width: float, height: float) -> Element:
    shared = " shared" if layer.share is not None else ""
    shape = _element(
        "rect", x=x, y=y, width=width - 0.5, height=max(height, 1.0), class_=f"block hue-{hue(block.kind)}{shared}"
    )
    return _titled(shape, _block_title(block, layer))


def _block_title(block: BlockView, layer: LayerView) -> str:
    weights = show_count(block.params) + " weights"
    if block.active != block.params:
        weights += f", {show_count(block.active)} active"
    shape = ", ".join(f"{name} {value:g}" for name, value in block.shape.items())
    parts = [f"layer {layer.index}: {block.text}, {block.doc}", shape, weights]
    if layer.share is not None:
        parts.append(f"weights of layer {layer.share}")
    if block.kv_bytes:
        parts.append(f"cache {show_bytes(block.kv_bytes)}")
    if block.state_bytes:
        parts.append(f"state {show_bytes(block.state_bytes)}")
    parts.append(f"{show_count(block.flops)}FLOP a token")
    return "; ".join(part for part in parts if part)


def _gap(index: int) -> Element:
    start = _GAP + index * (_COLUMN + _GAP)
    return _element("line", x1=start, x2=start + _COLUMN, y1=_HEIGHT / 2, y2=_HEIGHT / 2, class_="gap")


def _element(tag: str, *children: Element, text: str | None = None, **attributes: str | float) -> Element:
    """Makes one SVG element; `class_` is `class`, other underscores in names of attributes are hyphens."""
    names = ("class" if name == "class_" else name.replace("_", "-") for name in attributes)
    element = Element(tag, dict(zip(names, map(_value, attributes.values()), strict=True)))
    element.text = None if text is None else visible(text)
    element.extend(children)
    return element


def _titled(shape: Element, title: str) -> Element:
    """Adds the text for hovering and screen readers."""
    shape.insert(0, _element("title", text=title))
    return shape


def _picture(kind: str, label: str, width: float, height: float, shapes: Iterable[Element]) -> Markup:
    root = _element("svg", *shapes, class_=f"picture picture-{kind}", role="img", aria_label=label)
    root.set("xmlns", "http://www.w3.org/2000/svg")
    root.set("viewBox", f"0 0 {_value(width)} {_value(height)}")
    return Markup(ElementTree.tostring(_titled(root, label), encoding="unicode"))


def _value(value: str | float) -> str:
    """Returns text without control characters, which XML does not allow, and numbers with at most two decimals."""
    return visible(value) if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
