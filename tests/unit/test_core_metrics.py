"""The table of metrics: one row, and the metric is in every table that people read."""

from __future__ import annotations

import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cli_runner import nas
from pydantic import ValidationError
from release_lab import comparison, files, write_family
from study_support import figure

from nas.core.errors import InvalidInput, UnknownName
from nas.core.family import FAMILY, RecordedFigure, family_folder, read_family, write_record
from nas.core.layout import Layout
from nas.core.limit import Limit
from nas.core.measurement import Figure, Measurement
from nas.core.metrics import METRICS, Metric, metric
from nas.core.workload import Workload
from nas.measure.protocol.calibration import MeasurementTarget
from nas.measure.protocol.file_choice import Check
from nas.serve.views import candidate
from nas.serve.views.family import kind_of
from nas.train.adapt import device
from nas.train.adapt.device import DeviceBench
from nas.train.adapt.request import AdaptRequest
from nas.train.compare.tables import figures_table
from nas.train.release.model_card import card
from nas.train.release.options import FileOptions
from nas.train.scaling.measure import recorded_figure

MADE_UP = Metric("wakeups", "wake-ups", "1/s", "how often a core wakes up", recorded=True, compared=True)


@pytest.fixture(autouse=True)
def row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAS_HOME", str(tmp_path))
    monkeypatch.setitem(METRICS, MADE_UP.name, MADE_UP)


def measured() -> Measurement:
    names = {"wakeups": figure(12.0, 0.1, "1/s"), "decode_mean": Figure(value=20.0, low=16.0, high=25.0, unit="ms")}
    return cast(Measurement, SimpleNamespace(figures=names, workload=Workload(prompt=64, gen=16), wall_s=1.0))


def in_records() -> RecordedFigure:
    return recorded_figure(MADE_UP, 64, measured())


def test_records_of_families_have_it() -> None:
    assert (in_records().metric, in_records().value, in_records().prompt) == ("wakeups", 12.0, 64)
    assert recorded_figure(METRICS["decode_tps"], 64, measured()).ci95 == (40.0, 62.5)
    with pytest.raises(ValidationError, match="unknown metric of a family 'latency'"):
        RecordedFigure(metric="latency", prompt=64)


def test_commands_pages_cards_and_comparisons_show_it(tmp_path: Path) -> None:
    write_family(tmp_path)
    family = read_family("demo")
    small = family.members[1]
    one = small.measured[0].model_copy(update={"figures": (in_records(),)})
    changed = family.model_copy(update={"members": (small.model_copy(update={"measured": (one,)}),)})
    write_record(family_folder("demo") / FAMILY, changed)
    done = nas("family", "show", "demo")
    assert "wake-ups\t64\t12.0 1/s (10.9 to 13.2)" in done.out

    label = kind_of("wakeups", 64)
    assert (label.label, label.unit) == ("wake-ups at 64 tokens", "1/s")

    text = card("demo", Layout.parse(small.layout), files(tmp_path / "other"), FileOptions(measured=(one,)))
    assert "| wake-ups, 1/s | 64 | 12 [10.91, 13.2] |" in text

    compared = comparison("demo", "text")
    models = tuple(model.model_copy(update={"measured": one}) for model in compared.models)
    columns, rows = figures_table(compared.model_copy(update={"models": models}))
    assert columns[2:] == ["wake-ups 1/s 64"] and rows[0][2:] == ["12"]


def test_trials_are_compared_by_it() -> None:
    measurement = SimpleNamespace(key=("box", "fake", "chat"), calibration_ms=1.0, figures=measured().figures)
    (line,) = candidate._figures([cast(Any, SimpleNamespace(measurements=[measurement]))])
    assert (line.metric, line.unit, line.direction) == ("wakeups", "1/s", "min")


def test_an_adaptation_measures_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def measure_layout(*_: Any) -> Measurement:
        return measured()

    monkeypatch.setattr(device, "measure_layout", measure_layout)
    target = MeasurementTarget(cast(Any, None), cast(Any, None), cast(Any, None), "q4_0", {})
    monkeypatch.setattr(DeviceBench, "_open", lambda bench: (None, target))
    request = AdaptRequest(model=Path("m"), budget=("wakeups<=20",), corpus=(Path("c"),), output=Path("o"))
    layout = Layout.parse("d64 v256 ffn=swiglu:64 [C3 A2/1]")
    assert DeviceBench(request, print, [layout]).measure(layout).figures["wakeups"].value == 12.0


def test_budgets_name_it_but_not_inverses_of_others() -> None:
    assert str(Limit.parse("ttft<=20ms")) == "ttft <= 20 ms"
    assert metric("wakeups").label == "wake-ups"
    with pytest.raises(UnknownName, match="decode_tps"):
        metric("decode_tps")


def test_the_chance_of_a_relative_budget_counts_the_noise_of_what_it_refers_to() -> None:
    """Simulated: the ratio of two noisy figures is below the limit as often as is stated."""
    limit = Limit.parse("decode_p50<=0.8x", relative=True)
    assert str(limit) == "decode_p50 <= 0.8x"
    with pytest.raises(InvalidInput, match="not a multiple"):
        Limit.parse("decode_p50<=0.8x")
    child, base = (
        Figure(value=value, log_sd=sd, shared_log_sd=0.2, unit="ms") for value, sd in ((7.8, 0.03), (10, 0.04))
    )
    bound = limit.of({"decode_p50": 10.0})
    assert (bound.value, bound.relative) == (8.0, False)
    dice = random.Random(0)
    ratios = [7.8 * math.exp(dice.gauss(0, 0.03)) / (10 * math.exp(dice.gauss(0, 0.04))) for _ in range(20_000)]
    chance = Check.of(bound, child, base).chance
    assert chance == pytest.approx(sum(ratio <= 0.8 for ratio in ratios) / 20_000, abs=0.01)
    exact = Check.of(bound, child).chance
    assert exact is not None and exact < chance, "against milliseconds, noise that both figures share counts"
