"""`nas serve` as a process: what it says, how it ends, and that nothing is lost when it is killed."""

from __future__ import annotations

import signal
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path

import httpx
import pytest
from study_lab import LIMIT_S, Lab, finish

from nas.core.clock import SystemClock
from nas.core.device import Device
from nas.core.plan import Plan, PlanFile, Round, Runner
from nas.core.trust import Invitation
from nas.core.wire import EnrolReply, Job
from nas.infra.store import devices, jobs
from nas.infra.store.rows import JobState
from nas.infra.store.store import Store
from nas.infra.web.tls import Certificates
from nas.measure.farm.enrolment import invite
from nas.serve.api.serve import Address, last_address
from tests.support.waiting import until

PHONE = Device(id="phone", model="Phone", cpu="cpu", target="aarch64-android", cores=8, memory_mb=4096, os="Android")


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


@contextmanager
def serve(lab: Lab, *more: str) -> Iterator[tuple[subprocess.Popen[str], Address]]:
    (lab.home / "serve.json").unlink(missing_ok=True)
    with lab.start("serve", "--port", "0", *more) as process:
        until(lambda: process.poll() is not None or last_address(lab.home) is not None, LIMIT_S)
        address = last_address(lab.home)
        assert address is not None, process.communicate()
        try:
            yield process, address
        finally:
            if process.poll() is None:
                process.kill()


@pytest.fixture
def clients() -> Iterator[ExitStack]:
    """Closes them."""
    with ExitStack() as stack:
        yield stack


def enrol(invitation: Invitation, name: str, clients: ExitStack) -> httpx.Client:
    """What an agent does first: it believes the CA whose fingerprint it was told, and no other."""
    pem = httpx.get(f"{invitation.url}/v1/ca", verify=False, timeout=60).text
    assert sha256(ssl.PEM_cert_to_DER_cert(pem)).hexdigest() == invitation.ca_sha256
    trust = ssl.create_default_context(cadata=pem)
    client = clients.enter_context(httpx.Client(base_url=invitation.url, verify=trust, timeout=60))
    answer = client.post("/v1/agents/enrol", json={"token": invitation.token, "agent": name})
    reply = EnrolReply.model_validate_json(answer.content)
    client.auth = httpx.BasicAuth(name, reply.secret)
    body = {"agent": name, "devices": [PHONE.model_dump(mode="json")], "boot_id": "boot"}
    assert client.post("/v1/agents/register", json=body).status_code == 200
    return client


def queue(store: Store) -> str:
    runner = Runner(runtime="r", build="b", target="t", files={"run": PlanFile(sha256="0" * 64, size=1)}, main="run")
    plan = Plan(runner=runner, inputs={}, args=(), deadline_s=1)
    return jobs.enqueue(store, "1" * 64, Round(candidate=plan, repetitions=1), device="phone").id


def take(client: httpx.Client, wait_s: float = 20.0) -> Job | None:
    answer = client.post("/v1/lease", json={"agent": "host", "device": "phone", "wait_s": wait_s})
    assert answer.status_code == 200, answer.text
    body = answer.json()["job"]
    return Job.model_validate(body) if body else None


def hand_in(client: httpx.Client, job: Job) -> bool:
    body = {"agent": "host", "device": "phone", "epoch": job.epoch, "result": {"pairs": []}}
    answer = client.post(f"/v1/jobs/{job.id}/result", json=body)
    assert answer.status_code == 200, answer.text
    return bool(answer.json()["accepted"])


def test_it_serves_this_machine_and_others_until_it_is_told_to_stop(lab: Lab, clients: ExitStack) -> None:
    with serve(lab) as (process, address):
        store = lab.store()
        until(lambda: any(row.agent.startswith("local-") for row in devices.all(store)), LIMIT_S)
        client = enrol(invite(store, lab.home, address.url), "host", clients)
        start = time.monotonic()
        id = queue(store)  # by this process, not by the one that serves
        job = take(client)
        assert job is not None
        assert job.id == id
        assert hand_in(client, job)
        hasty = httpx.Timeout(60, read=0.2)
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/lease", json={"agent": "host", "device": "phone", "wait_s": 20}, timeout=hasty)
        process.send_signal(signal.SIGTERM)
        done = finish(process)
        assert time.monotonic() - start < 60
    assert address.url in done.stdout
    assert address.ca_sha256 in done.stdout
    assert "nas agent enrol" in done.stderr
    assert f"the dashboard is at {address.url}" in done.stderr
    assert "uvicorn" not in done.stderr
    with pytest.raises(httpx.ConnectError):
        take(client)


def test_a_killed_one_comes_back_as_it_was(lab: Lab, clients: ExitStack) -> None:
    with serve(lab) as (process, before):
        store = lab.store()
        client = enrol(invite(store, lab.home, before.url), "host", clients)
        id = queue(store)
        job = take(client)
        assert job is not None
        process.kill()
        process.communicate()
    held = jobs.get(store, id)
    with serve(lab) as (process, after):
        assert after.ca_sha256 == before.ca_sha256
        extended = jobs.get(store, id)
        assert held is not None
        assert extended is not None
        assert extended.state is JobState.LEASED
        assert (extended.lease_until or 0) > (held.lease_until or 0)
        # The agent has only its address to change: certificate, secret and lease are as before.
        client.base_url = httpx.URL(after.url)
        assert hand_in(client, job)
        assert hand_in(client, job)
        assert jobs.live(store) == []


def test_people_have_a_port_with_the_operators_own_certificate(lab: Lab, tmp_path: Path) -> None:
    authority = Certificates(tmp_path / "own", SystemClock())
    file = str(authority.server(["localhost"]))
    with serve(lab, "--cert", file, "--key", file, "--web-port", "0") as (process, address):
        assert process.stdout is not None
        fields = dict(process.stdout.readline().split() for _ in ("url", "web"))
        trust = ssl.create_default_context(cadata=authority.ca_pem)
        with httpx.Client(base_url=fields["web"], verify=trust, timeout=60) as client:
            assert "token" in client.get("/login").text
            assert client.get("/v1/studies").status_code == 401
            for path in ("/v1/ca", "/v1/runners"):  # these are for agents
                assert client.get(path).status_code == 404
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            httpx.get(f"{address.url}/v1/ca", verify=trust, timeout=60)
        assert fields == {"url": address.url, "web": fields["web"]} and "localhost" in fields["web"]
        process.send_signal(signal.SIGTERM)
        done = finish(process)
    assert f"nas server add {fields['web']}" in done.stderr


def test_a_second_one_on_the_same_home_is_refused(lab: Lab) -> None:
    with serve(lab) as (_, address):
        refused = lab.run("serve", "--port", "0", code=4)
        assert f"runs already at {address.url}" in refused.stderr


def test_what_cannot_be_served_is_told(lab: Lab) -> None:
    assert "neither a host name nor an IP address" in lab.run("serve", "--port", "0", "--name", "a b", code=3).stderr
    assert "cannot listen on 192.0.2.77" in lab.run("serve", "--host", "192.0.2.77", code=4).stderr
