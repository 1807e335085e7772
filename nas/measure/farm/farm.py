"""The devices that one process can use: the job API on a Unix socket, this machine's agent, and names of devices."""

from __future__ import annotations

import fcntl
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from nas.core.device import Device
from nas.core.errors import InfrastructureFailed, InvalidInput, NasError, UnknownName
from nas.core.logs import bound_log
from nas.core.plan import Runner
from nas.infra.store import agents, artifacts, devices, jobs
from nas.infra.store.devices import LIMITS
from nas.infra.store.rows import DeviceState, Health
from nas.infra.store.store import Store
from nas.infra.web.server import Server, listen_unix
from nas.measure.devices.agent.agent import child_arguments, local_agent_name
from nas.measure.devices.attachments import Attachment, Attachments, agent_cache, own_attachments
from nas.measure.devices.describe import boot_id, describe
from nas.measure.devices.host_lock import host_lock_folder
from nas.measure.devices.transports.local import LocalTransport
from nas.measure.farm.agent_api import POLL_S, make_app
from nas.measure.farm.queue import DeviceJobs, JobNotifier, LeaseMonitor
from nas.measure.farm.trust import Admissions, open_key
from nas.measure.runtimes.base import Runtime

LOCAL = "local"
"""Name of this machine as a device."""

TAG = "tag:"
_REGISTERS_WITHIN_S = 60.0
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0
_POLL_CHILD_S = 0.2
_STANDBY_S = 1.0
_SILENT_S = 1.5 * POLL_S
"""An agent that is alive asks for work more often."""
_STOP_S = 10.0

_QUICK_S = 10.0
"""A death within this time after the start is a quick one."""
_QUICK_DEATHS = 5
"""Consecutive quick deaths after which the agent is not started again."""


@dataclass
class Farm:
    """Devices that jobs can be run on.

    Args:
        store: where jobs and devices are.
        agent: of this machine.
        monitor: wakes agents and takes back expired leases.
        runners: what agents may run.
        attached: devices besides this machine that its agent serves.
        opened: time of the store before the agent was started.
    """

    store: Store
    agent: LocalAgent
    monitor: LeaseMonitor
    runners: Admissions
    attached: Attachments = field(default_factory=own_attachments)
    opened: float = 0.0

    @property
    def notifier(self) -> JobNotifier:
        """Notified when jobs are queued and when they end."""
        return self.monitor.notifier

    def device(self, name: str) -> Device:
        """Returns the device that `name` means: "local" is this machine; else an id, a prefix of one, or `tag:NAME`.

        Waits for a device that is attached to this machine until its agent has found it.

        Raises:
            UnknownName: no such device was ever registered, and none is attached here.
            InvalidInput: the name matches several devices.
            InfrastructureFailed: this machine's agent does not come up, or does not reach the device.
        """
        if name == LOCAL:
            return self._registered(this_machine().id, "this machine")
        attached = self.attached.read()
        id = find_name(name, known_devices(self.store, attached))
        for attachment in attached:
            if attachment.id == id:
                return self._registered(id, f"{id} ({attachment.address})")
        return devices.get(self.store, id).device

    def admit(self, runtime: Runtime, runner: Runner) -> None:
        """Allows agents to run this build."""
        self.runners.admit(runner, runtime.runner_folder(runner))

    def jobs(self, study: int | None) -> DeviceJobs:
        """Returns the job table as one study uses it; None: jobs of no study."""
        return DeviceJobs(self.store, study, self.notifier, self.agent.check)

    def find_file(self, sha256: str) -> Path | None:
        """Finds a runner's file or an artifact by content hash."""
        runner_file = self.runners.find_file(sha256)
        if runner_file is not None:
            return runner_file
        try:
            return artifacts.path(self.store, sha256)
        except NasError:
            return None

    def _registered(self, id: str, what: str) -> Device:
        recent, deadline = self.store.now() - LIMITS[DeviceState.IDLE], time.monotonic() + _REGISTERS_WITHIN_S
        while time.monotonic() < deadline:
            self.agent.check()
            # An earlier registration may be of an earlier launch's agent, and the device may have changed since; but an
            # agent that another launch keeps running does not register again.
            since = recent if self.agent.on_standby else max(recent, self.opened)
            for row in devices.all(self.store):
                if row.id == id and row.last_seen >= since and row.state is not DeviceState.OFFLINE:
                    return row.device
            time.sleep(0.05)
        raise InfrastructureFailed(
            f"this machine's agent did not register {what} within {_REGISTERS_WITHIN_S:.0f} s; see {self.agent.log}"
        )


