"""An idle agent lets the coordinator hold its question for a job, and still notices everything else at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from plugged_devices import A, B, Host

from nas.core.errors import InfrastructureFailed
from nas.core.wire import Job
from nas.measure.devices.agent import agent as agent_module
from nas.measure.devices.agent import session
from nas.measure.devices.agent.session import Poll
from tests.support.waiting import until

HOUR_S = 3600.0


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    for module, name in ((session, "_LOOK_S"), (session, "_FIRST_PAUSE_S"), (agent_module, "_LOOK_S")):
        monkeypatch.setattr(module, name, 0.05)
    host = Host(tmp_path)
    host.coordinator.poll_s = HOUR_S
    yield host
    for phone in host.phones.values():
        phone.plugged = False
    host.end()


def both_ask(host: Host) -> None:
    host.start()
    until(host.serves("a", "b"))
    until(lambda: len(host.coordinator.polls) >= 2)


def test_the_coordinator_holds_the_question(host: Host) -> None:
    looks: list[None] = []
    for phone in host.phones.values():
        ask = phone.read_text
        phone.read_text = lambda path, ask=ask: looks.append(None) or ask(path)  # type: ignore[method-assign]
    both_ask(host)
    until(lambda: len(looks) > 20)
    assert [poll.wait_s for poll in host.coordinator.polls] == [HOUR_S, HOUR_S]


def test_work_that_comes_is_begun(host: Host) -> None:
    both_ask(host)
    host.offer(host.id("a"), "1")
    host.coordinator.wait_for(results=1)


def test_an_unplugged_device_is_noticed_meanwhile(host: Host) -> None:
    both_ask(host)
    host.phones[A.address].plugged = False
    until(host.serves("b"))
    host.phones[A.address].plugged = True
    until(host.serves("a", "b"))
    host.offer(host.id("a"), "1")
    host.coordinator.wait_for(results=1)


def test_devices_are_attached_and_detached_meanwhile(host: Host) -> None:
    host.attached = [A]
    host.start()
    until(host.serves("a"))
    host.attached.append(B)
    until(host.serves("a", "b"))
    host.attached.remove(A)
    until(host.serves("b"))


def test_an_agent_that_ends_deregisters_without_waiting(host: Host) -> None:
    both_ask(host)
    agent, thread = host.running[-1]
    agent.stop()
    thread.join(60)
    assert not thread.is_alive()
    assert host.coordinator.serving() == []


def test_it_ends_though_the_coordinator_is_gone(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_ANSWER_S", 0.2)
    both_ask(host)
    host.coordinator.handle = refuse  # type: ignore[method-assign]
    agent, thread = host.running[-1]
    agent.stop()
    thread.join(60)
    assert not thread.is_alive()


def refuse(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


def test_a_job_that_is_granted_while_the_device_leaves_is_given_back(host: Host) -> None:
    both_ask(host)
    a, answer = host.id("a"), host.coordinator.handle

    def grant_on_leaving(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/register") and b"fake-a-" not in request.content:
            host.coordinator.handle = answer  # type: ignore[method-assign]
            host.offer(a, "1")
            until(lambda: "1" in host.coordinator._leased)
        return answer(request)

    host.coordinator.handle = grant_on_leaving  # type: ignore[method-assign]
    host.attached.remove(A)
    host.coordinator.wait_for(results=1)
    failure = host.coordinator.results["1"].failure
    assert failure is not None
    assert (failure.kind, failure.phase) == ("infrastructure", "preparing")
    until(host.serves("b"))
    assert not host.phones[A.address].running.is_set()


def test_a_late_job_of_an_abandoned_question_is_returned() -> None:
    job, gate, returned = Job.model_construct(id="1"), threading.Event(), []

    def ask() -> Job:
        assert gate.wait(30)
        return job

    poll = Poll(ask, threading.Event(), returned.append)
    poll.abandon()
    assert returned == []
    gate.set()
    poll.wait(30)
    assert returned == [job]


def test_the_error_of_a_poll_is_raised() -> None:
    def ask() -> Job:
        raise InfrastructureFailed("down")

    woken = threading.Event()
    poll = Poll(ask, woken, lambda job: None)
    assert woken.wait(30) and poll.answered
    with pytest.raises(InfrastructureFailed, match="down"):
        poll.job()
