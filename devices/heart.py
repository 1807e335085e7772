"""Renews the lease of a running job, and knows when the job has to end."""

from __future__ import annotations

import logging
import threading
from types import TracebackType
from typing import Self

from nas.core.clock import Clock
from nas.core.errors import InfrastructureFailed, NasError
from nas.core.protocol import HeartbeatRequest, Phase
from nas.devices.client import JobClient

log = logging.getLogger(__name__)


class Heart:
    """Beats in a thread of its own while the context is open.

    Args:
        client: the coordinator.
        request: what to send.
        interval_s: seconds between beats.
        deadline_s: seconds from now after which the job is of no use.
        clock: times the deadline.
        abort: set from outside when the agent has to go at once.
    """

    def __init__(
        self,
        client: JobClient,
        request: HeartbeatRequest,
        interval_s: float,
        deadline_s: float,
        clock: Clock,
        abort: threading.Event,
    ) -> None:
        self._client, self._request, self._interval_s = client, request, interval_s
        self._clock, self._end = clock, clock.monotonic() + deadline_s
        self._abort = abort
        self._phase: Phase = "preparing"
        self._cancelled, self._done = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"heart-{request.job}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    @property
    def phase(self) -> Phase:
        """How far the round has come."""
        return self._phase

    def enter(self, phase: Phase) -> None:
        """The round has come to `phase`: the next beat tells it."""
        # Not at once: a beat costs processor time here, which would be seen beside the first process.
        self._phase = phase

    @property
    def overdue(self) -> bool:
        """Whether the job's deadline is over."""
        return self._clock.monotonic() > self._end

    def must_end(self) -> bool:
        """Whether the job was cancelled, is overdue, or the agent has to go."""
        return self._cancelled.is_set() or self.overdue or self._abort.is_set()

    def _beat(self) -> None:
        while not self._done.wait(self._interval_s):
            try:
                if self._client.heartbeat(self._request.model_copy(update={"phase": self._phase})).cancel:
                    self._cancelled.set()
            except InfrastructureFailed as error:
                # The lease may expire, but until it is granted again a late result still counts.
                log.warning("heartbeat of job %s: %s", self._request.job, error)
            except NasError as error:
                log.warning("job %s is no longer ours: %s", self._request.job, error)
                self._cancelled.set()
