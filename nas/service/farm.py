"""The devices of one process: the job API on a Unix socket, and this machine's agent."""

from __future__ import annotations

import os
import platform
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nas.core import paths
from nas.core.device import Device
from nas.core.errors import InfrastructureFailed, NasError, UnknownName
from nas.core.plan import Runner
from nas.devices.describe import describe
from nas.devices.transports.local import LocalTransport
from nas.runtimes.base import Runtime
from nas.service.admissions import Admissions
from nas.service.coordinator import Server, listen_unix
from nas.service.device_jobs import DeviceJobs
from nas.service.doorbell import Doorbell
from nas.service.jobs_api import make_app
from nas.service.local_agent import LocalAgent
from nas.service.signing import open_key
from nas.service.watch import Watch
from nas.store import artifacts, devices, outcomes
from nas.store.store import Store

LOCAL = "local"
_REGISTERS_WITHIN_S = 60.0


@dataclass
class Farm:
    """Devices that jobs can be run on.

    Args:
        store: where jobs and devices are.
        agent: of this machine.
        doorbell: rung when jobs are queued and when they end.
        runners: what agents may run.
    """

    store: Store
    agent: LocalAgent
    doorbell: Doorbell
    runners: Admissions

    def device(self, name: str) -> Device:
        """The device a space calls `name`; "local" is this machine.

        Raises:
            UnknownName: no such device was ever registered.
            InfrastructureFailed: this machine's agent does not come up.
        """
        if name == LOCAL:
            return self._local()
        known = {row.id: row.device for row in devices.all(self.store)}
        if name not in known:
            raise UnknownName("device", name, [LOCAL, *known])
        return known[name]

    def admit(self, runtime: Runtime, runner: Runner) -> None:
        """Lets agents run this build."""
        self.runners.admit(runner, runtime.runner_folder(runner))

    def jobs(self, study: int | None) -> DeviceJobs:
        """The job table, for one study or for none."""
        return DeviceJobs(self.store, study, self.doorbell, self.agent.check)

    def find_file(self, sha256: str) -> Path | None:
        """A runner's file or an artifact, by content."""
        runner_file = self.runners.find_file(sha256)
        if runner_file is not None:
            return runner_file
        try:
            return artifacts.path(self.store, sha256)
        except NasError:
            return None

    def _local(self) -> Device:
        here = describe(LocalTransport(agent_cache()), platform.machine()).id
        begun, deadline = self.store.now(), time.monotonic() + _REGISTERS_WITHIN_S
        while time.monotonic() < deadline:
            self.agent.check()
            for row in devices.all(self.store):
                # An older word is of an earlier launch's agent, and the machine may have changed since.
                if row.id == here and row.last_seen >= begun:
                    return row.device
            time.sleep(0.05)
        raise InfrastructureFailed(
            f"this machine's agent did not register within {_REGISTERS_WITHIN_S:.0f} s; see {self.agent.log}"
        )


@contextmanager
def open_farm(store: Store, *, serves_others: bool = False) -> Iterator[Farm]:
    """The job API and this machine's agent, while the context is open.

    Args:
        store: where jobs and devices are.
        serves_others: whether the agents of other hosts speak to this process, so that it ends their leases.
    """
    run = Path(tempfile.mkdtemp(prefix="hilnas-"))
    home = store.artifacts.parent
    home.mkdir(parents=True, exist_ok=True)
    doorbell = Doorbell()
    socket, key = run / "jobs.sock", open_key(home)
    # While no coordinator was up, agents could not renew: that is no failure of theirs.
    outcomes.extend_leases(store)
    agent = LocalAgent(
        socket,
        cache=agent_cache(),
        lock=host_lock_folder(),
        state=home / "agent",
        key=key.public,
        turn=home / "agent.turn",
        log=home / "agent.log",
    )
    farm = Farm(store, agent, doorbell, Admissions(home, key, store.clock))
    try:
        app = make_app(store, farm.find_file, doorbell, farm.runners.signed)
        with Server(app, listen_unix(socket)), Watch(store, doorbell, local_only=not serves_others), agent:
            try:
                yield farm
            finally:
                doorbell.close()
    finally:
        shutil.rmtree(run, ignore_errors=True)


def host_lock_folder() -> Path:
    """One per user and machine, whatever database or temporary folder a launch uses.

    Raises:
        InfrastructureFailed: somebody else has taken the folder's name.
    """
    session = Path(f"/run/user/{os.getuid()}")
    folder = session / "hilnas" if session.is_dir() else Path(f"/tmp/hilnas-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise InfrastructureFailed(f"{folder} belongs to somebody else; remove it, or have it removed")
    return folder


def agent_cache() -> Path:
    """Where this machine's agent keeps files."""
    return paths.cache() / "agent"
