"""Small files that several processes write: whole at any moment, and one writer at a time."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from nas.core.errors import InfrastructureFailed

_DEADLINE_S = 30.0
_PAUSE_S = 0.01


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
