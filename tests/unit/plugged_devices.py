"""Devices with a plug, and a host that serves them to a coordinator in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nas.core.clock import SystemClock
from nas.core.errors import InfrastructureFailed, InvalidInput
from nas.measure.devices.agent.agent import Agent
from nas.measure.devices.agent.client import Downloads, JobClient
from nas.measure.devices.attachments import Attachment
from nas.measure.devices.files import ContentFolder
from nas.measure.devices.host_lock import HostLock
from nas.measure.devices.transports.base import CommandResult
from nas.measure.devices.transports.local import LocalTransport
from tests.support.fake_coordinator import FakeCoordinator

CPUINFO = "processor\t: 0\nmodel name\t: Fake {}\n"
A, B = (Attachment(address=f"ssh://u@{name}") for name in "ab")


class Phone(LocalTransport):
    """A device with a plug: what it is comes from files of its own, what it runs runs here."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder / f"cache-{name}", folder / f"root-{name}")
        self.plugged, self.running = True, threading.Event()
        self._root = folder / f"root-{name}"
        self.become(name)

    def become(self, name: str, boot: str = "1") -> None:
        """From now on, `name` answers."""
        files = {"proc/cpuinfo": CPUINFO.format(name), "proc/meminfo": "MemTotal: 1000000 kB\n"}
        files |= {"proc/sys/kernel/osrelease": "6.0\n", "proc/sys/kernel/random/boot_id": f"{name}-{boot}\n"}
        for path, text in (files | {"etc/machine-id": name}).items():
            (self._root / path).parent.mkdir(parents=True, exist_ok=True)
            (self._root / path).write_text(text)

    def connect(self) -> None:
        self._need_plug()

    def read_text(self, path: str) -> str:
        self._need_plug()
        return super().read_text(path)

    def read_many(self, paths: Sequence[str], commands: Sequence[str] = ()) -> dict[str, str | OSError]:
        self._need_plug()
        return super().read_many(paths, commands)

    def run(self, argv: Sequence[str], **options: Any) -> CommandResult:
        self.running.set()
        while self.plugged and argv[0].endswith("wait.sh"):
            threading.Event().wait(0.01)
        self._need_plug()
        return super().run(argv, **options)

    def _need_plug(self) -> None:
        if not self.plugged:
            raise InfrastructureFailed("no such device")


class Clockless(SystemClock):
    """The agent never asks for the time of day, so it may be anything."""

    def now(self) -> float:
        raise AssertionError("the time of day was asked for")


class Host:
    """An agent's host and its coordinator."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "served").mkdir()
        self.coordinator = FakeCoordinator(folder / "served")
        self.phones = {A.address: Phone(folder, "a"), B.address: Phone(folder, "b")}
        self.attached: list[Attachment] = [A, B]
        self.damaged = False
        self.running: list[tuple[Agent, threading.Thread]] = []

    def listed(self) -> tuple[Attachment, ...]:
        if self.damaged:
            raise InvalidInput("not a list of devices")
        return tuple(self.attached)

    def start(self) -> Agent:
        client = JobClient(self.coordinator.client())
        agent = Agent(
            "host",
            client,
            self.listed,
            lambda attachment: self.phones[attachment.address],
            Downloads(client, ContentFolder(self.folder / "files")),
            lambda runner: True,
            lock=HostLock(self.folder / "lock"),
            outbox=self.folder / "outbox",
            boot_id="b",
            clock=Clockless(),
        )
        self.running.append((agent, threading.Thread(target=agent.run)))
        self.running[-1][1].start()
        return agent

    def end(self) -> None:
        while self.running:
            agent, thread = self.running.pop()
            agent.abort()
            thread.join(30)
            assert not thread.is_alive()

    def offer(self, device: str, name: str, script: str = "exit 0", main: str = "main.sh") -> None:
        self.coordinator.offer_script(script, name, device, main)

    def serves(self, *names: str) -> Callable[[], bool]:
        """Returns whether exactly these devices are registered."""
        return lambda: {id.split("-")[1] for id in self.coordinator.serving()} == set(names)

    def id(self, name: str) -> str:
        return next(id for id in self.coordinator.serving() if id.startswith(f"fake-{name}-"))
