"""Commands of a device host: enrol, run, attach and detach."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_runner import nas

from nas.core.errors import InfrastructureFailed
from nas.core.trust import Invitation
from nas.infra.store import agents
from nas.infra.store.store import Store
from nas.measure.devices.agent.trust import read_enrolment
from nas.measure.devices.attachments import Attachment, agent_home, own_attachments
from nas.measure.devices.transports.base import NotTrusted
from tests.support.tls_coordinator import TlsCoordinator
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("home")

WITHOUT_DATABASE = """
import sys
for name in ("sqlalchemy", "alembic", "fastapi", "uvicorn", "torch", "ray", "optuna"):
    sys.modules[name] = None
import nas.cli.agent, nas.cli.device, nas.measure.devices.agent.agent
"""


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[TlsCoordinator]:
    with TlsCoordinator(tmp_path / "coordinator") as serving:
        yield serving


def test_a_device_host_needs_no_database_packages() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_DATABASE], check=True)


def test_token_prints_a_line_for_where_it_is_served(home: Path) -> None:
    home.mkdir()
    assert "https://HOST:PORT" in nas("agent", "token", "--url", "http://farm.example").err
    assert "nas serve" in nas("agent", "token").err
    assert "--url" in nas("agent", "token", "--url", "https://farm.example/path").err
    for url in ("https://farm.example", "https://farm.example:7711/", "farm.example"):  # as of `nas server add`
        assert Invitation.parse(nas("agent", "token", "--url", url).out).url == "https://farm.example:7711"
    issued = nas("agent", "token", "--url", "https://farm.example:7711", "--name", "shelf-1")
    assert Invitation.parse(issued.out).url == "https://farm.example:7711"
    more = json.loads(nas("agent", "token", "--url", "https://farm.example:7711", "--minutes", "5", "--json").out)
    assert more["good_for_s"] == 300
    store = Store.open()
    assert agents.enrol(store, Invitation.parse(issued.out).token, "shelf-1")
    store.close()


def test_enrol_from_standard_input(coordinator: TlsCoordinator) -> None:
    done = nas("agent", "enrol", "-", "--name", "shelf-1", stdin=coordinator.invite().format() + "\n")
    assert (done.code, done.out) == (0, "")
    enrolment = read_enrolment(agent_home())
    assert enrolment is not None and enrolment.name == "shelf-1"
    assert enrolment.secret not in done.err
    again = nas("agent", "enrol", coordinator.invite("shelf-1").format(), "--name", "shelf-1")
    assert again.code == 3 and "--replace" in again.err


def test_run_needs_an_enrolment() -> None:
    done = nas("agent", "run")
    assert done.code == 3 and "nas agent token" in done.err


def test_run_serves_this_machine_until_sigterm(coordinator: TlsCoordinator) -> None:
    nas("agent", "enrol", coordinator.invite().format(), "--name", "shelf-1")
    command = [sys.executable, "-c", "from nas.cli.main import main; main()"]
    with subprocess.Popen(
        [*command, "agent", "run", "--this-machine", "--log-json"], stderr=subprocess.PIPE, text=True
    ) as agent:
        until(lambda: "local" in coordinator.online())
        row = coordinator.online()["local"]
        done = coordinator.wait_for(coordinator.queue(row.id, "hello", "echo hello"))
        assert done.result is not None and done.result.pairs[0].candidate.stdout == "hello\n"
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(30) == 0
        assert agent.stderr is not None
        lines = [json.loads(line) for line in agent.stderr.read().splitlines()]
    assert row.agent == "shelf-1" and row.device.cores == os.cpu_count()
    assert {(line["job"], line["device"]) for line in lines if "job" in line} == {(done.id, row.id)}


@pytest.mark.parametrize("attached", [False, True])
def test_an_agent_without_devices_says_so(
    coordinator: TlsCoordinator, monkeypatch: pytest.MonkeyPatch, attached: bool
) -> None:
    class EndedAgent:
        def run(self) -> None: ...

    nas("agent", "enrol", coordinator.invite().format(), "--name", "shelf-1")
    attachments = own_attachments()
    if attached:
        attachments.add(Attachment(address="adb:R5CT1", id="pixel-1"))
    monkeypatch.setattr("nas.cli.agent.own_attachments", lambda: attachments)
    monkeypatch.setattr("nas.cli.agent.make_agent", lambda *arguments, **options: EndedAgent())
    monkeypatch.setattr("nas.cli.agent.end_on_signals", lambda agent: None)
    done = nas("agent", "run")
    attachments.serve_lock.release()
    assert done.code == 0, done.err
    assert ("no device is attached: 'nas device add'" in done.err) is not attached


def test_a_second_agent_of_a_home_is_refused(coordinator: TlsCoordinator) -> None:
    nas("agent", "enrol", coordinator.invite().format(), "--name", "shelf-1")
    lock = own_attachments().serve_lock
    assert lock.acquire()
    done = nas("agent", "run")
    lock.release()
    assert done.code == 4 and "devices.json" in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["local"], "--this-machine"),
        (["box"], "ssh:"),
        (["ssh://box"], "ssh://USER@HOST"),
        (["adb:a;b"], "adb:SERIAL"),
        (["adb:R5CT1", "--tag", "a b"], "--tag"),
        (["adb:R5CT1", *(word for number in range(65) for word in ("--tag", f"t{number}"))], "at most 64 tags, not 65"),
        (["adb:R5CT1", "--cores", "x"], "cores 'x'"),
    ],
)
def test_invalid_devices_are_not_attached(arguments: list[str], message: str) -> None:
    done = nas("device", "add", *arguments)
    assert done.code == 3 and message in done.err
    assert own_attachments().read() == ()


def test_a_host_key_that_is_another_one_is_no_reason_to_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    host_key = SimpleNamespace(fingerprint="SHA256:shown", get_name=lambda: "ssh-ed25519")
    monkeypatch.setattr("nas.cli.device.host_key", lambda address: host_key)
    done = nas("device", "add", "ssh://me@box", "--host-key", "SHA256:other")
    assert done.code == 3 and "this may be another machine" in done.err
    assert isinstance(NotTrusted("x"), InfrastructureFailed), "a job on such a device is not the candidate's failure"


def test_no_host_key_is_trusted_for_a_device_that_is_not_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nas.cli.device.host_key", lambda address: pytest.fail("it was asked for its key"))
    done = nas("device", "add", "ssh://me@box", "--yes", "--tag", "a b")
    assert done.code == 3 and "--tag: " in done.err


def test_unreachable_devices_are_not_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANDROID_ADB_SERVER_PORT", "2")
    done = nas("device", "add", "adb:R5CT1")
    assert done.code == 4 and "adb start-server" in done.err
    assert own_attachments().read() == ()


def test_remove_suggests_the_nearest_name() -> None:
    own_attachments().add(Attachment(address="adb:R5CT1", id="pixel-1"))
    done = nas("device", "remove", "pixel-2")
    assert done.code == 3 and "'pixel-1'" in done.err
    assert nas("device", "remove", "pixel-1").code == 0
    assert own_attachments().read() == ()


def test_attached_devices_are_listed(home: Path) -> None:
    assert "no database" in nas("device", "list").err
    own_attachments().add(Attachment(address="adb:R5CT1", id="pixel-1", tags=("phone",)))
    listed = nas("device", "list")
    assert listed.code == 0 and "pixel-1\t\tattached\t\t\t\t\t\tadb:R5CT1\t\tphone\t\tnever" in listed.out
    assert "nas agent run" in listed.err
    listing = json.loads(nas("device", "list", "--json").out)
    assert (listing["devices"], listing["attached"][0]["tags"]) == ([], ["phone"])
    assert nas("device", "list", "--db", f"sqlite:///{home / 'none'}").code == 0
