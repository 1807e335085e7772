"""Prints study reports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import typer

from nas.cli.output import print_table, say
from nas.core.stats import interval
from nas.core.units import show_count, show_duration, show_figure, show_number, show_share
from nas.search.analysis.history import VolumeView
from nas.serve.views.base import Interval
from nas.serve.views.effects import EffectsView

Report = Mapping[str, Any]


def report_fields(report: Report, database: str = "") -> Iterator[tuple[str, str]]:
    """Yields (name, value) for the state of a study; `database` is what its commands need (`same_database`)."""
    yield "study", report["study"]
    yield "space", report["space"]["name"]
    yield "state", report["state"]
    if reason := report.get("reason"):
        yield "reason", reason
    if resume := report.get("resume"):
        yield "to continue", f"{resume}{database}"
    if (headline := report["headline"]) is not None:
        yield "result", headline["text"]
    yield "trials", ", ".join(f"{count} {name}" for name, count in report["trials"].items() if count) or "none yet"
    yield "hypervolume", _volume(report)
    if (expected := report["expected_gain"]) is not None:
        share = expected["share"]
        most = f"{expected['hypervolume']:.2g}" if share is None else f"{show_share(share)} of the hypervolume"
        yield "next batch", f"of {expected['batch']}: expected gain at most {most}"
    if report["ended"] is not None:
        yield "search ended", report["ended"]["message"]
    for row in report["warm_start"]:
        yield "warm start", f"{row['layouts']} layouts of {row['study']}"
    if (noise := report["noise"]) is not None:
        yield "noise", noise["text"]
    yield "elapsed", show_duration(report["elapsed_s"])
    if (remaining := report["left"]) is not None:
        yield "time left", f"{remaining['text']}; from {'; '.join(remaining['based_on'])}"
    spent = {stage: seconds for stage, seconds in report["stage_seconds"].items() if seconds}
    yield "work", ", ".join(f"{stage} {show_duration(seconds)}" for stage, seconds in spent.items()) or "none yet"


def _volume(report: Report) -> str:
    volume = report["hypervolume"]
    if volume is None:
        return "not known until the references are measured"
    if not report["front"]:
        return "none: no trial is on the front"
    interval = report["hypervolume_ci95"]
    return VolumeView(value=volume, estimate=interval["estimate"], low=interval["low"], high=interval["high"]).text


def print_effects(view: EffectsView) -> None:
    """Prints the effects of knobs on the objectives, and a row for each value of each slice."""
    heads = list(map(_head, view.objectives, view.units))
    effects = [
        (knob.name, f"{show_number(knob.least)} to {show_number(knob.greatest)}", *map(_show_interval, knob.effects))
        for knob in view.knobs
    ]
    print_table(("knob", "tried", *heads), effects, "Change from the least to the greatest value tried, all else equal")
    if view.no_slices is not None:
        say(f"no slices: {view.no_slices}")
        return
    heads = list(map(_head, view.objectives, view.slice_units))
    slices = [
        (along.knob, show_number(value), len(along.layouts), *(_show_interval(row[place]) for row in along.predicted))
        for along in view.slices
        for place, value in enumerate(along.values)
    ]
    typer.echo()
    print_table(("knob", "value", "layouts", *heads), slices, "Forecast for layouts of the front, nothing else changed")


def _head(name: str, unit: str | None) -> str:
    return f"{name} [{unit}]" if unit else name


def _show_interval(interval: Interval | None) -> str:
    return show_figure(interval.value, interval.low, interval.high) if interval else "not known"


def say_result(report: Report) -> None:
    """Prints what the study found, why its search ended, and what it was measured beside."""
    if (headline := report.get("headline")) is not None:
        say(headline["text"])
    if (end := report.get("ended")) is not None:
        say(f"the search ended: {end['message']}")
    if (noise := report.get("noise")) is not None:
        say(noise["text"])


def print_front(report: Report, *, wide: bool = False) -> None:
    """Prints the references and the Pareto front, what adds most hypervolume first; `wide`: with 95 % intervals."""
    objectives = report["objectives"]
    heads = [_head(objective["name"], objective["unit"]) for objective in objectives]
    rows = [
        *(_row(row["name"], row, objectives, wide) for row in report["references"]),
        *(_row(str(row["trial"]), row, objectives, wide) for row in report["front"]),
    ]
    print_table(("trial", *heads, "p_front", "ties", "beaten by", "weights", "layout"), rows)
    notes = ["in brackets 95 % intervals"] * wide
    if any(row["params"]["active"] < row["params"]["total"] for row in (*report["references"], *report["front"])):
        notes.append("of weights with experts, all and active ones")
    if any(row["dominated_by"] for row in report["front"]):
        notes.append("p_front is among this study's own layouts: those of `beaten by` are better than it")
    if report["front"]:
        say("; ".join(["sorted by the hypervolume that each adds", *notes]))
    if (sure := report["reliability"]) is not None:
        say(sure["text"])


def print_agreement(report: Report) -> None:
    """Prints the rank correlations between the runtimes of a study, if it has several."""
    rows = [_agreement(agreement) for agreement in report["agreement"]]
    if rows:
        typer.echo()
        print_table(("rank agreement", "between", "layouts", "Spearman", "Kendall", "told apart by both"), rows)


def _agreement(agreement: Mapping[str, Any]) -> list[str]:
    correlation = agreement["correlation"]
    coefficients = [_coefficient(correlation[name]) for name in ("spearman", "kendall")]
    alike = correlation["reason"] or f"{agreement['alike']} of {agreement['apart']} pairs alike"
    where = f"{agreement['metric']}@{agreement['workload']} on {agreement['device']}"
    return [where, ", ".join(agreement["runtimes"]), str(correlation["layouts"]), *coefficients, alike]


def _coefficient(coefficient: Mapping[str, float] | None) -> str:
    return f"{coefficient['value']:.2f} [{coefficient['low']:.2f}, {coefficient['high']:.2f}]" if coefficient else ""


def _row(label: str, row: Mapping[str, Any], objectives: Sequence[Mapping[str, Any]], wide: bool) -> list[str]:
    values = [_value(row, objective, wide) for objective in objectives]
    sure = "" if row["p_front"] is None else f"{row['p_front']:.2f}"
    total, active = (show_count(row["params"][name]) for name in ("total", "active"))
    weights = total if total == active else f"{total}, {active}"
    return [label, *values, sure, _list(row["ties"]), _list(row["dominated_by"]), weights, row["layout"]]


def _value(row: Mapping[str, Any], objective: Mapping[str, Any], wide: bool) -> str:
    """Returns a value with the digits that its noise leaves; `wide`: and with its 95 % interval."""
    value, sd = row["objectives"][objective["name"]], row["value_sd"][objective["name"]]
    if value is None or sd is None:
        return "" if value is None else show_number(value)
    low, high = interval(value, sd, objective["transform"])
    return show_figure(value, low, high) if wide else show_number(value, low, high)


def _list(values: Iterable[object]) -> str:
    return " ".join(map(str, values))
