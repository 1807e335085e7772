"""The coordinator's background thread: wakes waiting agents and takes back expired leases."""

from __future__ import annotations

import asyncio
import threading
from argparse import Namespace
from pathlib import Path

import pytest
from store_support import StillClock, add_device, device, key, open_store, put, round_of, state, take

from nas.core.errors import InfrastructureFailed
from nas.infra.store import agents, devices, jobs, outcomes
from nas.infra.store.devices import LIMITS
from nas.infra.store.rows import DeviceState, Health, JobKind, JobState
from nas.infra.store.store import Store
from nas.measure.farm.agent_api import POLL_S
from nas.measure.farm.queue import JobNotifier, LeaseMonitor
from tests.support.waiting import until


def add_remote(store: Store, name: str = "phone", agent: str = "host") -> None:
    agents.enrol(store, agents.issue_token(store), agent)
    devices.register(store, agent, [device(name)], boot_id="boot")


@pytest.mark.parametrize("queued_here", [True, False], ids=["here", "by another process"])
def test_who_waits_is_called_when_there_is_work(store: Store, tmp_path: Path, queued_here: bool) -> None:
    for name in ("box", "phone"):
        add_device(store, name, agent=f"of-{name}")

    async def wait() -> list[bool]:
        notifier = JobNotifier()
        with (
            LeaseMonitor(store, notifier, agent="local"),
            notifier.waiting("box", "a") as box,
            notifier.waiting("phone", "b") as phone,
        ):
            jobs.enqueue(store if queued_here else open_store(tmp_path), key(1), round_of(), device="box")
            if queued_here:
                notifier.notify()
            await asyncio.wait_for(box.woken.wait(), 60)
            return [box.woken.is_set(), phone.woken.is_set()]

    assert asyncio.run(wait()) == [True, False]


@pytest.mark.sql
def test_work_is_what_a_claim_would_find(store: Store, clock: StillClock) -> None:
    for name in ("box", "bad", "off", "later", "checked"):
        add_device(store, name, agent=f"of-{name}")
        kind = JobKind.CHECK if name == "checked" else JobKind.MEASURE
        not_before = clock.time + 60 if name == "later" else 0.0
        jobs.enqueue(store, key(name), round_of(), device=name, kind=kind, not_before=not_before)
    for name in ("bad", "checked"):
        devices.set_health(store, name, Health.BAD, "it failed")
    devices.set_state(store, "off", DeviceState.DRAINING)
    names = ("box", "bad", "off", "later", "checked")
    assert jobs.with_work(store, names) == {"box", "checked"}
    clock.time += 60
    matches = {name for name in names if jobs.with_work(store, [name])}
    assert matches == {"box", "later", "checked"}
    assert matches == {row.id for row in devices.all(store) if jobs.claim(store, row.id, row.agent)}
    assert jobs.with_work(store, names) == set()


def test_nobody_waits_any_more_once_the_bell_is_closed() -> None:
    async def wait() -> bool:
        notifier = JobNotifier()
        with notifier.waiting("box", "a") as before:
            notifier.close()
            await asyncio.wait_for(before.woken.wait(), 60)
        with notifier.waiting("box", "a") as after:
            return after.woken.is_set()

    assert asyncio.run(wait())


def test_leases_that_ran_out_are_taken_back(store: Store, clock: StillClock) -> None:
    add_device(store)
    add_device(store, "nuc", agent="local-nuc")  # of another host that uses the database
    add_remote(store)
    for box in ("box", "nuc", "phone"):
        put(store, box, device=box)
    held = {"box": take(store), "nuc": take(store, "nuc", "local-nuc"), "phone": take(store, "phone", "host")}
    clock.time += jobs.LEASE_S + 1

    def states() -> dict[str, JobState]:
        rows = {name: jobs.get(store, job.id) for name, job in held.items()}
        return {name: row.state for name, row in rows.items() if row}

    with LeaseMonitor(store, JobNotifier(), agent="local"):
        until(lambda: states()["box"] is JobState.QUEUED)
    # Their coordinators may be other processes.
    assert (states()["nuc"], states()["phone"]) == (JobState.LEASED, JobState.LEASED)
    with LeaseMonitor(store, JobNotifier(), agent=None):
        until(lambda: set(states().values()) == {JobState.QUEUED})


def test_a_row_that_cannot_be_understood_does_not_end_the_thread(
    store: Store, clock: StillClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_device(store)
    put(store)
    leased = take(store)
    clock.time += jobs.LEASE_S + 1
    troubles = [TypeError("an unexpected keyword argument 'zone'"), KeyError("until"), ValueError("no state")]

    def expire(store: Store, *, agent: str | None) -> list[str]:
        if troubles:
            raise troubles.pop()
        return outcomes.expire(store, agent=agent)

    monkeypatch.setattr("nas.measure.farm.queue.outcomes", Namespace(expire=expire))
    with LeaseMonitor(store, JobNotifier(), agent=None):
        until(lambda: state(store, leased) is JobState.QUEUED)
    assert troubles == []


@pytest.mark.parametrize("jumps_s", [(10.0,) * 4, (10_000.0,)], ids=["the database was away", "the machine slept"])
def test_a_lease_that_could_not_be_renewed_has_its_time_again(
    store: Store, clock: StillClock, monkeypatch: pytest.MonkeyPatch, jumps_s: tuple[float, ...]
) -> None:
    add_device(store)
    put(store)
    leased = take(store)
    jumps, looked = list(jumps_s), threading.Event()

    def expire(store: Store, *, agent: str | None) -> list[str]:
        if jumps:
            clock.time += jumps.pop()
            raise InfrastructureFailed("the server is gone")
        lost = outcomes.expire(store, agent=agent)
        looked.set()
        return lost

    monkeypatch.setattr("nas.measure.farm.queue.outcomes", Namespace(expire=expire))
    with LeaseMonitor(store, JobNotifier(), agent=None):
        assert looked.wait(60)
    row = jobs.get(store, leased.id)
    assert row is not None and row.state is JobState.LEASED
    assert (row.phase_until or 0.0) > clock.time + jobs.LEASE_S


def test_an_idle_device_that_polls_is_seen_well_before_it_counts_as_offline(store: Store, clock: StillClock) -> None:
    add_device(store)
    for _ in range(6):
        clock.time += POLL_S
        assert jobs.claim(store, "box", "local") is None
        assert clock.time - devices.get(store, "box").last_seen <= LIMITS[DeviceState.IDLE] / 2
        assert clock.time - agents.all(store)[0].last_seen <= LIMITS[DeviceState.IDLE] / 2
