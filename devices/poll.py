"""A question for a job, which the coordinator may keep for a while: asked in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable

from nas.core.errors import NasError
from nas.core.protocol import Job


class Poll:
    """Asks at once; meanwhile the device can be looked after.

    Args:
        ask: gives a job or none; it may take long.
        woken: set when there is an answer.
        unwanted: takes a job for which nobody waits any more.
    """

    def __init__(self, ask: Callable[[], Job | None], woken: threading.Event, unwanted: Callable[[Job], None]) -> None:
        self._ask, self._woken, self._unwanted = ask, woken, unwanted
        self._lock = threading.Lock()
        self._job: Job | None = None
        self._trouble: NasError | None = None
        self._told = self._abandoned = False
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="poll", daemon=True).start()

    @property
    def answered(self) -> bool:
        """Whether there is an answer."""
        return self._ended.is_set()

    def wait(self, seconds: float) -> None:
        """Waits for the answer, but not longer."""
        self._ended.wait(seconds)

    def job(self) -> Job | None:
        """The answer, once; raises the `NasError` that came instead."""
        if self._trouble is not None:
            raise self._trouble
        assert self._told, "the thread of a poll died"
        return self._take()

    def abandon(self) -> None:
        """A job that nobody took, or that is still to come, goes to `unwanted`."""
        with self._lock:
            self._abandoned = True
        self._return(self._take())

    def _run(self) -> None:
        try:
            job = self._ask()
            with self._lock:
                self._job, self._told, abandoned = job, True, self._abandoned
            if abandoned:
                self._return(self._take())
        except NasError as error:
            self._trouble = error
        finally:
            self._ended.set()
            self._woken.set()

    def _take(self) -> Job | None:
        with self._lock:
            job, self._job = self._job, None
            return job

    def _return(self, job: Job | None) -> None:
        if job is not None:
            self._unwanted(job)
