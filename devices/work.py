"""One job from its lease to its acceptance."""

from __future__ import annotations

import contextlib
import logging
import threading

from nas.core.clock import Clock
from nas.core.errors import InfrastructureFailed, NasError
from nas.core.plan import RoundResult
from nas.core.protocol import Failure, FailureKind, HeartbeatRequest, Job, RegisterReply, ResultRequest
from nas.devices.backoff import Backoff
from nas.devices.client import JobClient, NotAdmitted
from nas.devices.condition import Observer
from nas.devices.execute import FileSource, KnownRunner, run_round
from nas.devices.find import Attached
from nas.devices.heart import Heart
from nas.devices.outbox import Outbox, Parcel
from nas.devices.transports.base import Cancelled, Lease

log = logging.getLogger(__name__)

_LAST_TRIES_S = 30.0
"""An agent that is to end tries so long to hand in what it has; then it keeps it for its next start."""


class Worker:
    """Runs jobs of one agent, on any of its devices, and hands in what came of them.

    Args:
        agent: name.
        client: the coordinator.
        files: where plan files come from.
        known: the runners that may run here.
        outbox: keeps results until they are accepted.
        clock: for deadlines and cool-downs.
        stop: set when the agent is to end.
        abort: set when it has to end now.
    """

    def __init__(
        self,
        agent: str,
        client: JobClient,
        files: FileSource,
        known: KnownRunner,
        outbox: Outbox,
        clock: Clock,
        *,
        stop: threading.Event,
        abort: threading.Event,
    ) -> None:
        self._agent, self._client, self._files, self._known = agent, client, files, known
        self._outbox, self._clock, self._stop, self._abort = outbox, clock, stop, abort

    def do(self, attached: Attached, job: Job, reply: RegisterReply) -> bool:
        """Runs a job and hands in its end; aborted, it hands in nothing, and the coordinator grants the job anew.

        Returns:
            Whether there was a result: else the device may be the reason.

        Raises:
            NotAdmitted: the coordinator will not have this agent any more.
        """
        device = attached.device.id
        log.info("begins, on %s", device)
        request = HeartbeatRequest(agent=self._agent, device=device, job=job.id, epoch=job.epoch)
        with Heart(self._client, request, reply.heartbeat_s, job.deadline_s, self._clock, self._abort) as heart:
            outcome = self._outcome(attached, job, Lease(reply.authority, job.epoch), heart)
            failure = outcome if isinstance(outcome, Failure) else None
            if failure is not None:
                if self._abort.is_set():
                    return False
                log.warning("%s: %s", failure.kind, failure.message)
            result = outcome if isinstance(outcome, RoundResult) else None
            end = ResultRequest(agent=self._agent, device=device, epoch=job.epoch, result=result, failure=failure)
            self._outbox.put(Parcel(authority=reply.authority, job=job.id, request=end))
            self.insist(reply.authority, device)
        return failure is None

    def give_back(self, device: str, job: Job, reply: RegisterReply) -> None:
        """A job that was granted and will not be begun: another try, or another device, can do it."""
        why = Failure(kind="infrastructure", message=f"{device} was let go before the job began", phase="preparing")
        request = ResultRequest(agent=self._agent, device=device, epoch=job.epoch, failure=why)
        self._outbox.put(Parcel(authority=reply.authority, job=job.id, request=request))
        try:
            self.hand_in(reply.authority, device)
        except NasError as error:
            log.warning("job %s is given back later: %s", job.id, error)

    def hand_in(self, authority: str, device: str) -> None:
        """Hands in what waits about a device.

        Raises:
            InfrastructureFailed: the coordinator cannot be reached; it still waits.
            NotAdmitted: the coordinator will not have this agent any more; it still waits.
        """
        for parcel in self._outbox.of(authority, device):
            job, epoch = parcel.job, parcel.request.epoch
            try:
                reply = self._client.submit(job, parcel.request)
            except (InfrastructureFailed, NotAdmitted):
                raise
            except NasError as error:
                log.error("job %s, epoch %d: refused: %s", job, epoch, error)
            else:
                log.info("job %s, epoch %d: %s", job, epoch, "accepted" if reply.accepted else reply.reason)
            self._outbox.drop(parcel)

    def insist(self, authority: str, device: str) -> None:
        """Hands in until it is done: a new lease of the device would make what waits worthless.

        Raises:
            NotAdmitted: see `hand_in`.
        """
        backoff, stopped_at = Backoff(), None
        while not self._abort.is_set():
            try:
                return self.hand_in(authority, device)
            except InfrastructureFailed as error:
                if self._stop.is_set():
                    stopped_at = stopped_at or self._clock.monotonic()
                    if self._clock.monotonic() - stopped_at > _LAST_TRIES_S:
                        log.warning("kept for the next start: what waits about %s: %s", device, error)
                        return None
                pause_s = backoff.pause_s(error)
                log.warning("%s; next try in %.1f s", error, pause_s)
                self._abort.wait(pause_s)

    def _outcome(self, attached: Attached, job: Job, lease: Lease, heart: Heart) -> RoundResult | Failure:
        transport, lock = attached.transport, attached.lock
        try:
            with lock.exclusive(job.deadline_s, heart.must_end) if lock else contextlib.nullcontext():
                transport.connect()
                attached.check()
                transport.claim(lease)
                return run_round(
                    job.round,
                    transport,
                    self._files,
                    self._known,
                    observer=Observer(transport),
                    clock=self._clock,
                    enter=heart.enter,
                    cancelled=heart.must_end,
                )
        except Cancelled as error:
            if heart.overdue:
                return _failure("infrastructure", f"not done within {job.deadline_s:g} s of the lease", heart)
            return _failure("cancelled", error, heart)
        except (InfrastructureFailed, OSError) as error:
            return _failure("infrastructure", error, heart)
        except NasError as error:
            return _failure("refused", error, heart)


def _failure(kind: FailureKind, why: object, heart: Heart) -> Failure:
    return Failure(kind=kind, message=str(why)[:4000], phase=heart.phase, overdue=heart.overdue)
