"""The host lock: training shares a machine; a measurement has it alone and does not queue after new training.

Three files, each with flock(2), which the kernel releases when its holder dies:

- `main`: compute holds it shared, a measurement exclusively. Mutual exclusion rests on this file alone.
- `turnstile`: everybody passes it on the way to `main`; a measurement holds it exclusively until it is done. So compute
  can see that it should yield (one failed attempt to share the turnstile), and newcomers queue after the measurement.
- `waiting`: compute that waits at the turnstile shares this one; a measurement does not enter while somebody does. So a
  stream of measurements lets waiting compute make a step in between.

Waits poll with growing pauses, because flock has no timeout. Locks belong to open file descriptions: a process that
forks without exec while it holds one shares it with its child.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, LOCK_UN, flock
from pathlib import Path

from nas.core import paths
from nas.core.clock import Clock, SystemClock
from nas.core.errors import InfrastructureFailed
from nas.measure.devices.transports.base import Cancelled, never

_FIRST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.02
_LONGEST_COMPUTE_PAUSE_S = 0.2
_COMPUTE_DEADLINE_S = 3600.0


class HostLock:
    """Shared for compute, exclusive and preferred for measurement, among all processes that use the same folder.

    A thread must not ask for the exclusive lock while it holds a share: it would wait for itself.

    Args:
        folder: holds the lock files; created if missing.
        clock: times the waits.
    """

    def __init__(self, folder: Path, clock: Clock | None = None) -> None:
        self._folder = folder
        self._clock = clock or SystemClock()
        folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def shared(self, deadline_s: float = _COMPUTE_DEADLINE_S) -> Iterator[SharedHold]:
        """Takes a share for compute, within `deadline_s`; call `yield_if_wanted` on it at every step."""
        with self._open("turnstile") as turnstile, self._open("main") as main, self._open("waiting") as waiting:
            hold = SharedHold(main, turnstile, waiting, self._clock, deadline_s)
            hold.acquire()
            yield hold

    @contextmanager
    def exclusive(self, deadline_s: float, cancelled: Callable[[], bool] = never) -> Iterator[None]:
        """Takes the machine exclusively, for a measurement.

        Raises:
            InfrastructureFailed: compute did not yield within `deadline_s`.
            Cancelled: `cancelled()` became true while it waited.
        """
        deadline = self._clock.monotonic() + deadline_s
        # Closed in reverse order: main is free before the turnstile is.
        with self._open("turnstile") as turnstile, self._open("main") as main, self._open("waiting") as waiting:
            steps: tuple[Callable[[], bool], ...] = (
                lambda: _unheld(waiting) and _try(turnstile, LOCK_EX),
                lambda: _try(main, LOCK_EX),
            )
            for step in steps:
                if not _poll(step, self._clock, deadline, _LONGEST_PAUSE_S, cancelled):
                    raise InfrastructureFailed(
                        f"host lock {self._folder}: training or another measurement on this machine did not make way "
                        f"within {deadline_s:g} s"
                    )
            yield

    @contextmanager
    def _open(self, name: str) -> Iterator[int]:
        descriptor = os.open(self._folder / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            os.utime(descriptor)  # files of /tmp are removed by their age, and a new file would be another lock
            yield descriptor
        finally:
            os.close(descriptor)


class SharedHold:
    """A share of the machine. Not thread-safe: each thread takes its own."""

    def __init__(self, main: int, turnstile: int, waiting: int, clock: Clock, deadline_s: float) -> None:
        self._main, self._turnstile, self._waiting = main, turnstile, waiting
        self._clock = clock
        self._deadline_s = deadline_s

    def yield_if_wanted(self) -> float:
        """Lets a waiting measurement go first. Returns the seconds waited; 0.0, after two system calls, if none waits.

        Raises:
            InfrastructureFailed: measurements held the machine for the deadline of the hold, which is then lost.
        """
        if _try(self._turnstile, LOCK_SH):
            flock(self._turnstile, LOCK_UN)
            return 0.0
        flock(self._main, LOCK_UN)
        return self.acquire()

    def acquire(self) -> float:
        """Takes the share, after any measurement that came first. Returns the seconds waited."""
        start = self._clock.monotonic()
        flock(self._waiting, LOCK_SH)
        try:
            self._take(self._turnstile, start)
            self._take(self._main, start)
        finally:
            flock(self._turnstile, LOCK_UN)
            flock(self._waiting, LOCK_UN)
        return self._clock.monotonic() - start

    def _take(self, descriptor: int, start: float) -> None:
        deadline = start + self._deadline_s
        if not _poll(lambda: _try(descriptor, LOCK_SH), self._clock, deadline, _LONGEST_COMPUTE_PAUSE_S):
            raise InfrastructureFailed(f"host lock: measurements kept this machine for {self._deadline_s:g} s")


def _poll(
    attempt: Callable[[], bool],
    clock: Clock,
    deadline: float,
    longest_pause_s: float,
    cancelled: Callable[[], bool] = never,
) -> bool:
    pause = _FIRST_PAUSE_S
    while not attempt():
        if cancelled():
            raise Cancelled("cancelled while waiting for the host lock")
        if clock.monotonic() >= deadline:
            return False
        clock.sleep(pause)
        pause = min(pause * 2, longest_pause_s)
    return True


def _try(descriptor: int, mode: int) -> bool:
    try:
        flock(descriptor, mode | LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unheld(descriptor: int) -> bool:
    if not _try(descriptor, LOCK_EX):
        return False
    flock(descriptor, LOCK_UN)
    return True


def host_lock_folder() -> Path:
    """Returns the lock folder: `$NAS_LOCK`, or one per user and machine, whatever database a launch uses.

    Raises:
        InfrastructureFailed: another user owns the folder's name.
    """
    session = Path(f"/run/user/{os.getuid()}")
    usual = session / "hilnas" if session.is_dir() else Path(f"/tmp/hilnas-{os.getuid()}")
    folder = paths.expanded(os.environ.get("NAS_LOCK") or usual, "$NAS_LOCK")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise InfrastructureFailed(f"{folder} belongs to another user; remove it, or have it removed")
    return folder
