"""Failed jobs: tried again, or the candidate's, or the device's."""

from __future__ import annotations

import pytest
from store_support import (
    BROKEN,
    RESULT,
    StillClock,
    add_device,
    break_down,
    device,
    key,
    new_study,
    proposal,
    put,
    take,
)

from nas.core.errors import InvalidInput
from nas.core.wire import Failure, FailureKind
from nas.infra.store import devices, jobs, outcomes, trials
from nas.infra.store.jobs import MAX_FAILURES
from nas.infra.store.outcomes import BAD_AFTER_JOBS
from nas.infra.store.rows import Blame, DeviceEventKind, Health, JobKind, JobState
from nas.infra.store.store import Store

pytestmark = pytest.mark.usefixtures("registered")


@pytest.mark.parametrize(
    "message",
    [
        "coordinator: /v1/files/0f: 503 the disk",
        "download broke off after 3 of 10 bytes; the next try goes on from there",
        "content of 0f0f0f0f0f0f: the bytes have SHA-256 1e1e1e1e1e1e instead",
    ],
)
def test_what_got_lost_before_the_device_is_neither_its_nor_the_candidates(
    store: Store, clock: StillClock, message: str
) -> None:
    devices.set_health(store, "box", Health.GOOD)
    put(store)
    for _ in range(jobs.MAX_FAILURES):
        clock.time += 1000
        job = take(store)
        failure = Failure(kind="infrastructure", message=message, phase="preparing")
        assert outcomes.fail(store, job.id, "box", "local", job.epoch or 0, failure).accepted
    row = jobs.get(store, job.id)
    assert row is not None and (row.state, row.blame) == (JobState.FAILED, Blame.INFRASTRUCTURE)
    assert devices.get(store, "box").health is Health.GOOD
    assert devices.history(store, "box", kind=DeviceEventKind.FAILURE) == []


def test_attempts_of_another_study_at_the_same_job_do_not_count(store: Store, clock: StillClock) -> None:
    """Version 0.1.0 stored attempts of an imported study under the ids that the file gave."""
    devices.set_health(store, "box", Health.GOOD)
    genuine, imported = (new_study(store, name).id for name in ("genuine", "imported"))
    for study in (genuine, imported):
        trials.propose(store, study, [proposal(32)])
    job = put(store, trial=(genuine, 0))
    with store.write() as connection:
        for _ in range(MAX_FAILURES):
            outcomes.insert_attempt(
                connection, kind="infrastructure", message="crash", at=1.0, job=job.id, device="box", study=imported
            )
    assert break_down(store, clock).state is JobState.QUEUED


def test_a_device_may_not_speak_of_the_coordinator_to_be_trusted(store: Store, clock: StillClock) -> None:
    devices.set_health(store, "box", Health.GOOD)
    put(store)
    job = take(store)
    failure = Failure(kind="infrastructure", message="coordinator: what a runner may print", phase="running")
    outcomes.fail(store, job.id, "box", "local", job.epoch or 0, failure)
    assert devices.get(store, "box").health is Health.UNKNOWN


def test_an_infrastructure_failure_is_tried_again_later_and_makes_the_device_doubtful(
    store: Store, clock: StillClock
) -> None:
    devices.set_health(store, "box", Health.GOOD)
    put(store)
    failed = break_down(store, clock)
    assert (failed.state, failed.blame, failed.message) == (JobState.QUEUED, None, "cable fell out")
    assert failed.not_before > clock.time
    assert jobs.claim(store, "box", "local") is None
    assert devices.get(store, "box").health is Health.UNKNOWN
    assert [attempt.message for attempt in outcomes.attempts_of_key(store, key("a"))] == ["cable fell out"]
    clock.time = failed.not_before
    again = take(store)
    assert (again.id, again.epoch) == (failed.id, 2)
    assert not outcomes.submit(store, again.id, "box", "local", 1, RESULT).accepted


def test_failing_again_after_a_passed_check_is_the_candidates(store: Store, clock: StillClock) -> None:
    put(store)
    assert break_down(store, clock).state is JobState.QUEUED
    clock.time += 1
    devices.set_health(store, "box", Health.GOOD)
    failed = break_down(store, clock)
    assert (failed.state, failed.blame, failed.reason) == (JobState.FAILED, Blame.CANDIDATE, "crash")


def test_failing_again_without_a_check_is_the_infrastructures_in_the_end(store: Store, clock: StillClock) -> None:
    put(store)
    states = [break_down(store, clock) for _ in range(MAX_FAILURES)]
    assert [job.state for job in states] == [JobState.QUEUED] * (MAX_FAILURES - 1) + [JobState.FAILED]
    assert states[-1].blame is Blame.INFRASTRUCTURE
    jobs.retry(store, states[-1].id)
    again = take(store)
    assert (again.blame, again.message, again.attempts) == (None, None, 1)
    with pytest.raises(InvalidInput, match="has not failed"):
        jobs.retry(store, again.id)


