"""The farm of the campaign: a coordinator on its own network, an agent, and machines with sshd and adbd."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from device_lab import Link, Machine, adbd, sshd, wired, within

from faults.disk import Disk, database, mounted
from faults.restarting import RestartedProcess
from faults.runtime import plugin
from nas.core.clock import SystemClock
from nas.core.trust import Invitation
from nas.infra.store import devices
from nas.infra.store.engine import ServerClock, sqlite_file
from nas.infra.store.rows import DeviceState
from nas.infra.store.store import Store
from nas.measure.devices.agent.client import JobClient
from nas.measure.devices.agent.trust import Enrolment, read_enrolment
from nas.measure.devices.attachments import Attachment, Attachments
from nas.measure.devices.transports.adb import AdbWire
from nas.measure.devices.transports.adb_device import AdbKey
from nas.measure.devices.transports.shell import ShellTransport
from nas.measure.devices.transports.ssh import SshAddress, SshWire, host_key, pin
from nas.measure.farm.trust import Admissions, open_key

NAS = (sys.executable, "-c", "from nas.cli.main import main; main()")
AGENT = "campaign"
ADBD = "adbd-auth"
PORT = 7711
MEGABITS = 40
"""Of every wire, so that transfers take long enough to be hit."""

_START_S = 300.0


@dataclass(frozen=True)
class Post:
    """A device of the stage.

    Args:
        id: of the device at the coordinator.
        machine: of the device.
        keys: of the agent.
        folder: of hilnas' files there, from its root.
        session: arguments that identify the process of a connection.
        daemon: arguments that identify that process and the listening one.
    """

    id: str
    machine: Machine
    keys: Path
    folder: str
    session: str
    daemon: str

    @property
    def files(self) -> Path:
        """The folder's path on this host."""
        return self.machine.root / self.folder

    def transport(self) -> ShellTransport:
        """Returns a transport of its own, with the agent's keys."""
        if self.session == ADBD:
            return ShellTransport(AdbWire(f"adb:{self.machine.address}:{self.machine.port}", self.keys))
        return ShellTransport(SshWire(SshAddress("root", self.machine.address, self.machine.port), self.keys))


class WrongClock(SystemClock):
    """A machine's clock that is wrong by `ahead_s` seconds."""

    def __init__(self, ahead_s: float) -> None:
        self._ahead_s = ahead_s

    def now(self) -> float:
        return super().now() + self._ahead_s


@dataclass(frozen=True)
class Stage:
    """The running farm."""

    store: Store
    url: str
    posts: list[Post]
    coordinator: RestartedProcess
    coordinator_link: Link
    agent: RestartedProcess
    agent_cache: Path
    clock_file: Path
    disk: Disk
    enrolment: Enrolment
    turn: threading.Lock
    """Held by a fault that concerns all devices: one at a time."""

    def client(self) -> JobClient:
        """Returns a client of the coordinator with the agent's secret."""
        return self.enrolment.client()

    def set_clock(self, offset_s: float) -> None:
        """Sets the offset of the agent's wall clock."""
        set_offset(self.clock_file, offset_s)

    @contextlib.contextmanager
    def other_host(self, ahead_s: float) -> Iterator[Store]:
        """Opens the database as a host whose clock is wrong; with SQLite as another process of this host."""
        clock = ServerClock(WrongClock(ahead_s)) if sqlite_file(self.store.engine.url) is None else None
        store = Store.open(self.url, clock=clock, artifacts=self.store.artifacts)
        try:
            yield store
        finally:
            store.close()

    @contextlib.contextmanager
    def copied_agent(self) -> Iterator[None]:
        """Runs a second agent with a copy of the first one's enrolment, name and list of devices."""
        folder = self.clock_file.parent
        with tempfile.TemporaryDirectory(prefix="copy-", dir=folder) as copy:
            left_out = shutil.ignore_patterns("outbox")
            shutil.copytree(folder / "agent", Path(copy) / "agent", ignore=left_out)
            env = os.environ | {"NAS_HOME": str(Path(copy) / "agent"), "NAS_CACHE": str(Path(copy) / "cache")}
            env |= {"NAS_LOCK": str(folder / "lock")}
            with RestartedProcess([*NAS, "agent", "run"], env, Path(copy) / "agent.log"):
                yield

    def until_serving(self) -> None:
        """Waits until a killed coordinator serves again, since agents report its absence until then."""
        assert within(_START_S, lambda: _listens(self.coordinator_link)), "the coordinator did not come back"

    def all_idle(self) -> bool:
        """Returns whether every device is reachable and idle."""
        rows = {row.id: row for row in devices.all(self.store)}
        return all(post.id in rows and rows[post.id].state is DeviceState.IDLE for post in self.posts)


@contextlib.contextmanager
def stage(folder: Path, machines: int, kind: str = "sqlite") -> Iterator[Stage]:
    """Sets everything up."""
    keys, clock = folder / "agent" / "keys", folder / "clock"
    set_offset(clock, 0.0)
    with contextlib.ExitStack() as stack:
        scratch = folder / "machines"
        shutil.rmtree(scratch, ignore_errors=True)  # of the run that is resumed
        booted = [stack.enter_context(_machine(scratch / str(i), keys, i)) for i in range(machines)]
        link = stack.enter_context(wired())
        for wire in (*booted, link):
            wire.slow(MEGABITS)
        home = folder / "coordinator"
        folder.chmod(0o711)  # a database server's user enters it
        stack.enter_context(mounted(folder / "coordinator.disk", home))
        url, disk = stack.enter_context(database(home, kind))
        store = Store.open(url, artifacts=home / "artifacts")
        stack.callback(store.close)
        coordinator = stack.enter_context(start_coordinator(folder, link, url))
        enrolment = enrol(folder, link, url)
        attached = folder / "agent" / "agent" / "devices.json"
        attached.unlink(missing_ok=True)
        for i, machine in enumerate(booted):
            Attachments(attached).add(_attachment(machine, keys, i))
        agent = stack.enter_context(start_agent(folder, _shim(folder), clock))
        ids = _registered(store, machines)
        posts = [_post(machine, keys, ids[_tag(i)], i) for i, machine in enumerate(booted)]
        cache = folder / "cache" / "agent"
        yield Stage(store, url, posts, coordinator, link, agent, cache, clock, disk, enrolment, threading.Lock())


