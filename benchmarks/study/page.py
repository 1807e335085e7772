"""Formats the figures of a comparison as the tables of docs/measured/real-study.md."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.page import table
from benchmarks.study.stacks import HEIGHTS
from benchmarks.study.terms import CALLED
from nas.core.units import show_duration

Json = Mapping[str, Any]
_WINNERS = 10
_STATES = ("complete", "stopped", "infeasible", "failed")
_KINDS = {"conv": "convolution", "gqa": "attention", "mamba2": "Mamba-2"}
_GROUPS = {"front": "on the front", "proposed": "proposed by all", "random": "proposed at random"}


def page(figures: Json) -> str:
    """Returns the generated part of the page: the tables of `benchmarks.study.figures.figures`."""
    winners = figures["front"]
    return "\n".join(
        [
            f"{engine_table(figures)}\n{_means(figures['studies'])}\n",
            f"{len(winners)} layout{'' if len(winners) == 1 else 's'} on the front of all studies; the {_WINNERS} that"
            f" add most hypervolume:\n\n{front_table(winners)}",
            stack_table(figures["stacks"]),
            "",
        ]
    )


def engine_table(figures: Json) -> str:
    """Returns a row for each study: hypervolume over trials, ends of trials, seconds."""
    studies, union = figures["studies"], figures["union_hypervolume"]
    marks = sorted({int(mark) for study in studies for mark in study["hypervolume"]})
    rows = [
        [
            CALLED[study["engine"]],
            study["seed"],
            *(_share(study["hypervolume"].get(str(mark)), union) for mark in marks),
            *(study["ended"].get(state, 0) for state in _STATES),
            *(show_duration(study[name]) for name in ("device_s", "training_s", "elapsed_s")),
        ]
        for study in studies
    ]
    return table(
        ["engine", "seed", *(f"@{mark}" for mark in marks), *_STATES, "measuring", "training", "wall time"], rows
    )


def front_table(winners: Sequence[Json]) -> str:
    """Returns a row for each of the layouts that add most."""
    rows = [
        [
            f"`{winner['layout']}`",
            *(f"{winner[name]:.3f}" for name in ("quality", "latency", "memory", "p_front")),
            ", ".join(winner["found_by"]),
        ]
        for winner in winners[:_WINNERS]
    ]
    return table(["layout", "quality", "latency", "memory", "p_front", "found by"], rows)


def stack_table(stacks: Json) -> str:
    """Returns the share of each mixer in each third of the stacks, for the front and for what was proposed."""
    kinds = list(stacks["proposed"]["mixers"][HEIGHTS[0]])
    rows = [
        [
            _GROUPS[name],
            stack["layouts"],
            f"{stack['depth']:.1f}",
            f"{stack['experts']:.2f}",
            *(f"{stack['mixers'][height].get(kind, 0.0):.2f}" for kind in kinds for height in HEIGHTS),
        ]
        for name, stack in stacks.items()
    ]
    places = [f"{_KINDS.get(kind, kind)}, {height}" for kind in kinds for height in HEIGHTS]
    return table(["", "layouts", "layers", "with experts", *places], rows)


def _means(studies: Sequence[Json]) -> str:
    shares: dict[str, list[float]] = {}
    for study in studies:
        shares.setdefault(CALLED[study["engine"]], []).append(study["share"] or 0.0)
    means = {engine: statistics.fmean(values) for engine, values in shares.items()}
    ordered = sorted(means, key=lambda engine: -means[engine])
    return f"Mean share at the end: {'; '.join(f'{engine} {means[engine]:.3f}' for engine in ordered)}."


def _share(volume: float | None, union: float) -> str:
    return "" if volume is None or not union else f"{volume / union:.3f}"
