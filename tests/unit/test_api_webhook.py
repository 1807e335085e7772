"""Messages to a webhook, received by a real HTTP server."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from cli_runner import nas
from live_lab import LiveLab
from store_support import add_device

from nas.core.errors import InvalidInput
from nas.infra.store import devices, studies
from nas.infra.store.rows import Health, StudyState
from nas.serve.api.webhook import EVERY_S, LONGEST_PAUSE_S, LONGEST_REASON, REFUSALS, Webhook, checked_url

DEADLINE_S = 30.0


class Receiver:
    """A server that notes what is posted to it, and answers with `status`."""

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []
        self.status = 200
        self.refused: dict[str, int] = {}
        """Name of a study or device -> answer to messages about it."""
        self.refusals = 0
        self.arrived = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status = receiver.refused.get(body["name"], receiver.status)
                if status == 200:
                    receiver.received.append(body)
                receiver.refusals += status != 200
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.send_header("Location", "/elsewhere")
                self.end_headers()
                receiver.arrived.set()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/secret-part"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    @contextmanager
    def running(self) -> Iterator[Receiver]:
        self._thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    @property
    def texts(self) -> list[str]:
        return [message["text"] for message in self.received]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver().running() as server:
        yield server


@pytest.fixture
def lab(tmp_path: Path) -> LiveLab:
    lab = LiveLab(tmp_path)
    add_device(lab.store)
    return lab


def hook(lab: LiveLab, receiver: Receiver, tmp_path: Path, **options: Any) -> Webhook:
    return Webhook(lab.store, receiver.url, tmp_path, "https://farm.example:7711", **options)


def test_ends_of_studies_and_bad_devices_are_sent_once(lab: LiveLab, receiver: Receiver, tmp_path: Path) -> None:
    old, new = lab.study("old"), lab.study("new")
    studies.set_state(lab.store, old, StudyState.FAILED, reason="before the first start")
    sender = hook(lab, receiver, tmp_path)
    assert sender.send_changes() == 0
    studies.set_state(lab.store, new, StudyState.FAILED, reason="the disk is full")
    devices.set_health(lab.store, "box", Health.BAD, "too hot")
    assert sender.send_changes() == 2
    assert receiver.texts == ["study new: failed: the disk is full", "device box: bad: too hot"]
    message = receiver.received[0]
    assert (message["event"], message["name"], message["state"]) == ("study", "new", "failed")
    assert message["url"] == "https://farm.example:7711/studies/new"
    assert hook(lab, receiver, tmp_path).send_changes() == 0  # also after a restart
    devices.set_health(lab.store, "box", Health.UNKNOWN)
    devices.set_health(lab.store, "box", Health.GOOD)
    studies.set_state(lab.store, new, StudyState.RUNNING)
    assert sender.send_changes() == 1
    studies.set_state(lab.store, new, StudyState.COMPLETE)
    assert sender.send_changes() == 1
    assert receiver.texts[2:] == ["device box: good", "study new: complete"]


@pytest.mark.parametrize("status", [307, 400, 429, 503])
def test_a_message_that_is_refused_is_sent_again_after_a_pause(
    lab: LiveLab, receiver: Receiver, tmp_path: Path, status: int
) -> None:
    study = lab.study()
    sender = hook(lab, receiver, tmp_path)
    sender.send_changes()
    studies.set_state(lab.store, study, StudyState.COMPLETE)
    receiver.status = status
    assert sender.send_changes() == 0
    receiver.status = 200
    assert sender.send_changes() == 0
    lab.clock.time += EVERY_S
    assert sender.send_changes() == 1
    assert receiver.texts == ["study study: complete"]


@pytest.mark.parametrize("status", [301, 400, 404, 503])
def test_a_message_that_is_refused_for_ever_keeps_back_no_other(
    lab: LiveLab, receiver: Receiver, tmp_path: Path, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    sender = hook(lab, receiver, tmp_path)
    receiver.refused["first"] = status
    sender.send_changes()
    for name in ("first", "second", "third"):
        studies.set_state(lab.store, lab.study(name), StudyState.COMPLETE)
    assert sender.send_changes() == 2
    assert receiver.texts == ["study second: complete", "study third: complete"]
    for _ in range(2 * REFUSALS):
        lab.clock.time += LONGEST_PAUSE_S
        assert sender.send_changes() == 0
    given_up = [record.message for record in caplog.records if "given up" in record.message]
    if status < 500:
        assert len(given_up) == 1 and f"first is complete is given up: it was answered {status}, 5 times" in given_up[0]
        assert receiver.refusals == REFUSALS
    else:
        assert given_up == [] and receiver.refusals == 2 * REFUSALS + 1
        receiver.refused.clear()
        lab.clock.time += LONGEST_PAUSE_S
        assert sender.send_changes() == 1


def test_a_long_reason_is_cut(lab: LiveLab, receiver: Receiver, tmp_path: Path) -> None:
    study, sender = lab.study(), hook(lab, receiver, tmp_path)
    sender.send_changes()
    studies.set_state(lab.store, study, StudyState.FAILED, reason="x" * 100_000)
    assert sender.send_changes() == 1
    [message] = receiver.received
    assert len(message["reason"]) == LONGEST_REASON and len(message["text"]) < LONGEST_REASON + 50


def test_a_receiver_that_cannot_be_reached_is_told_of_everything_later(
    lab: LiveLab, receiver: Receiver, tmp_path: Path
) -> None:
    study = lab.study()
    sender = hook(lab, receiver, tmp_path)
    sender.send_changes()
    studies.set_state(lab.store, study, StudyState.COMPLETE)
    with pytest.raises(httpx.HTTPError):
        Webhook(lab.store, "http://127.0.0.1:9/", tmp_path, "https://farm.example:7711").send_changes()
    assert sender.send_changes() == 1


def test_the_thread_outlives_a_receiver_that_is_down_and_logs_no_url(
    lab: LiveLab, receiver: Receiver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    study = lab.study()
    hook(lab, receiver, tmp_path).send_changes()
    studies.set_state(lab.store, study, StudyState.COMPLETE)
    receiver.status = 503
    with hook(lab, receiver, tmp_path, every_s=0.01):
        assert receiver.arrived.wait(DEADLINE_S)
        receiver.status = 200
        receiver.arrived.clear()
        deadline = time.monotonic() + DEADLINE_S
        # The sender may note its pause after this thread has seen the refusal: the clock goes on until that is over.
        while not receiver.arrived.wait(0.05) and time.monotonic() < deadline:
            lab.clock.time += 1
    assert receiver.texts == ["study study: complete"]
    assert "is complete is not delivered (it answered 503)" in caplog.text and "secret-part" not in caplog.text


def test_a_receiver_that_answers_byte_by_byte_is_left(
    lab: LiveLab, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = lab.study()
    sender = hook(lab, receiver, tmp_path)
    sender.send_changes()
    studies.set_state(lab.store, study, StudyState.COMPLETE)
    monkeypatch.setattr("nas.serve.api.webhook._TIMEOUT_S", 0.5)
    end = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                while not end.wait(0.05):
                    connection.sendall(b"H")

        thread = threading.Thread(target=drip)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            Webhook(lab.store, url, tmp_path, "https://farm.example:7711").send_changes()
        assert time.monotonic() - began < DEADLINE_S
        end.set()
        thread.join()
    assert sender.send_changes() == 1, "it is sent later"


@pytest.mark.parametrize(
    "url",
    [
        *("http://farm.example/x", "ftp://127.0.0.1", "https://", "http://[::1", "x", "http://10.0.0.1"),
        *("https://farm\u200b.example/x", "https://farm.example/\x07"),
    ],
)
def test_only_https_and_loopback_are_allowed(url: str) -> None:
    with pytest.raises(InvalidInput, match="https"):
        checked_url(url)
    done = nas("serve", "--webhook", url)
    assert done.code == 3 and "--webhook" in done.err


def test_allowed_urls() -> None:
    for url in ("https://hooks.example/T/B", "http://127.0.0.1:9/x", "http://[::1]:9", "http://localhost"):
        assert checked_url(url) == url