def test_a_job_that_two_agents_take_from_each_other_waits_and_ends_with_its_history(
    store: Store, clock: StillClock
) -> None:
    """Two copies of an agent ask in turn; only the first loss of a job is made up for at once."""
    put(store)
    first, again = take(store), take(store)
    assert (again.id, again.epoch) == (first.id, 2)
    waits = []
    while (job := jobs.get(store, first.id)) is not None and job.state is JobState.LEASED:
        assert jobs.claim(store, "box", "local") is None
        waiting = jobs.get(store, first.id)
        assert waiting is not None
        waits.append(waiting.not_before - clock.time)
        if waiting.state is JobState.QUEUED:
            clock.time = waiting.not_before
            take(store)
    assert waits[:-1] == [10.0, 20.0, 40.0]
    assert job is not None and (job.state, job.blame) == (JobState.FAILED, Blame.INFRASTRUCTURE)
    attempts = outcomes.attempts_of_key(store, job.result_key)
    assert [attempt.kind for attempt in attempts] == ["interrupted"] * MAX_FAILURES
    assert {attempt.message for attempt in attempts} == {job.message}
    assert "'local' asked for work while it had the job" in (job.message or "")
    assert devices.history(store, "box", kind=DeviceEventKind.FAILURE) == []


@pytest.mark.parametrize("again", ["retried", "cancelled and queued again"])
def test_a_job_that_is_queued_again_may_fail_as_often_as_a_new_one(store: Store, clock: StillClock, again: str) -> None:
    job = put(store)
    failures = MAX_FAILURES if again == "retried" else MAX_FAILURES - 1
    for _ in range(failures):
        break_down(store, clock)
    if again == "retried":
        jobs.retry(store, job.id)
    else:
        jobs.cancel(store, [job.id])
        put(store)
    states = [break_down(store, clock) for _ in range(MAX_FAILURES)]
    assert [job.state for job in states] == [JobState.QUEUED] * (MAX_FAILURES - 1) + [JobState.FAILED]


@pytest.mark.parametrize("kind", ["infrastructure", "cancelled"])
def test_a_run_whose_lease_expired_is_one_failure_whatever_its_agent_says_later(
    store: Store, clock: StillClock, kind: FailureKind
) -> None:
    put(store)
    devices.set_health(store, "box", Health.GOOD)
    job = take(store)
    assert jobs.renew(store, job.id, "box", "local", 1)
    clock.time += jobs.LEASE_S
    assert outcomes.expire(store) == [job.id]
    clock.time += 1
    devices.set_health(store, "box", Health.GOOD)  # a check passed meanwhile
    late = Failure(kind=kind, message="killed", phase="running")
    for accepted in (True, False):
        assert outcomes.fail(store, job.id, "box", "local", 1, late).accepted is accepted
    row = jobs.get(store, job.id)
    assert row is not None and (row.state, row.blame) == (JobState.QUEUED, None)
    assert len(outcomes.attempts_of_key(store, job.result_key)) == 1
    assert devices.get(store, "box").health is Health.GOOD


@pytest.mark.sql
def test_failing_on_two_devices_is_the_candidates_where_the_first_works(store: Store, clock: StillClock) -> None:
    add_device(store, "phone", agent="other")
    study = new_study(store).id
    trials.propose(store, study, [proposal(32), proposal(64)])
    put(store, "a", trial=(study, 0))
    put(store, "b", trial=(study, 0), device="phone")
    put(store, "c", trial=(study, 1), device="phone", priority=-1)
    assert break_down(store, clock).state is JobState.QUEUED
    clock.time += 1
    devices.set_health(store, "box", Health.GOOD)
    failed = break_down(store, clock, "phone", "other")
    assert (failed.state, failed.blame) == (JobState.FAILED, Blame.CANDIDATE)
    assert break_down(store, clock, "phone", "other").state is JobState.QUEUED


@pytest.fixture
def two(store: Store) -> Store:
    """Another device, and jobs of one trial on both."""
    add_device(store, "phone", agent="other")
    study = new_study(store).id
    trials.propose(store, study, [proposal(32)])
    put(store, "a", trial=(study, 0))
    put(store, "b", trial=(study, 0), device="phone")
    return store


def test_what_takes_two_devices_down_at_once_is_not_the_candidates(two: Store, clock: StillClock) -> None:
    assert break_down(two, clock).state is JobState.QUEUED
    assert break_down(two, clock, "phone", "other").state is JobState.QUEUED


def test_a_failure_of_a_job_that_was_done_in_the_end_is_forgotten(two: Store, clock: StillClock) -> None:
    break_down(two, clock)
    clock.time += 1000
    devices.set_health(two, "box", Health.GOOD)
    job = take(two)
    assert outcomes.submit(two, job.id, "box", "local", job.epoch or 0, RESULT).accepted
    assert break_down(two, clock, "phone", "other").state is JobState.QUEUED