def start_coordinator(folder: Path, link: Link, url: str) -> RestartedProcess:
    """Starts `nas serve` at the far end of `link`."""
    paths = os.pathsep.join([*plugin(folder / "plugin"), os.environ.get("PYTHONPATH", "")])
    # A cache of its own: no other runtime has a build there, so devices are checked with the campaign's.
    env = {"NAS_HOME": str(folder / "coordinator"), "NAS_CACHE": str(folder / "builds"), "PYTHONPATH": paths}
    env |= {"NAS_DB": url, "NAS_LOCK": str(folder / "lock")}
    argv = [*link.inside, *NAS, "serve", "--host", link.address, "--port", str(PORT)]
    return RestartedProcess(argv, os.environ | env, folder / "coordinator.log")


def enrol(folder: Path, link: Link, url: str) -> Enrolment:
    """Enrols the agent with an invitation of the coordinator."""
    coordinator, agent = (os.environ | {"NAS_HOME": str(folder / name)} for name in ("coordinator", "agent"))
    enrolment = read_enrolment(folder / "agent" / "agent")
    if enrolment is not None and enrolment.url == f"https://{link.address}:{PORT}":
        return enrolment
    assert within(_START_S, lambda: _listens(link)), f"no coordinator: see {folder / 'coordinator.log'}"
    line = _output([*NAS, "agent", "token", "--json"], coordinator | {"NAS_DB": url})
    invitation = Invitation.parse(json.loads(line)["line"])
    _output([*NAS, "agent", "enrol", invitation.format(), "--name", AGENT, "--replace"], agent)
    enrolment = read_enrolment(folder / "agent" / "agent")
    assert enrolment is not None, "enrolment left no trace"
    return enrolment


def start_agent(folder: Path, shim: Path, clock: Path) -> RestartedProcess:
    """Starts `nas agent run` with an adjustable wall clock."""
    env = {"NAS_HOME": str(folder / "agent"), "NAS_CACHE": str(folder / "cache"), "NAS_LOCK": str(folder / "lock")}
    env |= {"LD_PRELOAD": str(shim), "CLOCK_OFFSET": str(clock)}
    return RestartedProcess([*NAS, "agent", "run"], os.environ | env, folder / "agent.log")


def admissions(store: Store) -> Admissions:
    """Returns the admissions of runners in the coordinator's home."""
    home = store.artifacts.parent
    return Admissions(home, open_key(home), SystemClock())


def set_offset(file: Path, seconds: float) -> None:
    """Sets the offset that `clock.c` reads."""
    file.touch()
    with file.open("r+b") as out:
        out.write(struct.pack("d", seconds))


@contextlib.contextmanager
def _machine(folder: Path, keys: Path, number: int) -> Iterator[Machine]:
    if _is_phone(number):
        with adbd(folder, AdbKey.load(keys / "adb").public(), setup=_identity(number)) as machine:
            yield machine
    else:
        with sshd(folder, keys, setup=_identity(number)) as machine:
            yield machine


def _identity(number: int) -> str:
    """Returns commands that give a machine ids of its own.

    With this host's boot id, the agent would take it for this host: it would measure on one machine at a time, and
    only while nothing else on this host trains or measures.
    """
    boot = f"00000000-0000-4000-8000-{number + 1:012x}"
    return f"""
printf %032x {number + 1} >etc/machine-id
echo {boot} >etc/boot-id
mount --bind etc/boot-id proc/sys/kernel/random/boot_id
"""


def _is_phone(number: int) -> bool:
    return number % 2 == 1


def _attachment(machine: Machine, keys: Path, number: int) -> Attachment:
    """Returns the machine's address, pinned as by `nas device add`."""
    tags = (_tag(number),)
    if _is_phone(number):
        return Attachment(address=f"adb:{machine.address}:{machine.port}", tags=tags)
    address = SshAddress("root", machine.address, machine.port)
    pin(address, host_key(address), keys)
    return Attachment(address=str(address), tags=tags)


def _tag(number: int) -> str:
    return f"lab-{number}"


def _post(machine: Machine, keys: Path, id: str, number: int) -> Post:
    if _is_phone(number):
        return Post(id, machine, keys, AdbWire.folder.lstrip("/"), session=ADBD, daemon=ADBD)
    return Post(id, machine, keys, f"root/{SshWire.folder}", session="sshd-session", daemon="sshd")


def _registered(store: Store, count: int) -> dict[str, str]:
    """Returns tag -> device id, once all devices are registered."""
    begun = time.time()

    def named() -> dict[str, str]:
        there = [row for row in devices.all(store) if row.last_seen >= begun]
        return {tag: row.id for row in there for tag in row.device.tags}

    assert within(_START_S, lambda: len(named()) == count), f"devices that registered: {named()}"
    return named()


def _shim(folder: Path) -> Path:
    built = folder / "clock.so"
    source = Path(__file__).with_name("clock.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", str(built), str(source)], check=True)
    return built


def _output(argv: list[str], env: dict[str, str]) -> str:
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{argv[3:]}: {done.stderr}"
    return done.stdout


def _listens(link: Link) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((link.address, PORT), 1):
        return True
    return False
