"""Devices and the agents that serve them."""

from __future__ import annotations

import pytest
from store_support import StillClock, add_device, device, key, new_study, round_of, state

from nas.core.errors import InvalidInput, UnknownName
from nas.infra.store import agents, calibrations, devices, jobs
from nas.infra.store.devices import LIMITS
from nas.infra.store.rows import AgentAccess, DeviceEventKind, DeviceState, Health, JobKind, JobState
from nas.infra.store.store import Store


@pytest.mark.sql
def test_registering_again_changes_nothing(store: Store, clock: StillClock) -> None:
    add_device(store)
    devices.set_health(store, "box", Health.GOOD)
    jobs.enqueue(store, key(1), round_of(), device="box")
    jobs.claim(store, "box", "local")
    before = devices.get(store, "box")
    assert devices.register(store, "local", [device()], boot_id="boot") == [before]
    assert (before.health, before.epoch, before.state) == (Health.GOOD, 1, DeviceState.LEASED)


@pytest.mark.sql
def test_registering_replaces_what_an_agent_serves(store: Store) -> None:
    agents.register_local(store, "local")
    devices.register(store, "local", [device("a"), device("b")], boot_id="boot")
    devices.register(store, "local", [device("b"), device("c")], boot_id="boot")
    assert {row.id: row.state for row in devices.all(store)} == {
        "a": DeviceState.OFFLINE,
        "b": DeviceState.IDLE,
        "c": DeviceState.IDLE,
    }


def test_a_device_that_was_restarted_has_to_be_checked_again(store: Store) -> None:
    add_device(store)
    before = device().model_copy(update={"boot": "1"})
    devices.register(store, "local", [before], boot_id="boot")
    devices.set_health(store, "box", Health.GOOD)
    devices.register(store, "local", [before], boot_id="boot")
    assert devices.get(store, "box").health is Health.GOOD
    devices.register(store, "local", [before.model_copy(update={"boot": "2"})], boot_id="boot")
    row = devices.get(store, "box")
    assert (row.health, row.health_reason, row.check_due) == (Health.UNKNOWN, "it was restarted", store.now())


def test_a_device_that_was_restarted_after_a_long_absence_changes_its_health_once(
    store: Store, clock: StillClock
) -> None:  # fmt: skip
    add_device(store)
    before = device().model_copy(update={"boot": "1"})
    devices.register(store, "local", [before], boot_id="boot")
    devices.set_health(store, "box", Health.GOOD)
    clock.time += LIMITS[DeviceState.OFFLINE] + 1
    [row] = devices.register(store, "local", [before.model_copy(update={"boot": "2"})], boot_id="boot")
    assert (row.health, row.health_reason, row.checked_at) == (Health.UNKNOWN, "it was restarted", 0)
    changes = devices.history(store, "box", kind=DeviceEventKind.HEALTH)
    assert [change.what for change in changes] == ["unknown", "good"]


def test_a_device_that_describes_itself_otherwise_has_to_be_checked_again(store: Store) -> None:
    add_device(store)
    devices.set_health(store, "box", Health.GOOD)
    [row] = devices.register(store, "local", [device(memory_mb=2048)], boot_id="boot")
    assert (row.health, row.device.memory_mb, row.checked_at) == (Health.UNKNOWN, 2048, 0)


def test_another_agent_cannot_take_a_device_until_it_is_removed(store: Store) -> None:
    add_device(store)
    jobs.enqueue(store, key(1), round_of(), device="box")
    claimed = jobs.claim(store, "box", "local")
    assert claimed is not None
    with pytest.raises(InvalidInput, match="has jobs to do"):
        devices.remove(store, "box")
    with pytest.raises(InvalidInput, match="served by agent 'local'"):
        add_device(store, agent="other")
    jobs.cancel(store, [claimed.id])
    calibrations.put(store, "box", "fake", "b1", 1.0, {})
    devices.remove(store, "box")
    assert calibrations.of_device(store, "box") == []
    [still] = devices.register(store, "local", [device()], boot_id="boot")
    assert still.health is Health.RETIRED
    add_device(store, agent="other")
    moved = devices.get(store, "box")
    assert (moved.agent, moved.health, moved.epoch) == ("other", Health.UNKNOWN, 1)


def test_a_job_that_waits_for_no_study_keeps_no_device_from_being_removed(store: Store) -> None:
    add_device(store)
    check = jobs.enqueue(store, key(1), round_of(), device="box", kind=JobKind.CHECK)
    of_study = jobs.enqueue(store, key(2), round_of(), device="box", trial=(new_study(store).id, None))
    with pytest.raises(InvalidInput, match="stop the studies that use it"):
        devices.remove(store, "box")
    assert state(store, check) is JobState.QUEUED
    jobs.cancel(store, [of_study.id])
    devices.remove(store, "box")
    assert state(store, check) is JobState.CANCELLED
    assert devices.get(store, "box").health is Health.RETIRED


