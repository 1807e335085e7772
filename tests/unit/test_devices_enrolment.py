"""Enrolment against a real coordinator's routes, over TLS."""

from __future__ import annotations

import dataclasses
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from nas.core.clock import SystemClock
from nas.core.errors import InfrastructureFailed, InvalidInput, NasError
from nas.core.trust import Invitation, certificate_fault
from nas.core.wire import RegisterRequest
from nas.infra.store import agents
from nas.infra.web.server import listen_tcp
from nas.infra.web.tls import Certificates
from nas.measure.devices.agent.client import NotAdmitted, NotTheCoordinator
from nas.measure.devices.agent.trust import FILE, Enrolment, enrol, read_enrolment, trusting
from nas.measure.farm.trust import open_key
from nas.serve.client import Refused, UsersClient
from tests.support.tls_coordinator import TlsCoordinator


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[TlsCoordinator]:
    with TlsCoordinator(tmp_path / "home") as serving:
        yield serving


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "agent"


def register(enrolment: Enrolment) -> None:
    client = enrolment.client()
    try:
        client.register(RegisterRequest(agent=enrolment.name, devices=(), boot_id="b"))
    finally:
        client.close()


def test_an_enrolled_agent_is_let_in(coordinator: TlsCoordinator, folder: Path) -> None:
    enrolment = enrol(coordinator.invite(), "shelf-1", folder)
    assert read_enrolment(folder) == enrolment
    assert enrolment.signing_key == open_key(coordinator.home).public
    assert (folder / FILE).stat().st_mode & 0o777 == 0o600
    assert enrolment.secret not in repr(enrolment)
    register(enrolment)
    assert [agent.name for agent in agents.all(coordinator.store)] == ["shelf-1"]


def test_a_revoked_agent_is_not(coordinator: TlsCoordinator, folder: Path) -> None:
    enrolment = enrol(coordinator.invite(), "shelf-1", folder)
    agents.revoke(coordinator.store, "shelf-1")
    with pytest.raises(NotAdmitted):
        register(enrolment)


def test_a_token_is_good_once_and_the_refusal_says_what_to_do(coordinator: TlsCoordinator, folder: Path) -> None:
    line = coordinator.invite()
    enrol(line, "shelf-1", folder)
    with pytest.raises(InvalidInput, match=r"nas agent token --name shelf-1"):
        enrol(line, "shelf-1", folder, replace=True)
    register(Enrolment.model_validate_json((folder / FILE).read_bytes()))


def test_an_enrolment_is_replaced_only_on_request(coordinator: TlsCoordinator, folder: Path) -> None:
    first = enrol(coordinator.invite(), "shelf-1", folder)
    with pytest.raises(InvalidInput, match="--replace"):
        enrol(coordinator.invite("shelf-1"), "shelf-1", folder)
    second = enrol(coordinator.invite("shelf-1"), "shelf-1", folder, replace=True)
    register(second)
    with pytest.raises(NotAdmitted):
        register(first)


def test_somebody_in_between_learns_nothing(coordinator: TlsCoordinator, folder: Path, tmp_path: Path) -> None:
    line = coordinator.invite()
    with TlsCoordinator(tmp_path / "other") as other, pytest.raises(InvalidInput, match="Nothing was sent"):
        enrol(Invitation(other.url, line.ca_sha256, line.token), "shelf-1", folder)
    enrol(line, "shelf-1", folder)  # the token is as good as before


def test_a_server_of_the_authority_must_have_the_right_name(tmp_path: Path, folder: Path) -> None:
    with TlsCoordinator(tmp_path / "elsewhere", "farm.example") as elsewhere:
        with pytest.raises(InvalidInput, match=r"is for farm\.example, not for 127\.0\.0\.1"):
            enrol(elsewhere.invite(), "shelf-1", folder)
        assert agents.all(elsewhere.store) == []


@pytest.mark.parametrize("body", [b"", b"no certificate", b"x" * (1 << 20)])
def test_who_shows_no_certificate_is_no_coordinator(coordinator: TlsCoordinator, folder: Path, body: bytes) -> None:
    context = Certificates(coordinator.home, SystemClock()).context(["127.0.0.1"])
    with ExitStack() as stack:
        listening = stack.enter_context(listen_tcp("127.0.0.1", 0))
        listening.listen()
        answering = threading.Thread(target=answer, args=(listening, context, body))
        answering.start()
        stack.callback(answering.join)
        line = Invitation(f"https://127.0.0.1:{listening.getsockname()[1]}", "ab" * 32, "token")
        with pytest.raises(InvalidInput, match="certificate"):
            enrol(line, "shelf-1", folder)


