"""A coordinator on a port of this machine with all that agents talk to, and nothing else: no agent, no launch."""

from __future__ import annotations

import hashlib
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from nas.core.enrolment import Invitation
from nas.core.plan import Plan, PlanFile, Round, Runner
from nas.service import enrolling, jobs_api
from nas.service.admissions import Admissions
from nas.service.agent_access import SecretAccess
from nas.service.coordinator import Server, listen_tcp
from nas.service.doorbell import Doorbell
from nas.service.signing import open_key
from nas.service.tls import Certificates
from nas.service.watch import Watch
from nas.service.web import web_app
from nas.store import devices, jobs
from nas.store.rows import DeviceRow, DeviceState, JobRow
from nas.store.store import Store


class TlsCoordinator:
    """Serves while the context is open.

    Args:
        home: its folder; made.
        name: what its certificate is good for.
    """

    def __init__(self, home: Path, name: str = "127.0.0.1") -> None:
        home.mkdir()
        self.home, self._name = home, name
        self.url = ""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.store = Store.open(f"sqlite:///{self.home}/db", artifacts=self.home / "artifacts")
            stack.callback(self.store.close)
            certificates, access = Certificates(self.home, self.store.clock), SecretAccess(self.store)
            watch = Watch(self.store, Doorbell(), local_only=False)
            self._bell = watch.doorbell
            self._admissions = Admissions(self.home, open_key(self.home), self.store.clock)
            find_file, manifest = self._admissions.find_file, self._admissions.signed
            app = web_app()
            app.include_router(enrolling.router(self.store, self.home, certificates, access.forget))
            app.include_router(jobs_api.router(self.store, find_file, watch, manifest, access))
            listening = stack.enter_context(listen_tcp("127.0.0.1", 0))
            self.url = f"https://127.0.0.1:{listening.getsockname()[1]}"
            stack.enter_context(Server(app, listening, certificates.context([self._name])))
            stack.enter_context(watch)
            stack.callback(self._bell.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def invite(self, name: str | None = None) -> Invitation:
        """What `nas agent token` prints."""
        return enrolling.invite(self.store, self.home, self.url, name)

    def online(self) -> dict[str, DeviceRow]:
        """Devices that can be reached, by transport."""
        rows = (row for row in devices.all(self.store) if row.state is not DeviceState.OFFLINE)
        return {row.device.transport: row for row in rows}

    def queue(self, device: str, name: str, script: str) -> str:
        """A job that runs a shell script; gives its id."""
        content = f"#!/bin/sh\n{script}\n".encode()
        sha256 = hashlib.sha256(content).hexdigest()
        (self.home / name).write_bytes(content)
        files = {name: PlanFile(sha256=sha256, size=len(content))}
        runner = Runner(runtime="script", build=sha256, target="x86_64-linux", files=files, main=name)
        self._admissions.admit(runner, self.home)
        round_ = Round(candidate=Plan(runner=runner, inputs={}, args=(), deadline_s=100), repetitions=1)
        id = jobs.enqueue(self.store, sha256, round_, device=device).id
        self._bell.ring()
        return id

    def ended(self, id: str, within_s: float = 60.0) -> JobRow:
        """The job after its end."""
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            row = jobs.get(self.store, id)
            assert row is not None
            if row.state not in jobs.LIVE:
                return row
            time.sleep(0.05)
        raise AssertionError(f"job {id} did not end within {within_s:g} s")
