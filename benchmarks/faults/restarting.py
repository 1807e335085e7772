"""A process that is started again when it ends, as by a service manager."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

_PAUSE_S = 1.0
"""Between its death and its next start: `RestartSec` of the systemd unit."""

_STOP_S = 20.0


class RestartedProcess:
    """Runs while the context is open.

    Args:
        argv: the command; it must not fork away.
        env: its whole environment.
        log: gets its output.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self._argv, self._env, self.log = list(argv), dict(env), log
        self._stopping = threading.Event()
        self._up = threading.Event()
        self._up.set()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name=log.stem, daemon=True)
        self.exits: list[int] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._up.set()
        self._signal(signal.SIGTERM)
        self._thread.join(_STOP_S)
        self._signal(signal.SIGKILL)
        self._thread.join()

    def kill(self, down_s: float = 0.0) -> None:
        """Sends SIGKILL; the process is started again after `down_s` and the usual pause."""
        self._up.clear()
        self._signal(signal.SIGKILL)
        time.sleep(down_s)
        self._up.set()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Stops the process while the context is open, as on a suspended host."""
        self._signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(signal.SIGCONT)

    def _run(self) -> None:
        while not self._stopping.is_set():
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    self._argv, env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
                self.exits.append(self._process.wait())
            self._stopping.wait(_PAUSE_S)
            self._up.wait()

    def _signal(self, number: int) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
