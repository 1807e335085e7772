"""The job client and downloads, against a coordinator in memory."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import httpx
import pytest

from nas.core.durable import locked
from nas.core.errors import InfrastructureFailed, InvalidInput, NasError
from nas.core.plan import PlanFile, RoundResult
from nas.core.wire import LeaseRequest, RegisterRequest, ResultRequest, on_the_way
from nas.measure.devices.agent import client as download
from nas.measure.devices.agent.client import Downloads, JobClient, NotAdmitted, Outbox, PendingResult
from nas.measure.devices.files import ContentFolder
from tests.support.fake_coordinator import FakeCoordinator

REGISTER = RegisterRequest(agent="a", devices=(), boot_id="b")
DATA = bytes(range(256)) * 100
FILE = PlanFile(sha256=hashlib.sha256(DATA).hexdigest(), size=len(DATA))


@pytest.fixture
def coordinator(tmp_path: Path) -> FakeCoordinator:
    files = tmp_path / "served"
    files.mkdir()
    (files / FILE.sha256).write_bytes(DATA)
    return FakeCoordinator(files)


@pytest.fixture
def client(coordinator: FakeCoordinator) -> JobClient:
    return JobClient(coordinator.client())


@pytest.fixture
def folder(tmp_path: Path) -> ContentFolder:
    return ContentFolder(tmp_path / "cache")


@pytest.mark.parametrize(
    "trouble",
    [
        httpx.Response(500),
        httpx.Response(503),
        httpx.Response(429),
        httpx.ConnectError("refused"),
        httpx.ReadTimeout(""),
        httpx.RemoteProtocolError("closed"),
    ],
)
def test_trouble_can_be_retried(
    client: JobClient, coordinator: FakeCoordinator, trouble: httpx.Response | httpx.TransportError
) -> None:
    coordinator.trouble.append(trouble)
    with pytest.raises(InfrastructureFailed, match="coordinator"):
        client.register(REGISTER)
    assert client.register(REGISTER).poll_s > 0


@pytest.mark.parametrize(
    "refusal", [httpx.Response(403, text="token revoked"), httpx.Response(200, text="{}"), httpx.Response(200)]
)
def test_a_refusal_is_final(client: JobClient, coordinator: FakeCoordinator, refusal: httpx.Response) -> None:
    coordinator.trouble.append(refusal)
    with pytest.raises(NasError) as caught:
        client.register(REGISTER)
    assert not isinstance(caught.value, InfrastructureFailed)


def test_a_refusal_says_why(client: JobClient) -> None:
    with pytest.raises(NasError, match="404 unknown agent or device"):
        client.lease(LeaseRequest(agent="nobody", device="d", wait_s=0))


def test_a_refusal_of_the_coordinator_is_reported_in_its_words(client: JobClient, coordinator: FakeCoordinator) -> None:
    body = {"error": "the token is used", "kind": "invalid_input", "request_id": "x"}
    coordinator.trouble.append(httpx.Response(422, json=body))
    with pytest.raises(NasError, match=r"422 the token is used$"):
        client.register(REGISTER)


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://host", "https://"])
def test_other_urls(url: str) -> None:
    with pytest.raises(InvalidInput, match=r"http\+unix"):
        JobClient.open(url)


# httpcore leaves the socket that could not connect to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_no_coordinator_on_the_socket(tmp_path: Path) -> None:
    with pytest.raises(InfrastructureFailed):
        JobClient.open(f"http+unix://{tmp_path}/none.sock").register(REGISTER)


def test_name_and_secret_are_sent_to_the_coordinator() -> None:
    headers: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        headers.append(request.headers.get("Authorization"))
        return httpx.Response(401)

    client = JobClient.open("https://host", auth=("agent", "secret"))
    client._http._transport = httpx.MockTransport(answer)
    with pytest.raises(NotAdmitted, match="nas agent token"):
        client.register(REGISTER)
    assert headers == ["Basic YWdlbnQ6c2VjcmV0"]


def test_download(client: JobClient, folder: ContentFolder) -> None:
    path = Downloads(client, folder).fetch(FILE)
    assert path == folder.path(FILE.sha256)
    assert path.read_bytes() == DATA


def test_a_file_that_is_there_is_not_fetched_again(
    client: JobClient, coordinator: FakeCoordinator, folder: ContentFolder
) -> None:
    downloads = Downloads(client, folder)
    downloads.fetch(FILE)
    coordinator.trouble.append(httpx.Response(500))
    assert downloads.fetch(FILE).read_bytes() == DATA


def test_a_damaged_file_of_an_earlier_agent_is_fetched_again(client: JobClient, folder: ContentFolder) -> None:
    """Such as after a power failure: a device refuses its bytes, whatever else is tried."""
    path = Downloads(client, folder).fetch(FILE)
    path.write_bytes(b"\0" * len(DATA))
    assert Downloads(client, folder).fetch(FILE).read_bytes() == DATA


def test_a_file_that_is_damaged_later_is_fetched_again_once_a_device_refused_it(
    client: JobClient, folder: ContentFolder
) -> None:
    downloads = Downloads(client, folder)
    for _ in range(2):
        path = downloads.fetch(FILE)
    path.write_bytes(b"\0" * len(DATA))
    downloads.doubt(FILE)
    assert downloads.fetch(FILE).read_bytes() == DATA


def test_a_broken_transfer_is_resumed(client: JobClient, coordinator: FakeCoordinator, folder: ContentFolder) -> None:
    coordinator.trouble.append(httpx.Response(200, content=DATA[:1000]))
    downloads = Downloads(client, folder)
    with pytest.raises(InfrastructureFailed, match=f"1000 of {len(DATA)} bytes"):
        downloads.fetch(FILE)
    (coordinator.files / FILE.sha256).write_bytes(b"\0" * 1000 + DATA[1000:])
    assert downloads.fetch(FILE).read_bytes() == DATA


def test_a_coordinator_without_ranges(client: JobClient, coordinator: FakeCoordinator, folder: ContentFolder) -> None:
    coordinator.trouble += [httpx.Response(200, content=DATA[:1000]), httpx.Response(200, content=DATA)]
    downloads = Downloads(client, folder)
    with pytest.raises(InfrastructureFailed):
        downloads.fetch(FILE)
    assert downloads.fetch(FILE).read_bytes() == DATA


@pytest.mark.parametrize("wrong", [DATA[:-1] + b"x", DATA + b"x"])
def test_wrong_bytes_are_thrown_away(
    client: JobClient, coordinator: FakeCoordinator, folder: ContentFolder, wrong: bytes
) -> None:
    coordinator.trouble.append(httpx.Response(200, content=wrong))
    downloads = Downloads(client, folder)
    with pytest.raises(InfrastructureFailed):
        downloads.fetch(FILE)
    assert [path for path in folder.root.glob("??/*") if path.is_file()] == []
    assert downloads.fetch(FILE).read_bytes() == DATA


def test_who_wants_what_another_fetches_waits_for_it(
    client: JobClient, coordinator: FakeCoordinator, folder: ContentFolder
) -> None:
    """Two devices of one agent, or two agents of one host, start with the same runner."""
    answered = threading.Barrier(2)

    def slowly() -> Iterator[bytes]:
        yield DATA[:1000]
        answered.wait(30)
        yield DATA[1000:]

    coordinator.trouble.append(httpx.Response(200, content=slowly()))
    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(Downloads(client, ContentFolder(folder.root)).fetch, FILE) for _ in range(2)]
        answered.wait(30)
        assert [path.result(30).read_bytes() for path in both] == [DATA, DATA]
    assert coordinator.trouble == []


def test_a_wait_for_the_transfer_of_another_that_takes_too_long_is_no_failure_of_a_device(
    client: JobClient, folder: ContentFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads = Downloads(client, folder)
    monkeypatch.setattr(download, "_TRANSFER_S", -1.0)
    with locked(folder.root / "locks" / FILE.sha256[:2]), pytest.raises(InfrastructureFailed) as caught:
        downloads.fetch(FILE)
    assert on_the_way(str(caught.value))


def test_a_transfer_that_takes_too_long_goes_on_with_the_next_try(
    client: JobClient, coordinator: FakeCoordinator, folder: ContentFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator.trouble.append(httpx.Response(200, content=iter([DATA[:500], DATA[500:1000], DATA[1000:]])))
    with monkeypatch.context() as hasty, pytest.raises(InfrastructureFailed, match=f"500 of {len(DATA)} bytes"):
        hasty.setattr(download, "_TRANSFER_S", -1.0)
        hasty.setattr(download, "locked", lambda path, deadline_s: nullcontext())
        Downloads(client, folder).fetch(FILE)
    (coordinator.files / FILE.sha256).write_bytes(b"\0" * 500 + DATA[500:])
    assert Downloads(client, folder).fetch(FILE).read_bytes() == DATA


def test_a_local_coordinator_names_the_file(coordinator: FakeCoordinator, folder: ContentFolder) -> None:
    coordinator.local_paths = True
    path = Downloads(JobClient(coordinator.client(), local=True), folder).fetch(FILE)
    assert path.samefile(coordinator.files / FILE.sha256)


def test_what_a_local_coordinator_names_bounds_the_cache_too(
    coordinator: FakeCoordinator, folder: ContentFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = folder.path("0" * 64)
    old.parent.mkdir()
    old.write_bytes(b"of an earlier job")
    os.utime(old, (0, 0))
    monkeypatch.setattr(download, "_KEPT_BYTES", len(DATA))
    coordinator.local_paths = True
    assert Downloads(JobClient(coordinator.client(), local=True), folder).fetch(FILE).exists()
    assert not old.exists()


def test_a_named_file_is_verified(coordinator: FakeCoordinator, folder: ContentFolder) -> None:
    coordinator.local_paths = True
    (coordinator.files / FILE.sha256).write_bytes(b"else")
    with pytest.raises(InfrastructureFailed, match="SHA-256"):
        Downloads(JobClient(coordinator.client(), local=True), folder).fetch(FILE)


def test_a_remote_coordinator_cannot_name_local_files(
    client: JobClient, coordinator: FakeCoordinator, folder: ContentFolder
) -> None:
    coordinator.local_paths = True
    with pytest.raises(InfrastructureFailed, match="0 of"):
        Downloads(client, folder).fetch(FILE)


def test_a_file_the_coordinator_lacks(client: JobClient, folder: ContentFolder) -> None:
    with pytest.raises(NasError, match="404"):
        Downloads(client, folder).fetch(PlanFile(sha256="0" * 64, size=1))


def test_a_result_that_was_accepted_is_done_with_even_where_its_file_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(path: Path, missing_ok: bool = False) -> None:
        raise OSError("Read-only file system")

    outbox = Outbox(tmp_path, "a")
    request = ResultRequest(agent="a", device="d", epoch=1, result=RoundResult(pairs=[]))
    pending = PendingResult(authority="fake", job="1", request=request)
    outbox.put(pending)
    with monkeypatch.context() as disk:
        disk.setattr(Path, "unlink", refused)
        outbox.drop(pending)
    assert outbox.of("fake", "d") == []
    assert "Read-only file system" in caplog.text
