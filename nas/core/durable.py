"""Small files that several processes write: atomic replacement, file locks, and private files."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from nas.core.errors import InfrastructureFailed

_DEADLINE_S = 30.0
_PAUSE_S = 0.01
_FOR_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@contextmanager
def locked(
    path: Path,
    deadline_s: float = _DEADLINE_S,
    *,
    shared: bool = False,
    waiting: Callable[[], None] = lambda: None,
    meanwhile: Callable[[], object] = lambda: None,
) -> Iterator[None]:
    """Holds a lock on a file, created if missing; the kernel releases it when the holder dies.

    `waiting` is called once if it has to wait, `meanwhile`, which may block, before each further try.

    Raises:
        InfrastructureFailed: others held the lock for `deadline_s`.
    """
    deadline, reported = time.monotonic() + deadline_s, False
    with path.open("a+b") as file:  # NFS shares a lock only on a file that can be read
        while True:
            try:
                fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise InfrastructureFailed(f"{path}: another process kept it locked for {deadline_s:g} s") from None
                if not reported:
                    waiting()
                reported = True
                meanwhile()
                time.sleep(_PAUSE_S)
        yield


def read_private(path: Path) -> bytes | None:
    """Returns the content of a file that holds a secret; None where there is no such file.

    Raises:
        InfrastructureFailed: it cannot be read, or others on this machine may read it.
    """
    try:
        mode = path.stat().st_mode
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InfrastructureFailed(f"{path}, {error.strerror}: let this user read it") from error
    if mode & _FOR_OTHERS:
        raise InfrastructureFailed(f"{path} is open to others, mode {stat.S_IMODE(mode):04o}: run `chmod 600 {path}`")
    return content


def write_durably(path: Path, content: bytes) -> None:
    """Replaces a file atomically: after a kill or a power cut it holds the old content or the new. Mode 0600."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)
