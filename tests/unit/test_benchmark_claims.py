"""What hilnas states of studies is true over simulated ones, and every statistic that is shown is simulated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from study_support import bed_of, snapshot

from benchmarks.claims.experiments import EXPERIMENTS, rows_of
from benchmarks.claims.registry import COVERAGE, KEYS, SUFFIX, Nothing, statistics
from benchmarks.claims.rows import Row, calibration, share
from nas.search.analysis.report import study_report
from nas.serve.views.study import study_view

SMALL = {"null": 24, "gains": 16, "ordered": 12, "whole": 8, "fronts": 24, "models": 60}
"""Simulated studies of a group; 80 of the others."""


@pytest.fixture(scope="module")
def rows() -> dict[str, list[Row]]:
    return {name: rows_of(name, SMALL.get(name, 80)) for name in EXPERIMENTS}


@pytest.mark.parametrize("group", EXPERIMENTS)
def test_what_is_stated_is_so(rows: dict[str, list[Row]], group: str) -> None:
    assert rows[group]
    assert [row.cells() for row in rows[group] if not row.right] == []


def test_every_statistic_that_is_shown_is_listed() -> None:
    assert set(statistics()) == set(COVERAGE)


def test_every_listed_statistic_is_simulated(rows: dict[str, list[Row]]) -> None:
    simulated = {row.name for group in rows.values() for row in group}
    covered = {name for names in COVERAGE.values() if not isinstance(names, Nothing) for name in names}
    assert covered <= simulated
    assert all(names if isinstance(names, tuple) else names.reason for names in COVERAGE.values())


def test_the_json_of_a_study_has_no_other_statistics(tmp_path: Path) -> None:
    bed = bed_of(tmp_path)
    bed.run(6)
    view = study_view(bed.store, snapshot(bed.store), {}).model_dump(mode="json")
    keys = {key for data in (study_report(bed.store, "study"), view) for key in keys_of(data) if SUFFIX.search(key)}
    assert {"low", "p_front", "hypervolume_ci95"} <= keys
    assert keys <= {name.rpartition(".")[2] for name in COVERAGE} | {
        key for key, field in KEYS.items() if field in COVERAGE
    }


def keys_of(data: Any) -> Iterator[str]:
    if isinstance(data, dict):
        yield from map(str, data)
    for item in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        yield from keys_of(item)


def test_a_row_is_off_where_the_number_of_studies_tells() -> None:
    hits = [True] * 83 + [False] * 17
    assert share("x", "", 0.95, hits).right is False
    assert share("x", "", 0.95, hits[:3] + hits[-1:]).right is True, "four studies tell nothing"
    assert share("x", "", 0.05, [False] * 200, "at most").right
    assert not share("x", "", 0.05, [True] * 40 + [False] * 60, "at most").right


def test_the_interval_of_a_share_has_ends_between_0_and_1() -> None:
    row = share("x", "", 0.76, [True] * 23 + [False] * 2)
    assert row.cells()["held"] == "92.0 % (75.0 to 97.8 %)"
    assert row.right
    assert share("x", "", 0.0, [False] * 1000, "at most").cells()["held"] == "0.0 % (0.0 to 0.4 %)"


def test_chances_are_compared_with_how_often_they_come_true() -> None:
    stated = np.random.default_rng(0).random(4000)
    so = np.random.default_rng(1).random(4000) < stated
    assert all(row.right for row in calibration("x", "", stated.tolist(), so.tolist()))
    assert not all(row.right for row in calibration("x", "", stated.tolist(), (so & (stated > 0.5)).tolist()))
