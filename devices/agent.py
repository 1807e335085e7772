"""The agent: takes measurement jobs for its devices from a coordinator, runs them, hands the results in.

- `attachments` lists the devices, `find` reaches and describes one, `station` serves one, `roster` registers them all
- `work` runs a job, `heart` renews its lease meanwhile, `outbox` keeps its result until the coordinator has it

Deadlines, pauses and intervals are measured on clocks that never jump. The time of day is used for what people read
(logs, `started_at` of a run), for which cached file was used longest ago, and by TLS, for the dates of certificates.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from nas.core.clock import Clock, SystemClock
from nas.core.errors import InvalidInput, NasError
from nas.devices.attachments import Attachment
from nas.devices.client import JobClient, NotAdmitted
from nas.devices.execute import FileSource, KnownRunner
from nas.devices.find import Host
from nas.devices.hostlock import HostLock
from nas.devices.outbox import Outbox
from nas.devices.roster import Roster
from nas.devices.station import Station
from nas.devices.transports.base import Transport
from nas.devices.work import Worker

log = logging.getLogger(__name__)

_LOOK_S = 1.0
"""Between looks at the list of devices."""

_JOIN_S, _LONGEST_ABORT_S = 0.1, 5.0


class Agent:
    """Serves its devices, each in a thread of its own, until `stop`.

    Args:
        name: stable over restarts.
        client: the coordinator.
        attached: lists what it serves, asked again and again.
        reach: makes the transport of an attachment.
        files: where plan files come from.
        known: the runners that may run here.
        lock: the host lock, for what is measured on this machine.
        outbox: folder for results not yet handed in.
        boot_id: of this host.
        clock: for deadlines and cool-downs.
    """

    def __init__(
        self,
        name: str,
        client: JobClient,
        attached: Callable[[], Sequence[Attachment]],
        reach: Callable[[Attachment], Transport],
        files: FileSource,
        known: KnownRunner,
        *,
        lock: HostLock,
        outbox: Path,
        boot_id: str,
        clock: Clock | None = None,
    ) -> None:
        self._name, self._client, self._attached, self._reach = name, client, attached, reach
        self._host = Host(boot_id, lock)
        self._clock = clock or SystemClock()
        self._stop, self._abort = threading.Event(), threading.Event()
        self._roster = Roster(name, client, boot_id, self._clock)
        self._outbox = Outbox(outbox, name)
        self._worker = Worker(name, client, files, known, self._outbox, self._clock, stop=self._stop, abort=self._abort)
        self._stations: dict[str, Station] = {}
        self._refusal: NotAdmitted | None = None
        self._said = ""

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
            NotAdmitted: the coordinator refuses this agent.
        """
        self._follow_list(self._roster.expect)
        while not self._stop.is_set():
            self._follow_list()
            try:
                self._keep_in_touch()
            except NotAdmitted as error:
                self._refused(error)
            except NasError as error:
                self._say(error)
            self._stop.wait(_LOOK_S)
        self._roster.close()
        for station in self._stations.values():
            station.retire()
        self._see_off()
        if self._refusal is not None:
            raise self._refusal

    def _follow_list(self, announce: Callable[[Iterable[str]], None] = lambda addresses: None) -> None:
        """Lets go what is no longer listed, or listed otherwise, and begins with what is new."""
        try:
            listed = {attachment.address: attachment for attachment in self._attached()}
        except (InvalidInput, OSError) as error:
            self._say(error)
            return
        for address, station in list(self._stations.items()):
            if listed.get(address) != station.attachment:
                station.retire()
            if station.ended:
                del self._stations[address]
        announce(listed)
        for address, attachment in listed.items():
            if address not in self._stations:
                self._begin(attachment)

    def _begin(self, attachment: Attachment) -> None:
        try:
            transport = self._reach(attachment)
        except InvalidInput as error:
            self._say(error)
            self._roster.looked(attachment.address)
            return
        station = Station(
            self._name,
            attachment,
            transport,
            self._host,
            client=self._client,
            roster=self._roster,
            worker=self._worker,
            clock=self._clock,
            refused=self._refused,
        )
        self._stations[attachment.address] = station
        station.start()

    def _see_off(self) -> None:
        """Waits for the stations; aborted, not for one that is stuck: what runs ends with its connection."""
        aborted_at = None
        for station in self._stations.values():
            while not station.ended:
                station.join(_JOIN_S)
                if self._abort.is_set():
                    aborted_at = aborted_at or self._clock.monotonic()
                    if self._clock.monotonic() - aborted_at > _LONGEST_ABORT_S:
                        return

    def _keep_in_touch(self) -> None:
        """Says what the coordinator was not told yet, also about devices that are not here any more."""
        self._roster.refresh()
        authority = self._roster.authority
        if authority is not None:
            for device in self._outbox.devices(authority) - self._roster.ids():
                self._worker.hand_in(authority, device)

    def _refused(self, error: NotAdmitted) -> None:
        self._refusal = error
        self._stop.set()

    def _say(self, error: Exception) -> None:
        """Once for each reason."""
        if str(error) != self._said:
            log.warning("%s", error)
        self._said = str(error)
