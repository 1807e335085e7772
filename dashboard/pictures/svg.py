"""SVG elements as a tree, so that every text and attribute is escaped in one place."""

from __future__ import annotations

from collections.abc import Iterable
from xml.etree import ElementTree

from markupsafe import Markup

from nas.core.visible import visible

Element = ElementTree.Element
Value = str | float


def element(tag: str, *children: Element, text: str | None = None, **attributes: Value) -> Element:
    """One element.

    Args:
        tag: such as 'rect'.
        children: in the order in which they are painted.
        text: what it says; control characters stand as their escapes, which XML could not hold.
        attributes: `class_` is `class`, other underscores are hyphens; numbers are written with two decimals at most.
    """
    made = Element(tag, {_name(name): _value(value) for name, value in attributes.items()})
    made.text = None if text is None else visible(text)
    made.extend(children)
    return made


def titled(shape: Element, title: str) -> Element:
    """`shape` with what hovering shows and screen readers say."""
    shape.insert(0, element("title", text=title))
    return shape


def picture(kind: str, label: str, width: float, height: float, shapes: Iterable[Element]) -> Markup:
    """A whole picture, as wide as its place lets it be.

    Args:
        kind: its class is `picture-KIND`.
        label: what it shows, in words.
        width: of its own coordinates, from 0.
        height: of its own coordinates, from 0.
        shapes: what is painted.
    """
    root = element("svg", *shapes, class_=f"picture picture-{kind}", role="img", aria_label=label)
    root.set("xmlns", "http://www.w3.org/2000/svg")
    root.set("viewBox", f"0 0 {_value(width)} {_value(height)}")
    return Markup(ElementTree.tostring(titled(root, label), encoding="unicode"))


def points(xs: Iterable[float], ys: Iterable[float]) -> str:
    """Coordinates for `polyline` and `polygon`."""
    return " ".join(f"{_value(x)},{_value(y)}" for x, y in zip(xs, ys, strict=True))


def _name(name: str) -> str:
    return "class" if name == "class_" else name.replace("_", "-")


def _value(value: Value) -> str:
    return visible(value) if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
