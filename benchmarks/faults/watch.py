"""Observes the runners on the devices from this host: none may be alive 5 s after its deadline."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from device_lab import Machine

LATEST_S = 5.0
"""A run may last so long after its deadline on the device."""

_LOOK_S = 0.2
_UNKNOWN_LIMIT_S = 120.0
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Run:
    """A runner's session.

    Args:
        tag: of its job, if known.
        limit_s: its deadline.
        born: start time, in seconds since boot.
    """

    tag: str | None
    limit_s: float
    born: float


class Watch:
    """Polls all machines while the context is open.

    A process belongs to a run if it holds the device's lock, which runners and all that they start inherit.

    Args:
        machines: device id -> machine.
    """

    def __init__(self, machines: Mapping[str, Machine]) -> None:
        self._names = {_space(machine.init): device for device, machine in machines.items()}
        self._sessions: dict[tuple[str, int], Run] = {}
        self._live_sessions: frozenset[tuple[str, int]] = frozenset()
        self._late: dict[tuple[str, int], str] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def runs(self, tag: str) -> bool:
        """Returns whether a run of that job is alive."""
        return any(self._sessions[session].tag == tag for session in self._live_sessions)

    def quiet(self) -> bool:
        """Returns whether nothing runs on any machine."""
        return not self._live_sessions

    def run_count(self, tag: str) -> int:
        """Returns the number of observed runs of that job."""
        return sum(run.tag == tag for run in list(self._sessions.values()))

    def take_late(self) -> list[str]:
        """Returns runs found alive too late since the last call."""
        late = list(self._late.values())
        self._late = dict.fromkeys(self._late, "")
        return [line for line in late if line]

    def _look(self) -> None:
        while not self._stop.wait(_LOOK_S):
            now = time.clock_gettime(time.CLOCK_BOOTTIME)
            live_sessions = set()
            for device, pid in self._runners():
                with contextlib.suppress(OSError, ValueError):
                    live_sessions.add(self._note(device, pid))
            self._live_sessions = frozenset(live_sessions)
            for session in live_sessions - self._late.keys():
                run = self._sessions[session]
                over = now - run.born - run.limit_s
                if over > LATEST_S:
                    self._late[session] = f"{session[0]}: run {run.tag} is there {over:.1f} s after its deadline"

    def _runners(self) -> Iterator[tuple[str, int]]:
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                device = self._names.get(str((entry / "ns/pid").readlink()))
                if device and (entry / "fd/9").readlink().name == "lock":
                    yield device, int(entry.name)

    def _note(self, device: str, pid: int) -> tuple[str, int]:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        session, born = (device, int(words[3])), int(words[19]) / _TICKS
        options = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
        tag = options[options.index("--tag") + 1] if "--tag" in options else None
        limit_s = float(options[options.index("--limit") + 1]) if tag else _UNKNOWN_LIMIT_S
        run = self._sessions.setdefault(session, Run(tag, limit_s, born))
        if tag and run.tag is None:
            self._sessions[session] = Run(tag, limit_s, min(born, run.born))
        return session


def _space(pid: int) -> str:
    return str(Path(f"/proc/{pid}/ns/pid").readlink())
