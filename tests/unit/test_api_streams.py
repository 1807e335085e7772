"""The users' API's server-sent events, over real connections."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_lab import Lab
from store_support import add_device, new_study, proposal

from nas.core.trial import EventKind
from nas.infra.store import devices, events, studies, trials
from nas.infra.store.rows import Health, Role, StudyState
from nas.infra.web import events as following
from nas.infra.web.server import Server, listen_tcp
from tests.support.waiting import until

FOLLOW, DEVICES = "/v1/studies/first/events", "/v1/device-events"


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


@pytest.fixture
def url(lab: Lab) -> Iterator[str]:
    with Server(lab.app, listen_tcp("127.0.0.1", 0)) as server:
        try:
            yield f"http://127.0.0.1:{server.port}"
        finally:
            lab.closing = True


@contextmanager
def stream(lab: Lab, url: str, path: str, **headers: str) -> Iterator[httpx.Response]:
    headers |= {"Authorization": f"Bearer {lab.tokens[Role.READ]}", "Accept": "text/event-stream"}
    with httpx.stream("GET", url + path, headers=headers, timeout=30) as answer:
        yield answer


def blocks(lines: Iterator[str]) -> Iterator[dict[str, str]]:
    """Events, comments and settings of a stream, each as its fields; a comment is the field without a name."""
    fields: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(":")
            fields[name] = value.strip()
        elif fields:
            yield fields
            fields = {}


def test_a_study_is_streamed_to_its_end_and_gone_on_with(lab: Lab, url: str) -> None:
    study = new_study(lab.store).id
    trials.propose(lab.store, study, [proposal(128)])
    with stream(lab, url, FOLLOW) as answer:
        assert answer.status_code == 200
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        assert answer.headers["Cache-Control"] == "no-store"
        messages = blocks(answer.iter_lines())
        assert next(messages) == {"retry": "2000"}
        first = next(messages)
        page = lab.get(FOLLOW)
        assert json.loads(first["data"]) == page["events"][0]
        assert (first["id"], first["event"]) == (str(page["events"][0]["id"]), "proposed")
        trials.add_event(lab.store, study, 0, EventKind.FAILED, {"reason": "it broke"})  # while somebody listens
        second = next(messages)
        assert (second["event"], json.loads(second["data"])["payload"]) == ("failed", {"reason": "it broke"})
        studies.set_state(lab.store, study, StudyState.COMPLETE)
        assert [message["event"] for message in messages][-1] == "end"
    with stream(lab, url, FOLLOW, **{"Last-Event-ID": first["id"]}) as answer:
        again = [message for message in blocks(answer.iter_lines()) if "id" in message]
    assert again[0] == second
    assert events.since(lab.store, study)[-1].id == int(again[-1]["id"])


def test_devices_are_streamed_and_silence_is_told_from_a_lost_connection(
    lab: Lab, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "_COMMENT_S", 0.0)
    lab.clock.time += devices.SETTLED_S
    with stream(lab, url, DEVICES) as answer:
        messages = blocks(answer.iter_lines())
        assert [next(messages).keys() for _ in range(3)] == [{"retry"}, {"id", "event", "data"}, {""}]
        add_device(lab.store, "phone", "lab-1")
        lab.clock.time += devices.SETTLED_S
        event = next(message for message in messages if "data" in message)
        assert json.loads(event["data"])["device"] == "phone"


def test_streams_end_with_the_coordinator_and_after_a_while(
    lab: Lab, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stream(lab, url, DEVICES) as answer:
        messages = blocks(answer.iter_lines())
        next(messages)
        lab.closing = True
        assert list(messages) == []
    lab.closing = False
    monkeypatch.setattr(following, "LONGEST_STREAM_S", 0.0)
    with stream(lab, url, DEVICES) as answer:
        assert list(blocks(answer.iter_lines())) == [{"retry": "2000"}]


def test_a_long_poll_ends_with_the_coordinator(lab: Lab, url: str) -> None:
    headers = {"Authorization": f"Bearer {lab.tokens[Role.READ]}"}
    closing = threading.Timer(0.2, setattr, [lab, "closing", True])
    closing.start()
    began = time.monotonic()
    answer = httpx.get(f"{url}{DEVICES}", params={"wait_s": 30}, headers=headers, timeout=60)
    assert answer.json()["events"] == [] and time.monotonic() - began < 20
    closing.join()


def test_a_client_has_so_many_streams_and_others_have_theirs(
    lab: Lab, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "STREAMS_OF_ONE", 1)

    def status() -> int:
        with stream(lab, url, DEVICES) as answer:
            return answer.status_code

    with stream(lab, url, DEVICES) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert status() == 429
        operator = {"Authorization": f"Bearer {lab.tokens[Role.OPERATE]}", "Accept": "text/event-stream"}
        with httpx.stream("GET", url + DEVICES, headers=operator, timeout=30) as other:
            assert other.status_code == 200
    # Closed by its client, which the coordinator notices when it looks next.
    until(lambda: status() == 200)


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/studies/frist/events", {}, 404),
        (DEVICES + "?device=bxo", {}, 404),
        (DEVICES, {"Last-Event-ID": "-1"}, 422),
        (DEVICES, {"Last-Event-ID": "9" * 99}, 422),
        (DEVICES, {"Authorization": "Bearer hilnas.x.y"}, 401),
    ],
)
def test_what_cannot_be_followed_is_refused_as_anything_else(
    lab: Lab, path: str, headers: dict[str, str], status: int
) -> None:
    answer: Any = lab.client().get(path, headers={"Accept": "text/event-stream", **headers})
    assert answer.status_code == status
    assert answer.json()["request_id"]


def test_a_database_in_trouble_ends_a_stream_not_the_coordinator(lab: Lab, url: str) -> None:
    lab.clock.time += devices.SETTLED_S
    study = new_study(lab.store).id
    trials.propose(lab.store, study, [proposal(128)])
    with stream(lab, url, FOLLOW) as answer:
        messages = blocks(answer.iter_lines())
        assert {"id", "event", "data"} in [next(messages).keys() for _ in range(2)]
        studies.delete(lab.store, study)
        assert list(messages) == []
    devices.set_health(lab.store, "box", Health.GOOD)
    assert lab.get("/v1/devices/box")["health"] == "good"
