"""The keeper of health: checks queued once, judged once, for whatever device is due."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection
from pathlib import Path

import pytest
from store_support import StillClock, key, open_store, round_of
from study_support import DEVICE, raw, reference_times, sample

from nas.core.errors import InfrastructureFailed
from nas.core.plan import Pair, RawRun, RoundResult, Runner
from nas.core.registry import Registry
from nas.core.wire import Failure
from nas.infra.store import agents, calibrations, devices, jobs, outcomes
from nas.infra.store.jobs import CHECK_PRIORITY
from nas.infra.store.rows import DeviceEventKind, DeviceRow, Health, JobKind, JobRow, JobState
from nas.infra.store.store import Store
from nas.measure.farm.trust import Admissions, SigningKey
from nas.measure.protocol.health import AnyDevice, HealthKeeper, check_key
from nas.measure.protocol.reference import calibration_name, keep_calibration
from nas.measure.runtimes.base import Runtime
from nas.testing.fake_runtime import FakeRuntime
from tests.support.waiting import until

CALM, KILLED = raw(sample()), raw(exit_code=-9)
CRASHED, THROTTLED = raw(exit_code=-11), raw(sample(), throttled=True)
MS = reference_times().run_ms


class Lab:
    """A database with one device, its agent, and a keeper that looks when told to."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock = folder, StillClock()
        self.store = open_store(folder, self.clock)
        agents.register_local(self.store, "local")
        devices.register(self.store, "local", [DEVICE], boot_id="boot")
        self.admissions = Admissions(folder, SigningKey.generate(), self.clock)
        self.rung = 0
        self.any_device = AnyDevice(self.store, self.admissions, folder / "work")
        self.keeper = self.new_keeper()
        self.plan = AnyDevice(self.store, self.admissions, folder / "work").plan(devices.get(self.store, DEVICE.id))

    def new_keeper(self, store: Store | None = None, among: Collection[str] | None = None) -> HealthKeeper:
        return HealthKeeper(store or self.store, self.ring, self.any_device.plan, among)

    def ring(self) -> None:
        self.rung += 1

    def look(self) -> None:
        self.clock.time += 1
        self.keeper.step()

    def job(self) -> JobRow:
        """The one job that is queued."""
        [job] = jobs.live(self.store)
        return job

    def run(self, *runs: RawRun) -> JobRow:
        """The agent runs the queued job; gives it as it was leased."""
        self.clock.time += 60
        job = jobs.claim(self.store, DEVICE.id, "local")
        assert job is not None
        result = RoundResult(pairs=[Pair(reference=None, candidate=run) for run in runs])
        assert outcomes.submit(self.store, job.id, DEVICE.id, "local", job.epoch or 0, result).accepted
        return job

    def check(self, *runs: RawRun) -> DeviceRow:
        """One check of one round, from its queueing to its verdict."""
        self.look()
        self.run(*runs)
        self.look()
        return self.device()

    def calibrate(self) -> None:
        key = DEVICE.id, "fake", calibration_name(self.plan)
        keep_calibration(self.store, key, [sample()] * 10, self.plan, disturbed=False)

    def device(self) -> DeviceRow:
        return devices.get(self.store, DEVICE.id)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    install(monkeypatch, fake=FakeRuntime(tmp_path / "fake"))
    return Lab(tmp_path)


def install(monkeypatch: pytest.MonkeyPatch, **runtimes: FakeRuntime) -> None:
    """Makes these the only runtimes."""
    registry: Registry[Runtime] = Registry("runtime", "nas.no.plugins", runtimes)
    monkeypatch.setattr("nas.measure.protocol.health.RUNTIMES", registry)


def test_a_new_device_is_checked_and_calibrated(lab: Lab) -> None:
    lab.look()
    job = lab.job()
    assert (job.kind, job.study, job.priority, job.payload.reference) == (JobKind.CHECK, None, CHECK_PRIORITY, None)
    assert (job.payload.candidate, job.payload.repetitions) == (lab.plan, 10)
    row = lab.check(*[CALM] * 10)
    assert (row.health, row.check_due) == (Health.GOOD, None)
    [calibration] = calibrations.of_device(lab.store, DEVICE.id)
    assert (calibration.runtime, calibration.build) == ("fake", calibration_name(lab.plan))
    assert calibration.reference_ms == pytest.approx(MS)
    lab.look()
    assert jobs.live(lab.store) == []


def test_a_noisy_device_is_good_and_calibrated(lab: Lab) -> None:
    assert lab.check(*[raw(sample(), foreign_cpu=0.9)] * 10).health is Health.GOOD
    [calibration] = calibrations.of_device(lab.store, DEVICE.id)
    assert calibration.reference_ms == pytest.approx(MS)


def test_a_calibrated_device_runs_three_times_and_its_drift_is_kept(lab: Lab) -> None:
    lab.calibrate()
    lab.look()
    assert lab.job().payload.repetitions == 3
    assert lab.check(*[raw(sample(10.2, 1.02), temperature_c=51.0)] * 3).health is Health.GOOD
    [drift] = calibrations.drift(lab.store, DEVICE.id)
    assert [(point.run.ratio, point.run.temperature_c) for point in drift.points] == [(pytest.approx(1.02), 51.0)] * 3


