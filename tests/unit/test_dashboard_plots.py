"""Descriptions of plots: what a browser draws from them, their text alternatives, and hostile text in them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest
from exhaustive import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from markupsafe import escape

from nas.core.scoring import MeasurementKey
from nas.serve.api.devices import ReferenceRunView
from nas.serve.dashboard.plots import (
    MOST_BUCKETS,
    MOST_STEPS,
    Limit,
    Plot,
    cumulative,
    drift,
    histogram,
    no_temperature,
    sparkline,
    token_trace,
    training_curves,
)
from nas.serve.views.candidate import CandidateView, MeasurementView, RepetitionView

HOSTILE = "</div><script>alert(1)</script>\" onload='x' & \x00\x1b[2J\u202e"
VIEW = CandidateView.model_construct(budgets=())


class Elements(HTMLParser):
    """The elements of a page with their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))


def described(plot: Plot) -> dict[str, Any]:
    """The description that the script gets."""
    [(_, attributes), *_] = Elements(str(escape(plot))).elements
    description: dict[str, Any] = json.loads(attributes["data-plot"] or "")
    assert attributes["role"] == "img" and attributes["aria-label"] == description["label"] == plot.label
    return description


def run(token_ms: list[float], temperature_c: float | None = None, reason: str | None = None) -> RepetitionView:
    return RepetitionView.model_construct(
        token_ms=tuple(token_ms), temperature_c=temperature_c, valid=reason is None, reason=reason, drift=0.0,
        temperature_unread=None if temperature_c else "no sensor",
    )  # fmt: skip


def trace(*repetitions: RepetitionView) -> Plot:
    place = MeasurementView.model_construct(key=MeasurementKey("box", "fake", "chat"), repetitions=repetitions)
    return token_trace(VIEW, place)


def reference(at: float, ratio: float = 1.2, temperature_c: float | None = None, calm: bool = True) -> ReferenceRunView:
    return ReferenceRunView(at=at, job="j", ratio=ratio, temperature_c=temperature_c, calm=calm)


PLOTS: dict[str, Callable[[str], Plot]] = {
    "sparkline": lambda name: sparkline([(0, 1), (1, 3), (2, 2)], name),
    "histogram": lambda name: histogram([1.0, 2, 2, 3], name, name, [Limit("x", name, 2.5)]),
    "cumulative": lambda name: cumulative({name: [1.0, 2], "b": []}, name, name),
    "trace": lambda name: trace(run([1.0, 2], 40.0), run([3.0], reason=name)),
    "curves": lambda name: training_curves([(name, name, [(1, 2.0), (2, 1.0)])], name),
    "drift": lambda name: drift([reference(0.0), reference(0.0, calm=False)], name, 3600.0),
}


@pytest.mark.parametrize("kind", PLOTS)
def test_hostile_text_stays_text(kind: str) -> None:
    text = str(escape(PLOTS[kind](HOSTILE)))
    assert {tag for tag, _ in Elements(text).elements} <= {"div", "noscript"}
    assert {name for _, attributes in Elements(text).elements for name in attributes} == {
        "class", "role", "aria-label", "data-plot",
    }  # fmt: skip
    description = str(json.loads(Elements(text).elements[0][1]["data-plot"] or ""))
    assert text.isprintable() and description.isprintable() and "\u202e" not in description


@pytest.mark.parametrize(
    "plot",
    [
        histogram([], "a", "ms"), cumulative({}, "a", "ms"), cumulative({"b": []}, "a", "ms"),
        trace(), trace(run([])), training_curves([], "a"), training_curves([("a", "b", [])], "a"), drift([], "a", 0.0),
    ],
)  # fmt: skip
def test_nothing_to_draw_is_said_in_words(plot: Plot) -> None:
    text = str(escape(plot))
    assert text.startswith('<p class="missing">') and "data-plot" not in text


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=20))
@settings(max_examples=examples(50))
def test_any_figures_can_be_described(values: list[float]) -> None:
    points = list(enumerate(values))
    described(sparkline(points, "a"))
    bars = described(histogram(values, "a", "ms"))["series"][0]["points"]
    assert sum(count for _, count in bars) == len(values)
    steps = described(cumulative({"a": values}, "a", "ms"))["series"][0]["points"]
    assert steps[-1][1] == 1 and [x for x, _ in steps] == sorted(x for x, _ in steps)
    described(training_curves([("a", "b", points)], "a"))


def test_unknown_figures_are_null() -> None:
    assert described(sparkline([(0, 1.0), (1, math.nan)], "a"))["series"][0]["points"] == [[0, 1.0], [1, None]]


def test_equal_samples_have_one_bin() -> None:
    plot = described(histogram([3.0, 3.0], "a", "ms", [Limit("x", "budget: 2 ms", 2.0)]))
    assert plot["series"][0]["points"] == [[3.0, 2]]
    assert plot["x"]["covers"] == [2.5, 3.5]
    assert plot["limits"] == [{"axis": "x", "name": "budget: 2 ms", "value": 2.0}]


