"""The agent: takes measurement jobs for its devices from a coordinator, runs them, hands the results in."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass

from nas.core.clock import Clock, SystemClock
from nas.core.device import Device
from nas.core.errors import InfrastructureFailed, NasError
from nas.core.plan import RoundResult
from nas.core.protocol import (
    Failure,
    FailureKind,
    HeartbeatRequest,
    Job,
    LeaseRequest,
    RegisterReply,
    RegisterRequest,
    ResultRequest,
)
from nas.devices.backoff import Backoff
from nas.devices.client import JobClient
from nas.devices.condition import Observer
from nas.devices.execute import FileSource, KnownRunner, run_round
from nas.devices.heart import Heart
from nas.devices.hostlock import HostLock
from nas.devices.transports.base import Cancelled, Lease, Transport

log = logging.getLogger(__name__)

_LONGEST_POLL_S = 2.0
"""An idle agent that is told to stop is gone after this time."""

_SUBMIT_FOR_S = 600.0


@dataclass(frozen=True, slots=True)
class Attached:
    """A device and the wire to it.

    Args:
        device: what it is.
        transport: how it is reached.
        lock: the host lock, where the device is a machine that also computes.
    """

    device: Device
    transport: Transport
    lock: HostLock | None = None


class Agent:
    """Serves its devices, each in a thread of its own, until `stop`.

    Args:
        name: stable over restarts.
        client: the coordinator.
        devices: what it serves.
        files: where plan files come from.
        known: the runners that may run here.
        boot_id: of this host.
        clock: for deadlines and cool-downs.
    """

    def __init__(
        self,
        name: str,
        client: JobClient,
        devices: Sequence[Attached],
        files: FileSource,
        known: KnownRunner,
        *,
        boot_id: str,
        clock: Clock | None = None,
    ) -> None:
        self._name, self._client, self._devices = name, client, tuple(devices)
        self._files, self._known = files, known
        self._registration = RegisterRequest(
            agent=name, devices=tuple(attached.device for attached in devices), boot_id=boot_id
        )
        self._clock = clock or SystemClock()
        self._stop, self._abort = threading.Event(), threading.Event()

    def stop(self) -> None:
        """Ends `run` after the jobs that are held. Safe in signal handlers and from other threads."""
        self._stop.set()

    def abort(self) -> None:
        """Ends `run` now: kills what runs and hands nothing in. The coordinator grants the job anew."""
        self._abort.set()
        self._stop.set()

    def run(self) -> None:
        """Serves until `stop` or `abort`.

        Raises:
            NasError: the coordinator refuses this agent.
        """
        reply = self._register()
        if reply is None:
            return
        with ThreadPoolExecutor(len(self._devices), thread_name_prefix="device") as threads:
            serving = [threads.submit(self._serve, attached, reply) for attached in self._devices]
            wait(serving, return_when=FIRST_EXCEPTION)
            self._stop.set()
        for ended in serving:
            ended.result()

    def _register(self) -> RegisterReply | None:
        backoff = Backoff()
        while not self._stop.is_set():
            try:
                return self._client.register(self._registration)
            except InfrastructureFailed as error:
                self._wait(backoff, error)
        return None

    def _serve(self, attached: Attached, reply: RegisterReply) -> None:
        backoff, known_there = Backoff(), True
        wait_s = min(reply.poll_s, _LONGEST_POLL_S)
        while not self._stop.is_set():
            try:
                if not known_there:
                    # It may have restarted meanwhile; to register twice is harmless.
                    reply, known_there = self._client.register(self._registration), True
                request = LeaseRequest(agent=self._name, device=attached.device.id, wait_s=wait_s)
                job = self._client.lease(request).job
            except NasError as error:
                known_there = False
                self._wait(backoff, error)
                continue
            backoff.reset()
            if job:
                self._work(attached, job, reply)

    def _work(self, attached: Attached, job: Job, reply: RegisterReply) -> None:
        log.info("job %s, epoch %d, on %s", job.id, job.epoch, attached.device.id)
        request = HeartbeatRequest(agent=self._name, device=attached.device.id, job=job.id, epoch=job.epoch)
        with Heart(self._client, request, reply.heartbeat_s, job.deadline_s, self._clock, self._abort) as heart:
            outcome = self._outcome(attached, job, Lease(reply.authority, job.epoch), heart)
            self._submit(attached, job, outcome)

    def _outcome(self, attached: Attached, job: Job, lease: Lease, heart: Heart) -> RoundResult | Failure:
        lock = attached.lock
        try:
            with lock.exclusive(job.deadline_s, heart.must_end) if lock else contextlib.nullcontext():
                attached.transport.connect()
                attached.transport.claim(lease)
                return run_round(
                    job.round,
                    attached.transport,
                    self._files,
                    self._known,
                    observer=Observer(attached.transport, self._clock),
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

    def _submit(self, attached: Attached, job: Job, outcome: RoundResult | Failure) -> None:
        if isinstance(outcome, Failure):
            log.warning("job %s: %s: %s", job.id, outcome.kind, outcome.message)
        request = ResultRequest(
            agent=self._name,
            device=attached.device.id,
            epoch=job.epoch,
            result=None if isinstance(outcome, Failure) else outcome,
            failure=outcome if isinstance(outcome, Failure) else None,
        )
        backoff, end = Backoff(), self._clock.monotonic() + _SUBMIT_FOR_S
        while not self._abort.is_set():
            try:
                reply = self._client.submit(job.id, request)
            except InfrastructureFailed as error:
                if self._clock.monotonic() > end:
                    log.error("job %s: result lost, no coordinator for %g s: %s", job.id, _SUBMIT_FOR_S, error)
                    return
                self._wait(backoff, error, until=self._abort)
            except NasError as error:
                log.error("job %s: result refused: %s", job.id, error)
                return
            else:
                log.info("job %s: %s", job.id, "accepted" if reply.accepted else f"not accepted: {reply.reason}")
                return

    def _wait(self, backoff: Backoff, error: NasError, until: threading.Event | None = None) -> None:
        pause_s = backoff.pause_s()
        log.warning("%s; next try in %.1f s", error, pause_s)
        (until or self._stop).wait(pause_s)


def _failure(kind: FailureKind, why: object, heart: Heart) -> Failure:
    return Failure(kind=kind, message=str(why)[:4000], phase=heart.phase, overdue=heart.overdue)
