"""Agents over TLS: each speaks for itself, for its own devices, and reads the files of the job that it holds."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
from farm_support import Coordinator, registration
from fastapi.testclient import TestClient
from store_support import RESULT, StillClock, key, put_bytes, round_of

from nas.core.plan import InputFile, Plan, Round
from nas.infra.store import agents, devices, jobs, outcomes
from nas.measure.farm import agent_api

CONTENT = bytes(range(256)) * 4096
HASH = sha256(CONTENT).hexdigest()
Auth = tuple[str, str]


@pytest.fixture
def lab(tmp_path: Path) -> Coordinator:
    return Coordinator(tmp_path)


@pytest.fixture
def client(lab: Coordinator) -> TestClient:
    return TestClient(lab.app, raise_server_exceptions=False)


@pytest.fixture
def host(lab: Coordinator, client: TestClient) -> Auth:
    return enrolled(lab, client, "host", "box")


@pytest.fixture
def other(lab: Coordinator, client: TestClient) -> Auth:
    return enrolled(lab, client, "other", "phone")


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    """A client of a coordinator that is asked only for what it refuses."""
    lab = Coordinator(tmp_path_factory.mktemp("refusing"))
    client = TestClient(lab.app, raise_server_exceptions=False)
    enrolled(lab, client, "host", "box")
    return client


def enrolled(lab: Coordinator, client: TestClient, name: str, *names: str) -> Auth:
    auth = lab.enrol(name)
    assert client.post("/v1/agents/register", json=registration(name, *names), auth=auth).status_code == 200
    return auth


def poll(client: TestClient, auth: Auth, device: str, agent: str | None = None) -> httpx.Response:
    body = {"agent": agent or auth[0], "device": device, "wait_s": 0}
    answer: httpx.Response = client.post("/v1/lease", json=body, auth=auth)
    return answer


def lease(client: TestClient, auth: Auth, device: str) -> dict[str, Any]:
    answer = poll(client, auth, device)
    assert answer.status_code == 200, answer.text
    job: dict[str, Any] = answer.json()["job"]
    return job


def queue_file(lab: Coordinator, device: str, content: bytes = CONTENT) -> str:
    """A job for `device` that needs the content; returns its hash."""
    stored = put_bytes(lab.store, content)
    inputs = {"model": InputFile(sha256=stored.sha256, size=stored.size)}
    runner = round_of().candidate.runner
    plan = Plan(runner=runner, inputs=inputs, args=(), deadline_s=1)
    jobs.enqueue(lab.store, key(stored.sha256, device), Round(candidate=plan, repetitions=1), device=device)
    return stored.sha256


@pytest.mark.parametrize(
    "path", ["agents/register", "lease", "heartbeat", "jobs/x.0/result", "runners", "files/" + HASH]
)
@pytest.mark.parametrize(
    "header",
    ["", "Bearer x", "Basic", "Basic !!!", "Basic aG9zdA==", "Basic /////w==", "Basic aG9zdDo=", "basic aG9zdDp4"],
)
def test_strangers_are_sent_away(refusing: TestClient, path: str, header: str) -> None:
    method = "GET" if path.startswith(("runners", "files")) else "POST"
    # Before anything of the body is looked at.
    answer = refusing.request(method, f"/v1/{path}", headers={"Authorization": header}, content=b"nonsense")
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"] == 'Basic realm="hilnas"'


def test_nobody_speaks_in_anothers_name_or_touches_anothers_device(
    lab: Coordinator, client: TestClient, host: Auth, other: Auth
) -> None:
    jobs.enqueue(lab.store, key("job"), round_of(), device="phone")
    job = lease(client, other, "phone")
    before = devices.get(lab.store, "phone")
    beat = {"device": "phone", "epoch": job["epoch"], "job": job["id"]}
    result = {"device": "phone", "epoch": job["epoch"], "result": RESULT.model_dump(mode="json")}
    for name, *names in (("other", "phone"), ("host", "box", "phone")):
        for path, body in (
            ("agents/register", registration(name, *names)),
            ("lease", {"agent": name, "device": "phone", "wait_s": 0}),
            ("heartbeat", {"agent": name, **beat}),
            (f"jobs/{job['id']}/result", {"agent": name, **result}),
        ):
            answer = client.post(f"/v1/{path}", json=body, auth=host)
            assert answer.status_code == 403, path
            assert name == "host" or answer.json()["error"] == "agent 'host' may not speak for 'other'"
    assert devices.get(lab.store, "phone") == before
    # One's own device does not help with another's job either.
    identity = {"agent": "host", "device": "box"}
    assert not client.post(f"/v1/jobs/{job['id']}/result", json=result | identity, auth=host).json()["accepted"]
    assert client.post("/v1/heartbeat", json=beat | identity, auth=host).json()["cancel"]
    owner = {"agent": "other"}
    assert client.post("/v1/heartbeat", json=beat | owner, auth=other).json() == {"cancel": False}
    assert client.post(f"/v1/jobs/{job['id']}/result", json=result | owner, auth=other).json()["accepted"]


def test_an_agent_is_told_of_its_own_devices_only(client: TestClient, host: Auth, other: Auth) -> None:
    answer = poll(client, host, "pone")
    assert answer.status_code == 404
    assert "phone" not in answer.text
    assert "valid: box" in answer.text


def test_a_file_is_for_who_holds_its_job(lab: Coordinator, client: TestClient, host: Auth, other: Auth) -> None:
    assert queue_file(lab, "box") == HASH
    path = f"/v1/files/{HASH}"
    assert client.get(path, auth=host).status_code == 403  # queued, not leased
    job = lease(client, host, "box")
    answer = client.get(path, auth=host)
    assert (answer.status_code, answer.content, answer.headers["ETag"]) == (200, CONTENT, f'"{HASH}"')
    assert "X-Local-Path" not in answer.headers
    assert client.get(path, auth=other).status_code == 403
    body = {"agent": "host", "device": "box", "epoch": job["epoch"], "result": RESULT.model_dump(mode="json")}
    client.post(f"/v1/jobs/{job['id']}/result", json=body, auth=host)
    assert client.get(path, auth=host).status_code == 403  # done


def test_a_file_of_the_runner_comes_with_the_job(lab: Coordinator, client: TestClient, host: Auth) -> None:
    jobs.enqueue(lab.store, key("job"), round_of(), device="box")
    lease(client, host, "box")
    missing = client.get(f"/v1/files/{key('runner')}", auth=host)
    assert missing.status_code == 503  # may be read; this coordinator has no such runner, which is its own trouble
    assert client.get(f"/v1/files/{key('another')}", auth=host).status_code == 403


def test_a_lease_that_ran_out_keeps_its_files_until_it_is_granted_anew(tmp_path: Path) -> None:
    clock = StillClock()
    lab = Coordinator(tmp_path, clock)
    client = TestClient(lab.app, raise_server_exceptions=False)
    host = enrolled(lab, client, "host", "box")
    queue_file(lab, "box")
    lease(client, host, "box")
    clock.time += 45
    assert len(outcomes.expire(lab.store)) == 1
    assert client.get(f"/v1/files/{HASH}", auth=host).status_code == 200  # its result would still count
    devices.register(lab.store, "host", [devices.get(lab.store, "box").device], boot_id="boot")
    jobs.cancel(lab.store, [job.id for job in jobs.live(lab.store)])
    assert client.get(f"/v1/files/{HASH}", auth=host).status_code == 403


@pytest.mark.parametrize(
    ("header", "status", "content"),
    [
        ("bytes=1000-", 206, CONTENT[1000:]),
        ("bytes=0-0", 206, CONTENT[:1]),
        ("bytes=-7", 206, CONTENT[-7:]),
        (f"bytes=5-{10**30}", 206, CONTENT[5:]),
        (f"bytes={len(CONTENT)}-", 416, None),
        ("bytes=9-1", 400, None),
        ("bytes=0-1,5-6", 200, CONTENT),  # several are not worth the trouble: all of it
        ("lines=1-2", 400, None),
    ],
)
def test_a_download_goes_on_where_it_broke_off(
    lab: Coordinator, client: TestClient, host: Auth, header: str, status: int, content: bytes | None
) -> None:
    queue_file(lab, "box")
    lease(client, host, "box")
    answer = client.get(f"/v1/files/{HASH}", headers={"Range": header}, auth=host)
    assert answer.status_code == status
    if content is not None:
        assert answer.content == content
    stale = {"Range": "bytes=1000-", "If-Range": f'"{key("before")}"'}
    assert client.get(f"/v1/files/{HASH}", headers=stale, auth=host).content == CONTENT


@pytest.mark.parametrize("name", ["short", "..%2F..%2Fetc%2Fpasswd", "%2e%2e/runners", "A" * 64, HASH + "0", "%00"])
def test_names_of_files_are_hashes_and_nothing_else(client: TestClient, host: Auth, name: str) -> None:
    assert client.get(f"/v1/files/{name}", auth=host).status_code in (403, 404)


def test_a_revoked_agent_is_out_soon(lab: Coordinator, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_api.SecretAccess, "FRESH_S", 0.0)
    host = enrolled(lab, client, "host", "box")
    assert lease(client, host, "box") is None
    agents.revoke(lab.store, "host")
    assert poll(client, host, "box").status_code == 401


def test_secrets_are_read_for_all_at_once(
    lab: Coordinator, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_api.SecretAccess, "FRESH_S", 3600.0)
    everybody = [lab.enrol(f"host-{number}") for number in range(3)]
    assert client.get("/v1/runners", auth=everybody[0]).status_code == 404
    monkeypatch.setattr(agents, "secret_hashes", None)  # would fail, were it asked again
    monkeypatch.setattr(agents, "authenticate", None)
    assert [client.get("/v1/runners", auth=auth).status_code for auth in everybody] == [404] * 3


def test_a_local_agent_cannot_come_over_the_network(lab: Coordinator, client: TestClient) -> None:
    agents.register_local(lab.store, "local")
    for secret in ("", "None", "x"):
        assert client.get("/v1/runners", auth=("local", secret)).status_code == 401