def answer(listening: socket.socket, context: ssl.SSLContext, body: bytes) -> None:
    plain, _ = listening.accept()
    with context.wrap_socket(plain, server_side=True) as connection:
        connection.recv(1 << 16)
        try:
            connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body)
        except OSError:
            return  # it had heard enough


def test_nobody_there(folder: Path, coordinator: TlsCoordinator) -> None:
    line = Invitation("https://127.0.0.1:1", "ab" * 32, "token")
    with pytest.raises(InfrastructureFailed, match=r"127\.0\.0\.1:1"):
        enrol(line, "shelf-1", folder)


def test_a_reply_that_is_lost_is_explained(
    coordinator: TlsCoordinator, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(*arguments: object) -> str:
        raise InfrastructureFailed("the database is gone")

    monkeypatch.setattr(agents, "enrol", lose)
    with pytest.raises(InfrastructureFailed, match=r"get another line with 'nas agent token --name shelf-1'"):
        enrol(coordinator.invite(), "shelf-1", folder)
    assert read_enrolment(folder) is None


@pytest.mark.parametrize("name", ["", "a b", "../x", "x" * 65])
def test_names_that_cannot_be_used_spend_nothing(coordinator: TlsCoordinator, folder: Path, name: str) -> None:
    line = coordinator.invite()
    with pytest.raises(InvalidInput, match="--name"):
        enrol(line, name, folder)
    enrol(line, "shelf-1", folder)


def test_a_folder_that_cannot_be_written_spends_nothing(coordinator: TlsCoordinator, tmp_path: Path) -> None:
    line = coordinator.invite()
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        enrol(line, "shelf-1", tmp_path / "file" / "agent")
    enrol(line, "shelf-1", tmp_path / "agent")


def test_a_damaged_enrolment_is_reported(coordinator: TlsCoordinator, folder: Path) -> None:
    enrol(coordinator.invite(), "shelf-1", folder)
    (folder / FILE).write_text(json.dumps({"v": 1}))
    with pytest.raises(NasError, match="nas agent enrol LINE --replace"):
        read_enrolment(folder)
    with pytest.raises(NasError, match="--replace"):
        enrol(coordinator.invite("shelf-1"), "shelf-1", folder)
    register(enrol(coordinator.invite("shelf-1"), "shelf-1", folder, replace=True))


def test_a_certificate_for_other_names_is_reported_with_its_names_and_not_retried(
    coordinator: TlsCoordinator, folder: Path
) -> None:
    line = coordinator.invite()
    other = dataclasses.replace(line, url=line.url.replace("127.0.0.1", "localhost"))
    with pytest.raises(InvalidInput) as error:
        enrol(other, "shelf-1", folder)
    assert "is for 127.0.0.1, not for localhost" in str(error.value)
    assert "nas serve --name localhost" in str(error.value)
    assert "ry again" not in str(error.value)
    enrolment = enrol(line, "shelf-1", folder)  # the token was not spent
    with pytest.raises(NotTheCoordinator, match=r"is for 127\.0\.0\.1"):
        register(enrolment.model_copy(update={"url": other.url}))
    with UsersClient(other.url, "token", enrolment.ca) as people, pytest.raises(Refused, match=r"is for 127\.0\.0\.1"):
        people.get("/v1/server")


def test_a_coordinator_that_was_set_up_again_is_reported(
    coordinator: TlsCoordinator, folder: Path, tmp_path: Path
) -> None:
    enrolment = enrol(coordinator.invite(), "shelf-1", folder)
    with TlsCoordinator(tmp_path / "other") as other, pytest.raises(NotTheCoordinator, match="set up again"):
        register(enrolment.model_copy(update={"url": other.url}))


def test_a_clock_that_is_wrong_can_be_set(coordinator: TlsCoordinator, folder: Path) -> None:
    """Some hosts know the time only once they are on the network."""
    enrolment = enrol(coordinator.invite(), "shelf-1", folder)
    error = ssl.SSLCertVerificationError("certificate is not yet valid")
    error.verify_code, error.verify_message = 9, "certificate is not yet valid"
    fault = certificate_fault(error, enrolment.url, trusting(enrolment.ca))
    assert fault is not None and not fault.lasting and "clocks" in str(fault)
