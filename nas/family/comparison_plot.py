"""A comparison as a picture like the report's Figure 4: tokens per second against size."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from nas.core.errors import InvalidInput
from nas.core.family import ComparedModel, Comparison, Metric
from nas.core.published import LFM2
from nas.family.ratios import figure_of

# Okabe and Ito's palette, which people with colour-vision deficiencies can tell apart.
_KINDS = {"member": ("#0072B2", "*", 150), "LFM2": ("#D55E00", "o", 50), "reference": ("#999999", "s", 36)}
_PANELS: tuple[tuple[Metric, int, str], ...] = (
    ("prefill_tps", 4096, "prefill at 4K [tokens/s]"),
    ("decode_tps", 4096, "decode at 4K [tokens/s]"),
)
_SUFFIXES = (".png", ".svg", ".pdf")
_DPI = 160
_SIZE, _LINE, _LETTER = 7, 9.0, 4.2
"""Of the points' names, in points of 1/72 inch: font, least distance of lines, width of a letter."""


def draw_comparison(comparison: Comparison, path: Path) -> None:
    """Writes the picture, whole or not at all; its kind follows from the file's suffix.

    Raises:
        InvalidInput: a suffix that is none of .png, .svg and .pdf.
    """
    check_suffix(path)
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    for panel, (metric, prompt, title) in zip(figure.subplots(1, len(_PANELS)), _PANELS, strict=True):
        _draw_panel(panel, comparison, metric, prompt)
        panel.set_ylabel(title)
    figure.suptitle(f"{comparison.device}, {comparison.conditions.get('threads', '?')} thread(s), Q4_0", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with matplotlib.rc_context({"svg.hashsalt": "hilnas", "svg.fonttype": "none"}):
        # No date in the file: equal results give equal bytes.
        metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix)
        figure.savefig(partial, format=path.suffix[1:], dpi=_DPI, metadata=metadata)
    partial.replace(path)


def check_suffix(path: Path) -> None:
    """Refuses a file name that no picture can have.

    Raises:
        InvalidInput: its suffix is none of .png, .svg and .pdf.
    """
    if path.suffix not in _SUFFIXES:
        raise InvalidInput(f"{path}: write {', '.join(_SUFFIXES)}", where="--plot")


def _draw_panel(panel: Axes, comparison: Comparison, metric: Metric, prompt: int) -> None:
    panel.set_xscale("log")
    panel.set_yscale("log")
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())
    named: list[tuple[str, float, float]] = []
    for kind, (colour, marker, size) in _KINDS.items():
        points = [
            (model.name, model.parameters / 1e9, figure.value)
            for model in comparison.models
            if _kind(model) == kind and (figure := figure_of(model, metric, prompt)) and figure.value is not None
        ]
        if points:
            _, x, y = zip(*points, strict=True)
            panel.scatter(x, y, s=size, color=colour, marker=marker, label=kind, zorder=3)
        named += points
    panel.set_xlabel("parameters [billions]")
    panel.grid(alpha=0.25, which="both")
    panel.margins(x=0.32, y=0.15)  # room for the names on the right
    _write_names(panel, named)
    if panel.get_legend_handles_labels()[0]:
        panel.legend(loc="upper right", frameon=False, fontsize=9)  # speed falls with size: free


def _write_names(panel: Axes, points: list[tuple[str, float, float]]) -> None:
    """A name to the right of each point, further down where another one stands, with a line to its point."""
    panel.autoscale_view()
    per_inch = panel.figure.dpi
    taken: list[tuple[float, float, float]] = []  # left, right, height of names, in points of 1/72 inch
    for name, x, y in sorted(points, key=lambda point: -point[2]):
        left, height = (float(each) * 72 / per_inch for each in panel.transData.transform((x, y)))
        right, free = left + _LETTER * len(name), height
        while any(left < other[1] and other[0] < right and abs(free - other[2]) < _LINE for other in taken):
            free -= 1
        taken.append((left, right, free))
        panel.annotate(
            name, (x, y), xytext=(6, free - height - _SIZE / 3), textcoords="offset points", fontsize=_SIZE,
            arrowprops={"arrowstyle": "-", "lw": 0.4, "color": "#999999"} if free < height else None,
        )  # fmt: skip


def _kind(model: ComparedModel) -> str:
    return "member" if model.member else "LFM2" if model.name in LFM2 else "reference"