def test_distributions_name_each_series_and_those_without_samples() -> None:
    plot = cumulative({"one": [1.0, 2, 3], "two": [2.0, 4], "none": []}, "a", "ms")
    assert [series.name for series in plot.series] == ["one, median 2", "two, median 3"]
    assert len({series.hue for series in plot.series}) == 2
    assert "none: no samples" in plot.label
    (series,) = cumulative({"a": [float(number) for number in range(10_000)]}, "a", "ms").series
    assert len(series.points) == MOST_STEPS


def test_a_trace_keeps_its_peaks_however_long_it_is() -> None:
    tokens = [1.0] * 20_000
    tokens[12_345] = 9.0
    (series,) = trace(run(tokens)).series
    assert len(series.points) <= 2 * MOST_BUCKETS + 1
    assert (12_345.0, 1.5) in series.points


def test_a_trace_tells_temperatures_and_why_repetitions_were_refused() -> None:
    plot = trace(run([1.0, 1.0], 40.0), run([2.0], 44.0, "it throttled"), run([1.0], 41.0))
    assert [series.name for series in plot.series] == ["counted", "refused: it throttled", "temperature"]
    counted, refused, temperature = plot.series
    assert [x for x, y in counted.points if y is not None] == [0, 1, 3] and (1.5, None) in counted.points
    assert refused.points[0] == (2, 2.0) and refused.hue != counted.hue
    assert temperature.right and {y for _, y in temperature.points} == {40.0, 44.0, 41.0, None}
    assert plot.label == "chat on box/fake: 4 tokens, 3 repetitions"
    cold = MeasurementView.model_construct(repetitions=(run([1.0]),))
    assert no_temperature(cold) == "no sensor" and not trace(run([1.0])).right


def test_runs_of_one_group_share_a_colour() -> None:
    runs = [("lm", "seed 0", [(1, 2.0)]), ("lm", "seed 1", [(1, 1.0)]), ("task", "seed 0", [(1, 3.0)])]
    first, second, third = training_curves(runs, "a").series
    assert first.hue == second.hue != third.hue
    assert [first.name, third.name] == ["lm, seed 0", "task, seed 0"]


def test_a_sparkline_says_where_it_begins_and_ends() -> None:
    assert escape(sparkline([], "hypervolume")) == ""
    assert described(sparkline([(0, 0.5), (10, 0.75)], "hypervolume"))["label"] == "hypervolume: 0.5 to 0.75"


def test_one_slow_token_does_not_flatten_the_others() -> None:
    plot = described(histogram([10 + 0.001 * n for n in range(999)] + [230.0], "a", "ms per token"))
    assert plot["x"]["label"] == "ms per token (1 above, up to 230 ms)"
    assert max(plot["x"]["covers"]) == pytest.approx(10.998)
    assert sum(count for _, count in plot["series"][0]["points"]) == 999
    assert described(histogram([10.0] * 50 + [29.0], "a", "ms"))["x"]["label"] == "ms"


def test_one_slow_token_does_not_flatten_distributions() -> None:
    plot = cumulative({"fast": [*[1.0] * 999, 230.0], "slow": [10.0] * 5}, "a", "ms per token")
    assert plot.x.label == "ms per token (1 above, up to 230 ms)"
    assert [max(x for x, _ in line.points) for line in plot.series] == [1.0, 10.0]


def test_a_slow_token_is_at_the_edge_of_the_trace() -> None:
    plot = described(trace(run([10.0] * 400 + [230.0])))
    assert plot["y"]["label"] == "ms per token (1 above, up to 230 ms)"
    times = [y for _, y in plot["series"][0]["points"] if y is not None]
    assert (min(times), max(times)) == (10.0, 15.0)


def test_drift_is_drawn_between_its_limits() -> None:
    plot = drift([reference(0.0), reference(3600.0)], "box", 7200.0)
    assert plot.x and plot.x.label == "hours, 0 is now" and not plot.right
    assert [limit.value for limit in plot.limits] == [20.0, -5.0]
    assert [y for _, y in plot.series[0].points] == pytest.approx([20.0, 20.0])
    later = drift([reference(0.0)], "box", 90 * 86_400.0)
    assert later.x and later.x.label == "days, 0 is now"
    assert "+20.00 %" in later.label


def test_runs_of_one_moment_keep_their_own_points() -> None:
    (series,) = drift([reference(0.0), reference(0.0, 1.1), reference(0.0, 1.0)], "box", 3600.0).series
    assert len({x for x, _ in described(drift([reference(0.0)] * 3, "box", 3600.0))["series"][0]["points"]}) == 3
    assert len(series.points) == 3
