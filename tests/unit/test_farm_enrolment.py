"""How an agent gets in: the line that a person carries, and what becomes of one that is used twice or by another."""

from __future__ import annotations

import ssl
from hashlib import sha256
from pathlib import Path

import pytest
from farm_support import Coordinator
from fastapi.testclient import TestClient

from nas.core.errors import InvalidInput
from nas.core.trust import Invitation
from nas.infra.store import agents
from nas.measure.farm.enrolment import invite
from nas.measure.farm.trust import open_key

URL = "https://box:7711"


@pytest.fixture
def lab(tmp_path: Path) -> Coordinator:
    return Coordinator(tmp_path)


@pytest.fixture
def client(lab: Coordinator) -> TestClient:
    return TestClient(lab.app, raise_server_exceptions=False)


def test_an_invitation_enrols_one_agent(lab: Coordinator, client: TestClient) -> None:
    invitation = Invitation.parse(invite(lab.store, lab.home, URL).format())
    assert invitation.url == URL
    assert sha256(ssl.PEM_cert_to_DER_cert(client.get("/v1/ca").text)).hexdigest() == invitation.ca_sha256
    answer = client.post("/v1/agents/enrol", json={"token": invitation.token, "agent": "host"})
    assert answer.status_code == 200
    assert answer.json()["signing_key"] == open_key(lab.home).public
    assert answer.json()["authority"] == agents.authority(lab.store)
    assert client.get("/v1/runners", auth=("host", answer.json()["secret"])).status_code == 404  # let in; none there
    replayed = client.post("/v1/agents/enrol", json={"token": invitation.token, "agent": "thief"})
    assert replayed.status_code == 422
    assert "unknown, used or too old" in replayed.json()["error"]


def test_an_invitation_for_a_name_is_good_for_that_name(lab: Coordinator, client: TestClient) -> None:
    token = invite(lab.store, lab.home, URL, name="host").token
    assert client.post("/v1/agents/enrol", json={"token": token, "agent": "thief"}).status_code == 422
    assert client.post("/v1/agents/enrol", json={"token": token, "agent": "host"}).status_code == 200
    with pytest.raises(InvalidInput, match="no agent name"):
        invite(lab.store, lab.home, URL, name="../host")


def test_who_enrols_again_locks_out_the_old_secret_at_once(lab: Coordinator, client: TestClient) -> None:
    old = lab.enrol("host")
    assert client.get("/v1/runners", auth=old).status_code == 404
    token = agents.issue_token(lab.store, name="host")
    new = client.post("/v1/agents/enrol", json={"token": token, "agent": "host"}).json()["secret"]
    assert client.get("/v1/runners", auth=old).status_code == 401
    assert client.get("/v1/runners", auth=("host", new)).status_code == 404


def test_an_invitation_that_came_too_late_is_refused(lab: Coordinator, client: TestClient) -> None:
    token = invite(lab.store, lab.home, URL, ttl_s=-1).token
    assert client.post("/v1/agents/enrol", json={"token": token, "agent": "host"}).status_code == 422


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nonsense",
        b"\xff",
        b"[" * 3000,
        b'{"token": "", "agent": "host"}',
        b'{"token": "x", "agent": "../host"}',
        b'{"token": "x", "agent": "host", "more": 1}',
        b'{"token": "\\ud800", "agent": "host"}',
        b'{"token": "\\u0000", "agent": "host"}',
        b'{"token": "x", "agent": "host\\n"}',
        b'{"token": "' + b"x" * 8000 + b'", "agent": "host"}',
    ],
    ids=lambda body: body[:30].decode(errors="replace"),
)
def test_what_makes_no_sense_is_refused_politely(client: TestClient, body: bytes) -> None:
    answer = client.post("/v1/agents/enrol", content=body, headers={"Content-Type": "application/json"})
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.json()["error"]
