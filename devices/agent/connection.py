"""Connects to an attached device, identifies it, and computes pauses between attempts."""

from __future__ import annotations

import random
from dataclasses import dataclass

from nas.core.device import Device
from nas.core.errors import InfrastructureFailed
from nas.measure.devices.agent.client import NotReached
from nas.measure.devices.attachments import Attachment, scheme_of
from nas.measure.devices.describe import boot_id, describe, restricted
from nas.measure.devices.host_lock import HostLock
from nas.measure.devices.probes.readings import Unread
from nas.measure.devices.transports.base import NotTrusted, Transport


class AnotherDevice(NotTrusted):
    """Another device answers than the one that was attached under this address."""


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
    """A connected device.

    Args:
        device: its description.
        transport: to the device.
        boot: id of the boot that was described; None if the device does not report it.
        lock: the host lock, if the device has the processors of the agent's own machine.
    """

    device: Device
    transport: Transport
    boot: str | None
    lock: HostLock | None = None

    def check(self) -> None:
        """Raises `InfrastructureFailed` unless the same boot of the same device answers at the address."""
        if _boot(self.transport) != self.boot:
            raise InfrastructureFailed(f"device {self.device.id} was restarted or exchanged")


def find(attachment: Attachment, transport: Transport, host: Host | None = None) -> Attached:
    """Connects to the device at an address and describes it.

    A device that runs under the host's own kernel (a container, a login on localhost) is the host: its jobs take the
    host lock.

    Raises:
        AnotherDevice: it is another one than was attached.
        InfrastructureFailed: it cannot be reached, or does not say what it is.
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
    device = restricted(device, attachment.isa, attachment.gpu, attachment.threads)
    if attachment.id not in (None, device.id):
        raise AnotherDevice(
            f"{attachment.address} answers as device {device.id}, but {attachment.id} was attached: it is not served. "
            "If this is intended, or it is the same one (a new /etc/machine-id or serial number changes the id; so may "
            f"an upgrade of hilnas): nas device remove {attachment.address}, then add it again"
        )
    lock = host.lock if host is not None and host.boot_id == boot else None
    return Attached(device, transport, boot, lock)


def _boot(transport: Transport) -> str | None:
    try:
        return boot_id(transport)
    except Unread:
        return None


NOBODY_THERE_S = 6.0
"""Longest pause where the connection is refused."""
IN_TROUBLE_S = 30.0
"""Longest pause after any other failure of the coordinator."""


class Backoff:
    """Random pauses below a bound that doubles ("full jitter"), so that many agents spread out.

    If the connection is refused, the bound stays low: trying a closed port costs next to nothing, and a coordinator
    that restarts should have its agents back soon. A coordinator that answers with errors is left alone for longer.

    Source: M. Brooker, Exponential Backoff And Jitter, AWS Architecture Blog, 2015.

    Args:
        first_s: bound of the first pause.
        longest_s: bound of every pause.
        rng: the source of jitter.
    """

    def __init__(self, first_s: float = 0.2, longest_s: float = IN_TROUBLE_S, rng: random.Random | None = None) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._bound_s = first_s
        self._rng = rng or random.Random()

    def reset(self) -> None:
        """Starts over after a success."""
        self._bound_s = self._first_s

    def pause_s(self, error: Exception) -> float:
        """Returns the next pause after `error`, in seconds."""
        bound_s = min(self._bound_s, NOBODY_THERE_S) if isinstance(error, NotReached) else self._bound_s
        self._bound_s = min(self._bound_s * 2, self._longest_s)
        return bound_s * self._rng.random()
