"""The job API over a real store: what agents may say, and what they are answered."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from pydantic import TypeAdapter
from store_support import RESULT, device, key, open_store, round_of

from nas.core.clock import SystemClock
from nas.core.plan import MAX_OUTPUT, MAX_REPETITIONS, Pair, RawRun, RoundResult
from nas.core.trust import RunnerManifest, SignedManifest
from nas.core.wire import LOCAL_PATH_HEADER, MOST_DEVICES
from nas.infra.store import devices, jobs
from nas.infra.store.rows import DeviceState, JobState
from nas.infra.store.store import Store
from nas.measure.farm import agent_api
from nas.measure.farm.agent_api import make_app
from nas.measure.farm.queue import JobNotifier
from nas.measure.farm.trust import SigningKey

KEY = key("measurement")
FILE = key("file")
WHO = {"agent": "local", "device": "box"}
SIGNED = SigningKey.generate().sign(RunnerManifest(serial=1, issued_at=0.5, runners=()))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path, SystemClock())  # type: ignore[arg-type]


@pytest.fixture
def client(store: Store, tmp_path: Path) -> TestClient:
    return served(store, tmp_path)


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    """A client of a coordinator that is asked only for what it refuses."""
    folder = tmp_path_factory.mktemp("refusing")
    return served(open_store(folder, SystemClock()), folder)  # type: ignore[arg-type]


def served(store: Store, folder: Path) -> TestClient:
    """A client of the API over a store, with one device and one file."""
    path = folder / "a file"
    path.write_bytes(b"content")
    client = TestClient(
        make_app(store, {FILE: path}.get, JobNotifier(), [None, SIGNED].pop), raise_server_exceptions=False
    )
    registration = {"agent": "local", "devices": [device().model_dump(mode="json")], "boot_id": "boot"}
    assert client.post("/v1/agents/register", json=registration).status_code == 200
    return client


def lease(client: TestClient) -> dict[str, Any]:
    answer = client.post("/v1/lease", json={**WHO, "wait_s": 0})
    assert answer.status_code == 200
    job: dict[str, Any] = answer.json()["job"]
    return job


def submit(client: TestClient, job: dict[str, Any], **body: Any) -> httpx.Response:
    message = {**WHO, "epoch": job["epoch"], **body}
    return client.post(f"/v1/jobs/{job['id']}/result", json=message)


def test_a_job_is_leased_renewed_and_ended(client: TestClient, store: Store) -> None:
    assert lease(client) is None
    queued = jobs.enqueue(store, KEY, round_of(), device="box")
    job = lease(client)
    assert job["id"] == queued.id
    assert job["deadline_s"] > round_of().candidate.deadline_s
    beat = {**WHO, "job": job["id"], "epoch": job["epoch"]}
    assert client.post("/v1/heartbeat", json=beat).json() == {"cancel": False}
    for _ in range(2):  # a result that comes twice is accepted twice and counts once
        answer = submit(client, job, result=RESULT.model_dump(mode="json"))
        assert answer.json() == {"accepted": True, "reason": None}
    row = jobs.get(store, job["id"])
    assert row is not None
    assert (row.state, row.result) == (JobState.DONE, RESULT)
    assert devices.get(store, "box").state is DeviceState.IDLE


RUN = RawRun(exit_code=0, stdout="", wall_s=1.0, started_at=0.0).model_dump(mode="json")
ENERGY = {"counter": "RAPL package", "joules": 1.0, "steps": 1}


@pytest.mark.parametrize(
    "result",
    [
        {"pairs": [{"reference": None, "candidate": RUN}] * (MAX_REPETITIONS + 1)},
        {"pairs": [{"reference": None, "candidate": RUN | {"stdout": "x" * (MAX_OUTPUT + 1)}}]},
        {"pairs": [{"reference": None, "candidate": RUN | {"stderr_tail": "x" * (MAX_OUTPUT + 1)}}]},
        {"pairs": [{"reference": None, "candidate": RUN | {"conditions": {"energy": ENERGY | {"steps": 10**400}}}}]},
        {"pairs": [{"reference": None, "candidate": RUN | {"conditions": {"energy": ENERGY | {"joules": 1e308}}}}]},
    ],
    ids=["pairs", "stdout", "stderr", "steps", "joules"],
)
def test_a_result_is_bounded(client: TestClient, store: Store, result: dict[str, Any]) -> None:
    jobs.enqueue(store, KEY, round_of(), device="box")
    job = lease(client)
    assert submit(client, job, result=result).status_code == 422
    assert submit(client, job, result=RESULT.model_dump(mode="json")).json()["accepted"]


@pytest.mark.parametrize(
    "fields",
    [
        {"devices": [device(f"box-{n}").model_dump(mode="json") for n in range(MOST_DEVICES + 1)]},
        {"devices": [device().model_dump(mode="json") | {"unread": {"x" * 1000: "reason"}}]},
        {"devices": [device().model_dump(mode="json") | {"unread": {"\x1b[2J": "reason"}}]},
        {"devices": [device().model_dump(mode="json") | {"memory_mb": 10**400}]},
        {"devices": [], "boot_id": "x" * 1000},
    ],
    ids=["devices", "long name", "control characters", "memory", "boot"],
)
def test_a_registration_is_bounded(client: TestClient, store: Store, fields: dict[str, Any]) -> None:
    assert client.post("/v1/agents/register", json={"agent": "local", "boot_id": "boot"} | fields).status_code == 422
    assert [row.id for row in devices.all(store)] == ["box"]


@pytest.mark.parametrize(
    ("phase", "state"), [({"phase": "preparing"}, "preparing"), ({"phase": "cooling"}, "cooling"), ({}, "leased")]
)
def test_a_heartbeat_tells_how_far_the_job_has_come(
    client: TestClient, store: Store, phase: dict[str, str], state: str
) -> None:
    jobs.enqueue(store, KEY, round_of(), device="box")
    job = lease(client)
    beat = {**WHO, "job": job["id"], "epoch": job["epoch"], **phase}
    assert client.post("/v1/heartbeat", json=beat).json() == {"cancel": False}
    assert devices.get(store, "box").state == state
    assert client.post("/v1/heartbeat", json=beat | {"phase": "asleep"}).status_code == 422


def test_an_older_epoch_is_refused(client: TestClient, store: Store) -> None:
    jobs.enqueue(store, KEY, round_of(), device="box")
    old, new = lease(client), lease(client)  # the agent restarted and asked again
    assert (old["id"], old["epoch"] + 1) == (new["id"], new["epoch"])
    beat = {**WHO, "job": old["id"], "epoch": old["epoch"]}
    assert client.post("/v1/heartbeat", json=beat).json() == {"cancel": True}
    refused = submit(client, old, result=RESULT.model_dump(mode="json")).json()
    assert not refused["accepted"]
    assert "epoch" in refused["reason"]
    assert submit(client, new, result=RESULT.model_dump(mode="json")).json()["accepted"]


def test_a_failure_puts_the_job_back(client: TestClient, store: Store) -> None:
    jobs.enqueue(store, KEY, round_of(), device="box")
    job = lease(client)
    failure = {"kind": "infrastructure", "message": "the cable"}
    assert submit(client, job, failure=failure).json()["accepted"]
    again = jobs.get(store, job["id"])
    assert again is not None
    assert (again.state, again.message) == (JobState.QUEUED, "the cable")


def test_the_manifest_is_handed_out_as_it_was_signed(client: TestClient) -> None:
    assert SignedManifest.model_validate_json(client.get("/v1/runners").content) == SIGNED
    nothing = client.get("/v1/runners")
    assert nothing.status_code == 404
    assert "no runner was admitted" in nothing.text


def test_a_waiting_agent_is_woken_by_a_new_job(store: Store, client: TestClient) -> None:
    notifier = JobNotifier()
    count = notifier.count
    notifier.notify()
    assert notifier.wait(count, 3600) == count + 1
    assert notifier.wait(notifier.count, 0.01) == notifier.count


def test_files_are_named_by_path(client: TestClient, tmp_path: Path) -> None:
    answer = client.get(f"/v1/files/{FILE}")
    assert answer.status_code == 200
    assert answer.headers[LOCAL_PATH_HEADER] == str(tmp_path / "a file").replace(" ", "%20")
    assert answer.content == b""


@pytest.mark.parametrize("name", [key("another"), "short", "..%2F..%2Fetc%2Fpasswd", "A" * 64])
def test_other_files_are_not_found(refusing: TestClient, name: str) -> None:
    assert refusing.get(f"/v1/files/{name}").status_code == 404


def test_who_is_not_known_is_refused(client: TestClient) -> None:
    assert client.post("/v1/lease", json={"agent": "local", "device": "other", "wait_s": 0}).status_code == 404
    answer = client.post("/v1/lease", json={"agent": "stranger", "device": "box", "wait_s": 0})
    assert answer.status_code == 403
    assert "served by agent 'local'" in answer.json()["error"]


RESULT_PATH = f"/v1/jobs/{KEY}.0/result"
PAIR = Pair(reference=None, candidate=RawRun(exit_code=0, stdout="x", wall_s=1.0, started_at=0.0))
GOOD = json.dumps({**WHO, "epoch": 1, "result": RoundResult(pairs=[PAIR]).model_dump(mode="json")})


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nonsense",
        b"\xff\xfe",
        b"[" * 5000,
        b'{"agent": NaN}',
        b'{"agent": "local", "\\ud800": 1}',
        GOOD.replace('"epoch": 1', '"epoch": -1').encode(),
        GOOD.replace('"epoch": 1', '"epoch": 1' + "0" * 30).encode(),
        GOOD.replace('"wall_s": 1.0', '"wall_s": NaN').encode(),
        GOOD.replace('"wall_s": 1.0', '"wall_s": Infinity').encode(),
        GOOD.replace('"stdout": "x"', '"stdout": "\\ud800"').encode(),
        GOOD.replace('"device": "box"', '"device": "\\u0000"').encode(),
        GOOD.replace('"foreign_cpu": null', '"foreign_cpu": ' + '{"a":' * 300 + "1" + "}" * 300).encode(),
        GOOD.replace('"epoch": 1', '"epoch": 1, "failure": {"kind": "cancelled", "message": ""}').encode(),
    ],
    ids=lambda body: body[:40].decode(errors="replace"),
)
@pytest.mark.parametrize("path", [RESULT_PATH, "/v1/lease", "/v1/heartbeat", "/v1/agents/register"])
def test_what_makes_no_sense_is_refused_politely(refusing: TestClient, path: str, body: bytes) -> None:
    answer = refusing.post(path, content=body, headers={"Content-Type": "application/json"})
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.json()
    assert refusing.post("/v1/lease", json={**WHO, "wait_s": 0}).status_code == 200


@pytest.mark.parametrize("name", ["..%2Fx", "a b", "%00", "x" * 200])
def test_jobs_have_plain_names(refusing: TestClient, name: str) -> None:
    body = {**WHO, "epoch": 1, "result": RESULT.model_dump(mode="json")}
    assert 400 <= refusing.post(f"/v1/jobs/{name}/result", json=body).status_code < 500


def test_a_job_that_was_never_there_is_not_accepted(client: TestClient) -> None:
    answer = submit(client, {"id": "none.0", "epoch": 0}, result=RESULT.model_dump(mode="json"))
    assert answer.status_code == 200
    assert not answer.json()["accepted"]


def large(**fields: object) -> dict[str, Any]:
    """A result of half a megabyte."""
    raw = RawRun(exit_code=0, stdout="x" * (1 << 18), wall_s=1.0, started_at=1.0)
    return RoundResult(pairs=[Pair(reference=raw, candidate=raw)]).model_dump(mode="json") | fields


def test_others_are_answered_while_a_large_result_is_parsed(
    client: TestClient, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsing, answered = threading.Event(), threading.Event()

    class Slow:
        def __init__(self, model: Any) -> None:
            self._real = TypeAdapter(model)

        def validate_json(self, body: bytes) -> Any:
            parsing.set()
            assert answered.wait(10), "nobody else was answered meanwhile"
            return self._real.validate_json(body)

    monkeypatch.setattr(agent_api, "TypeAdapter", Slow, raising=False)
    jobs.enqueue(store, KEY, round_of(), device="box")
    with client, ThreadPoolExecutor(1) as other:
        job = lease(client)
        sent = other.submit(submit, client, job, result=large())
        assert parsing.wait(10), "a large result is parsed by the event loop"
        beat = {**WHO, "job": job["id"], "epoch": job["epoch"]}
        assert client.post("/v1/heartbeat", json=beat).status_code == 200
        answered.set()
        assert sent.result(10).json() == {"accepted": True, "reason": None}
    row = jobs.get(store, job["id"])
    assert row is not None and row.result is not None
    assert row.result.model_dump(mode="json") == large()


@pytest.mark.parametrize("field", [{"wall_s": -1}, {"unknown": 1}, {"pairs": [{}]}, {"wall_s": "x"}])
def test_a_large_result_is_refused_as_a_small_one(refusing: TestClient, field: dict[str, Any]) -> None:
    job = {"id": "none.0", "epoch": 1}
    small, big = (submit(refusing, job, result=result) for result in ({"pairs": []} | field, large(**field)))
    assert small.status_code == big.status_code == 422
    assert {**small.json(), "request_id": None} == {**big.json(), "request_id": None}


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "chunked"])
def test_a_request_that_is_too_large_is_not_read(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, store: Store, announced: bool
) -> None:
    monkeypatch.setattr(agent_api, "_MAX_RESULT", 1000)
    small = TestClient(make_app(store, {}.get, JobNotifier(), lambda: None), raise_server_exceptions=False)
    body = json.dumps({**WHO, "epoch": 1, "result": {"pairs": [], "extra": {"a": "x" * 2000}}}).encode()
    content = body if announced else (body[at : at + 100] for at in range(0, len(body), 100))
    answer = small.post(RESULT_PATH, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 413
