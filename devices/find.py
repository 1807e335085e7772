"""Who answers at an address: connects, asks what it is, and notices when it is not the same any more."""

from __future__ import annotations

from dataclasses import dataclass

from nas.core.device import Device
from nas.core.errors import InfrastructureFailed
from nas.devices.attachments import Attachment, scheme_of
from nas.devices.describe import boot_id, describe
from nas.devices.hostlock import HostLock
from nas.devices.probes.unread import Unread
from nas.devices.transports.base import NotTrusted, Transport


class AnotherDevice(NotTrusted):
    """What answers is not the device that was attached under this address."""


@dataclass(frozen=True, slots=True)
class Host:
    """The machine that the agent runs on.

    Args:
        boot_id: of its kernel.
        lock: taken while something is measured on its processors.
    """

    boot_id: str
    lock: HostLock


@dataclass(frozen=True, slots=True)
class Attached:
    """A device that was reached.

    Args:
        device: what it is.
        transport: how it is reached.
        boot: which boot of it was described; None where it does not tell.
        lock: the host lock, where the device has the processors of the agent's own machine.
    """

    device: Device
    transport: Transport
    boot: str | None
    lock: HostLock | None = None

    def check(self) -> None:
        """Asks whether it still is who it was: a transport reconnects by itself, to whoever has the address by then.

        Raises:
            InfrastructureFailed: it does not answer, was restarted, or another one answers.
        """
        if _boot(self.transport) != self.boot:
            raise InfrastructureFailed(f"device {self.device.id} was restarted or exchanged")


def find(attachment: Attachment, transport: Transport, host: Host | None = None) -> Attached:
    """The device at the address, described.

    What runs under the host's own kernel, reached by whatever way, is the host: a container, a login on localhost. Its
    jobs take the host lock.

    Raises:
        AnotherDevice: it is another one than was attached.
        InfrastructureFailed: it cannot be reached, or does not tell what it is.
        InvalidInput: it lacks a tool, or a core that it is to be measured on.
    """
    transport.connect()
    boot = _boot(transport)
    try:
        device = describe(
            transport, transport=scheme_of(attachment.address), tags=attachment.tags, pinned_to=attachment.cores
        )
    except Unread as error:
        raise InfrastructureFailed(f"{attachment.address}: {error}") from error
    if attachment.id not in (None, device.id):
        raise AnotherDevice(
            f"{attachment.address} answers as device {device.id}, but {attachment.id} was attached: it is not served. "
            f"If that is meant: nas device remove {attachment.address}, then add it again"
        )
    lock = host.lock if host is not None and host.boot_id == boot else None
    return Attached(device, transport, boot, lock)


def _boot(transport: Transport) -> str | None:
    try:
        return boot_id(transport)
    except Unread:
        return None
