"""The agent process: follows the list of attached devices and serves each in a `DeviceSession`.

It runs as `nas agent run`, or as a child process of `nas launch` and `nas serve` (`python -m
nas.measure.devices.agent.agent`). The parent of a child holds the write end of its standard input; nothing is ever
written, and its end makes the child stop.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType

from nas.core.clock import Clock, SystemClock
from nas.core.errors import InvalidInput, NasError
from nas.core.logs import configure_logs
from nas.core.wire import MOST_DEVICES
from nas.measure.devices.agent.client import Downloads, JobClient, NotAdmitted, Outbox
from nas.measure.devices.agent.connection import Host
from nas.measure.devices.agent.job import JobExecutor
from nas.measure.devices.agent.registry import DeviceRegistry
from nas.measure.devices.agent.run_plan import FileSource, KnownRunner
from nas.measure.devices.agent.session import DeviceSession
from nas.measure.devices.agent.trust import PinnedManifest
from nas.measure.devices.attachments import LOCAL, THIS_MACHINE, Attachment, Attachments, open_transport
from nas.measure.devices.describe import boot_id, describe
from nas.measure.devices.files import ContentFolder
from nas.measure.devices.host_lock import HostLock
from nas.measure.devices.transports.base import Transport
from nas.measure.devices.transports.local import LocalTransport

log = logging.getLogger(__name__)

_LOOK_S = 1.0
"""Interval between reads of the list of devices."""

_JOIN_S = 0.1
_LONGEST_ABORT_S = 5.0


class Agent:
    """Serves its devices, each in a thread of its own, until `stop`.

    Args:
        name: stable over restarts.
        client: the coordinator.
        attached: lists the devices to serve; called repeatedly.
        reach: returns the transport of an attachment.
        files: source of plan files.
        is_known: whether a runner may run here.
        lock: the host lock, for measurements on this machine.
        outbox: folder for results that the coordinator has not accepted yet.
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
        is_known: KnownRunner,
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
        self._registry = DeviceRegistry(name, client, boot_id, self._clock)
        self._outbox = Outbox(outbox, name)
        self._executor = JobExecutor(
            name, client, files, is_known, self._outbox, self._clock, stop=self._stop, abort=self._abort
        )
        self._sessions: dict[str, DeviceSession] = {}
        self._refusal: NotAdmitted | None = None
        self._warnings: deque[str] = deque(maxlen=MOST_DEVICES)

    def stop(self) -> None:
        """Ends `run` after the jobs in progress. Safe in signal handlers and from other threads."""
        self._stop.set()

    def abort(self) -> None:
        """Ends `run` now: kills what runs and submits nothing. The coordinator leases the job again."""
        self._abort.set()
        self._stop.set()

    def run(self) -> None:
        """Serves until `stop` or `abort`.

        Raises:
            NotAdmitted: the coordinator refuses this agent.
        """
        self._follow_list(self._registry.expect)
        while not self._stop.is_set():
            self._follow_list()
            try:
                self._send_pending()
            except NotAdmitted as error:
                self._refused(error)
            except NasError as error:
                self._warn_once(error)
            self._stop.wait(_LOOK_S)
        self._registry.close()
        for session in self._sessions.values():
            session.retire()
        self._wait_for_sessions()
        if self._refusal is not None:
            raise self._refusal

    def _follow_list(self, announce: Callable[[Iterable[str]], None] = lambda addresses: None) -> None:
        """Retires sessions whose attachment was removed or changed, and starts sessions for new ones."""
        try:
            listed = {attachment.address: attachment for attachment in self._attached()}
        except (InvalidInput, OSError) as error:
            self._warn_once(error)
            return
        for address, session in list(self._sessions.items()):
            if listed.get(address) != session.attachment:
                session.retire()
            if session.has_ended:
                del self._sessions[address]
        announce(listed)
        for address, attachment in listed.items():
            if address not in self._sessions:
                self._start_session(attachment)

    def _start_session(self, attachment: Attachment) -> None:
        try:
            transport = self._reach(attachment)
        except (NasError, OSError) as error:
            self._warn_once(error)
            self._registry.looked(attachment.address)
            return
        session = DeviceSession(
            self._name,
            attachment,
            transport,
            self._host,
            client=self._client,
            registry=self._registry,
            executor=self._executor,
            clock=self._clock,
            refused=self._refused,
        )
        self._sessions[attachment.address] = session
        session.start()

    def _wait_for_sessions(self) -> None:
        """Waits for the sessions to end; after `abort` not for one that is stuck."""
        aborted_at = None
        for session in self._sessions.values():
            while not session.has_ended:
                session.join(_JOIN_S)
                if self._abort.is_set():
                    aborted_at = aborted_at or self._clock.monotonic()
                    if self._clock.monotonic() - aborted_at > _LONGEST_ABORT_S:
                        return

    def _send_pending(self) -> None:
        """Sends what the coordinator has not received yet, also about devices that are gone."""
        self._registry.refresh()
        authority = self._registry.authority
        if authority is not None:
            for device in self._outbox.devices(authority) - self._registry.ids():
                self._executor.submit_pending(authority, device)

    def _refused(self, error: NotAdmitted) -> None:
        self._refusal = error
        self._stop.set()

    def _warn_once(self, error: Exception) -> None:
        """Logs each reason once, also where several take turns."""
        if str(error) not in self._warnings:
            log.warning("%s", error)
            self._warnings.append(str(error))