class LocalAgent:
    """Keeps one agent process running.

    Args:
        socket: of the coordinator.
        cache: the agent's folder for files.
        lock: folder of the host lock.
        state: the agent's folder for its durable state.
        key: public key of the coordinator, which the agent pins.
        lock_file: the launch that holds its lock runs the agent.
        log: file for the agent's output.
        attachments: file with the devices that it serves besides this machine.
    """

    def __init__(
        self,
        socket: Path,
        *,
        cache: Path,
        lock: Path,
        state: Path,
        key: str,
        lock_file: Path,
        log: Path,
        attachments: Path | None = None,
    ) -> None:
        url = f"http+unix://{socket}"
        self._argv = [
            sys.executable,
            *child_arguments(url, cache=cache, lock=lock, state=state, key=key, devices=attachments),
        ]
        self._lock_file = lock_file
        self.log = log
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher = threading.Thread(target=self._watch, name="local-agent", daemon=True)
        self._failed: str | None = None
        self.on_standby = False
        """True if another launch over this database runs the agent."""

    def __enter__(self) -> Self:
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._watcher.join(2 * _STOP_S)

    @property
    def pid(self) -> int | None:
        """Process id of the running agent."""
        return self._process.pid if self._process else None

    def check(self) -> None:
        """Raises `InfrastructureFailed` if the agent cannot be kept running."""
        if self._failed:
            raise InfrastructureFailed(f"the device agent of this machine does not run: {self._failed}")

    def _watch(self) -> None:
        try:
            with self._lock_file.open("ab") as lock:
                while not self._stopping.is_set():
                    try:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        self.on_standby = True
                        self._stopping.wait(_STANDBY_S)
                    else:
                        self.on_standby = False
                        return self._keep_running()
        except OSError as error:
            self._failed = str(error)

    def _keep_running(self) -> None:
        deaths, pause = 0, _FIRST_PAUSE_S
        while not self._stopping.is_set():
            lived_s = self._run_once()
            quick = lived_s < _QUICK_S
            deaths, pause = (deaths + 1, min(pause * 2, _LONGEST_PAUSE_S)) if quick else (0, _FIRST_PAUSE_S)
            if deaths >= _QUICK_DEATHS:
                self._failed = f"it ended {deaths} times right after its start; see {self.log}"
                return
            self._stopping.wait(pause)

    def _run_once(self) -> float:
        """Runs the agent until it ends or this process stops it; returns the seconds it lived."""
        start = time.monotonic()
        # Its stdin is never written to: it closes when this process ends, in whatever way.
        with (
            self.log.open("ab") as log,
            subprocess.Popen(self._argv, stdin=subprocess.PIPE, stdout=log, stderr=log) as process,
        ):
            self._process = process
            while process.poll() is None:
                bound_log(self.log)
                if self._stopping.wait(_POLL_CHILD_S):
                    _end(process)
        return time.monotonic() - start


