"""The agent of this machine, as a child process of the launch: the same program that runs on a device host.

It dies with its parent: its stdin closes. Where it dies first, it is started again. Several launches over one database
share one agent: who holds the file lock runs it, the others stand by.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Self

from nas.core.errors import InfrastructureFailed
from nas.devices.child import child_arguments

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0
_LOOK_S = 0.2
_STAND_BY_S = 1.0
_STOP_S = 10.0
_QUICK_S, _QUICK_DEATHS = 10.0, 5
"""So many deaths in a row, each within so many seconds of the start, are not worth another try."""


class LocalAgent:
    """Keeps one agent process running.

    Args:
        socket: of the coordinator.
        cache: the agent's folder for files.
        lock: folder of the host lock.
        state: the agent's folder for what it must not forget.
        key: public key of the coordinator, which the agent pins.
        turn: file whose lock says which launch runs the agent.
        log: file for the agent's output.
        devices: list of the devices that it serves beside this machine.
    """

    def __init__(
        self, socket: Path, *, cache: Path, lock: Path, state: Path, key: str, turn: Path, log: Path,
        devices: Path | None = None,
    ) -> None:  # fmt: skip
        url = f"http+unix://{socket}"
        self._argv = [
            sys.executable, *child_arguments(url, cache=cache, lock=lock, state=state, key=key, devices=devices)
        ]  # fmt: skip
        self._turn = turn
        self.log = log
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher = threading.Thread(target=self._watch, name="local-agent", daemon=True)
        self._failed: str | None = None
        self.stands_by = False
        """Whether another launch over this database runs the agent."""

    def __enter__(self) -> Self:
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._watcher.join(2 * _STOP_S)

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        return self._process.pid if self._process else None

    def check(self) -> None:
        """Raises `InfrastructureFailed` where the agent cannot be kept running."""
        if self._failed:
            raise InfrastructureFailed(f"the device agent of this machine does not run: {self._failed}")

    def _watch(self) -> None:
        try:
            with self._turn.open("ab") as turn:
                while not self._stopping.is_set():
                    try:
                        fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        self.stands_by = True
                        self._stopping.wait(_STAND_BY_S)
                    else:
                        self.stands_by = False
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
        """Runs the agent until it ends or is no longer wanted; gives the seconds it lived."""
        begun = time.monotonic()
        # Nobody writes to its standard input: that closes when this process ends, in whatever way.
        with self.log.open("ab") as log, subprocess.Popen(
            self._argv, stdin=subprocess.PIPE, stdout=log, stderr=log
        ) as process:  # fmt: skip
            self._process = process
            while process.poll() is None:
                if self._stopping.wait(_LOOK_S):
                    _end(process)
        return time.monotonic() - begun


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
