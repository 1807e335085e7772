"""Rounds as rows of the job table, seen from the orchestrator."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from store_support import RESULT, StillClock, add_device, key, new_study, open_store, proposal, put, round_of

from nas.core.errors import CandidateFailed, InfrastructureFailed
from nas.core.plan import RoundResult
from nas.core.wire import Failure
from nas.infra.store import devices, jobs, outcomes, studies, trials
from nas.infra.store.devices import LIMITS
from nas.infra.store.rows import CheckOutcome, DeviceState, Health, JobKind, JobState, Reservation
from nas.infra.store.store import Store
from nas.measure.farm import queue
from nas.measure.farm.queue import DeviceJobs, JobNotifier

KEY = key("measurement")
ROUND = round_of().model_copy(update={"reference": round_of().candidate})


class SetClock(StillClock):
    """A clock whose time of day may be set."""

    wall, real = 1000.0, 50.0

    def now(self) -> float:
        return self.wall

    def monotonic(self) -> float:
        return self.real


class Lab:
    """A store with one device, a study and a trial; an agent that does as told."""

    def __init__(self, folder: Path) -> None:
        self.clock = StillClock()
        self.store: Store = open_store(folder, self.clock)
        self.notifier = JobNotifier()
        self.device = add_device(self.store)
        self.study = new_study(self.store).id
        trials.propose(self.store, self.study, [proposal(64)])
        self.down: str | None = None

    def jobs(self, study: int | None = None) -> DeviceJobs:
        return DeviceJobs(self.store, study or self.study, self.notifier, self.check)

    def check(self) -> None:
        if self.down:
            raise InfrastructureFailed(self.down)

    def work(self, outcome: RoundResult | Failure) -> None:
        job = jobs.claim(self.store, self.device, "local")
        assert job is not None
        assert job.epoch is not None
        who = (self.store, job.id, self.device, "local", job.epoch)
        verdict = outcomes.submit(*who, outcome) if isinstance(outcome, RoundResult) else outcomes.fail(*who, outcome)
        assert verdict.accepted
        self.notifier.notify()

    def wait(self, during: Callable[[], Awaitable[None]], round_: Any = ROUND) -> RoundResult:
        """Runs a round while something happens."""

        async def go() -> RoundResult:
            task = asyncio.create_task(self.jobs().run(KEY, 0, self.device, round_, 0))
            await asyncio.sleep(0.02)
            await during()
            return await asyncio.wait_for(task, 60)

        return asyncio.run(go())

    def job(self) -> Any:
        return jobs.get(self.store, f"{KEY}.0")


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.setattr(queue, "_CHECK_S", 0.01)
    return Lab(tmp_path)


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the steps of the test's clock be time that has passed."""
    monkeypatch.setattr(queue.Interruptions, "happened", lambda self: False)


def test_a_round_is_queued_and_its_result_comes_back(lab: Lab) -> None:
    async def during() -> None:
        assert (lab.job().study, lab.job().trial, lab.job().kind) == (lab.study, 0, JobKind.MEASURE)
        lab.work(RESULT)

    assert lab.wait(during) == RESULT


def test_a_round_that_was_done_before_is_not_queued_again(lab: Lab) -> None:
    async def during() -> None:
        lab.work(RESULT)

    async def nothing() -> None:
        assert jobs.claim(lab.store, lab.device, "local") is None

    lab.wait(during)
    assert lab.wait(nothing) == RESULT


def test_the_reference_alone_also_goes_to_a_doubtful_device(lab: Lab) -> None:
    devices.set_health(lab.store, lab.device, Health.BAD, "three jobs failed")

    async def during() -> None:
        assert lab.job().kind is JobKind.CHECK
        lab.work(RESULT)

    assert lab.wait(during, round_of()) == RESULT