def test_checked_at_is_when_the_runs_ended_not_when_they_were_judged(lab: Lab) -> None:
    lab.look()
    lab.run(*[CALM] * 10)
    end = lab.clock.time
    lab.clock.time += 100
    lab.look()
    assert lab.device().checked_at == end


@pytest.mark.parametrize("broken", [KILLED, CRASHED, raw()], ids=["killed", "crashed", "no report"])
def test_a_device_on_which_the_reference_fails_is_bad(lab: Lab, broken: RawRun) -> None:
    lab.calibrate()
    lab.look()
    waits = []
    while jobs.live(lab.store):
        waits.append(lab.run(broken).payload.cool_down_s)
        lab.look()
    assert waits == [0, 5, 10, 20]
    row = lab.device()
    assert row.health is Health.BAD
    assert row.health_reason is not None and row.health_reason.startswith("the reference model of fake failed: ")
    lab.look()
    assert jobs.live(lab.store) == [], "not again at once"
    lab.clock.time = row.check_due or 0.0
    assert lab.check(*[CALM] * 3).health is Health.GOOD


def test_one_killed_run_fails_no_check(lab: Lab) -> None:
    lab.calibrate()
    lab.look()
    lab.run(CALM, KILLED)
    lab.look()
    lab.run(*[CALM] * 3)
    lab.look()
    assert lab.device().health is Health.GOOD


def test_a_drifted_device_is_not_bad_but_says_so(lab: Lab) -> None:
    lab.calibrate()
    row = lab.check(*[raw(sample(13.0, 1.3))] * 3)
    assert row.health is Health.UNKNOWN
    assert row.health_reason == (
        "the reference model runs +30 % off its calibration (limits -5 and +20 %); the next study has a second look "
        "and calibrates it again"
    )
    devices.set_health(lab.store, DEVICE.id, Health.BAD, "three jobs failed")
    lab.clock.time += 60
    row = lab.check(*[raw(sample(13.0, 1.3), foreign_cpu=0.5)] * 3)
    assert row.health is Health.BAD, "only a passed check heals"
    assert "other processes ran there" in (row.health_reason or "")


def test_a_throttling_device_does_not_pass(lab: Lab) -> None:
    lab.calibrate()
    lab.look()
    while jobs.live(lab.store):
        lab.run(*[THROTTLED] * 3)
        lab.look()
    row = lab.device()
    assert (row.health, row.health_reason) == (Health.UNKNOWN, "it throttled while the reference model ran")
    [check] = devices.history(lab.store, DEVICE.id, kind=DeviceEventKind.CHECK)
    assert (check.what, check.reason) == ("unsure", row.health_reason)


def test_a_check_that_no_agent_can_finish_fails(lab: Lab) -> None:
    lab.look()
    while jobs.live(lab.store):
        lab.clock.time += 1000
        job = jobs.claim(lab.store, DEVICE.id, "local")
        assert job is not None
        failure = Failure(kind="infrastructure", message="no device")
        outcomes.fail(lab.store, job.id, DEVICE.id, "local", job.epoch or 0, failure)
        lab.look()
    row = lab.device()
    assert (row.health, row.health_reason) == (Health.BAD, "the health check could not be run: no device")


def test_a_check_whose_files_got_lost_on_the_way_says_nothing_of_the_device(lab: Lab) -> None:
    lab.look()
    while jobs.live(lab.store):
        lab.clock.time += 1000
        job = jobs.claim(lab.store, DEVICE.id, "local")
        assert job is not None
        lost = Failure(kind="infrastructure", message="download of 0f: broken pipe", phase="preparing")
        outcomes.fail(lab.store, job.id, DEVICE.id, "local", job.epoch or 0, lost)
        lab.look()
    row = lab.device()
    assert row.health is Health.UNKNOWN
    assert row.health_reason == "the health check did not reach it: download of 0f: broken pipe"


def test_a_refused_check_says_nothing_of_the_device(lab: Lab) -> None:
    lab.look()
    job = jobs.claim(lab.store, DEVICE.id, "local")
    assert job is not None
    refusal = Failure(kind="refused", message="not in the manifest")
    outcomes.fail(lab.store, job.id, DEVICE.id, "local", job.epoch or 0, refusal)
    lab.look()
    row = lab.device()
    assert (row.health, row.health_reason) == (Health.UNKNOWN, "the health check was refused: not in the manifest")


def test_a_device_for_which_nothing_was_built_says_so(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, fake=FakeRuntime(lab.folder, targets=()))
    lab.look()
    row = lab.device()
    assert row.health is Health.UNKNOWN
    assert row.health_reason == (
        "it cannot be checked: no fake runner for x86_64-linux; no patched fake runner for x86_64-linux"
    )
    assert jobs.live(lab.store) == []


