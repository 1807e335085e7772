"""Runs one job, from its lease until its result is accepted, and renews the lease meanwhile."""

from __future__ import annotations

import contextlib
import logging
import threading
from types import TracebackType
from typing import Self

from nas.core.clock import Clock
from nas.core.errors import InfrastructureFailed, NasError
from nas.core.logs import visible
from nas.core.plan import RoundResult
from nas.core.wire import (
    LAST_EPOCH,
    Failure,
    FailureKind,
    HeartbeatRequest,
    Job,
    Phase,
    RegisterReply,
    ResultRequest,
)
from nas.measure.devices.agent.client import JobClient, NotAdmitted, Outbox, PendingResult
from nas.measure.devices.agent.connection import Attached, Backoff
from nas.measure.devices.agent.run_plan import FileSource, KnownRunner, Observer, run_round
from nas.measure.devices.transports.base import Cancelled, Lease, StaleLease

log = logging.getLogger(__name__)


class Heartbeat:
    """Renews the lease of a running job in a thread, and tracks when the job must end.

    Args:
        client: the coordinator.
        request: what to send.
        interval_s: seconds between heartbeats.
        deadline_s: seconds from now after which the job is useless.
        clock: times the deadline.
        abort: set from outside when the agent must end at once.
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
        self._thread = threading.Thread(target=self._run, name=f"heartbeat-{request.job}", daemon=True)

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
        """The current phase of the round."""
        return self._phase

    def enter(self, phase: Phase) -> None:
        """Sets the phase that the next heartbeat reports."""
        # Not at once: a heartbeat costs processor time, which would disturb the first process.
        self._phase = phase

    @property
    def overdue(self) -> bool:
        """Whether the job's deadline has passed."""
        return self._clock.monotonic() > self._end

    def must_end(self) -> bool:
        """Returns whether the job was cancelled, is overdue, or the agent must end."""
        return self._cancelled.is_set() or self.overdue or self._abort.is_set()

    def _run(self) -> None:
        while not self._done.wait(self._interval_s):
            try:
                if self._client.heartbeat(self._request.model_copy(update={"phase": self._phase})).cancel:
                    self._cancelled.set()
            except InfrastructureFailed as error:
                # The lease may expire, but until it is granted again a late result still counts.
                log.warning("heartbeat of job %s: %s", self._request.job, error)
            except NasError as error:
                log.warning("the lease of job %s is lost: %s", self._request.job, error)
                self._cancelled.set()


_LAST_TRIES_S = 30.0
"""Seconds for which a stopping agent tries to submit a result; then it keeps the result for its next start."""