def test_unknown_names_are_told_apart(store: Store) -> None:
    with pytest.raises(InvalidInput, match="has not enrolled"):
        devices.register(store, "stranger", [device()], boot_id="boot")
    add_device(store)
    for use in (
        lambda: devices.get(store, "bix"),
        lambda: devices.remove(store, "bix"),
        lambda: devices.set_state(store, "bix", DeviceState.IDLE),
        lambda: devices.set_health(store, "bix", Health.BAD),
        lambda: jobs.claim(store, "bix", "local"),
    ):
        with pytest.raises(UnknownName, match="did you mean 'box'"):
            use()


@pytest.mark.sql
def test_a_token_enrols_one_agent_once(store: Store, clock: StillClock) -> None:
    token = agents.issue_token(store, ttl_s=60)
    secret = agents.enrol(store, token, "host-1")
    assert agents.authenticate(store, "host-1", secret)
    assert not agents.authenticate(store, "host-1", secret + "x")
    assert not agents.authenticate(store, "host-2", secret)
    for spent in (token, "made up"):
        with pytest.raises(InvalidInput, match="unknown, used or too old"):
            agents.enrol(store, spent, "host-2")
    late = agents.issue_token(store, ttl_s=60)
    clock.time += 60
    with pytest.raises(InvalidInput, match="too old"):
        agents.enrol(store, late, "host-2")
    with pytest.raises(InvalidInput, match="no agent name"):
        agents.enrol(store, agents.issue_token(store), "../host")


def test_enrolling_again_replaces_the_secret(store: Store) -> None:
    old, new = (agents.enrol(store, agents.issue_token(store, name="host"), "host") for _ in range(2))
    assert not agents.authenticate(store, "host", old)
    assert agents.authenticate(store, "host", new)
    assert [agent.name for agent in agents.all(store)] == ["host"]


def test_a_token_for_no_name_cannot_take_anothers_place(store: Store) -> None:
    secret = agents.enrol(store, agents.issue_token(store), "host")
    token = agents.issue_token(store)
    with pytest.raises(InvalidInput, match=r"there is an agent 'host' already.*--name host"):
        agents.enrol(store, token, "host")
    assert agents.authenticate(store, "host", secret)
    assert agents.enrol(store, token, "other")  # a refusal does not spend it


def test_a_token_for_a_name_enrols_no_other(store: Store) -> None:
    token = agents.issue_token(store, name="host")
    with pytest.raises(InvalidInput, match="for agent 'host', not for 'other'"):
        agents.enrol(store, token, "other")
    assert agents.enrol(store, token, "host")
    with pytest.raises(InvalidInput, match="no agent name"):
        agents.issue_token(store, name="a host")


def test_a_revoked_agent_has_to_enrol_under_its_name_again(store: Store) -> None:
    secret, unspent = agents.enrol(store, agents.issue_token(store), "host"), agents.issue_token(store, name="host")
    agents.revoke(store, "host")
    assert not agents.authenticate(store, "host", secret)
    assert not agents.authenticate(store, "host", "")
    assert agents.secret_hashes(store) == {}
    assert [agent.access for agent in agents.all(store)] == [AgentAccess.REVOKED]
    with pytest.raises(InvalidInput, match="unknown, used or too old"):
        agents.enrol(store, unspent, "host")
    with pytest.raises(InvalidInput, match="there is an agent 'host' already"):
        agents.enrol(store, agents.issue_token(store), "host")
    again = agents.enrol(store, agents.issue_token(store, name="host"), "host")
    assert agents.authenticate(store, "host", again)
    with pytest.raises(UnknownName, match="did you mean 'host'"):
        agents.revoke(store, "hots")


def test_a_local_agent_has_no_secret_and_cannot_be_an_enrolled_one(store: Store) -> None:
    agents.register_local(store, "local")
    agents.register_local(store, "local")
    assert not agents.authenticate(store, "local", "")
    for refused in (
        lambda: agents.enrol(store, agents.issue_token(store), "local"),
        lambda: agents.issue_token(store, name="local"),
        lambda: agents.revoke(store, "local"),
    ):
        with pytest.raises(InvalidInput, match="runs on the coordinator's own machine"):
            refused()
    agents.enrol(store, agents.issue_token(store), "host")
    with pytest.raises(InvalidInput, match="choose another name"):
        agents.register_local(store, "host")
