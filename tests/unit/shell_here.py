"""A `Wire` to this machine's own `sh`."""

from __future__ import annotations

import os
import select
import subprocess
from pathlib import Path

from nas.core.errors import InfrastructureFailed
from nas.measure.devices.transports.wire import Stream


class Pipe:
    """A `Stream` to a child process."""

    def __init__(self, command: str) -> None:
        self.process = subprocess.Popen(
            ["sh", "-c", command],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={"PATH": os.environ["PATH"]},
        )
        assert self.process.stdin and self.process.stdout
        self.stdin, self.stdout = self.process.stdin, self.process.stdout

    def read(self, timeout_s: float) -> bytes | None:
        ready, _, _ = select.select([self.stdout], [], [], timeout_s)
        return os.read(self.stdout.fileno(), 1 << 16) if ready else None

    def write(self, data: bytes) -> None:
        try:
            self.stdin.write(data)
        except OSError as error:
            raise InfrastructureFailed(f"here: {error}") from error

    def close(self) -> None:
        self.stdin.close()
        self.stdout.close()
        self.process.wait(60)


class ShellHere:
    """A `Wire` that goes nowhere."""

    name = "here"

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def connect(self) -> None: ...

    def close(self) -> None: ...

    def start(self, command: str) -> Stream:
        return Pipe(command)
