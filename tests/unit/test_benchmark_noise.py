"""Estimators compared on recorded runs: they are the protocol's, and nothing is scored by itself."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.noise.estimators import BASELINE, STATISTICS, Estimator, Unit, read_units
from benchmarks.noise.record import REFERENCE
from benchmarks.noise.report import (
    PROTOCOL,
    Scored,
    by_condition,
    fit_interval,
    held_out,
    page,
    row,
    scored,
    shown_estimators,
)
from nas.core import stats
from nas.core.measurement import Sample
from nas.core.stats import Z95
from nas.measure.protocol.estimator import read_times, slowness, time_figures

LAYOUTS, ROUNDS = 3, 5


def write(folder: Path, condition: str, block: int, slow: float = 1.0, threads: int = 1, seed: int = 0) -> None:
    """Rounds in which all runs are slower by the same factor, with noise of 1 %; the reference runs before each."""
    rng = np.random.default_rng([seed, block, len(condition)])
    rows: list[dict[str, Any]] = []
    for round_ in range(ROUNDS):
        for layout in range(LAYOUTS):
            for index, ms in ((REFERENCE, 50.0), (layout, 100.0 + layout)):
                wall = 1e3 * ms * slow * math.exp(abs(rng.normal(0, 0.01)))
                tokens = [round(wall / 50 * (1 + place / 1000)) for place in range(32)]
                rows.append(
                    {
                        "layout": index, "round": round_, "seconds": 0.2, "ttft_us": round(wall),
                        "ttft_cpu_us": round(wall / 2), "decode_us": tokens, "decode_cpu_us": tokens,
                    }
                )  # fmt: skip
    with gzip.open(folder / f"{condition}-llama.cpp-{threads}-{block}.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(one) + "\n" for one in rows)


@pytest.fixture
def units(tmp_path: Path) -> list[Unit]:
    for block in range(3):
        write(tmp_path, "calm", block)
        write(tmp_path, "loop", block, slow=1.5)
    return read_units([tmp_path])


def test_a_figure_is_that_of_the_protocol(units: list[Unit], tmp_path: Path) -> None:
    with gzip.open(tmp_path / "loop-llama.cpp-1-0.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]

    def read(row: dict[str, Any]) -> Sample:
        return Sample(
            load_ms=1, ttft_ms=row["ttft_us"] / 1e3, prefill_cpu_ms=row["ttft_cpu_us"] / 1e3,
            decode_ns=[1000 * us for us in row["decode_us"]],
            decode_cpu_ns=[1000 * us for us in row["decode_cpu_us"]],
        )  # fmt: skip

    places = [place for place, row in enumerate(rows) if row["layout"] == 1]
    samples, beside = [read(rows[place]) for place in places], [read(rows[place - 1]) for place in places]
    assert len(samples) == len(beside) == ROUNDS
    slow = slowness(read_times(beside, 1).floors(), read_times([beside[0]], 1).floors())
    figures = time_figures(samples, read_times(samples, 1), slow, 32)
    level = read_times([beside[0]], 1).floors()
    unit = next(unit for unit in units if (unit.condition, unit.block) == ("loop", 0))
    for metric, name, constant in (("ttft", "ttft", level.ttft_ms), ("decode", "decode_p50", level.decode_ms)):
        (power,) = PROTOCOL[1, metric].settings
        estimate = PROTOCOL[1, metric].estimate(unit, 1, 10, metric, power)
        assert math.exp(estimate.value) * constant**power == pytest.approx(figures[name].value)
    logs = np.log([9.0, 3.0, 7.0, 4.0, 5.0, 8.0])
    assert math.exp(float(STATISTICS["floor"](logs))) == pytest.approx(stats.floor(np.exp(logs).tolist()))


def test_a_machine_that_is_slower_for_all_costs_the_ratio_nothing(units: list[Unit]) -> None:
    plain, ratio = (
        row(by_condition(held_out(units, Estimator("cpu", "floor", correction), "ttft", 10))["loop"])
        for correction in ("none", "ratio")
    )
    assert plain["bias"] == pytest.approx(100 * math.log(1.5), abs=2)
    assert ratio["bias"] == pytest.approx(0, abs=1.5) and ratio["rms"] is not None and ratio["rms"] < 2


def test_the_calm_figure_is_of_other_blocks(tmp_path: Path) -> None:
    for block in range(2):
        write(tmp_path, "calm", block, slow=1.0 + block)
    errors = scored(read_units([tmp_path]), Estimator("wall", "median"), "ttft", 10, 0.0)
    assert {error.unit.block: round(error.error, 1) for error in errors} == {0: -0.5, 1: 0.5}


def test_a_condition_of_one_block_is_fitted_on_other_layouts(tmp_path: Path) -> None:
    write(tmp_path, "calm", 0)
    write(tmp_path, "loops", 1, slow=2.0)
    errors = scored(read_units([tmp_path]), BASELINE, "ttft", 10, 1.0)
    assert sorted(error.fold for error in errors if error.unit.condition == "loops") == [0, 1, 2]


def test_an_interval_is_as_wide_as_the_errors(units: list[Unit]) -> None:
    rng = np.random.default_rng(0)
    errors = [
        Scored(units[place % 6], 0, 0, float(rng.normal(0, math.hypot(0.022, 0.5 * slow))), slow, 0.0, 10, 1.0)
        for place, slow in enumerate([0.0, 0.2] * 600)
    ]  # fmt: skip
    model = fit_interval(errors)
    held = [abs(error.error) < Z95 * math.hypot(model.base, model.correction_weight * error.slow) for error in errors]
    assert 0.93 < np.mean(held) < 0.97
    assert model.base == pytest.approx(0.022, abs=0.006) and model.correction_weight == pytest.approx(0.5, abs=0.15)


def test_the_page_has_the_estimators_and_the_constants(tmp_path: Path) -> None:
    for threads in (1, 2):
        for block in range(2):
            write(tmp_path, "calm", block, threads=threads)
    text = page(read_units([tmp_path]), 10)
    for metric in ("ttft", "decode"):
        assert all(estimator.name in text for estimator in shown_estimators(1, metric))
    assert "## Decode p50, 2 threads" in text and "| wall | TTFT |" in text
