"""Serves one attached device in a thread: connects, registers it, runs its jobs, and notices when it is gone."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from nas.core.clock import Clock
from nas.core.errors import InfrastructureFailed, NasError
from nas.core.logs import log_fields
from nas.core.wire import Job, LeaseRequest, RegisterReply
from nas.measure.devices.agent.client import JobClient, NotAdmitted
from nas.measure.devices.agent.connection import Attached, Backoff, Host, find
from nas.measure.devices.agent.job import JobExecutor
from nas.measure.devices.agent.registry import DeviceRegistry
from nas.measure.devices.attachments import Attachment
from nas.measure.devices.transports.base import Transport


class Poll:
    """Asks for a job in a thread of its own, because the coordinator may hold the request for a while (long poll).

    Args:
        ask: returns a job or none; may take long.
        woken: set when there is an answer.
        unwanted: takes a job for which nobody waits any more.
    """

    def __init__(self, ask: Callable[[], Job | None], woken: threading.Event, unwanted: Callable[[Job], None]) -> None:
        self._ask, self._woken, self._unwanted = ask, woken, unwanted
        self._answer: Future[Job | None] = Future()
        self._end, self._is_taken = threading.Event(), False
        threading.Thread(target=self._run, name="poll", daemon=True).start()

    @property
    def answered(self) -> bool:
        """Whether there is an answer."""
        return self._end.is_set()

    def wait(self, seconds: float) -> None:
        """Waits for the answer for at most `seconds`."""
        self._end.wait(seconds)

    def job(self) -> Job | None:
        """Returns the answer that is there; raises what came instead."""
        self._is_taken = True
        return self._answer.result(0)

    def abandon(self) -> None:
        """Hands a job that nobody took, or that is still to come, to `unwanted`."""
        if not self._is_taken:
            self._answer.add_done_callback(self._hand_back)

    def _run(self) -> None:
        try:
            self._answer.set_result(self._ask())
        except Exception as error:  # of which the session tells
            self._answer.set_exception(error)
        finally:
            self._end.set()
            self._woken.set()

    def _hand_back(self, answer: Future[Job | None]) -> None:
        if answer.exception() is None and (job := answer.result()) is not None:
            self._unwanted(job)


log = logging.getLogger(__name__)

_LOOK_S = 5.0
"""Interval at which an idle device is checked."""

_ANSWER_S = 3.0
"""Time for a coordinator to answer the poll about a device that was just deregistered."""

_FIRST_PAUSE_S = 0.5
"""Between the first attempts to reach a device that is gone."""
_LONGEST_PAUSE_S = 15.0


class DeviceSession:
    """Serves one attachment until `retire`.

    Args:
        agent: name.
        attachment: the device to serve.
        transport: to the device; closed by the session.
        host: the machine of the agent.
        client: the coordinator.
        registry: the devices registered with the coordinator.
        executor: runs the jobs.
        clock: measures how long ago the device answered.
        refused: called when the coordinator refuses this agent.
    """

    def __init__(
        self,
        agent: str,
        attachment: Attachment,
        transport: Transport,
        host: Host,
        *,
        client: JobClient,
        registry: DeviceRegistry,
        executor: JobExecutor,
        clock: Clock,
        refused: Callable[[NotAdmitted], None],
    ) -> None:
        self.attachment = attachment
        self._agent, self._transport, self._host = agent, transport, host
        self._client, self._registry, self._executor = client, registry, executor
        self._clock, self._refused = clock, refused
        self._stop, self._woken = threading.Event(), threading.Event()
        self._poll: Poll | None = None
        self._last: Attached | None = None
        self._last_warning = ""
        self._asked_at = clock.monotonic()
        self._thread = threading.Thread(target=self._run, name=attachment.address, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def retire(self) -> None:
        """Ends the session after the job in progress; see `has_ended`."""
        self._stop.set()
        self._woken.set()

    @property
    def has_ended(self) -> bool:
        """Whether the device has been released."""
        return not self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        """Waits for the end of the session for at most `timeout_s`."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        with log_fields(address=self.attachment.address):
            while not self._stop.is_set():
                try:
                    self._serve(backoff)
                except NotAdmitted as error:
                    self._refused(error)
                    break
                except Exception as error:
                    if not isinstance(error, NasError | OSError):
                        log.exception("unexpected error")  # a defect of ours: other devices are served on
                    self._warn_once(error)
                    self._registry.looked(self.attachment.address)
                    self._stop.wait(backoff.pause_s(error))
            self._transport.close()

    def _serve(self, backoff: Backoff) -> None:
        """Connects and serves until the session retires; raises the error that ended the connection."""
        address = self.attachment.address
        if self.attachment.id is not None:
            self._registry.check_free(self.attachment.id, address)
        attached = find(self.attachment, self._transport, self._host)
        with log_fields(device=attached.device.id):
            reply = self._registry.join(attached.device, address)
            self._log_connected(attached)
            try:
                self._take_jobs(attached, reply, backoff)
            finally:
                self._leave(attached.device.id)

    def _leave(self, device: str) -> None:
        """Deregisters the device; the coordinator then answers the open poll for it."""
        try:
            self._registry.leave(device)
        except InfrastructureFailed as error:
            log.warning("%s; %s is deregistered later", error, device)
        finally:
            if self._poll is not None:
                self._poll.wait(_ANSWER_S)
                self._poll.abandon()
                self._poll = None

    def _take_jobs(self, attached: Attached, reply: RegisterReply, lost: Backoff) -> None:
        backoff, self._asked_at = Backoff(), self._clock.monotonic()
        while not self._stop.is_set():
            poll = self._poll = self._ask(attached.device.id, reply)
            self._check_while_polling(attached, poll, lost)
            if not poll.answered:
                return
            try:
                job = poll.job()
            except NotAdmitted:
                raise
            except NasError as error:
                self._pause(backoff, error)
                reply = self._register_again(attached, reply, backoff)
                continue
            backoff.reset()
            if job is not None:
                with log_fields(job=job.id, epoch=job.epoch):
                    if not self._executor.run(attached, job, reply):
                        attached.check()
                self._asked_at = self._clock.monotonic()

    def _ask(self, device: str, reply: RegisterReply) -> Poll:
        """Starts a poll for a job, after submitting pending results."""

        def next_job() -> Job | None:
            self._executor.submit_pending(reply.authority, device)
            return self._client.lease(LeaseRequest(agent=self._agent, device=device, wait_s=reply.poll_s)).job

        self._woken.clear()
        return Poll(next_job, self._woken, partial(self._give_back, device, reply))

    def _check_while_polling(self, attached: Attached, poll: Poll, lost: Backoff) -> None:
        """Checks regularly that the device is there, until the poll is answered or the session retires."""
        while not (poll.answered or self._stop.is_set()):
            left_s = self._asked_at + _LOOK_S - self._clock.monotonic()
            if left_s > 0:
                self._woken.wait(left_s)
            else:
                attached.check()
                lost.reset()
                self._asked_at = self._clock.monotonic()

    def _give_back(self, device: str, reply: RegisterReply, job: Job) -> None:
        """Returns a job that was leased in the moment when the device left."""
        self._executor.give_back(device, job, reply)
        # The job is reported; this only corrects that the device now seems registered.
        with contextlib.suppress(NasError):
            self._registry.repeat()

    def _register_again(self, attached: Attached, reply: RegisterReply, backoff: Backoff) -> RegisterReply:
        """Registers once more, because the coordinator may have been replaced or reset; harmless otherwise."""
        while not self._stop.is_set():
            try:
                return self._registry.join(attached.device, self.attachment.address, reply)
            except InfrastructureFailed as error:
                self._pause(backoff, error)
        return reply

    def _pause(self, backoff: Backoff, error: NasError) -> None:
        pause_s = backoff.pause_s(error)
        log.warning("%s; next try in %.1f s", error, pause_s)
        self._stop.wait(pause_s)

    def _log_connected(self, attached: Attached) -> None:
        again = self._last is not None and self._last.device.id == attached.device.id
        booted = " after a restart" if again and self._last and self._last.boot != attached.boot else ""
        log.info("%s%s: %s", "connected again" if again else "connected", booted, attached.device.model)
        self._last, self._last_warning = attached, ""

    def _warn_once(self, error: Exception) -> None:
        """Logs each reason once: a device may be gone for weeks."""
        reason = str(error)
        if reason != self._last_warning:
            log.warning("not served: %s", reason)
        self._last_warning = reason
