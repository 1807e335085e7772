"""Every state of a device ends: by the agent's word, or by the time limit in one table."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_support import RESULT, StillClock, add_device, device, put, state, take

from nas.core.errors import InvalidInput
from nas.core.wire import Phase
from nas.infra.store import devices, jobs, outcomes
from nas.infra.store import listings as pages
from nas.infra.store.devices import LIMITS, phase_limit_s, state_of
from nas.infra.store.rows import DeviceEventKind, DeviceState, Health, JobRow, JobState
from nas.infra.store.store import Store

PHASES: list[Phase] = ["preparing", "cooling", "running"]
IDLE_S, OFFLINE_S = LIMITS[DeviceState.IDLE], LIMITS[DeviceState.OFFLINE]


pytestmark = pytest.mark.usefixtures("registered")


def beat(store: Store, job: JobRow, phase: Phase) -> bool:
    return jobs.renew(store, job.id, "box", "local", job.epoch or 0, phase=phase)


def live_on(store: Store, clock: StillClock, job: JobRow, phase: Phase, seconds: float) -> bool:
    """Renews for `seconds`, as an agent does; returns whether it may continue."""
    end = clock.time + seconds
    while clock.time < end:
        clock.time = min(end, clock.time + jobs.LEASE_S / 2)
        if not beat(store, job, phase):
            return False
    return True


def test_every_state_has_a_limit() -> None:
    assert set(LIMITS) == set(DeviceState)
    assert min(LIMITS.values()) > 0


def test_the_limits_are_documented() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference/farm-health.md"
    rows = [line for line in page.read_text().splitlines() if line.startswith("| `")]
    documented = {line.split("|")[1].strip(): line for line in rows}
    for device_state, limit in LIMITS.items():
        assert f"{limit:g} s" in documented[f"`{device_state}`"]


def test_a_device_shows_how_far_its_job_has_come(store: Store) -> None:
    put(store)
    job = take(store)
    states = [devices.get(store, "box").state]
    for phase in PHASES:
        assert beat(store, job, phase)
        states.append(devices.get(store, "box").state)
    assert states == [DeviceState.LEASED, DeviceState.PREPARING, DeviceState.COOLING, DeviceState.LEASED]
    assert beat(store, job, "preparing")
    assert devices.get(store, "box").state is DeviceState.LEASED, "a round does not go back"
    assert outcomes.submit(store, job.id, "box", "local", job.epoch or 0, RESULT).accepted
    assert devices.get(store, "box").state is DeviceState.IDLE


@pytest.mark.parametrize("phase", PHASES)
def test_no_phase_lasts_for_ever_though_the_agent_goes_on_renewing(
    store: Store, clock: StillClock, phase: Phase
) -> None:
    put(store)
    job = take(store)
    assert beat(store, job, phase)
    assert jobs.get(store, job.id).lease_until == devices.get(store, "box").lease_until == clock.time + jobs.LEASE_S
    allowed = phase_limit_s(phase, job.payload)
    assert live_on(store, clock, job, phase, allowed - 1)
    assert outcomes.expire(store) == []
    assert not live_on(store, clock, job, phase, 1)
    assert outcomes.expire(store) == [job.id]
    [failure] = devices.history(store, "box", kind=DeviceEventKind.FAILURE)
    assert (failure.what, failure.job) == (phase, job.id)
    assert failure.reason == f"it was {phase} for longer than 'box' may take for that"
    assert state(store, job) is JobState.QUEUED
    assert devices.get(store, "box").state is DeviceState.IDLE


def test_a_job_that_never_begins_is_taken_back_too(store: Store, clock: StillClock) -> None:
    put(store)
    job = take(store)
    assert job.phase_until == clock.time + sum(phase_limit_s(phase, job.payload) for phase in PHASES)


def test_what_a_plan_takes_is_added_to_the_limit(store: Store) -> None:
    put(store)
    round_ = take(store).payload.model_copy(update={"cool_down_s": 300.0, "repetitions": 4})
    both = round_.model_copy(update={"reference": round_.candidate})
    assert phase_limit_s("cooling", round_) == 300 + LIMITS[DeviceState.COOLING]
    assert phase_limit_s("running", both) == 4 * 2 * round_.candidate.deadline_s + LIMITS[DeviceState.LEASED]
    assert phase_limit_s("preparing", both) == LIMITS[DeviceState.PREPARING]


def test_an_agent_that_only_beats_for_what_is_over_does_not_keep_its_device_alive(
    store: Store, clock: StillClock
) -> None:
    put(store)
    job = take(store)
    jobs.cancel(store, [job.id])
    clock.time += IDLE_S
    assert not beat(store, job, "running")
    outcomes.expire(store)
    assert devices.get(store, "box").state is DeviceState.OFFLINE


def test_a_device_that_fell_silent_reads_as_offline_though_nobody_wrote_it_down(
    store: Store, clock: StillClock
) -> None:
    add_device(store, "drained", agent="other")
    devices.set_state(store, "drained", DeviceState.DRAINING)
    start = clock.time
    clock.time += IDLE_S - 1
    assert [row.state for row in devices.all(store)] == [DeviceState.IDLE, DeviceState.DRAINING]
    clock.time += 100
    assert [row.state for row in devices.all(store)] == [DeviceState.OFFLINE, DeviceState.DRAINING]
    row = devices.get(store, "box")
    assert (row.state, row.state_since) == (DeviceState.OFFLINE, start + IDLE_S)
    assert pages.devices_by_condition(store) == {("offline", "unknown"): 1, ("draining", "unknown"): 1}
    jobs.claim(store, "box", "local")
    assert devices.get(store, "box").state is DeviceState.IDLE


def test_a_device_whose_agent_said_goodbye_stays_offline_when_its_lease_runs_out(
    store: Store, clock: StillClock
) -> None:
    put(store)
    job = take(store)
    devices.register(store, "local", [], boot_id="boot")
    clock.time += jobs.LEASE_S
    assert outcomes.expire(store) == [job.id]
    assert devices.get(store, "box").state is DeviceState.OFFLINE
    assert state(store, job) is JobState.QUEUED


def test_a_draining_device_keeps_draining_through_silence_and_absence(store: Store, clock: StillClock) -> None:
    devices.set_state(store, "box", DeviceState.DRAINING, "needs a new battery")
    clock.time += IDLE_S
    outcomes.expire(store)
    devices.register(store, "local", [], boot_id="boot")
    devices.register(store, "local", [device()], boot_id="boot")
    assert devices.get(store, "box").state is DeviceState.DRAINING
    put(store)
    assert jobs.claim(store, "box", "local") is None
    devices.set_state(store, "box", DeviceState.IDLE)
    take(store)


@pytest.mark.parametrize("other", sorted(set(DeviceState) - {DeviceState.IDLE, DeviceState.DRAINING}))
def test_only_draining_is_for_people_to_set(store: Store, other: DeviceState) -> None:
    with pytest.raises(InvalidInput, match="cannot be set to"):
        devices.set_state(store, "box", other)
    devices.set_state(store, "box", DeviceState.IDLE)
    assert devices.history(store, "box", kind=DeviceEventKind.STATE) == []


@pytest.mark.parametrize(("away_s", "health"), [(OFFLINE_S, Health.GOOD), (OFFLINE_S + 1, Health.UNKNOWN)])
def test_a_device_that_was_away_for_long_is_checked(
    store: Store, clock: StillClock, away_s: float, health: Health
) -> None:
    devices.set_health(store, "box", Health.GOOD)
    clock.time += away_s
    outcomes.expire(store)
    assert devices.get(store, "box").state is DeviceState.OFFLINE
    jobs.claim(store, "box", "local")
    row = devices.get(store, "box")
    assert (row.state, row.health, row.state_since) == (DeviceState.IDLE, health, clock.time)
    assert (row.check_due == clock.time) == (health is Health.UNKNOWN)


def test_limits_start_anew_after_a_coordinator_was_down(store: Store, clock: StillClock) -> None:
    put(store)
    job = take(store)
    assert beat(store, job, "preparing")
    clock.time += 10_000
    jobs.extend_leases(store)
    assert beat(store, job, "running")
    assert outcomes.expire(store) == []


def test_a_phase_has_its_full_time_again_after_the_clock_jumped(store: Store, clock: StillClock) -> None:
    put(store)
    job = take(store)
    assert beat(store, job, "running")
    clock.time += 10_000
    jobs.extend_leases(store)
    jobs.restart_phases(store)
    assert live_on(store, clock, job, "running", phase_limit_s("running", job.payload) - 1)
    clock.time += 2
    assert not beat(store, job, "running")


def test_state_of_every_phase() -> None:
    assert [state_of(phase) for phase in PHASES] == [DeviceState.PREPARING, DeviceState.COOLING, DeviceState.LEASED]