def test_a_check_with_a_runtime_that_is_not_installed_any_more_ends_and_holds_up_no_other_device(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.look()
    lab.run(*[CALM] * 10)
    other = DEVICE.model_copy(update={"id": "other-box"})
    devices.register(lab.store, "local", [DEVICE, other], boot_id="boot")
    install(monkeypatch, other=FakeRuntime(lab.folder / "other", name="other"))
    lab.look()
    assert (lab.device().health_reason or "").startswith("it cannot be checked: unknown runtime 'fake'")
    assert [job.device for job in jobs.live(lab.store)] == [other.id]


def test_many_devices_are_checked_a_few_at_a_time_and_builds_are_looked_through_once_for_their_kind(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = [DEVICE.model_copy(update={"id": f"box-{number}"}) for number in range(5)]
    devices.register(lab.store, "local", [DEVICE, *more], boot_id="boot")
    looked: list[str] = []

    class Counted(FakeRuntime):
        def runner(
            self, target: str, features: Collection[str] | None = None, patched: bool = False, libc: str | None = None
        ) -> Runner:
            looked.append(target)
            return super().runner(target, features, patched, libc)

    install(monkeypatch, fake=Counted(lab.folder, targets=()))
    monkeypatch.setattr("nas.measure.protocol.health._DEVICES_PER_STEP", 4)
    lab.look()
    assert sum(row.check_number for row in devices.all(lab.store)) == 4
    lab.look()
    assert [row.check_number for row in devices.all(lab.store)] == [1] * 6
    assert len(looked) == 2, "stock and patched, once"
    # A build that is made meanwhile is found soon.
    install(monkeypatch, fake=FakeRuntime(lab.folder / "fake"))
    lab.clock.time += 60
    lab.look()
    assert len(jobs.live(lab.store)) == 4


def test_the_first_runtime_that_has_a_build_checks(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    first = FakeRuntime(lab.folder, name="first", targets=("aarch64-linux",))
    install(monkeypatch, first=first, second=FakeRuntime(lab.folder / "second", name="second"))
    lab.look()
    runner = lab.job().payload.candidate.runner
    assert runner.runtime == "second"
    assert lab.admissions.find_file(runner.files[runner.main].sha256) is not None


def test_a_process_leaves_devices_alone_that_are_not_its_own(lab: Lab) -> None:
    lab.keeper = lab.new_keeper(among=["another"])
    lab.look()
    assert (lab.device().check_number, jobs.live(lab.store)) == (0, [])


def test_two_keepers_queue_and_judge_once(lab: Lab) -> None:
    other_store = open_store(lab.folder, lab.clock)
    other = lab.new_keeper(store=other_store)
    lab.look()
    other.step()
    assert lab.job().result_key == check_key(lab.device())
    lab.run(*[CALM] * 10)
    rounds = jobs.of_key(lab.store, check_key(lab.device()))
    before = lab.device()
    lab.look()
    other._continue(before, rounds)  # it read the table at the same moment
    assert (lab.device().check_number, lab.device().health) == (1, Health.GOOD)
    assert len(devices.history(lab.store, DEVICE.id, kind=DeviceEventKind.CHECK)) == 1
    other_store.close()


def test_a_device_that_a_study_calibrates_just_now_is_not_checked_besides(lab: Lab) -> None:
    jobs.enqueue(lab.store, key("calibration"), round_of(), device=DEVICE.id, kind=JobKind.CHECK)
    lab.look()
    assert [job.result_key for job in jobs.live(lab.store)] == [key("calibration")]


def test_a_check_goes_before_measurements_and_tells_whose_failure_it_was(lab: Lab) -> None:
    lab.calibrate()
    lab.check(*[CALM] * 3)
    crash = Failure(kind="infrastructure", message="connection lost")
    bad = jobs.enqueue(lab.store, key("bad"), round_of(), device=DEVICE.id)
    jobs.enqueue(lab.store, key("other"), round_of(), device=DEVICE.id)
    for _ in range(2):
        job = jobs.claim(lab.store, DEVICE.id, "local")
        assert job is not None and job.id == bad.id
        outcomes.fail(lab.store, job.id, DEVICE.id, "local", job.epoch or 0, crash)
        lab.look()
        assert lab.run(*[CALM] * 3).kind is JobKind.CHECK
        lab.look()
        assert lab.device().health is Health.GOOD
    row = jobs.get(lab.store, bad.id)
    assert row is not None and (row.state, row.blame) == (JobState.FAILED, "candidate")


def test_the_thread_checks_by_itself_and_survives_a_database_in_trouble(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nas.measure.protocol.health._STEP_S", 0.01)
    troubles = [InfrastructureFailed("locked")] * 3

    def due(store: Store, *, among: Collection[str] | None, most: int) -> list[DeviceRow]:
        if troubles:
            raise troubles.pop()
        return outcomes.due_checks(store, among=among, most=most)

    checks = Namespace(due_checks=due, conclude_check=outcomes.conclude_check)
    monkeypatch.setattr("nas.measure.protocol.health.outcomes", checks)
    with lab.keeper:
        until(lambda: bool(jobs.live(lab.store)))
        lab.run(*[CALM] * 10)
        until(lambda: lab.device().health is Health.GOOD)
    assert troubles == []
