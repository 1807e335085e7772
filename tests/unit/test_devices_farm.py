"""An agent of many devices against a coordinator in memory: they come, go and fail each on their own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from plugged_devices import A, B, Host, Phone

from nas.core.errors import InvalidInput
from nas.core.plan import RoundResult
from nas.core.wire import ResultRequest
from nas.measure.devices.agent import agent as agent_module
from nas.measure.devices.agent import session
from nas.measure.devices.agent.client import Outbox, PendingResult
from nas.measure.devices.attachments import Attachment
from tests.support.waiting import until


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    for module, name in ((session, "_LOOK_S"), (session, "_FIRST_PAUSE_S"), (agent_module, "_LOOK_S")):
        monkeypatch.setattr(module, name, 0.05)
    monkeypatch.setattr(session, "_LONGEST_PAUSE_S", 0.1)
    host = Host(tmp_path)
    yield host
    for phone in host.phones.values():
        phone.plugged = False
    host.end()


def test_each_device_works_for_itself(host: Host) -> None:
    host.start()
    until(host.serves("a", "b"))
    host.offer(host.id("a"), "1", main="wait.sh")
    assert host.phones[A.address].running.wait(30)
    host.offer(host.id("b"), "2")
    host.coordinator.wait_for(results=1)
    assert list(host.coordinator.results) == ["2"]


def test_what_is_there_at_the_start_is_registered_at_once(host: Host) -> None:
    host.attached.append(Attachment(address="ssh://u@gone"))
    host.phones["ssh://u@gone"] = Phone(host.folder, "gone")
    host.phones["ssh://u@gone"].plugged = False
    host.start()
    until(lambda: bool(host.coordinator.registered))
    assert len(host.coordinator.registered[0].devices) == 2


def test_an_unplugged_device_goes_and_comes_back(host: Host) -> None:
    host.start()
    until(host.serves("a", "b"))
    host.phones[A.address].plugged = False
    until(host.serves("b"))
    host.phones[A.address].plugged = True
    until(host.serves("a", "b"))
    host.offer(host.id("a"), "1")
    host.coordinator.wait_for(results=1)


def test_one_that_is_not_there_keeps_nobody_waiting(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    host.phones[A.address].plugged = False
    host.start()
    until(host.serves("b"))
    host.offer(host.id("b"), "1")
    host.coordinator.wait_for(results=1)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        "not served: no such device"
    ]


def test_one_that_drops_out_of_a_job_fails_it_and_is_no_longer_registered(host: Host) -> None:
    host.start()
    until(host.serves("a", "b"))
    host.offer(host.id("a"), "1", main="wait.sh")
    assert host.phones[A.address].running.wait(30)
    host.phones[A.address].plugged = False
    host.coordinator.wait_for(results=1)
    failure = host.coordinator.results["1"].failure
    assert failure is not None
    assert (failure.kind, failure.message) == ("infrastructure", "no such device")
    until(host.serves("b"))


def test_another_device_at_the_address_is_reported_and_not_served(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    host.start()
    until(host.serves("a", "b"))
    host.attached[:] = [A.model_copy(update={"id": host.id("a")}), B]
    until(host.serves("b"))
    until(host.serves("a", "b"))
    host.phones[A.address].become("c")
    until(host.serves("b"))
    until(lambda: "ssh://u@a answers as device fake-c-" in caplog.text)
    assert "nas device remove ssh://u@a" in caplog.text


def test_a_job_for_a_device_that_was_exchanged_meanwhile_is_not_run_on_the_other(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_LOOK_S", 3600)
    host.start()
    until(host.serves("a", "b"))
    a = host.id("a")
    host.phones[A.address].become("c")
    host.offer(a, "1")
    host.coordinator.wait_for(results=1)
    failure = host.coordinator.results["1"].failure
    assert failure is not None and "restarted or exchanged" in failure.message
    assert not host.phones[A.address].running.is_set()
    until(host.serves("b", "c"))


def test_a_restarted_device_is_reported_and_served_again(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    host.start()
    until(host.serves("a", "b"))
    host.phones[A.address].become("a", boot="2")
    until(lambda: "connected again after a restart" in caplog.text)
    until(host.serves("a", "b"))


def test_the_same_device_twice_is_served_once_and_reported(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    host.phones[B.address].become("a")
    host.start()
    until(host.serves("a"))
    until(lambda: "is already served as" in caplog.text)
    host.offer(host.id("a"), "1")
    host.coordinator.wait_for(results=1)
    assert [phone.running.is_set() for phone in host.phones.values()].count(True) == 1


def test_the_second_way_is_taken_when_the_first_is_lost(host: Host) -> None:
    host.phones[B.address].become("a")
    host.start()
    until(host.serves("a"))
    host.offer(host.id("a"), "1")
    host.coordinator.wait_for(results=1)
    phone = next(phone for phone in host.phones.values() if phone.running.is_set())
    phone.plugged = False
    host.offer(host.id("a"), "2")
    host.coordinator.wait_for(results=2)
    until(host.serves("a"))
    host.offer(host.id("a"), "3")
    host.coordinator.wait_for(results=3)
    assert host.coordinator.results["3"].result is not None


def test_the_list_of_devices_is_followed(host: Host) -> None:
    host.attached = [A]
    host.start()
    until(host.serves("a"))
    host.attached.append(B)
    until(host.serves("a", "b"))
    host.attached.remove(A)
    until(host.serves("b"))
    host.attached[:] = [B.model_copy(update={"tags": ("new",)})]
    until(lambda: [device.tags for device in host.coordinator.registered[-1].devices] == [("new",)])


def test_a_detached_device_finishes_its_job(host: Host) -> None:
    host.start()
    until(host.serves("a", "b"))
    mark = host.folder / "go"
    host.offer(host.id("a"), "1", script=f"while [ ! -e {mark} ]; do sleep 0.01; done; echo done")
    assert host.phones[A.address].running.wait(30)
    host.attached.remove(A)
    mark.touch()
    host.coordinator.wait_for(results=1)
    result = host.coordinator.results["1"].result
    assert result is not None and result.pairs[0].candidate.stdout == "done\n"
    until(host.serves("b"))


def test_a_list_that_cannot_be_read_leaves_things_as_they_are(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    host.start()
    until(host.serves("a", "b"))
    host.damaged = True
    until(lambda: "not a list of devices" in caplog.text)
    host.offer(host.id("a"), "1")
    host.coordinator.wait_for(results=1)
    assert host.serves("a", "b")()


class Unreachable(dict[str, Phone]):
    """Phones, and addresses to which no transport can be made."""

    attempts = 0

    def __missing__(self, address: str) -> Phone:
        self.attempts += 1
        if address.endswith("full"):
            raise OSError("no space left")
        raise InvalidInput("not an address")


def test_addresses_that_cannot_be_used_are_reported_once_and_take_no_device_with_them(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    host.phones = phones = Unreachable(host.phones)
    host.attached += [Attachment(address=f"ssh://u@{name}") for name in ("full", "odd")]
    host.start()
    until(host.serves("a", "b"))
    until(lambda: phones.attempts >= 6)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == ["no space left", "not an address"]


def test_a_device_that_the_coordinator_refuses_takes_none_with_it(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    answer = host.coordinator.handle

    def refuse_b(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/register") and b"fake-b-" in request.content:
            return httpx.Response(422, text="served by agent 'other'")
        return answer(request)

    host.coordinator.handle = refuse_b  # type: ignore[method-assign]
    host.start()
    until(host.serves("a"))
    until(lambda: "served by agent 'other'" in caplog.text)
    host.offer(host.id("a"), "1")
    host.coordinator.wait_for(results=1)


def test_a_device_beyond_those_that_an_agent_may_have_is_reported_and_takes_no_other_with_it(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("nas.measure.devices.agent.registry.MOST_DEVICES", 1)
    host.start()
    until(lambda: "not served: an agent serves at most 1 devices" in caplog.text)
    until(lambda: len(host.coordinator.serving()) == 1)


def test_an_agent_without_a_device_says_that_it_is_there(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nas.measure.devices.agent.registry._FIRST_REGISTRATION_S", 0.0)
    host.attached = []
    host.start()
    until(lambda: bool(host.coordinator.registered))
    assert host.coordinator.registered[0].devices == ()


def pending(host: Host, device: str, name: str = "old", epoch: int = 2, **of: Any) -> PendingResult:
    result = RoundResult(pairs=[])
    request = ResultRequest(**({"agent": "host", "device": device, "epoch": epoch, "result": result} | of))
    return PendingResult(authority="fake", job=name, request=request)


def test_results_of_a_killed_agent_are_submitted_before_the_next_lease(host: Host) -> None:
    host.start()
    until(host.serves("a", "b"))
    a = host.id("a")
    host.end()
    Outbox(host.folder / "outbox", "host").put(pending(host, a))
    host.coordinator._leased["old"] = 2
    host.offer(a, "new")
    host.start()
    host.coordinator.wait_for(results=2)
    assert list(host.coordinator.results) == ["old", "new"]
    until(lambda: list((host.folder / "outbox").iterdir()) == [])


def test_it_is_handed_in_even_if_its_device_is_gone(host: Host) -> None:
    host.attached = [B]
    Outbox(host.folder / "outbox", "host").put(pending(host, "fake-a-gone"))
    host.coordinator._leased["old"] = 2
    host.start()
    host.coordinator.wait_for(results=1)
    until(lambda: list((host.folder / "outbox").iterdir()) == [])


def test_what_is_for_another_coordinator_or_of_another_agent_stays(host: Host) -> None:
    outbox = Outbox(host.folder / "outbox", "host")
    outbox.put(pending(host, "a").model_copy(update={"authority": "other"}))
    outbox.put(pending(host, "b", agent="somebody"))
    (host.folder / "outbox" / "damaged.json").write_text("{")
    host.start()
    until(host.serves("a", "b"))
    host.offer(host.id("a"), "1")
    host.coordinator.wait_for(results=1)
    host.end()
    assert len(list((host.folder / "outbox").iterdir())) == 3


def test_a_disk_that_is_full_does_not_cost_the_result(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    host.start()
    until(host.serves("a", "b"))
    (host.folder / "outbox").rmdir()
    host.offer(host.id("a"), "1")
    host.coordinator.wait_for(results=1)
    assert "only in memory" in caplog.text
