"""Which repetitions decide about a trial's budgets."""

from __future__ import annotations

import asyncio
import math
from typing import Any, cast

import pytest
from study_support import CHAT, tiny_space

from nas.core.layout import Layout
from nas.core.measurement import Figure
from nas.core.scoring import MeasurementKey
from nas.search.study import trial as trial_module
from nas.search.study.trial import StudyContext, TrialRun, run_trial

SPACE = tiny_space(budgets=[{"metric": "ttft", "max": "10ms", **CHAT}])
PLACE = MeasurementKey("local", "fake", "chat")
SURE, NEAR, BROKEN = 8.0, 10 * math.exp(0.01), 12.0
"""TTFT in ms; one standard deviation of every figure is 2 %."""


class Study:
    """A study whose measurements are scripted; used for every part of a `StudyContext`."""

    def __init__(self, *script: float) -> None:
        self.space, self._script = SPACE, list(script)
        self.measurements: list[tuple[int, int]] = []
        self.marks: list[str] = []

    async def measure(
        self, trial: int, artifact: Any, where: MeasurementKey, repetitions: int, replicate: int = 0
    ) -> Any:
        self.measurements.append((repetitions, replicate))
        figure = Figure(value=self._script.pop(0), log_sd=0.02, n=repetitions, unit="ms")
        return type("Measurement", (), {"figures": {"ttft": figure}})

    async def export_all(self, trial: int, layout: Layout) -> dict[str, Any]:
        return {"fake": None}

    async def check_equivalence(self, trial: int, layout: Layout) -> None:
        """Passes."""

    async def published_figures(self) -> dict[Any, Any]:
        return {}

    def axes(self, run: TrialRun) -> list[None]:
        return []

    def workloads_by_cost(self) -> list[str]:
        return ["chat"]

    def measurement_keys(self, workloads: Any) -> list[MeasurementKey]:
        return [PLACE for _ in workloads]

    def mark(self, trial: int, kind: Any, **payload: Any) -> None:
        self.marks.append(kind.value)


@pytest.fixture(autouse=True)
def _trained(monkeypatch: pytest.MonkeyPatch) -> None:
    async def train(run: TrialRun, study: StudyContext) -> bool:
        return True

    monkeypatch.setattr(trial_module, "_train", train)


def life(*script: float) -> Study:
    study = Study(*script)
    parts = cast(Any, study)
    context = StudyContext(parts, parts, parts, parts, lambda run, status: None)
    run = TrialRun(3, Layout.parse("d128 v256 ffn=swiglu:320 [C3 A2/1 C3]"), None)
    asyncio.run(asyncio.wait_for(run_trial(run, context), 10))
    return study


def test_few_repetitions_are_enough_for_a_sure_layout_and_fresh_ones_confirm_it() -> None:
    study = life(SURE, SURE)
    assert study.measurements == [(2, 0), (3, 0)]
    assert "borderline" not in study.marks and study.marks[-1] == "complete"


def test_a_layout_that_surely_breaks_a_budget_is_given_up_at_once() -> None:
    study = life(BROKEN)
    assert study.measurements == [(2, 0)]
    assert study.marks[-1] == "infeasible"


def test_what_lets_a_borderline_layout_in_does_not_confirm_it() -> None:
    """The lucky repetitions that let it in have a key of their own, so that other ones are measured in the end."""
    study = life(NEAR, SURE, BROKEN)
    assert study.measurements == [(2, 0), (3, 1), (3, 0)]
    assert [mark for mark in study.marks if mark in ("borderline", "gated_in", "infeasible")] == [
        "borderline", "gated_in", "infeasible",
    ]  # fmt: skip


@pytest.mark.parametrize(("second", "end"), [(NEAR, "infeasible"), (10 * math.exp(-0.01), "complete")])
def test_of_a_borderline_layout_the_likelier_of_the_two_decides(second: float, end: str) -> None:
    assert life(NEAR, second, SURE).marks[-1] == end
