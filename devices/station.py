"""One attached device: finds it, registers it, works for it, and notices when it is gone. In a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from functools import partial

from nas.core.clock import Clock
from nas.core.errors import InfrastructureFailed, NasError
from nas.core.logs import log_fields
from nas.core.protocol import Job, LeaseRequest, RegisterReply
from nas.devices.attachments import Attachment
from nas.devices.backoff import Backoff
from nas.devices.client import JobClient, NotAdmitted
from nas.devices.find import Attached, Host, find
from nas.devices.poll import Poll
from nas.devices.roster import Registration, Roster
from nas.devices.transports.base import Transport
from nas.devices.work import Worker

log = logging.getLogger(__name__)

_LOOK_S = 5.0
"""An idle device is asked so often whether it is still there."""

_ANSWER_S = 3.0
"""A coordinator that was told of a device's end answers the poll about it at once, or cannot be reached."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 15.0
"""Between tries to find a device that is gone."""


class Station:
    """Serves one attachment until `retire`.

    Args:
        agent: name.
        attachment: what to serve.
        transport: the way there; the station closes it.
        host: the machine of the agent.
        client: the coordinator.
        roster: what the coordinator knows of this agent.
        worker: runs the jobs.
        clock: measures how long ago the device answered.
        refused: told when the coordinator will not have this agent.
    """

    def __init__(
        self,
        agent: str,
        attachment: Attachment,
        transport: Transport,
        host: Host,
        *,
        client: JobClient,
        roster: Roster,
        worker: Worker,
        clock: Clock,
        refused: Callable[[NotAdmitted], None],
    ) -> None:
        self.attachment = attachment
        self._agent, self._transport, self._host = agent, transport, host
        self._client, self._roster, self._worker, self._clock, self._refused = client, roster, worker, clock, refused
        self._stop, self._woken = threading.Event(), threading.Event()
        self._poll: Poll | None = None
        self._last: Attached | None = None
        self._said = ""
        self._asked_at = clock.monotonic()
        self._thread = threading.Thread(target=self._run, name=attachment.address, daemon=True)

    def start(self) -> None:
        """Begins to serve."""
        self._thread.start()

    def retire(self) -> None:
        """Ends after the job that is held; `ended` tells when."""
        self._stop.set()
        self._woken.set()

    @property
    def ended(self) -> bool:
        """Whether the device was let go."""
        return not self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        """Waits for that, but not longer than `timeout_s`."""
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
                except (NasError, OSError) as error:
                    self._say(error)
                    self._roster.looked(self.attachment.address)
                    self._stop.wait(backoff.pause_s(error))
            self._transport.close()

    def _serve(self, backoff: Backoff) -> None:
        """Finds the device and serves it until the station retires; raises what took the device away."""
        address = self.attachment.address
        if self.attachment.id is not None:
            self._roster.check_free(self.attachment.id, address)
        attached = find(self.attachment, self._transport, self._host)
        with log_fields(device=attached.device.id):
            registration = self._roster.join(attached.device, address)
            self._greet(attached)
            try:
                self._take_jobs(attached, registration, backoff)
            finally:
                self._leave(attached.device.id)

    def _leave(self, device: str) -> None:
        """Tells the coordinator, which then answers what it was asked for the device."""
        try:
            self._roster.leave(device)
        except InfrastructureFailed as error:
            log.warning("%s; the coordinator is told later that %s is gone", error, device)
        finally:
            if self._poll is not None:
                self._poll.wait(_ANSWER_S)
                self._poll.abandon()
                self._poll = None

    def _take_jobs(self, attached: Attached, registration: Registration, lost: Backoff) -> None:
        backoff, self._asked_at = Backoff(), self._clock.monotonic()
        while not self._stop.is_set():
            poll = self._poll = self._ask(attached.device.id, registration.reply)
            self._look_after(attached, poll, lost)
            if not poll.answered:
                return
            try:
                job = poll.job()
            except NotAdmitted:
                raise
            except NasError as error:
                self._pause(backoff, error)
                registration = self._register_again(attached, registration, backoff)
                continue
            backoff.reset()
            if job is not None:
                with log_fields(job=job.id, epoch=job.epoch):
                    if not self._worker.do(attached, job, registration.reply):
                        attached.check()
                self._asked_at = self._clock.monotonic()

    def _ask(self, device: str, reply: RegisterReply) -> Poll:
        """Asks for a job, after what is still to be handed in."""

        def next_job() -> Job | None:
            self._worker.hand_in(reply.authority, device)
            return self._client.lease(LeaseRequest(agent=self._agent, device=device, wait_s=reply.poll_s)).job

        self._woken.clear()
        return Poll(next_job, self._woken, partial(self._give_back, device, reply))

    def _look_after(self, attached: Attached, poll: Poll, lost: Backoff) -> None:
        """Asks the device from time to time whether it is there, until the poll is answered or the station retires."""
        while not (poll.answered or self._stop.is_set()):
            left_s = self._asked_at + _LOOK_S - self._clock.monotonic()
            if left_s > 0:
                self._woken.wait(left_s)
            else:
                attached.check()
                lost.reset()
                self._asked_at = self._clock.monotonic()

    def _give_back(self, device: str, reply: RegisterReply, job: Job) -> None:
        """A job that was granted in the moment when the device left."""
        self._worker.give_back(device, job, reply)
        with contextlib.suppress(NasError):  # it was told of; this only corrects that it now seems to be there
            self._roster.repeat()

    def _register_again(self, attached: Attached, seen: Registration, backoff: Backoff) -> Registration:
        """The coordinator may be another one by now, or have forgotten; to register once more is harmless."""
        while not self._stop.is_set():
            try:
                return self._roster.join(attached.device, self.attachment.address, seen)
            except InfrastructureFailed as error:
                self._pause(backoff, error)
        return seen

    def _pause(self, backoff: Backoff, error: NasError) -> None:
        pause_s = backoff.pause_s(error)
        log.warning("%s; next try in %.1f s", error, pause_s)
        self._stop.wait(pause_s)

    def _greet(self, attached: Attached) -> None:
        again = self._last is not None and self._last.device.id == attached.device.id
        booted = " after a restart" if again and self._last and self._last.boot != attached.boot else ""
        log.info("%s%s: %s", "there again" if again else "there", booted, attached.device.model)
        self._last, self._said = attached, ""

    def _say(self, error: Exception) -> None:
        """Once for each reason: a device may be gone for weeks."""
        reason = str(error)
        if reason != self._said:
            log.warning("not served: %s", reason)
        self._said = reason
