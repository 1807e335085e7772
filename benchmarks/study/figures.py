"""Computes figures of recorded studies: hypervolume over trials and time, the union front and its layouts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.search.recorded import Recorded, Row, rounded, worst_point
from benchmarks.study.stacks import Stacks, built_of
from nas.core.layout import Layout
from nas.core.pareto import front_mask, hypervolume, rank_trials
from nas.core.scoring import Axis

Json = dict[str, Any]
CURVES = ("trial", "device_s")
"""The horizontal axes of hypervolume; see `curve`."""
_MARKS = (10, 20, 30, 40, 50, 60, 80, 100)


def figures(studies: Sequence[Recorded]) -> Json:
    """Returns all figures of the page as JSON.

    Hypervolume is taken from one corner for all: the worst of the studies' own reference points.
    """
    corner = worst_point(studies)
    union = volume(_front_rows(studies), corner)
    return rounded(  # type: ignore[no-any-return]
        {
            "space": studies[0]["space"],
            "corner": corner,
            "union_hypervolume": union,
            "studies": [_study(study, corner, union) for study in studies],
            "front": _winners(studies, corner),
            "stacks": {name: built.as_json() for name, built in _stacks(studies).items()},
        }
    )


def complete(study: Recorded) -> list[Row]:
    """Returns the trials that count for the front, in the order of proposals."""
    return [row for row in proposed(study) if row["status"] == "complete"]


def curve(study: Recorded, corner: Mapping[str, float], by: str) -> list[tuple[float, float]]:
    """Returns (position, hypervolume) after each trial."""
    rows = proposed(study)
    history: list[Row] = []
    spent, points = 0.0, []
    for number, row in enumerate(rows, 1):
        spent += row["stage_seconds"].get("measure", 0.0)
        history.append(row)
        at = {"trial": float(number), "device_s": spent}[by]
        points.append((at, volume((row for row in history if row["status"] == "complete"), corner)))
    return points


def proposed(study: Recorded) -> list[Row]:
    """Returns the trials without the references, in the order of proposals."""
    return [row for row in study["told"] if row["origin"] != "reference"]


def _study(study: Recorded, corner: Mapping[str, float], union: float) -> Json:
    rows, done = proposed(study), complete(study)
    curves = {by: curve(study, corner, by) for by in CURVES}
    by_trial = dict(curves["trial"])
    reached = volume(done, corner)
    return {
        "study": study["study"],
        "engine": study["engine"],
        "seed": study["seed"],
        "trials": len(rows),
        "ended": dict(sorted(Counter(row["status"] for row in rows).items())),
        "hypervolume": {str(mark): by_trial[mark] for mark in (*_MARKS, len(rows)) if mark in by_trial},
        "reached": reached,
        "share": reached / union if union else None,
        "curves": {by: [list(point) for point in points] for by, points in curves.items()},
        "elapsed_s": study["elapsed_s"],
        "device_s": sum(row["stage_seconds"].get("measure", 0.0) for row in rows),
        "training_s": sum(row["stage_seconds"].get("train", 0.0) for row in rows),
    }


def _winners(studies: Sequence[Recorded], corner: Mapping[str, float]) -> list[Json]:
    """Returns the front of all studies together, ordered by each layout's own contribution."""
    rows = _distinct(studies)
    studies_of: dict[str, list[str]] = {}
    for study in studies:
        for row in complete(study):
            studies_of.setdefault(row["layout"], []).append(study["study"])
    axes = {index: [_axis(row, name) for name in corner] for index, row in enumerate(rows)}
    return [
        {
            "layout": rows[place.trial]["layout"],
            "adds": place.hv_contribution,
            "p_front": place.p_front,
            "ties": len(place.ties),
            "quality": -rows[place.trial]["objectives"]["quality"],
            **{name: math.exp(rows[place.trial]["objectives"][name]) for name in corner if name != "quality"},
            "found_by": studies_of[rows[place.trial]["layout"]],
        }
        for place in rank_trials(axes, list(corner.values()))
        if place.rank == 0
    ]


def _axis(row: Row, name: str) -> Axis:
    coordinate = row["objectives"][name]
    source = row["proxy_id"] if name == "quality" else None
    return Axis(value=coordinate, coordinate=coordinate, sd=row.get("noise", {}).get(name, 0.0), source=source)


def _distinct(studies: Iterable[Recorded]) -> list[Row]:
    """Returns the complete trials of all studies; of a layout in several, the first."""
    rows: dict[str, Row] = {}
    for study in studies:
        for row in complete(study):
            rows.setdefault(row["layout"], row)
    return list(rows.values())


def _front_rows(studies: Iterable[Recorded]) -> list[Row]:
    rows = _distinct(studies)
    mask = front_mask([list(row["objectives"].values()) for row in rows])
    return [row for row, inside in zip(rows, mask, strict=True) if inside]


def _stacks(studies: Sequence[Recorded]) -> dict[str, Stacks]:
    """Returns statistics of the layouts of the union front and of all proposals."""
    proposals = {row["layout"] for study in studies for row in proposed(study)}
    at_random = {row["layout"] for study in studies if study["engine"] == "random" for row in proposed(study)}
    front = {row["layout"] for row in _front_rows(studies)}
    groups = {"front": front, "proposed": proposals, "random": at_random}
    return {name: built_of([Layout.parse(text) for text in sorted(group)]) for name, group in groups.items() if group}


def points(rows: Iterable[Row], corner: Mapping[str, float]) -> list[list[float]]:
    """Returns the coordinates of trials in the order of `corner`."""
    return [[row["objectives"][name] for name in corner] for row in rows]


def volume(rows: Iterable[Row], corner: Mapping[str, float]) -> float:
    """Returns the hypervolume of trials from a corner, objective -> coordinate."""
    return hypervolume(points(rows, corner), [corner[name] for name in corner])
