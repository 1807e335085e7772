"""A layout drawn layer by layer: colour is the kind of block, height its weights."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from markupsafe import Markup

from nas.core.units import show_count
from nas.dashboard.pictures.svg import Element, element, picture, titled
from nas.service.layout_view import BlockView, LayerView

COLUMN, GAP, HEIGHT = 20.0, 3.0, 96.0
_LEAST = 2.0
_MIXER_SHARE = 0.5
_LETTERS = 14.0
_HUES = {"conv": 0, "gqa": 1, "swa": 2, "mamba2": 3, "swiglu": 4, "moe": 5}
_FURTHER_HUES = 4


def hue(kind: str) -> int:
    """The colour's number of a kind of block, from 0 to 9: kinds of other distributions share the last four."""
    known = _HUES.get(kind)
    return len(_HUES) + crc32(kind.encode()) % _FURTHER_HUES if known is None else known


def layout_strip(
    columns: Sequence[LayerView | None], label: str, *, most: int | None = None, marked: Sequence[int] = ()
) -> Markup:
    """One column a layer: mixers above the middle, side by side where they run in parallel, the feed-forward below.

    Areas are weights. Layers with another's weights are hollow; a gap is empty.

    Args:
        columns: first to last; None leaves a gap, where layouts are compared.
        label: says what is drawn.
        most: weights of the tallest block, where several pictures share a scale; None: the tallest of these.
        marked: positions of columns that differ from others.
    """
    scale = _Heights(most or tallest(columns))
    shapes = [
        _column(layer, place, place in marked, scale) if layer else _gap(place) for place, layer in enumerate(columns)
    ]
    return picture("strip", label, len(columns) * (COLUMN + GAP) + GAP, HEIGHT + _LETTERS, shapes)


def tallest(columns: Sequence[LayerView | None]) -> int:
    """Weights of the largest mixer stack or feed-forward; at least 1."""
    stacks = [stack for layer in columns if layer for stack in (layer.mixers, (layer.ffn,) if layer.ffn else ())]
    return max([1, *(max(block.params for block in stack) * len(stack) for stack in stacks if stack)])


class _Heights:
    """Weights to height, within half a column."""

    def __init__(self, most: int) -> None:
        self._most = most

    def __call__(self, params: float) -> float:
        return max(_LEAST, min(1.0, params / self._most) * HEIGHT * _MIXER_SHARE)


def _column(layer: LayerView, place: int, marked: bool, scale: _Heights) -> Element:
    left, middle = GAP + place * (COLUMN + GAP), HEIGHT * _MIXER_SHARE
    width = COLUMN / max(1, len(layer.mixers))
    shapes = []
    for number, mixer in enumerate(layer.mixers):
        # As many times as high as there are mixers, because each is only so wide.
        tall = scale(mixer.params * len(layer.mixers))
        shapes.append(_block(mixer, layer, left + number * width, middle - tall, width, tall))
    if layer.ffn:
        shapes.append(_block(layer.ffn, layer, left, middle + 1, COLUMN, scale(layer.ffn.params) - 1))
    shapes.append(element("text", text=_letters(layer), x=left + COLUMN / 2, y=HEIGHT + 10, text_anchor="middle"))
    classes = "layer marked" if marked else "layer"
    return element("g", *shapes, class_=classes)


def _block(block: BlockView, layer: LayerView, x: float, y: float, width: float, height: float) -> Element:
    shared = " shared" if layer.share is not None else ""
    shape = element(
        "rect", x=x, y=y, width=width - 0.5, height=max(height, 1.0), class_=f"block hue-{hue(block.kind)}{shared}"
    )
    return titled(shape, block_title(block, layer))


def block_title(block: BlockView, layer: LayerView) -> str:
    """What a block is and costs, on one line."""
    weights = show_count(block.params) + " weights"
    if block.active != block.params:
        weights += f", {show_count(block.active)} active"
    parts = [f"layer {layer.index}: {block.text}, {block.doc}", _shape(block), weights]
    if layer.share is not None:
        parts.append(f"weights of layer {layer.share}")
    if block.kv_bytes:
        parts.append(f"cache {show_bytes(block.kv_bytes)}")
    if block.state_bytes:
        parts.append(f"state {show_bytes(block.state_bytes)}")
    parts.append(f"{show_count(block.flops)}FLOP a token")
    return "; ".join(part for part in parts if part)


def show_bytes(count: float) -> str:
    """12582912 -> '12.58 MB'."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count:.0f} B"


def _shape(block: BlockView) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in block.shape.items())


def _letters(layer: LayerView) -> str:
    if layer.share is not None:
        return f"^{layer.share}"
    return "&".join(mixer.text[:1] for mixer in layer.mixers) or "-"


def _gap(place: int) -> Element:
    left = GAP + place * (COLUMN + GAP)
    return element("line", x1=left, x2=left + COLUMN, y1=HEIGHT / 2, y2=HEIGHT / 2, class_="gap")