def test_a_bad_device_is_waited_for_until_its_first_check_has_ended(lab: Lab) -> None:
    async def during() -> None:
        devices.set_health(lab.store, lab.device, Health.BAD, "three jobs failed")
        await asyncio.sleep(0.05)
        assert lab.job().state is JobState.QUEUED
        outcomes.conclude_check(lab.store, lab.device, 0, CheckOutcome.FAILED, "the check crashed", lab.clock.time)

    with pytest.raises(InfrastructureFailed, match=r"device box takes no jobs: bad, the check crashed"):
        lab.wait(during)
    assert lab.job().state is JobState.CANCELLED


def test_a_bad_device_that_passes_its_check_goes_on(lab: Lab) -> None:
    async def during() -> None:
        devices.set_health(lab.store, lab.device, Health.BAD, "three jobs failed")
        await asyncio.sleep(0.05)
        assert jobs.claim(lab.store, lab.device, "local") is None
        outcomes.conclude_check(lab.store, lab.device, 0, CheckOutcome.PASSED, None, lab.clock.time)
        lab.work(RESULT)

    assert lab.wait(during) == RESULT


def test_a_bad_device_that_nobody_checks_is_not_waited_for_for_ever(lab: Lab) -> None:
    async def during() -> None:
        devices.set_health(lab.store, lab.device, Health.BAD, "three jobs failed")
        await asyncio.sleep(0.05)
        lab.clock.sleep(120)

    with pytest.raises(InfrastructureFailed, match=r"device box takes no jobs: bad, three jobs failed"):
        lab.wait(during)


@pytest.mark.usefixtures("steady")
def test_a_draining_device_is_waited_for_for_a_while(lab: Lab) -> None:
    async def during() -> None:
        devices.set_state(lab.store, lab.device, DeviceState.DRAINING)
        lab.clock.sleep(LIMITS[DeviceState.DRAINING])
        assert jobs.claim(lab.store, lab.device, "local") is None
        await asyncio.sleep(0.05)
        assert lab.job().state is JobState.QUEUED
        lab.clock.sleep(1)

    with pytest.raises(InfrastructureFailed, match="device box is drained: 'nas device resume box'"):
        lab.wait(during)


@pytest.mark.usefixtures("steady")
def test_a_silent_device_is_not_waited_for_for_ever(lab: Lab) -> None:
    async def during() -> None:
        lab.clock.sleep(outcomes.OFFLINE_S - 1)
        await asyncio.sleep(0.05)
        assert lab.job().state is JobState.QUEUED
        lab.clock.sleep(2)

    with pytest.raises(InfrastructureFailed, match=r"device box is offline: nothing was heard from its agent 'local'"):
        lab.wait(during)


def test_a_machine_that_slept_takes_no_silence_for_a_failure(lab: Lab) -> None:
    async def during() -> None:
        lab.clock.sleep(10 * outcomes.OFFLINE_S)
        await asyncio.sleep(0.05)
        assert lab.job().state is JobState.QUEUED
        lab.work(RESULT)

    assert lab.wait(during) == RESULT


@pytest.mark.parametrize(("wall", "real", "expected"), [(1, 1, False), (600, 1, True), (-600, 1, True), (20, 20, True)])
def test_a_clock_that_was_set_and_a_process_that_stood_still_are_noticed(
    wall: float, real: float, expected: bool
) -> None:
    clock = SetClock()
    interruptions = queue.Interruptions(clock)
    clock.wall, clock.real = clock.wall + wall, clock.real + real
    assert interruptions.happened() is expected
    assert not interruptions.happened()


def test_an_agent_that_will_never_come_is_not_waited_for(lab: Lab) -> None:
    async def during() -> None:
        lab.down = "the agent does not run"

    with pytest.raises(InfrastructureFailed, match="the agent does not run"):
        lab.wait(during)


def test_a_cancelled_wait_takes_the_job_back(lab: Lab) -> None:
    async def go() -> None:
        task = asyncio.create_task(lab.jobs().run(KEY, 0, lab.device, ROUND, 0))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(go())
    assert lab.job().state is JobState.CANCELLED


