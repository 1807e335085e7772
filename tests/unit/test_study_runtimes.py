"""A study on two runtimes: measured on both, right on both, failed where one of them fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from store_support import open_store
from study_support import TINY, Bed, InlineJobs, calibrated, tiny_space

from nas.cli.study_view import print_agreement
from nas.core.clock import SystemClock
from nas.core.errors import CandidateFailed, InfrastructureFailed, NasError
from nas.core.layout import Layout
from nas.core.plan import Plan, Round, RoundResult, Runner
from nas.core.space import SearchSpace
from nas.core.trial import TrialState
from nas.core.workload import Workload
from nas.infra.store import artifacts, studies, trials
from nas.infra.store.rows import StudyState
from nas.infra.store.store import Store
from nas.measure.protocol.calibration import MeasurementTarget
from nas.measure.runtimes import RUNTIMES
from nas.measure.runtimes.base import Artifact, Checkpoint, GateReport, RandomWeights, Weights
from nas.search.analysis.archive import export_study, import_study
from nas.search.analysis.record import read_study
from nas.search.analysis.report import study_report, study_table
from nas.search.analysis.snapshot import StudySnapshot
from nas.search.study.ledger import Ledger
from nas.search.study.stages import StageWork
from nas.testing.fake_runtime import FakeRuntime

TRIALS = 14
SPACE: dict[str, Any] = {
    "runtimes": [{"name": "fake", "quantisation": "q4_0"}, {"name": "other", "quantisation": "q4_0"}],
    "budgets": [
        {"metric": "peak_rss", "max": "2x", "workload": "chat"},
        {"metric": "decode_p50", "max": "1.6x", "workload": "chat", "runtime": "other"},
    ],
    "objectives": [
        {"name": "quality", "metric": "quality"},
        {"name": "latency", "metric": "latency", "workload": "chat", "aggregate": "geomean"},
        {"name": "left", "metric": "latency", "workload": "chat", "runtime": "fake"},
        {"name": "memory", "metric": "peak_rss", "workload": "chat"},
    ],
    # Its layouts do not depend on what finishes first, so that some of them have four taps on any machine.
    "search": {"proposer": "random", "seeds": 3, "pool": 16},
}
BROKEN = 4
"""The second runtime cannot export a convolution with so many taps."""


class Fragile(FakeRuntime):
    """Lowers nothing with four taps."""

    def export(
        self, layout: Layout, quantisation: str, weights: Weights, destination: Path, *, recipe: bool = False
    ) -> Artifact:
        if taps(layout) == BROKEN:
            raise CandidateFailed("export", "cannot lower a conv program: ExportError: no such operator")
        return super().export(layout, quantisation, weights, destination, recipe=recipe)


class Wrong(FakeRuntime):
    """Computes something else than PyTorch."""

    def gate(self, layout: Layout, quantisation: str, checkpoint: Checkpoint, model: Path, runner: Any) -> GateReport:
        return GateReport(errors=(0.5,), error=0.5, limit=0.01)


def taps(layout: Layout) -> int:
    return max((layer.mixers[0].int("kernel") for layer in layout.layers if layer.mixers[0].kind == "conv"), default=0)


class DualBed(Bed):
    """With a second runtime on the same device."""

    other: FakeRuntime

    def work(self, ledger: Ledger) -> StageWork:
        first = super().work(ledger)
        return replace(first, targets={**first.targets, ("local", "other"): self.other_target()})

    def other_target(self) -> MeasurementTarget:
        reference = self.folder / "other-reference"
        model = FakeRuntime.export(self.other, self.other.reference_models()[0], "q4_0", RandomWeights(), reference)
        artifacts.put_file(self.store, reference)
        return calibrated(self.jobs, self.other, model, self.space.workloads.values())


def bed(folder: Path, other: type[FakeRuntime] = FakeRuntime, **changes: Any) -> DualBed:
    dual_bed = DualBed(
        open_store(folder, SystemClock()), folder, tiny_space(**(SPACE | changes)), FakeRuntime(folder / "fake")  # type: ignore[arg-type]
    )  # fmt: skip
    dual_bed.other = other(folder / "other", name="other", slowdown=3.0)
    RUNTIMES.add("other", dual_bed.other)
    return dual_bed


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DualBed, Mapping[str, Any]]]:
    """A study whose second runtime cannot export what has four taps."""
    dual_bed = bed(tmp_path_factory.mktemp("dual"), Fragile)
    assert dual_bed.run(TRIALS) is StudyState.COMPLETE
    yield dual_bed, study_report(dual_bed.store, "study")


def test_a_broken_export_is_its_candidate_s_failure_and_no_other_s(broken: tuple[DualBed, Mapping[str, Any]]) -> None:
    dual_bed, report = broken
    rows = [row for row in trials.all(dual_bed.store, 1) if row.origin != "reference"]
    failed = [row for row in rows if row.status.state is TrialState.FAILED]
    assert failed and len(rows) == TRIALS
    for row in rows:
        assert (row.status.state is TrialState.FAILED) == (taps(Layout.from_json(row.layout)) == BROKEN)
    assert {row.status.reason for row in failed} == {
        "export: cannot lower a conv program: ExportError: no such operator"
    }
    assert not any(row.status.retryable for row in failed)
    assert report["front"]


def test_every_trial_on_the_ranking_was_measured_on_both(broken: tuple[DualBed, Mapping[str, Any]]) -> None:
    _, report = broken
    published = next(row for row in report["references"] if row["name"] == "published")
    for row in [*report["ranking"], published]:
        places = {
            tuple(measurement["place"].values()): measurement["figures"]["latency"]["value"]
            for measurement in row["measurements"]
        }
        assert places.keys() == {("local", "fake", "chat"), ("local", "other", "chat")}
        # The second is three times as slow as the first throughout, so ratios to the reference are the same.
        assert places["local", "other", "chat"] == pytest.approx(3 * places["local", "fake", "chat"], rel=1e-3)
        assert row["objectives"]["left"] == places["local", "fake", "chat"]
    axes = {axis["name"]: (axis["unit"], axis["aggregate"], axis["runtime"]) for axis in report["objectives"]}
    assert axes["latency"] == ("x", "geomean", None) and axes["left"] == ("ms", None, "fake")
    assert published["objectives"]["latency"] == published["objectives"]["memory"] == pytest.approx(1)


def test_budgets_are_kept_on_the_runtimes_they_name(broken: tuple[DualBed, Mapping[str, Any]]) -> None:
    _, report = broken
    assert [(budget["metric"], budget["runtime"]) for budget in report["budgets"]] == [
        ("peak_rss", "fake"), ("peak_rss", "other"), ("decode_p50", "other"),
    ]  # fmt: skip


def test_show_tells_how_far_the_runtimes_agree(
    broken: tuple[DualBed, Mapping[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    _, report = broken
    assert json.loads(json.dumps(report["agreement"], allow_nan=False)) == report["agreement"]
    by_metric = {row["metric"]: row for row in report["agreement"]}
    latency = by_metric["latency"]
    assert latency["runtimes"] == ["fake", "other"]
    measured = [row for row in report["references"] + report["ranking"]]
    assert latency["correlation"]["layouts"] >= len(measured)
    # Times are reported in whole nanoseconds, so neighbours may tie on the faster one.
    assert latency["correlation"]["spearman"]["value"] > 0.98
    assert latency["apart"] == latency["alike"] > 0
    print_agreement(report)
    head, *lines = capsys.readouterr().out.strip().splitlines()
    assert head.split("\t") == ["rank agreement", "between", "layouts", "Spearman", "Kendall", "told apart by both"]
    assert [line.split("\t")[0] for line in lines] == [
        f"{metric}@chat on local" for metric in ("latency", "ttft", "decode_p50", "peak_rss")
    ]


class Stuck(InlineJobs):
    """The first runtime never answers for a layout that crashes on the second."""

    cancelled: int = 0

    async def run(self, key: str, number: int, device: str, round_: Round, trial: int | None = None) -> RoundResult:
        if trial == 2 and round_.candidate.runner.runtime == "fake":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        return await super().run(key, number, device, round_, trial)


class Crashing(FakeRuntime):
    """Runs nothing but references."""

    def plan(
        self,
        artifact: Artifact,
        runner: Runner,
        workload: Workload,
        deadline_s: float,
        reference: Artifact | None = None,
    ) -> Plan:
        plan = super().plan(artifact, runner, workload, deadline_s, reference)
        references = (Layout.parse(text) for text in TINY["references"].values())
        good = {self.reference_models()[0].id, *(layout.id for layout in references)}
        return plan if artifact.layout_id in good else plan.model_copy(update={"args": (*plan.args[:-1], "crash")})


def test_what_fails_in_one_place_is_not_measured_on_in_another(tmp_path: Path) -> None:
    dual_bed = bed(tmp_path, Crashing)
    dual_bed.jobs = jobs = Stuck(dual_bed.store)
    assert dual_bed.run(1) is StudyState.COMPLETE
    (row,) = [row for row in trials.all(dual_bed.store, 1) if row.origin != "reference"]
    assert row.status.state is TrialState.FAILED
    assert row.status.reason is not None and row.status.reason.startswith("crash:")
    assert jobs.cancelled == 1


def test_a_worker_that_dies_beside_a_broken_export_does_not_hide_it(tmp_path: Path) -> None:
    dual_bed = bed(tmp_path, Fragile)

    def die(stage: str, spec: Mapping[str, Any]) -> None:
        if stage == "export" and spec["runtime"] == "fake" and taps(Layout.from_json(spec["layout"])) == BROKEN:
            raise InfrastructureFailed("a worker died")

    dual_bed.compute.fail = die
    assert dual_bed.run(TRIALS) is StudyState.COMPLETE
    failed = [row for row in trials.all(dual_bed.store, 1) if row.status.state is TrialState.FAILED]
    assert failed and not any(row.status.retryable for row in failed)


def test_a_graph_that_is_wrong_on_one_runtime_is_found_though_the_other_is_right(tmp_path: Path) -> None:
    dual_bed = bed(tmp_path, Wrong)
    with pytest.raises(NasError, match=r"the .* reference failed.*differ from PyTorch by 50"):
        dual_bed.run(2)


class Quantised(FakeRuntime):
    """Three times as slow in f16."""

    def export(
        self, layout: Layout, quantisation: str, weights: Weights, destination: Path, *, recipe: bool = False
    ) -> Artifact:
        as_slow = replace(self, slowdown=3.0 if quantisation == "f16" else 1.0)
        return FakeRuntime.export(as_slow, layout, quantisation, weights, destination, recipe=recipe)


class QuantisedBed(Bed):
    """With one runtime and two quantisations."""

    def work(self, ledger: Ledger) -> StageWork:
        first = super().work(ledger)
        target = self.target()
        targets = {("local", f"fake {name}"): replace(target, quantisation=name) for name in ("q4_0", "f16")}
        return replace(first, targets=targets)


def quantised_space(**changes: Any) -> SearchSpace:
    quantised = {
        "runtimes": [{"name": "fake", "quantisation": "q4_0"}, {"name": "fake", "quantisation": "f16"}],
        "budgets": [{"metric": "decode_p50", "max": "9x", "workload": "chat", "runtime": "fake f16"}],
        "objectives": [
            {"name": "quality", "metric": "quality"},
            {"name": "latency", "metric": "latency", "workload": "chat", "aggregate": "geomean"},
            {"name": "small", "metric": "latency", "workload": "chat", "runtime": "fake q4_0"},
            {"name": "both", "metric": "latency", "workload": "chat", "runtime": "fake"},
        ],
    }
    return tiny_space(**(quantised | changes))


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    folder = tmp_path_factory.mktemp("quantised")
    runtime = Quantised(folder / "fake", quantisations=("q4_0", "f16"))
    quantised_bed = QuantisedBed(open_store(folder, SystemClock()), folder, quantised_space(), runtime)
    assert quantised_bed.run(6) is StudyState.COMPLETE
    yield quantised_bed.store


def test_two_quantisations_of_a_runtime_have_their_own_figures(quantised: Store) -> None:
    report = study_report(quantised, "study")
    for row in [*report["references"], *report["ranking"]]:
        latency = {one["place"]["runtime"]: one["figures"]["latency"]["value"] for one in row["measurements"]}
        assert latency.keys() == {"fake q4_0", "fake f16"}
        assert latency["fake f16"] == pytest.approx(3 * latency["fake q4_0"], rel=1e-3)
        assert row["objectives"]["small"] == latency["fake q4_0"]
        assert row["objectives"]["both"] == pytest.approx(row["objectives"]["latency"], rel=1e-3)
    assert [(budget["metric"], budget["runtime"]) for budget in report["budgets"]] == [("decode_p50", "fake f16")]
    assert {tuple(row["runtimes"]) for row in report["agreement"]} == {("fake q4_0", "fake f16")}
    assert all(row["correlation"]["layouts"] for row in report["agreement"])
    columns = study_table(StudySnapshot(read_study(quantised, "study")))[0]
    assert {"latency@chat local/fake q4_0 [ms]", "latency@chat local/fake f16 [ms]"} <= set(columns)


def test_two_quantisations_survive_an_archive(quantised: Store, tmp_path: Path) -> None:
    archive = BytesIO()
    export_study(quantised, studies.get(quantised, "study").id, archive)
    archive.seek(0)
    with closing(open_store(tmp_path, SystemClock())) as other:
        import_study(other, archive, name="copy", trust_results=False)
        first, copy = study_report(quantised, "study"), study_report(other, "copy")
    assert [row["objectives"] for row in copy["ranking"]] == [row["objectives"] for row in first["ranking"]] != []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runtimes": [{"name": "fake", "quantisation": "q4_0"}] * 2}, "fake q4_0 occurs twice"),
        ({"devices": ["local", "local"]}, "local occurs twice"),
        (
            {"references": dict.fromkeys(("published", "attention"), TINY["references"]["attention"])},
            "is the layout of",
        ),
        ({"budgets": [{"metric": "ttft", "max": "2x", "workload": "chat", "runtime": "fake q8"}]}, "unknown runtime"),
    ],
)
def test_what_occurs_twice_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        quantised_space(**changes)
