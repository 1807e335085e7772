"""A coordinator on a port of this machine with only the API of agents: no agent, no launch."""

from __future__ import annotations

import hashlib
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from nas.core.plan import Plan, PlanFile, Round, Runner
from nas.core.trust import Invitation
from nas.infra.store import devices, jobs
from nas.infra.store.rows import DeviceRow, DeviceState, JobRow
from nas.infra.store.store import Store
from nas.infra.web.server import Server, listen_tcp, web_app
from nas.infra.web.tls import Certificates
from nas.measure.farm import agent_api, enrolment
from nas.measure.farm.agent_api import SecretAccess
from nas.measure.farm.queue import JobNotifier, LeaseMonitor
from nas.measure.farm.trust import Admissions, open_key


class TlsCoordinator:
    """Serves while the context is open.

    Args:
        home: its folder; created.
        name: host name in its certificate.
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
            monitor = LeaseMonitor(self.store, JobNotifier(), agent=None)
            self._notifier = monitor.notifier
            self._admissions = Admissions(self.home, open_key(self.home), self.store.clock)
            find_file, manifest = self._admissions.find_file, self._admissions.signed
            app = web_app()
            app.include_router(enrolment.router(self.store, self.home, certificates, access.forget))
            app.include_router(agent_api.router(self.store, find_file, monitor.notifier, manifest, access))
            listening = stack.enter_context(listen_tcp("127.0.0.1", 0))
            self.url = f"https://127.0.0.1:{listening.getsockname()[1]}"
            stack.enter_context(Server(app, listening, certificates.context([self._name])))
            stack.enter_context(monitor)
            stack.callback(self._notifier.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def invite(self, name: str | None = None) -> Invitation:
        """Returns an invitation, as `nas agent token` prints it."""
        return enrolment.invite(self.store, self.home, self.url, name)

    def online(self) -> dict[str, DeviceRow]:
        """Returns devices that are not offline, by transport."""
        rows = (row for row in devices.all(self.store) if row.state is not DeviceState.OFFLINE)
        return {row.device.transport: row for row in rows}

    def queue(self, device: str, name: str, script: str) -> str:
        """Queues a job that runs a shell script; returns its id."""
        content = f"#!/bin/sh\n{script}\n".encode()
        sha256 = hashlib.sha256(content).hexdigest()
        (self.home / name).write_bytes(content)
        files = {name: PlanFile(sha256=sha256, size=len(content))}
        runner = Runner(runtime="script", build=sha256, target="x86_64-linux", files=files, main=name)
        self._admissions.admit(runner, self.home)
        round_ = Round(candidate=Plan(runner=runner, inputs={}, args=(), deadline_s=100), repetitions=1)
        id = jobs.enqueue(self.store, sha256, round_, device=device).id
        self._notifier.notify()
        return id

    def wait_for(self, id: str, within_s: float = 60.0) -> JobRow:
        """Waits for a job's end and returns it."""
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            row = jobs.get(self.store, id)
            assert row is not None
            if row.state not in jobs.LIVE:
                return row
            time.sleep(0.05)
        raise AssertionError(f"job {id} did not end within {within_s:g} s")