def test_a_job_that_another_study_took_back_is_queued_again(lab: Lab) -> None:
    async def during() -> None:
        jobs.cancel(lab.store, [lab.job().id])
        await asyncio.sleep(0.1)
        lab.work(RESULT)

    assert lab.wait(during) == RESULT


def test_a_job_that_went_with_another_study_is_queued_again(lab: Lab) -> None:
    other = studies.create(lab.store, "other", {}, seed=0, version="0").id
    trials.propose(lab.store, other, [proposal(64)])
    jobs.enqueue(lab.store, KEY, ROUND, device=lab.device, trial=(other, 0))

    async def during() -> None:
        studies.delete(lab.store, other)
        await asyncio.sleep(0.1)
        assert lab.job().study == lab.study
        lab.work(RESULT)

    assert lab.wait(during) == RESULT


def test_a_device_that_failed_is_tried_again_later(lab: Lab) -> None:
    async def during() -> None:
        lab.work(Failure(kind="infrastructure", message="the cable"))
        assert lab.job().state is JobState.QUEUED
        lab.clock.sleep(30)
        lab.work(RESULT)

    assert lab.wait(during) == RESULT


def test_a_refused_plan_is_nobodys_fault_and_may_be_tried_again(lab: Lab) -> None:
    async def refuse() -> None:
        lab.work(Failure(kind="refused", message="not in the manifest"))

    async def work() -> None:
        lab.work(RESULT)

    with pytest.raises(InfrastructureFailed, match="box: not in the manifest"):
        lab.wait(refuse)
    assert lab.wait(work) == RESULT


def test_what_fails_again_after_a_passed_check_is_the_candidates(lab: Lab) -> None:
    async def during() -> None:
        lab.work(Failure(kind="infrastructure", message="gone"))
        lab.clock.sleep(30)
        devices.set_health(lab.store, lab.device, Health.GOOD)
        lab.clock.sleep(30)
        lab.work(Failure(kind="infrastructure", message="gone again"))

    with pytest.raises(CandidateFailed, match="gone again"):
        lab.wait(during)


@pytest.mark.usefixtures("steady")
def test_a_lease_that_no_coordinator_takes_back_is_not_waited_for(lab: Lab) -> None:
    async def during() -> None:
        assert jobs.claim(lab.store, lab.device, "local") is not None
        lab.clock.time += jobs.LEASE_S + outcomes.OFFLINE_S + 1

    with pytest.raises(InfrastructureFailed, match="start 'nas serve'"):
        lab.wait(during)
    assert lab.job().state is JobState.CANCELLED


@pytest.mark.parametrize("obstacle", ["reserved", "draining", "a health check", "another study", "its own study"])
def test_what_a_round_waits_for_is_said_once(lab: Lab, caplog: pytest.LogCaptureFixture, obstacle: str) -> None:
    other = new_study(lab.store, "other").id
    expected = {"draining": "it is draining", "a health check": "it runs a health check", "its own study": None}
    expected |= {"reserved": "reserved by ann until 1970-01-01 01:16+00:00: release", "another study": "study other"}
    if obstacle == "reserved":
        devices.reserve(lab.store, lab.device, Reservation(lab.clock.time + 3600, "ann", "release"))
    elif obstacle == "draining":
        devices.set_state(lab.store, lab.device, DeviceState.DRAINING)
    else:
        of = {"a health check": None, "another study": (other, None), "its own study": (lab.study, None)}[obstacle]
        put(lab.store, "another", trial=of, kind=JobKind.CHECK)
        assert jobs.claim(lab.store, lab.device, "local") is not None

    async def wait() -> None:
        task = asyncio.create_task(lab.jobs().run(KEY, 0, lab.device, ROUND, 0))
        await asyncio.sleep(0.05)
        assert not caplog.records
        lab.clock.time += queue._QUIET_S
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(wait())
    messages = [record.getMessage() for record in caplog.records if record.name == queue.__name__]
    if expected[obstacle] is None:
        assert messages == []
    else:
        (line,) = messages
        assert line.startswith("waiting for box: ") and str(expected[obstacle]) in line