def make_agent(
    name: str,
    client: JobClient,
    attached: Callable[[], Sequence[Attachment]],
    *,
    cache: Path,
    lock: Path,
    state: Path,
    key: str,
) -> Agent:
    """Returns an agent of this host.

    Args:
        name: stable over restarts.
        client: the coordinator.
        attached: lists the devices to serve.
        cache: folder for files and runners.
        lock: folder of the host lock.
        state: folder for what the agent must not lose.
        key: public key of the coordinator, which must have signed every runner manifest.
    """
    return Agent(
        name,
        client,
        attached,
        lambda attachment: open_transport(attachment.address, cache),
        Downloads(client, ContentFolder(cache)),
        PinnedManifest(client.manifest, key, state),
        lock=HostLock(lock),
        outbox=state / "outbox",
        boot_id=boot_id(LocalTransport(cache)),
    )


def served(attachments: Attachments, *, this_machine: bool) -> Callable[[], Sequence[Attachment]]:
    """Returns the lister for `Agent`: the devices of a file while this process holds its lock, and this machine."""

    def listed() -> Sequence[Attachment]:
        local = (THIS_MACHINE,) if this_machine else ()
        others = tuple(attachment for attachment in attachments.read() if attachment.address != LOCAL)
        return (*local, *others) if others and attachments.serve_lock.acquire() else local

    return listed


def end_on_signals(agent: Agent) -> None:
    """Makes the first signal stop the agent after its jobs, and the second abort it."""

    def handle(number: int, frame: FrameType | None) -> None:
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signal_number, lambda number, frame: agent.abort())
        agent.stop()

    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, handle)


_STOP_WITHIN_S = 5.0


def child_arguments(
    server: str, *, cache: Path, lock: Path, state: Path, key: str, devices: Path | None = None
) -> list[str]:
    """Returns Python's arguments for an agent of this machine, whose parent keeps its standard input open.

    `server` is a URL such as `http+unix:///path/of.sock`, `devices` the file of other devices to serve (`Attachments`);
    the others are as in `make_agent`.
    """
    options = {"--server": server, "--cache": cache, "--lock": lock, "--state": state, "--key": key}
    options |= {"--devices": devices} if devices else {}
    return ["-m", __name__, *(str(part) for option in options.items() for part in option)]


def local_agent_name(cache: Path) -> str:
    """Returns the name of this machine's own agent, which has no enrolment."""
    return f"local-{describe(LocalTransport(cache), platform.machine()).id}"[:64]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the agent until standard input ends or a signal arrives. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="nas-agent")
    parser.add_argument("--server", required=True)
    parser.add_argument("--key", required=True)
    for folder in ("--cache", "--lock", "--state"):
        parser.add_argument(folder, type=Path, required=True)
    parser.add_argument("--devices", type=Path, help="list of the devices to serve besides this machine")
    options = parser.parse_args(arguments)
    configure_logs()
    client = JobClient.open(options.server)
    try:
        agent = _local_agent(client, options)
        _end_with_parent(agent)
        end_on_signals(agent)
        agent.run()
    except NasError as error:
        logging.error("%s", error)
        return error.exit_code
    finally:
        client.close()
    return 0


def _local_agent(client: JobClient, options: argparse.Namespace) -> Agent:
    folders = {"cache": options.cache, "lock": options.lock, "state": options.state}
    attached = served(Attachments(options.devices), this_machine=True) if options.devices else lambda: (THIS_MACHINE,)
    return make_agent(local_agent_name(options.cache), client, attached, key=options.key, **folders)


def _end_with_parent(agent: Agent) -> None:
    def wait_for_end() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        agent.abort()
        # A thread may still wait for the coordinator, which died with the parent.
        time.sleep(_STOP_WITHIN_S)
        os._exit(1)

    threading.Thread(target=wait_for_end, name="parent", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
