"""A study that counts energy: an objective and a budget like any other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from study_support import bed_of, tiny_space

from nas.infra.store.rows import StudyState
from nas.search.analysis.report import study_report


def test_energy_is_an_objective_and_a_budget_like_any_other(tmp_path: Path) -> None:
    energy = {"metric": "energy_mj_per_token", "workload": "chat"}
    space = tiny_space(
        objectives=[{"name": "quality", "metric": "quality"}, {"name": "energy", **energy}],
        budgets=[{**energy, "max": "1.02x"}],
    )
    bed = bed_of(tmp_path, space)
    assert bed.run(12) is StudyState.COMPLETE
    report = study_report(bed.store, "study")
    assert report["trials"]["infeasible"] > 0
    assert report["hypervolume"] > 0
    published = next(row for row in report["references"] if row["name"] == "published")
    limit = 1.02 * figure_of(published)["value"]
    for row in report["front"]:
        assert row["objectives"]["energy"] == figure_of(row)["value"] <= limit
        assert figure_of(row)["unit"] == "mJ"


def figure_of(row: Mapping[str, Any]) -> dict[str, Any]:
    (measured,) = row["measurements"]
    figure: dict[str, Any] = measured["figures"]["energy_mj_per_token"]
    return figure
