"""Agents as processes: what makes one, and how it is told to end."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from nas.devices.agent import Agent
from nas.devices.attachments import LOCAL, THIS_MACHINE, Attachment, Attachments, open_transport
from nas.devices.client import JobClient
from nas.devices.content import ContentFolder
from nas.devices.describe import boot_id
from nas.devices.download import Downloads
from nas.devices.hostlock import HostLock
from nas.devices.manifest import PinnedManifest
from nas.devices.places import agent_home
from nas.devices.transports.local import LocalTransport


def own_attachments() -> Attachments:
    """The devices of this home, `$NAS_HOME/agent/devices.json`."""
    return Attachments(agent_home() / "devices.json")


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
    """An agent of this host.

    Args:
        name: stable over restarts.
        client: the coordinator.
        attached: lists what it serves.
        cache: folder for files and runners.
        lock: folder of the host lock.
        state: folder for what the agent must not forget.
        key: public key of the coordinator, whose signature every runner manifest must carry.
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
    """What an agent serves: the devices of a file while it is its turn, and this machine, if wanted, in any case."""

    def listed() -> Sequence[Attachment]:
        own = (THIS_MACHINE,) if this_machine else ()
        others = tuple(each for each in attachments.read() if each.address != LOCAL)
        return (*own, *others) if others and attachments.turn.mine() else own

    return listed


def end_on_signals(agent: Agent) -> None:
    """The first signal lets the running jobs finish, the second does not."""

    def handle(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, lambda number, frame: agent.abort())
        agent.stop()

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, handle)
