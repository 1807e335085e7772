"""Files to the device over adb's `sync:` service. Back, `cat` is as fast."""

from __future__ import annotations

import struct
import time
from pathlib import Path

from nas.core.errors import InfrastructureFailed
from nas.devices.transports.wire import SILENT_S, Stream

_PIECE = 1 << 16
"""The most that the protocol allows in one DATA."""

_PIECES_AT_ONCE = 15
"""With their headers just below 1 MiB, the most that adbd takes in one packet: each costs a way there and back."""

_MODE = 0o100644


def push(stream: Stream, local: Path, remote: str, name: str) -> None:
    """Copies a file to the device.

    Args:
        stream: of the service `sync:`.
        local: the file.
        remote: its path on the device; missing folders are made.
        name: of the device, for messages.

    Raises:
        InfrastructureFailed: the device refuses, or the connection is lost; half a file may be left.
    """
    stream.write(_request(b"SEND", f"{remote},{_MODE}".encode()))
    with local.open("rb") as file:
        while pieces := [piece for _ in range(_PIECES_AT_ONCE) if (piece := file.read(_PIECE))]:
            stream.write(b"".join(_request(b"DATA", piece) for piece in pieces))
    stream.write(struct.pack("<4sI", b"DONE", int(time.time())))
    answer = _read(stream, 8, name)
    if answer[:4] == b"FAIL":
        size = min(int.from_bytes(answer[4:8], "little"), _PIECE)
        why = _read(stream, 8 + size, name, answer)[8:]
        raise InfrastructureFailed(f"{name}: {why.decode(errors='replace')}")
    if answer[:4] != b"OKAY":
        raise InfrastructureFailed(f"{name}: unexpected {answer[:4]!r} after a file transfer")


def _request(name: bytes, data: bytes) -> bytes:
    return struct.pack("<4sI", name, len(data)) + data


def _read(stream: Stream, size: int, name: str, known: bytes = b"") -> bytes:
    """At least `size` bytes, those that are `known` included."""
    answer, end = known, time.monotonic() + SILENT_S
    while len(answer) < size:
        piece = stream.read(1.0)
        answer += piece or b""
        if piece == b"" or time.monotonic() > end:
            raise InfrastructureFailed(f"{name}: the connection ended during a file transfer")
    return answer