@pytest.mark.parametrize("phase", ["preparing", "cooling"])
def test_what_fails_before_the_candidate_ran_is_never_its_fault(store: Store, clock: StillClock, phase: str) -> None:
    put(store)
    break_down(store, clock)
    failure = Failure.model_validate({"kind": "infrastructure", "message": "cable", "phase": phase})
    for _ in range(MAX_FAILURES - 1):
        clock.time += 1000
        devices.set_health(store, "box", Health.GOOD)
        clock.time += 1
        job = take(store)
        assert outcomes.fail(store, job.id, "box", "local", job.epoch or 0, failure).accepted
    after = jobs.get(store, job.id)
    assert after is not None and after.blame is Blame.INFRASTRUCTURE


@pytest.mark.parametrize(("transport", "blame"), [("local", Blame.CANDIDATE), ("ssh", Blame.INFRASTRUCTURE)])
@pytest.mark.sql
def test_silence_of_an_agent_says_something_only_where_the_candidate_runs_beside_it(
    store: Store, clock: StillClock, transport: str, blame: Blame
) -> None:
    devices.register(store, "local", [device(transport=transport)], boot_id="boot")
    put(store)
    for _ in range(MAX_FAILURES):
        clock.time += 1000
        devices.set_health(store, "box", Health.GOOD)
        clock.time += 1
        job = jobs.claim(store, "box", "local")
        if job is None:
            break
        assert jobs.renew(store, job.id, "box", "local", job.epoch or 0)
        clock.time += jobs.LEASE_S
        assert outcomes.expire(store) == [job.id]
    [row] = jobs.of_key(store, key("a"))
    assert row.blame is blame


def test_a_job_that_overran_its_deadline_failed_of_time(store: Store, clock: StillClock) -> None:
    put(store)
    failure = Failure(kind="infrastructure", message="not done within 60 s", overdue=True)
    for _ in range(2):
        clock.time += 1000
        devices.set_health(store, "box", Health.GOOD)
        clock.time += 1
        job = take(store)
        outcomes.fail(store, job.id, "box", "local", job.epoch or 0, failure)
    after = jobs.get(store, job.id)
    assert after is not None and (after.blame, after.reason) == (Blame.CANDIDATE, "timeout")


def test_what_a_person_decided_is_not_changed_by_failures(store: Store, clock: StillClock) -> None:
    for n in range(BAD_AFTER_JOBS):
        put(store, f"j{n}", priority=-n)
    for _ in range(BAD_AFTER_JOBS - 1):
        break_down(store, clock)
    clock.time += 1000
    job = take(store)
    devices.set_health(store, "box", Health.MAINTENANCE, "new battery")
    outcomes.fail(store, job.id, "box", "local", job.epoch or 0, BROKEN)
    row = devices.get(store, "box")
    assert (row.health, row.health_reason, row.check_due) == (Health.MAINTENANCE, "new battery", None)


def test_a_check_is_never_the_candidates(store: Store, clock: StillClock) -> None:
    put(store, kind=JobKind.CHECK)
    for _ in range(MAX_FAILURES):
        clock.time += 1
        devices.set_health(store, "box", Health.GOOD)
        failed = break_down(store, clock)
    assert (failed.state, failed.blame) == (JobState.FAILED, Blame.INFRASTRUCTURE)


@pytest.mark.sql
def test_a_device_turns_bad_after_three_different_jobs_until_it_passes_a_check(store: Store, clock: StillClock) -> None:
    for n in range(BAD_AFTER_JOBS):
        assert devices.get(store, "box").health is Health.UNKNOWN
        put(store, f"j{n}", priority=n)
        break_down(store, clock)
    bad = devices.get(store, "box")
    assert bad.health is Health.BAD
    assert "cable fell out" in (bad.health_reason or "")
    clock.time += 1000
    assert jobs.claim(store, "box", "local") is None
    devices.set_health(store, "box", Health.GOOD)
    assert devices.get(store, "box").health_reason is None
    break_down(store, clock)
    assert devices.get(store, "box").health is Health.UNKNOWN


def test_one_job_that_fails_often_makes_no_device_bad(store: Store, clock: StillClock) -> None:
    put(store)
    for _ in range(MAX_FAILURES):
        break_down(store, clock)
    assert devices.get(store, "box").health is Health.UNKNOWN


@pytest.mark.parametrize(
    ("kind", "state", "blame"),
    [("refused", JobState.FAILED, Blame.REFUSED), ("cancelled", JobState.CANCELLED, None)],
)
def test_other_failures_end_the_job_and_are_not_the_devices(
    store: Store, kind: str, state: JobState, blame: Blame | None
) -> None:
    job = put(store)
    take(store)
    devices.set_health(store, "box", Health.GOOD)
    failure = Failure.model_validate({"kind": kind, "message": "no"})
    assert outcomes.fail(store, job.id, "box", "local", 1, failure).accepted
    after = jobs.get(store, job.id)
    assert after is not None and (after.state, after.blame) == (state, blame)
    assert devices.get(store, "box").health is Health.GOOD
