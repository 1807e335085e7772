"""Devices made ready: calibrated, checked, and refused where figures would not compare."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import pytest
from store_support import StillClock, open_store
from study_support import DEVICE, ScriptedJobs, raw, reference_times, sample

from nas.core.device import Cluster
from nas.core.errors import InfrastructureFailed, InvalidInput, StudyChanged, UnknownName, Unsupported
from nas.core.measurement import ReferenceTimes
from nas.core.plan import Pair, Plan, RawRun, Round, RoundResult, Runner
from nas.core.space import MeasurementSettings, RuntimeSpace
from nas.core.workload import Workload
from nas.infra.store import agents, artifacts, calibrations, devices, results
from nas.infra.store.calibrations import ReferenceRun
from nas.infra.store.rows import Health
from nas.measure.farm.farm import Farm, LocalAgent
from nas.measure.farm.queue import JobNotifier, LeaseMonitor
from nas.measure.farm.trust import Admissions, SigningKey
from nas.measure.protocol.calibration import Calibrator, MeasurementTarget, SavedCalibration
from nas.measure.protocol.reference import export_key, measure_key, reference_layout
from nas.measure.runtimes import RUNTIMES
from nas.measure.runtimes.base import Artifact, RandomWeights
from nas.testing.fake_runtime import FakeRuntime

FAKE = RuntimeSpace(name="fake", quantisation="q4_0")
CALM, KILLED = raw(sample()), raw(exit_code=-9)
WORKLOAD = Workload(prompt=16, gen=8)
SAVED = reference_times(sample(100.0, 5.0))


class Lab:
    def __init__(self, folder: Path) -> None:
        self.runtime = FakeRuntime(folder / "fake")
        RUNTIMES.add("fake", self.runtime)
        self.store = open_store(folder, StillClock())
        agents.register_local(self.store, "local")
        devices.register(self.store, "local", [DEVICE], boot_id="boot")
        self.folder = folder
        self.messages: list[str] = []
        admissions = Admissions(folder, SigningKey.generate(), self.store.clock)
        monitor = LeaseMonitor(self.store, JobNotifier(), agent="local")  # looks at nothing until it is entered
        self.farm = Farm(self.store, cast(LocalAgent, None), monitor, admissions)
        self.jobs = ScriptedJobs([])

    def target(
        self,
        *script: RoundResult,
        saved: SavedCalibration | None = None,
        device: str = DEVICE.id,
        runtime: RuntimeSpace = FAKE,
    ) -> MeasurementTarget:
        self.jobs = ScriptedJobs(list(script))
        return asyncio.run(self.calibrator().target(device, runtime, saved))

    def calibrator(self) -> Calibrator:
        settings = MeasurementSettings(max_attempts=1)
        return Calibrator(
            self.farm, self.jobs, settings, self.folder / "work", self.messages.append, {"chat": WORKLOAD}
        )

    def saved(self, build: str | None = None, **changes: Any) -> SavedCalibration:
        conditions = self.calibrator().prepare(DEVICE.id, FAKE).conditions | changes
        return SavedCalibration(build or self.build(), {"chat": SAVED}, conditions)

    def repetitions(self) -> list[int]:
        assert all(round_.reference is None for _, _, round_ in self.jobs.calls)
        return [round_.repetitions for _, _, round_ in self.jobs.calls]

    def build(self) -> str:
        return self.runtime.runner(DEVICE.target).build


def runs(*candidates: RawRun) -> RoundResult:
    return RoundResult(pairs=[Pair(reference=None, candidate=run) for run in candidates])


TEN = runs(*[CALM] * 3), runs(*[CALM] * 7)
"""A calibration of a calm device."""


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def test_a_new_device_is_calibrated_and_then_only_checked(lab: Lab) -> None:
    assert lab.target(*TEN).shortest.calibration == reference_times()
    assert lab.repetitions() == [3, 7]
    assert devices.get(lab.store, DEVICE.id).health is Health.GOOD
    assert lab.target(runs(*[raw(sample(10.2, 1.02))] * 3)).shortest.calibration == reference_times()
    assert lab.repetitions() == [3]


def test_a_device_that_a_person_takes_out_while_it_is_calibrated_stays_out(lab: Lab) -> None:
    class Meanwhile(ScriptedJobs):
        async def run(self, key: str, number: int, device: str, round_: Round, trial: int | None = None) -> RoundResult:
            devices.set_health(lab.store, device, Health.MAINTENANCE, "a new battery")
            return await super().run(key, number, device, round_, trial)

    lab.jobs = Meanwhile([*TEN])
    asyncio.run(lab.calibrator().target(DEVICE.id, FAKE))
    row = devices.get(lab.store, DEVICE.id)
    assert (row.health, row.health_reason) == (Health.MAINTENANCE, "a new battery")


def test_what_stands_beside_measurements_is_kept_under_the_calibration(lab: Lab) -> None:
    place = lab.target(*TEN)
    place.shortest.note("job.0", [ReferenceRun(1.01, 40.0, True)])
    [drift] = calibrations.drift(lab.store, DEVICE.id)
    assert drift.calibration is not None
    assert (drift.runtime, drift.points[0].calibration_ms) == ("fake", pytest.approx(reference_times().run_ms))


def scaled(factor: float, **conditions: Any) -> RawRun:
    return raw(sample(10.0 * factor, 1.0 * factor), **conditions)


def is_kept(lab: Lab, calibration: ReferenceTimes) -> bool:
    """Whether the next study takes it over after a check."""
    return lab.target(runs(*[scaled(calibration.ttft_ms / 10)] * 3)).shortest.calibration == calibration


def test_no_machine_is_too_busy_to_be_calibrated(lab: Lab) -> None:
    busy = [scaled(factor, foreign_cpu=1.9) for factor in (1.0, 1.9, 1.1, 3.0, 1.2, 1.4, 2.2, 1.3, 1.05, 1.8)]
    calibration = lab.target(runs(*busy[:3]), runs(*busy[3:])).shortest.calibration
    assert calibration.ttft_ms == pytest.approx(10 * (1.0 + 1.05) / 2)
    assert lab.repetitions() == [3, 7]
    assert is_kept(lab, calibration)


@pytest.mark.parametrize("now", [0.96, 1.0, 1.1, 1.19])
def test_a_calibration_is_kept_while_the_device_is_somewhat_slower(lab: Lab, now: float) -> None:
    """A check whose time is between 5 % below and 20 % above the calibration passes."""
    lab.target(*TEN)
    assert lab.target(runs(*[scaled(now)] * 3)).shortest.calibration == reference_times()


def test_a_calibration_of_a_bad_minute_is_replaced(lab: Lab) -> None:
    lab.target(runs(*[scaled(1.5)] * 3), runs(*[scaled(1.5)] * 7))
    place = lab.target(runs(*[CALM] * 3), runs(*[scaled(1.5)] * 4, *[CALM] * 6))
    assert place.shortest.calibration.ttft_ms == pytest.approx(10.0)
    assert "-33 % off its calibration: it was calibrated in a bad minute; calibrated again" in lab.messages[-1]
    assert is_kept(lab, place.shortest.calibration)


def test_a_device_that_was_slow_for_a_moment_keeps_its_calibration_after_a_second_look(lab: Lab) -> None:
    lab.target(*TEN)
    place = lab.target(runs(*[scaled(1.5)] * 3), runs(*[scaled(1.5)] * 4, *[CALM] * 6))
    assert place.shortest.calibration == reference_times()
    assert lab.repetitions() == [3, 10]


def test_a_device_that_changed_is_calibrated_anew_and_it_is_said(lab: Lab) -> None:
    lab.target(*TEN)
    place = lab.target(runs(*[scaled(2.0)] * 3), runs(*[scaled(2.0)] * 10))
    assert place.shortest.calibration.run_ms == pytest.approx(2 * reference_times().run_ms)
    assert "+100 % off its calibration: the device changed; calibrated again" in lab.messages[-1]


def test_a_device_that_is_slow_beside_other_processes_keeps_its_calibration(lab: Lab) -> None:
    lab.target(*TEN)
    busy = scaled(4.0, foreign_cpu=1.0)
    assert lab.target(runs(*[busy] * 3), runs(*[busy] * 10)).shortest.calibration == reference_times()
    assert "+300 % off its calibration beside other processes" in lab.messages[-1]
    changed = lab.target(runs(*[busy] * 3), runs(*[busy] * 9, scaled(4.0, foreign_cpu=0.2))).shortest.calibration
    assert changed.run_ms == pytest.approx(4 * reference_times().run_ms), "also while little else ran"


def test_a_hot_device_is_waited_for(lab: Lab) -> None:
    hot = scaled(3.0, throttled=True)
    place = lab.target(runs(CALM, *[hot] * 2), runs(*[CALM] * 2), runs(*[CALM] * 7))
    assert place.shortest.calibration == reference_times()
    assert [round_.cool_down_s for _, _, round_ in lab.jobs.calls] == [0.0, 5.0, 0.0]
    with pytest.raises(InfrastructureFailed, match="the reference model of fake failed: the device throttled"):
        lab.target(*[runs(*[hot] * 3)] * 2)


def test_the_runner_and_the_reference_model_can_be_fetched(lab: Lab) -> None:
    place = lab.target(*TEN)
    sent = [file.travels for file in place.shortest.plan.inputs.values()]
    assert sent and place.runner.files
    for file in [*place.runner.files.values(), *sent]:
        path = lab.farm.find_file(file.sha256)
        assert path is not None
        assert path.stat().st_size == file.size
    assert lab.farm.find_file("0" * 64) is None
    assert {artifact.pinned for artifact in artifacts.all(lab.store)} == {True}


def test_a_stored_failure_does_not_stand_for_the_reference_model(lab: Lab) -> None:
    """Such a failure may come from an imported archive whose results are trusted."""
    key = export_key(lab.runtime.reference_models()[0], lab.runtime, "q4_0", RandomWeights().describe())
    results.put(lab.store, key, "export", {"failed": {"reason": "export", "message": "no"}})
    assert lab.target(*TEN).shortest.calibration == reference_times()


def test_one_killed_runner_does_not_spoil_a_calibration(lab: Lab) -> None:
    place = lab.target(runs(CALM, CALM, KILLED), runs(CALM), runs(*[CALM] * 7))
    assert place.shortest.calibration == reference_times()
    assert lab.repetitions() == [3, 1, 7]


def test_a_reference_that_does_not_run_is_told(lab: Lab) -> None:
    with pytest.raises(InfrastructureFailed, match=r"box: the reference model of fake failed: .*killed"):
        lab.target(runs(KILLED), runs(KILLED))


def test_a_resumed_study_keeps_its_calibration(lab: Lab) -> None:
    assert lab.target(saved=lab.saved()).shortest.calibration == SAVED
    assert lab.repetitions() == []


def test_a_bad_device_is_checked_before_a_study_goes_on(lab: Lab) -> None:
    devices.set_health(lab.store, DEVICE.id, Health.BAD, "three jobs failed")
    assert lab.target(runs(*[CALM] * 3), saved=lab.saved()).shortest.calibration == SAVED
    assert devices.get(lab.store, DEVICE.id).health is Health.GOOD


def test_a_study_does_not_go_on_with_another_build(lab: Lab) -> None:
    with pytest.raises(StudyChanged, match=r"began with build aaaaaaaaaaaa, which is .*begin a new study"):
        lab.target(saved=lab.saved("a" * 64))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"energy_counter": "RAPL package"}, "energy counter none, which is RAPL package now"),
        ({"page_size": 16384}, "memory page size in bytes none, which is 16384 now"),
        ({"pinned_to": (1,)}, "cores chat: any, which is chat: 1 now; reference run "),
    ],
)
def test_a_study_does_not_go_on_under_other_conditions(lab: Lab, changed: dict[str, Any], message: str) -> None:
    calibrator: Any = Calibrator(
        lab.farm, lab.jobs, MeasurementSettings(), lab.folder / "work", lambda line: None,
        workloads={"chat": Workload(prompt=16, gen=8, threads=1)},
    )  # fmt: skip
    began = json.loads(json.dumps(calibrator.prepare(DEVICE.id, FAKE).conditions))
    calibrator.prepare(DEVICE.id, FAKE).require_unchanged(began)
    devices.register(lab.store, "local", [DEVICE.model_copy(update=changed)], boot_id="boot")
    with pytest.raises(StudyChanged, match=f"box with fake: the study began with {message}"):
        asyncio.run(calibrator.target(DEVICE.id, FAKE, SavedCalibration(lab.build(), {"chat": SAVED}, began)))
    assert lab.repetitions() == []


def test_a_page_size_is_in_measurement_keys(lab: Lab) -> None:
    runner, limits = lab.runtime.runner(DEVICE.target), MeasurementSettings()
    sizes = (4096, 16384, 65536)
    keys = [measure_key("a" * 64, runner, "box", Workload(), 5, limits, SAVED, page_size=size) for size in sizes]
    assert len(set(keys)) == 3


def test_a_device_that_nobody_registered_is_refused_with_the_nearest(lab: Lab) -> None:
    with pytest.raises(UnknownName, match=r"unknown device 'boxx'; did you mean 'box'\?"):
        lab.target(device="boxx")


def test_an_unknown_quantisation_is_refused(lab: Lab) -> None:
    calibrator: Any = Calibrator(lab.farm, lab.jobs, MeasurementSettings(), lab.folder, lambda line: None, {})
    with pytest.raises(UnknownName, match="q4_0"):
        asyncio.run(calibrator.target(DEVICE.id, RuntimeSpace(name="fake", quantisation="q4_1"), None))


def test_a_workload_that_the_runtime_lacks_is_told_before_anything_is_measured(lab: Lab) -> None:
    class Without(FakeRuntime):
        def plan(
            self,
            artifact: Artifact,
            runner: Runner,
            workload: Workload,
            deadline_s: float,
            reference: Artifact | None = None,
        ) -> Plan:
            if workload.kv_type != "f16":
                raise Unsupported(f"no {workload.kv_type} cache")
            return super().plan(artifact, runner, workload, deadline_s, reference)

    RUNTIMES.add("fake", Without(lab.folder / "fake"))
    workloads = {"chat": Workload(prompt=16, gen=8), "small": Workload(prompt=16, gen=8, kv_type="q8_0")}
    calibrator: Any = Calibrator(
        lab.farm, lab.jobs, MeasurementSettings(), lab.folder / "work", lambda line: None, workloads=workloads
    )
    with pytest.raises(Unsupported, match="workloads: workload 'small' on fake: no q8_0 cache"):
        asyncio.run(calibrator.target(DEVICE.id, FAKE, None))
    assert lab.repetitions() == []


PHONE = DEVICE.model_copy(
    update={
        "cores": 4,
        "clusters": (Cluster(cpu="Cortex-X1", cores=(3,)), Cluster(cpu="Cortex-A55", cores=(0, 1, 2))),
    }
)


def prepared(lab: Lab, workload: Workload, *script: RoundResult) -> tuple[MeasurementTarget, list[str]]:
    messages: list[str] = []
    lab.jobs = ScriptedJobs(list(script))
    calibrator = Calibrator(
        lab.farm, lab.jobs, MeasurementSettings(), lab.folder / "work", messages.append, workloads={"chat": workload}
    )  # fmt: skip
    return asyncio.run(calibrator.target(DEVICE.id, FAKE)), messages


def test_the_reference_runs_on_the_biggest_cores_too_and_it_is_said(lab: Lab) -> None:
    devices.register(lab.store, "local", [PHONE], boot_id="boot")
    bench, messages = prepared(lab, Workload(), *TEN)
    assert bench.shortest.plan.affinity == (3,)
    assert {round_.candidate.affinity for _, _, round_ in lab.jobs.calls} == {(3,)}
    assert messages[0] == "box: chat runs on cores 3, its biggest: Cortex-X1"


def test_other_cores_are_another_calibration(lab: Lab) -> None:
    lab.target(*TEN)
    for device in (PHONE, PHONE.model_copy(update={"pinned_to": (0, 1)})):
        devices.register(lab.store, "local", [device], boot_id="boot")
        lab.target(*TEN)
        assert lab.repetitions() == [3, 7]
        lab.target(runs(*[CALM] * 3))
        assert lab.repetitions() == [3]


def test_another_quantisation_is_another_calibration(lab: Lab) -> None:
    RUNTIMES.add("fake", FakeRuntime(lab.folder / "fake", quantisations=("q4_0", "f16")))
    half = RuntimeSpace(name="fake", quantisation="f16")
    four_bits = lab.target(*TEN).shortest.calibration
    sixteen = lab.target(runs(*[scaled(2.6)] * 3), runs(*[scaled(2.6)] * 7), runtime=half).shortest.calibration
    assert lab.repetitions() == [3, 7]
    assert sixteen.run_ms == pytest.approx(2.6 * four_bits.run_ms)
    assert lab.target(runs(*[CALM] * 3)).shortest.calibration == four_bits
    assert lab.target(runs(*[scaled(2.6)] * 3), runtime=half).shortest.calibration == sixteen


def test_cores_that_are_not_there_are_told_before_anything_is_measured(lab: Lab) -> None:
    devices.register(lab.store, "local", [PHONE], boot_id="boot")
    with pytest.raises(InvalidInput, match="workload 'chat': affinity: box has no core 7; it has 0-3"):
        prepared(lab, Workload(affinity=(7,)))
    assert lab.repetitions() == []


def test_every_workload_has_a_calibration_of_its_own(lab: Lab) -> None:
    fast = [scaled(0.6)]
    lab.jobs = ScriptedJobs([*TEN, runs(*fast * 3), runs(*fast * 7)])
    workloads = {"chat": Workload(), "pair": Workload(threads=2)}
    calibrator: Any = Calibrator(
        lab.farm, lab.jobs, MeasurementSettings(), lab.folder / "work", lab.messages.append, workloads=workloads
    )
    target = asyncio.run(calibrator.target(DEVICE.id, FAKE))
    assert [round_.candidate.threads for _, _, round_ in lab.jobs.calls] == [1, 1, 2, 2]
    assert target.references[workloads["chat"]].calibration == reference_times()
    assert target.references[workloads["pair"]].calibration.ttft_ms == pytest.approx(6.0)
    assert target.references[workloads["pair"]].plan.threads == 2
    assert target.shortest.plan.threads == 2
    lab.jobs.script = [runs(*[CALM] * 3), runs(*fast * 3)]
    again = asyncio.run(calibrator.target(DEVICE.id, FAKE))
    assert {workload: reference.calibration for workload, reference in again.references.items()} == {
        workload: reference.calibration for workload, reference in target.references.items()
    }


def test_a_long_calibration_has_fewer_runs(lab: Lab) -> None:
    slow = scaled(3000.0)
    lab.target(runs(*[slow] * 3), runs(slow))
    assert lab.repetitions() == [3, 1], "run times of 78 s"
    lab.target(runs(*[scaled(1000.0)] * 3), runs(*[scaled(1000.0)] * 3))
    assert lab.repetitions() == [3, 3]


@pytest.mark.parametrize(("weights", "step"), [(None, 0), (1, 0), (50_000_000, 0), (70_000_000, 1), (10**10, 3)])
def test_the_reference_model_is_of_like_size(weights: int | None, step: int) -> None:
    layouts = RUNTIMES["llama.cpp"].reference_models()
    assert reference_layout(RUNTIMES["llama.cpp"], weights) == layouts[step]


def test_a_calibration_with_more_threads_is_a_condition_of_its_own(lab: Lab) -> None:
    def conditions(**workloads: Workload) -> dict[str, Any]:
        calibrator: Any = Calibrator(
            lab.farm, lab.jobs, MeasurementSettings(), lab.folder / "work", lambda line: None, workloads=workloads
        )
        values: dict[str, Any] = calibrator.prepare(DEVICE.id, FAKE).conditions
        return values

    one, two = Workload(), Workload(threads=2)
    cases = [conditions(chat=one), conditions(chat=two), conditions(chat=one, pair=two)]
    assert len({case["calibration"] for case in cases}) == 3
    assert conditions(chat=one)["calibration"] != conditions(chat=one, long=Workload(prompt=1024))["calibration"]
