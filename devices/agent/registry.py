"""The devices of this agent that are registered with the coordinator."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

from nas.core.clock import Clock
from nas.core.device import Device
from nas.core.errors import InfrastructureFailed, InvalidInput, NasError
from nas.core.wire import MOST_DEVICES, RegisterReply, RegisterRequest
from nas.measure.devices.agent.client import JobClient, NotAdmitted

log = logging.getLogger(__name__)

_GATHER_S = 2.0
_FIRST_REGISTRATION_S = 3.0
_LONGEST_SILENCE_S = 20.0
"""An agent without devices polls for no job either, so it registers this often to show that it is alive."""


class AlreadyServed(NasError):
    """The device is already served through another address."""


class DeviceRegistry:
    """Keeps the registration up to date. Each registration replaces the previous one, so they are made one at a time.

    Every method raises `InfrastructureFailed` if the coordinator cannot be reached, and `NotAdmitted` if it refuses
    this agent regardless of its devices.

    Args:
        agent: name.
        client: the coordinator.
        boot_id: of this host.
        clock: measures silence.
    """

    def __init__(self, agent: str, client: JobClient, boot_id: str, clock: Clock) -> None:
        self._agent, self._client, self._boot_id, self._clock = agent, client, boot_id, clock
        self._changed = threading.Condition()
        self._present: dict[str, tuple[Device, str]] = {}
        self._registered: dict[str, Device] = {}
        self._awaited: set[str] = set()
        self._gather_until = clock.monotonic()
        self._last: RegisterReply | None = None
        self._registered_at = clock.monotonic() - _LONGEST_SILENCE_S + _FIRST_REGISTRATION_S
        self._closed = self._unreachable = False

    @property
    def authority(self) -> str | None:
        """The coordinator's authority, once it has answered."""
        return self._last.authority if self._last else None

    def ids(self) -> set[str]:
        """Returns the ids of the devices that are served now."""
        with self._changed:
            return set(self._present)

    def expect(self, addresses: Iterable[str]) -> None:
        """Announces the search for these devices: those found soon are registered together, so none seems gone."""
        with self._changed:
            self._awaited = set(addresses)
            self._gather_until = self._clock.monotonic() + _GATHER_S

    def looked(self, address: str) -> None:
        """Records that the search for the device at the address is over, successful or not."""
        with self._changed:
            self._awaited.discard(address)
            self._changed.notify_all()

    def join(self, device: Device, address: str, reply: RegisterReply | None = None) -> RegisterReply:
        """Registers all present devices and this one.

        Args:
            device: served from now on.
            address: how it is reached.
            reply: the answer to a registration that the coordinator seems to have lost; None: the device is new here.

        Raises:
            AlreadyServed: the same device is served through another address.
            InvalidInput: the agent serves as many devices as it may.
            NasError: the coordinator refuses this device; devices registered before stay registered.
        """
        self.looked(address)
        with self._changed:
            self.check_free(device.id, address)
            if len(self._present.keys() - {device.id}) >= MOST_DEVICES:
                raise InvalidInput(f"an agent serves at most {MOST_DEVICES} devices: attach {address} to another host")
            self._present[device.id] = device, address
            self._changed.wait_for(lambda: not self._awaited, self._gather_until - self._clock.monotonic())
            if self._last and self._last is not reply and self._registered.get(device.id) == device:
                return self._last
            # The refusal of another device may have removed it.
            self._present[device.id] = device, address
            try:
                return self._register()
            except (InfrastructureFailed, NotAdmitted):
                if device.id not in self._registered:
                    del self._present[device.id]
                raise
            except NasError:
                self._present = {
                    id: way for id, way in self._present.items() if id in self._registered and id != device.id
                }
                self._register_others()
                raise

    def check_free(self, id: str, address: str) -> None:
        """Raises `AlreadyServed` if `join` would."""
        with self._changed:
            _, way = self._present.get(id, (None, address))
            if way != address:
                raise AlreadyServed(f"{address} is device {id}, which is already served as {way}")

    def leave(self, id: str) -> None:
        """Deregisters a device. If the coordinator cannot be reached, `refresh` does it later."""
        with self._changed:
            self._present.pop(id, None)
            if self._unreachable:
                return
            try:
                self.refresh()
            except InfrastructureFailed:
                # Its lease expires anyway; an agent of many devices should not wait for each of them.
                self._unreachable = self._closed
                raise

    def close(self) -> None:
        """Ends: if deregistering one device fails from now on, the others are not tried."""
        with self._changed:
            self._closed = True

    def repeat(self) -> None:
        """Registers the present devices once more, if the coordinator may have another view meanwhile."""
        with self._changed:
            self._register_others()

    def refresh(self) -> None:
        """Sends the coordinator what it does not know yet; to be called from time to time."""
        with self._changed:
            silent_s = self._clock.monotonic() - self._registered_at
            removals = self._registered.keys() - self._present.keys()
            if removals or (not self._present and silent_s > _LONGEST_SILENCE_S):
                self._register_others()

    def _register_others(self) -> None:
        """Registers without a new device, so that a refusal concerns the agent."""
        try:
            self._register()
        except InfrastructureFailed:
            raise
        except NasError as error:
            raise NotAdmitted(str(error)) from error

    def _register(self) -> RegisterReply:
        devices = tuple(device for _, (device, _) in sorted(self._present.items()))
        request = RegisterRequest(agent=self._agent, devices=devices, boot_id=self._boot_id)
        self._last = self._client.register(request)
        self._registered = {id: device for id, (device, _) in self._present.items()}
        self._registered_at = self._clock.monotonic()
        return self._last
