"""The devices of one process: the job API on a Unix socket, and this machine's agent."""

from __future__ import annotations

import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from nas.core.device import Device
from nas.core.errors import InfrastructureFailed, NasError
from nas.core.plan import Runner
from nas.devices.attachments import Attachments
from nas.devices.describe import describe
from nas.devices.host import own_attachments
from nas.devices.places import agent_cache, host_lock_folder
from nas.devices.transports.local import LocalTransport
from nas.runtimes.base import Runtime
from nas.service.admissions import Admissions
from nas.service.coordinator import Server, listen_unix
from nas.service.device_jobs import DeviceJobs
from nas.service.device_names import LOCAL, find_name, known_devices
from nas.service.doorbell import Doorbell
from nas.service.jobs_api import make_app
from nas.service.local_agent import LocalAgent
from nas.service.own_files import OwnFiles
from nas.service.signing import open_key
from nas.service.watch import Watch
from nas.store import artifacts, devices, outcomes
from nas.store.rows import DeviceState
from nas.store.store import Store
from nas.store.timeouts import LIMITS

_REGISTERS_WITHIN_S = 60.0


@dataclass
class Farm:
    """Devices that jobs can be run on.

    Args:
        store: where jobs and devices are.
        agent: of this machine.
        watch: looks after the job table for this process.
        runners: what agents may run.
        attached: devices beside this machine that its agent serves.
        own_files: looks after what agents get from here.
    """

    store: Store
    agent: LocalAgent
    watch: Watch
    runners: Admissions
    attached: Attachments = field(default_factory=own_attachments)
    own_files: OwnFiles = field(init=False)

    def __post_init__(self) -> None:
        self.own_files = OwnFiles(self.store, self.find_file, self.doorbell.ring, host_lock_folder())

    @property
    def doorbell(self) -> Doorbell:
        """Rung when jobs are queued and when they end."""
        return self.watch.doorbell

    def device(self, name: str) -> Device:
        """The device a space calls `name`: "local" is this machine; else an id, the start of one, or `tag:NAME`.

        A device that is attached to this machine is waited for: its agent has to find it first.

        Raises:
            UnknownName: no such device was ever registered, and none is attached here.
            InvalidInput: several devices could be meant.
            InfrastructureFailed: this machine's agent does not come up, or does not reach the device.
        """
        if name == LOCAL:
            return self._registered(describe(LocalTransport(agent_cache()), platform.machine()).id, "this machine")
        attached = self.attached.read()
        id = find_name(name, known_devices(self.store, attached))
        for attachment in attached:
            if attachment.id == id:
                return self._registered(id, f"{id} ({attachment.address})")
        return devices.get(self.store, id).device

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

    def _registered(self, id: str, what: str) -> Device:
        begun, deadline = self.store.now(), time.monotonic() + _REGISTERS_WITHIN_S
        while time.monotonic() < deadline:
            self.agent.check()
            # An older word is of an earlier launch's agent, and the device may have changed since; but an agent that
            # another launch keeps running has nothing new to say before it asks for its next job.
            since = begun - LIMITS[DeviceState.IDLE].seconds if self.agent.stands_by else begun
            for row in devices.all(self.store):
                if row.id == id and row.last_seen >= since and row.state is not DeviceState.OFFLINE:
                    return row.device
            time.sleep(0.05)
        raise InfrastructureFailed(
            f"this machine's agent did not register {what} within {_REGISTERS_WITHIN_S:.0f} s; see {self.agent.log}"
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
    socket, key = run / "jobs.sock", open_key(home)
    attached = own_attachments()
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
        devices=attached.path,
    )
    watch = Watch(store, Doorbell(), local_only=not serves_others)
    farm = Farm(store, agent, watch, Admissions(home, key, store.clock), attached)
    try:
        app = make_app(store, farm.find_file, farm.watch, farm.runners.signed, farm.own_files.suspect)
        with Server(app, listen_unix(socket)), farm.watch, farm.own_files, agent:
            try:
                yield farm
            finally:
                farm.doorbell.close()
    finally:
        shutil.rmtree(run, ignore_errors=True)
