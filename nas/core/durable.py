"""Small files that several processes write: whole at any moment, and one writer at a time."""

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
    path: Path, deadline_s: float = _DEADLINE_S, *, waiting: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Keeps other processes and threads out that lock the same file; the kernel lets go when its holder dies.

    Args:
        path: of the lock file; made if missing, and never removed.
        deadline_s: how long it waits for its turn.
        waiting: called once if it has to wait.

    Raises:
        InfrastructureFailed: others kept the lock that long.
    """
    deadline, told = time.monotonic() + deadline_s, False
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise InfrastructureFailed(f"{path}: another process kept it locked for {deadline_s:g} s") from None
                if not told:
                    waiting()
                told = True
                time.sleep(_PAUSE_S)
        yield


def read_private(path: Path) -> bytes | None:
    """The content of a file that is a secret; None where there is no such file.

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
    """Replaces a file at once: after a kill or a power cut it holds the old content or the new. Mode 0600."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)
