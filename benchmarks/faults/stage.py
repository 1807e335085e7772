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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

from device_lab import ACCOUNT, Link, Machine, account, adbd, board, sshd, wired, within

from benchmarks.faults.disk import Disk, database, mounted
from benchmarks.faults.restarting import RestartedProcess
from benchmarks.faults.runtime import plugin
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
PORT = 7711
MEGABITS = 40
"""Of every wire, so that transfers take long enough to be hit."""

_START_S = 300.0


class MachineKind(NamedTuple):
    """A kind of machine.

    Args:
        boot: starts a machine in a folder, with the agent's keys and setup commands.
        user: of ssh; None: adb.
        folder: of hilnas' files there, from its root.
        session: argument that identifies the process of a connection.
        daemon: argument that identifies that process and the listening one.
    """

    boot: Callable[[Path, Path, str], AbstractContextManager[Machine]]
    user: str | None
    folder: str
    session: str
    daemon: str


MACHINES = {
    "sshd": MachineKind(
        lambda folder, keys, setup: sshd(folder, keys, setup=setup),
        "root",
        f"root/{SshWire.folder}",
        "sshd-session",
        "sshd",
    ),
    "adbd": MachineKind(
        lambda folder, keys, setup: adbd(folder, AdbKey.load(keys / "adb").public(), setup=setup),
        None,
        AdbWire.folder.lstrip("/"),
        "adbd-auth",
        "adbd-auth",
    ),
    "board": MachineKind(
        lambda folder, keys, setup: board(folder, keys, setup=setup),
        "root",
        f"root/{SshWire.folder}",
        "dropbear",
        "dropbear",
    ),
    "account": MachineKind(
        lambda folder, keys, setup: account(folder, keys, setup=setup),
        ACCOUNT,
        f"home/{ACCOUNT}/{SshWire.folder}",
        "sshd-session",
        "sshd",
    ),
}


@dataclass(frozen=True)
class Post:
    """A device of the stage.

    Args:
        id: of the device at the coordinator.
        machine: of the device.
        keys: of the agent.
        kind: of the machine.
    """

    id: str
    machine: Machine
    keys: Path
    kind: MachineKind

    @property
    def files(self) -> Path:
        """The path of hilnas' folder on this host."""
        return self.machine.root / self.kind.folder

    def transport(self) -> ShellTransport:
        """Returns a transport of its own, with the agent's keys."""
        address = _address(self.machine, self.kind)
        wire = AdbWire(address, self.keys) if self.kind.user is None else SshWire(SshAddress.parse(address), self.keys)
        return ShellTransport(wire)


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
            left_out = shutil.ignore_patterns("outbox", ".*")  # files that are being written
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
def stage(
    folder: Path, machines: int, database_kind: str = "sqlite", kinds: Sequence[str] = ("sshd", "adbd")
) -> Iterator[Stage]:
    """Sets everything up; `kinds` are those of `MACHINES`, in turn."""
    keys, clock = folder / "agent" / "keys", folder / "clock"
    set_offset(clock, 0.0)
    with contextlib.ExitStack() as stack:
        scratch = folder / "machines"
        shutil.rmtree(scratch, ignore_errors=True)  # of the run that is resumed
        of_machine = [MACHINES[kind] for kind in islice(cycle(kinds), machines)]
        booted = [
            stack.enter_context(kind.boot(scratch / str(i), keys, _identity(i))) for i, kind in enumerate(of_machine)
        ]
        link = stack.enter_context(wired())
        for wire in (*booted, link):
            wire.slow(MEGABITS)
        home = folder / "coordinator"
        folder.chmod(0o711)  # a database server's user enters it
        stack.enter_context(mounted(folder / "coordinator.disk", home))
        url, disk = stack.enter_context(database(home, database_kind))
        store = Store.open(url, artifacts=home / "artifacts")
        stack.callback(store.close)
        coordinator = stack.enter_context(start_coordinator(folder, link, url))
        enrolment = enrol(folder, link, url)
        attached = folder / "agent" / "agent" / "devices.json"
        attached.unlink(missing_ok=True)
        for i, (machine, kind) in enumerate(zip(booted, of_machine, strict=True)):
            Attachments(attached).add(_attachment(machine, kind, keys, i))
        agent = stack.enter_context(start_agent(folder, _shim(folder), clock))
        ids = _registered(store, machines)
        posts = [
            Post(ids[_tag(i)], machine, keys, kind)
            for i, (machine, kind) in enumerate(zip(booted, of_machine, strict=True))
        ]
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


def _address(machine: Machine, kind: MachineKind) -> str:
    if kind.user is None:
        return f"adb:{machine.address}:{machine.port}"
    return str(SshAddress(kind.user, machine.address, machine.port))


def _attachment(machine: Machine, kind: MachineKind, keys: Path, number: int) -> Attachment:
    """Returns the machine's address, pinned as by `nas device add`."""
    address = _address(machine, kind)
    if kind.user is not None:
        parsed = SshAddress.parse(address)
        pin(parsed, host_key(parsed), keys)
    return Attachment(address=address, tags=(_tag(number),))


def _tag(number: int) -> str:
    return f"lab-{number}"


def _registered(store: Store, count: int) -> dict[str, str]:
    """Returns tag -> device id, once all devices are registered."""
    start = time.time()

    def named() -> dict[str, str]:
        rows = [row for row in devices.all(store) if row.last_seen >= start]
        return {tag: row.id for row in rows for tag in row.device.tags}

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