@contextmanager
def open_farm(store: Store, *, serves_others: bool = False) -> Iterator[Farm]:
    """Runs the job API and this machine's agent while the context is open.

    Args:
        store: where jobs and devices are.
        serves_others: whether agents of other hosts speak to this process, so that it takes back their leases, too.
    """
    home = store.artifacts.parent
    home.mkdir(parents=True, exist_ok=True)
    key = open_key(home)
    attached = own_attachments()
    local = local_agent_name(agent_cache())
    require_own_name(store, local, boot_id(LocalTransport(agent_cache())))
    # While no coordinator was running, agents could not renew their leases.
    jobs.extend_leases(store)
    with tempfile.TemporaryDirectory(prefix="hilnas-", ignore_cleanup_errors=True) as run:
        socket = Path(run) / "jobs.sock"
        agent = LocalAgent(
            socket,
            cache=agent_cache(),
            lock=host_lock_folder(),
            state=home / "agent",
            key=key.public,
            lock_file=agents.turn_file(store),  # an agent serves one database
            log=home / "agent.log",
            attachments=attached.path,
        )
        monitor = LeaseMonitor(store, JobNotifier(), agent=None if serves_others else local)
        farm = Farm(store, agent, monitor, Admissions(home, key, store.clock), attached, store.now())
        app = make_app(store, farm.find_file, farm.monitor.notifier, farm.runners.signed)
        with Server(app, listen_unix(socket)), farm.monitor, agent:
            try:
                yield farm
            finally:
                farm.notifier.close()


def require_own_name(store: Store, agent: str, boot: str) -> None:
    """Raises `InvalidInput` where another machine that is alive has registered as this machine's agent.

    Copies of one disk image share /etc/machine-id, from which the names of device and agent follow; over one database
    they would take each other's leases. Waits for up to `_SILENT_S` where this machine was just restarted.
    """
    heard: float | None = None
    deadline = store.clock.monotonic() + _SILENT_S  # the database's times may be ahead of this machine's clock
    while True:
        row = next((agent_row for agent_row in agents.all(store) if agent_row.name == agent), None)
        if row is None or row.boot_id in (None, boot) or row.last_seen is None:
            return
        heard = row.last_seen if heard is None else heard
        if row.last_seen > heard:
            raise InvalidInput(
                f"another machine uses this database as {agent}: copies of one disk image share /etc/machine-id, by "
                "which hilnas tells devices apart. Give this machine its own: remove that file and run "
                "systemd-machine-id-setup"
            )
        if store.now() >= heard + _SILENT_S or store.clock.monotonic() >= deadline:
            return
        store.clock.sleep(_FIRST_PAUSE_S)


def this_machine() -> Device:
    """Returns the description of this machine as a device."""
    return describe(LocalTransport(agent_cache()), platform.machine())


def known_devices(store: Store | None, attached: Iterable[Attachment]) -> dict[str, tuple[str, ...]]:
    """Returns id -> tags of registered devices that were not removed, and of those attached to this host.

    Args:
        store: the database; None: there is none yet.
        attached: to this host.
    """
    registered: dict[str, tuple[str, ...]] = {}
    if store is not None:
        labels = devices.labels(store)
        for row in devices.all(store):
            if row.health is not Health.RETIRED:
                registered[row.id] = (*row.device.tags, *(labels[row.id].tags if row.id in labels else ()))
    return registered | {
        attachment.id: (*attachment.tags, *registered.get(attachment.id, ()))
        for attachment in attached
        if attachment.id is not None
    }


def find_name(name: str, devices: Mapping[str, Collection[str]], *, where: str | None = None) -> str:
    """Returns the id of the device that a name means: an id, a prefix of only one, or `tag:NAME` of only one.

    `devices` maps ids to tags; `where` is the source of the name, for messages.

    Raises:
        UnknownName: it matches no device.
        InvalidInput: it matches several.
    """
    if name in devices:
        return name
    if name.startswith(TAG):
        tag = name.removeprefix(TAG)
        meant = [id for id, tags in devices.items() if tag in tags]
        if not meant:
            raise UnknownName("tag of a device", tag, set().union(*devices.values()), where=where)
    else:
        meant = [id for id in devices if name and id.startswith(name)]
        if not meant:
            raise UnknownName("device", name, [LOCAL, *devices], where=where)
    if len(meant) > 1:
        raise InvalidInput(f"device {name!r} may be any of {', '.join(sorted(meant))}: name one of them", where=where)
    return meant[0]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
