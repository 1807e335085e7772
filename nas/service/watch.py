"""What a process does once for all its agents, where each request would otherwise do it for itself.

It looks for work and calls those who wait for it, takes back leases that ran out, and writes down who was heard from.
A thousand agents so cost the database one look and one transaction a second.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Self

from nas.core.errors import NasError
from nas.service.doorbell import Doorbell
from nas.store import outcomes, presence, queue
from nas.store.presence import Renewal
from nas.store.store import Store

log = logging.getLogger(__name__)

_LOOK_S = 0.25
"""Between looks for jobs that another process queued; this one's are seen at once."""

_PAUSE_S = 0.02
"""Between looks at the least, however often the bell rings."""

_SWEEP_S = 1.0
_STOP_S = 5.0


class Watch:
    """A thread, while the context is open. The methods may be called from any other, also before and after.

    Args:
        store: where jobs are.
        doorbell: rung when the table changes; calls the agents.
        local_only: only leases of this machine's agent are taken back. Others' agents may speak to a coordinator that
            is down just now, which is no fault of theirs.
    """

    def __init__(self, store: Store, doorbell: Doorbell, *, local_only: bool) -> None:
        self.doorbell = doorbell
        self._store, self._local_only = store, local_only
        self._lock = threading.Lock()
        self._heard: dict[str, str] = {}
        self._renewed: dict[str, Renewal] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def heard(self, agent: str, device: str) -> None:
        """Notes that the agent spoke for its device; written down within about a second."""
        with self._lock:
            self._heard[device] = agent

    def renew(self, renewal: Renewal) -> None:
        """Prolongs a lease that is current, within about a second.

        A crash before that loses nothing: whoever starts after it gives every lease its full time again.
        """
        with self._lock:
            self._renewed[renewal.device] = renewal

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self.doorbell.ring()
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        seen, sweep_at = self.doorbell.count, 0.0
        while not self._stop.wait(_PAUSE_S):
            try:
                if time.monotonic() >= sweep_at:
                    self._sweep()
                    sweep_at = time.monotonic() + _SWEEP_S
                if waited_for := self.doorbell.waited_for():
                    self.doorbell.call(queue.with_work(self._store, waited_for))
            except NasError as error:
                log.warning("the job table cannot be looked at: %s", error)
            seen = self.doorbell.wait(seen, _LOOK_S)

    def _sweep(self) -> None:
        with self._lock:
            heard, renewed = self._heard, self._renewed
            self._heard, self._renewed = {}, {}
        try:
            presence.note(self._store, heard, list(renewed.values()))
        except NasError:
            with self._lock:
                self._heard, self._renewed = heard | self._heard, renewed | self._renewed
            raise
        outcomes.expire(self._store, local_only=self._local_only)
