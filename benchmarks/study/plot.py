"""Plots the hypervolume of every study over trials and seconds of measuring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.search.recorded import Recorded
from benchmarks.study.figures import curve
from benchmarks.study.terms import CALLED

# Okabe and Ito's palette, which people with colour-vision deficiencies can tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_LINES = ("-", "--", ":", "-.")
_PANELS = {"trial": "trials proposed", "device_s": "seconds of measuring"}
_PANEL_IN = (4.6, 3.6)
_DPI = 120


def draw(studies: Sequence[Recorded], corner: Mapping[str, float], whole: float, file: Path) -> None:
    """Draws the studies."""
    engines = list(dict.fromkeys(study["engine"] for study in studies))
    seeds = list(dict.fromkeys(study["seed"] for study in studies))
    figure = Figure(figsize=(_PANEL_IN[0] * len(_PANELS), _PANEL_IN[1] + 0.5), layout="constrained")
    panels = figure.subplots(1, len(_PANELS), sharey=True)
    for panel, (by, label) in zip(panels, _PANELS.items(), strict=True):
        for study in studies:
            colour = _COLOURS[engines.index(study["engine"]) % len(_COLOURS)]
            line = _LINES[seeds.index(study["seed"]) % len(_LINES)]
            _step(
                panel, curve(study, corner, by), whole, colour, line, f"{CALLED[study['engine']]}, seed {study['seed']}"
            )
        panel.set_xlabel(label)
        panel.grid(alpha=0.25)
    panels[0].set_ylabel("share of the union front's hypervolume")
    marks, labels = panels[0].get_legend_handles_labels()
    figure.legend(marks, labels, loc="outside lower center", ncols=len(engines), frameon=False, fontsize=9)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.partial")
    figure.savefig(partial, format="png", dpi=_DPI, metadata={"Software": None})
    partial.replace(file)


def _step(panel: Axes, points: Sequence[tuple[float, float]], whole: float, colour: str, line: str, label: str) -> None:
    at, volumes = zip((0.0, 0.0), *points, strict=True)
    shares = [volume / whole if whole else 0.0 for volume in volumes]
    panel.step(at, shares, where="post", color=colour, linestyle=line, label=label)
