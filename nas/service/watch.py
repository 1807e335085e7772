"""Looks at the job table for a process: once for all its waiting agents, where each would look for itself."""

from __future__ import annotations

import logging
import threading
import time
from typing import Self

from nas.core.errors import NasError
from nas.service.doorbell import Doorbell
from nas.store import jobs, outcomes
from nas.store.store import Store

log = logging.getLogger(__name__)

_LOOK_S = 0.25
"""Between looks for jobs that another process queued; this one's are seen at once."""

_PAUSE_S = 0.02
"""Between looks at the least, however often the bell rings."""

_SWEEP_S = 1.0
_STOP_S = 5.0


class Watch:
    """Tells waiting agents of work and takes back leases that ran out, in a thread, while the context is open.

    Args:
        store: where jobs are.
        doorbell: rung when the table changes; calls the agents.
        local_only: only leases of this machine's agent are taken back. Others' agents may speak to a coordinator that
            is down just now, which is no fault of theirs.
    """

    def __init__(self, store: Store, doorbell: Doorbell, *, local_only: bool) -> None:
        self._store, self._doorbell, self._local_only = store, doorbell, local_only
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._doorbell.ring()
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        seen, sweep_at = self._doorbell.count, 0.0
        while not self._stop.wait(_PAUSE_S):
            try:
                if time.monotonic() >= sweep_at:
                    outcomes.expire(self._store, local_only=self._local_only)
                    sweep_at = time.monotonic() + _SWEEP_S
                if waited_for := self._doorbell.waited_for():
                    self._doorbell.call(waited_for & jobs.with_work(self._store))
            except NasError as error:
                log.warning("the job table cannot be looked at: %s", error)
            seen = self._doorbell.wait(seen, _LOOK_S)