class JobExecutor:
    """Runs jobs of one agent, on any of its devices, and submits the results.

    Args:
        agent: name.
        client: the coordinator.
        files: source of plan files.
        is_known: whether a runner may run here.
        outbox: keeps results until they are accepted.
        clock: for deadlines and cool-downs.
        stop: set when the agent is to end.
        abort: set when it must end now.
    """

    def __init__(
        self,
        agent: str,
        client: JobClient,
        files: FileSource,
        is_known: KnownRunner,
        outbox: Outbox,
        clock: Clock,
        *,
        stop: threading.Event,
        abort: threading.Event,
    ) -> None:
        self._agent, self._client, self._files, self._is_known = agent, client, files, is_known
        self._outbox, self._clock, self._stop, self._abort = outbox, clock, stop, abort

    def run(self, attached: Attached, job: Job, reply: RegisterReply) -> bool:
        """Runs a job and submits its result; aborted, it submits nothing, and the coordinator leases the job again.

        Returns:
            Whether there was a result: otherwise the device may be the cause.

        Raises:
            NotAdmitted: the coordinator refuses this agent.
        """
        device = attached.device.id
        log.info("started on %s", device)
        request = HeartbeatRequest(agent=self._agent, device=device, job=job.id, epoch=job.epoch)
        with Heartbeat(self._client, request, reply.heartbeat_s, job.deadline_s, self._clock, self._abort) as heartbeat:
            outcome = self._outcome(attached, job, Lease(reply.authority, job.epoch), heartbeat)
            failure = outcome if isinstance(outcome, Failure) else None
            if failure is not None:
                if self._abort.is_set():
                    return False
                log.warning("%s: %s", failure.kind, failure.message)
            result = outcome if isinstance(outcome, RoundResult) else None
            end = ResultRequest(agent=self._agent, device=device, epoch=job.epoch, result=result, failure=failure)
            self._outbox.put(PendingResult(authority=reply.authority, job=job.id, request=end))
            self.submit_until_accepted(reply.authority, device)
        return failure is None

    def give_back(self, device: str, job: Job, reply: RegisterReply) -> None:
        """Returns a job that was leased and will not be started, so that another device can run it."""
        why = Failure(kind="infrastructure", message=f"{device} was released before the job began", phase="preparing")
        request = ResultRequest(agent=self._agent, device=device, epoch=job.epoch, failure=why)
        self._outbox.put(PendingResult(authority=reply.authority, job=job.id, request=request))
        try:
            self.submit_pending(reply.authority, device)
        except NasError as error:
            log.warning("job %s is returned later: %s", job.id, error)

    def submit_pending(self, authority: str, device: str) -> None:
        """Submits the pending results of a device.

        Raises:
            InfrastructureFailed: the coordinator cannot be reached; they stay pending.
            NotAdmitted: the coordinator refuses this agent; they stay pending.
        """
        for pending in self._outbox.of(authority, device):
            job, epoch = pending.job, pending.request.epoch
            try:
                reply = self._client.submit(job, pending.request)
            except (InfrastructureFailed, NotAdmitted):
                raise
            except NasError as error:
                log.error("job %s, epoch %d: refused: %s", job, epoch, error)
            else:
                log.info("job %s, epoch %d: %s", job, epoch, "accepted" if reply.accepted else reply.reason)
            self._outbox.drop(pending)

    def submit_until_accepted(self, authority: str, device: str) -> None:
        """Submits until it succeeds: a new lease of the device would make pending results worthless.

        Raises:
            NotAdmitted: see `submit_pending`.
        """
        backoff, stopped_at = Backoff(), None
        while not self._abort.is_set():
            try:
                return self.submit_pending(authority, device)
            except InfrastructureFailed as error:
                if self._stop.is_set():
                    stopped_at = stopped_at or self._clock.monotonic()
                    if self._clock.monotonic() - stopped_at > _LAST_TRIES_S:
                        log.warning("results of %s are kept for the next start: %s", device, error)
                        return None
                pause_s = backoff.pause_s(error)
                log.warning("%s; next try in %.1f s", error, pause_s)
                self._abort.wait(pause_s)

    def _outcome(self, attached: Attached, job: Job, lease: Lease, heartbeat: Heartbeat) -> RoundResult | Failure:
        transport, lock = attached.transport, attached.lock
        try:
            with lock.exclusive(job.deadline_s, heartbeat.must_end) if lock else contextlib.nullcontext():
                transport.connect()
                attached.check()
                transport.claim(lease)
                return run_round(
                    job.round,
                    transport,
                    self._files,
                    self._is_known,
                    observer=Observer(transport),
                    clock=self._clock,
                    enter=heartbeat.enter,
                    cancelled=heartbeat.must_end,
                )
        except Cancelled as error:
            if heartbeat.overdue:
                return _failure("infrastructure", f"not done within {job.deadline_s:g} s of the lease", heartbeat)
            return _failure("cancelled", error, heartbeat)
        except StaleLease as error:
            last = error.last if error.last <= LAST_EPOCH else None
            return _failure("infrastructure", error, heartbeat).model_copy(update={"last_epoch": last})
        except (InfrastructureFailed, OSError) as error:
            return _failure("infrastructure", error, heartbeat)
        except NasError as error:
            return _failure("refused", error, heartbeat)
        except Exception as error:
            # A defect of ours: the job must say so, or the next lease would only tell that the agent was gone.
            log.exception("unexpected error")
            why = f"unexpected error of the agent, see its log: {type(error).__name__}: {error}"
            return _failure("infrastructure", why, heartbeat)


def _failure(kind: FailureKind, why: object, heartbeat: Heartbeat) -> Failure:
    return Failure(
        kind=kind, message=visible(str(why), keep="\n")[:4000], phase=heartbeat.phase, overdue=heartbeat.overdue
    )
