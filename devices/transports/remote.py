"""Small scripts on a device, over any wire."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator
from typing import BinaryIO

from nas.core.errors import InfrastructureFailed
from nas.devices.transports import scripts
from nas.devices.transports.base import TEXT_LIMIT
from nas.devices.transports.wire import Stream, Wire

SLICE_S = 0.2
"""How often a wait looks at the clock."""

_SHORT_S = 30.0
LONG_S = 600.0
"""For scripts that read whole files."""


class RemoteShell:
    """Runs scripts that end soon, connecting where needed.

    Args:
        wire: the way to the shell.
    """

    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    def must(self, script: str, *arguments: str, timeout_s: float = _SHORT_S) -> str:
        """Output of a script.

        Raises:
            InfrastructureFailed: the connection is lost, or the exit code is not 0; the message is the output.
        """
        code, said = self.call(script, *arguments, timeout_s=timeout_s)
        text = said.decode(errors="replace")
        if code:
            raise InfrastructureFailed(f"{self.wire.name}: {text.strip()[-400:] or f'exit code {code}'}")
        return text

    def call(
        self, script: str, *arguments: str, timeout_s: float = _SHORT_S, limit: int = TEXT_LIMIT
    ) -> tuple[int, bytes]:
        """Exit code and output of a script, standard error included.

        Raises:
            InfrastructureFailed: the connection is lost, or there is no end of it.
        """
        mark = secrets.token_hex(8)
        command = scripts.join(["sh", "-c", scripts.with_exit_code(script, mark), "sh", *arguments])
        said, end = bytearray(), time.monotonic() + timeout_s
        with self.stream(command) as stream:
            while (piece := stream.read(SLICE_S)) != b"":
                said += piece or b""
                if len(said) > limit + scripts.REPORT_LIMIT:
                    raise InfrastructureFailed(f"{self.wire.name}: says more than it was asked for")
                if time.monotonic() > end:
                    raise InfrastructureFailed(f"{self.wire.name}: no answer within {timeout_s:g} s")
        _, begun, told = bytes(said).partition(mark.encode() + b"\n")
        output, ended, code = told.rpartition(b"\n" + mark.encode() + b" ")
        if not (begun and ended and code.strip().isdigit()):
            raise InfrastructureFailed(f"{self.wire.name}: the connection ended: {bytes(said[-200:])!r}")
        return int(code), output

    def copy(self, remote: str, file: BinaryIO) -> None:
        """Writes a remote file to `file`; whether all of it came, the caller has to verify.

        Raises:
            InfrastructureFailed: the connection is lost.
        """
        silent_since = time.monotonic()
        with self.stream(scripts.join(["cat", remote])) as stream:
            while (piece := stream.read(SLICE_S)) != b"":
                if piece:
                    file.write(piece)
                    silent_since = time.monotonic()
                elif time.monotonic() - silent_since > _SHORT_S:
                    raise InfrastructureFailed(f"{self.wire.name}: {remote} stopped half-way")

    @contextlib.contextmanager
    def stream(self, command: str) -> Iterator[Stream]:
        """A command that runs while the context is open."""
        with self.hanging_up_on_failure():
            self.wire.connect()
            stream = self.wire.start(command)
            try:
                yield stream
            finally:
                stream.close()

    @contextlib.contextmanager
    def hanging_up_on_failure(self) -> Iterator[None]:
        """A connection that failed once is not used again: by its end the device knows that nobody listens."""
        try:
            yield
        except InfrastructureFailed:
            self.wire.close()
            raise
