"""What the coordinator knows of this agent: the devices that can be reached now."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from nas.core.clock import Clock
from nas.core.device import Device
from nas.core.errors import InfrastructureFailed, NasError
from nas.core.protocol import RegisterReply, RegisterRequest
from nas.devices.client import JobClient, NotAdmitted

log = logging.getLogger(__name__)

_GATHER_S = 2.0
_FIRST_WORD_S = 3.0
_LONGEST_SILENCE_S = 20.0
"""An agent that has no device asks for no job either, so it says from time to time that it is there."""


class AlreadyServed(NasError):
    """The device is there, but by another way."""


@dataclass(frozen=True, slots=True)
class Registration:
    """An answer of the coordinator; they are numbered."""

    reply: RegisterReply
    number: int


class Roster:
    """Keeps the registration true. A registration replaces the one before, so they are made one at a time.

    Every method raises `InfrastructureFailed` where the coordinator cannot be reached, and `NotAdmitted` where it will
    not have this agent, whatever its devices.

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
        self._told: dict[str, Device] = {}
        self._awaited: set[str] = set()
        self._gather_until = clock.monotonic()
        self._last: Registration | None = None
        self._spoke_at = clock.monotonic() - _LONGEST_SILENCE_S + _FIRST_WORD_S
        self._closed = self._deaf = False

    @property
    def authority(self) -> str | None:
        """Of the coordinator, once it answered."""
        return self._last.reply.authority if self._last else None

    def ids(self) -> set[str]:
        """Of the devices that are served now."""
        with self._changed:
            return set(self._present)

    def expect(self, addresses: Iterable[str]) -> None:
        """Begins the search for these devices. What is found soon is registered together; the rest would seem gone."""
        with self._changed:
            self._awaited = set(addresses)
            self._gather_until = self._clock.monotonic() + _GATHER_S

    def looked(self, address: str) -> None:
        """There was a look for the device at the address, whatever came of it."""
        with self._changed:
            self._awaited.discard(address)
            self._changed.notify_all()

    def join(self, device: Device, address: str, seen: Registration | None = None) -> Registration:
        """Registers all present devices and this one.

        Args:
            device: what is served from now on.
            address: how it is reached.
            seen: the registration that the coordinator seems to have forgotten; None: the device is new here.

        Raises:
            AlreadyServed: the same device is served by way of another address.
            NasError: the coordinator refuses this device; those registered before stay so.
        """
        self.looked(address)
        with self._changed:
            self._check_free(device.id, address)
            self._present[device.id] = device, address
            self._changed.wait_for(lambda: not self._awaited, self._gather_until - self._clock.monotonic())
            if self._last and self._told.get(device.id) == device and (seen is None or seen.number < self._last.number):
                return self._last
            # Another one's refusal may have taken it out.
            self._present[device.id] = device, address
            try:
                return self._register()
            except (InfrastructureFailed, NotAdmitted):
                if device.id not in self._told:
                    del self._present[device.id]
                raise
            except NasError:
                self._present = {id: way for id, way in self._present.items() if id in self._told and id != device.id}
                self._register_others()
                raise

    def check_free(self, id: str, address: str) -> None:
        """Raises `AlreadyServed` where `join` would."""
        with self._changed:
            self._check_free(id, address)

    def leave(self, id: str) -> None:
        """The device is not served any more. Where the coordinator cannot be reached, `refresh` tells it later."""
        with self._changed:
            self._present.pop(id, None)
            if not self._deaf:
                self._last_word()

    def close(self) -> None:
        """The agent ends: a coordinator that does not hear one device's end is not told of the others'."""
        with self._changed:
            self._closed = True

    def repeat(self) -> None:
        """Tells once more which devices are there, where the coordinator may think otherwise meanwhile."""
        with self._changed:
            self._register_others()

    def refresh(self) -> None:
        """Tells the coordinator what it was not told yet; to be called from time to time."""
        with self._changed:
            silent_s = self._clock.monotonic() - self._spoke_at
            gone = self._told.keys() - self._present.keys()
            if gone or (not self._present and silent_s > _LONGEST_SILENCE_S):
                self._register_others()

    def _last_word(self) -> None:
        try:
            self.refresh()
        except InfrastructureFailed:
            # It falls silent anyway; an agent of many devices should not wait for each of them.
            self._deaf = self._closed
            raise

    def _check_free(self, id: str, address: str) -> None:
        _, way = self._present.get(id, (None, address))
        if way != address:
            raise AlreadyServed(f"{address} is device {id}, which is served by way of {way} already")

    def _register_others(self) -> None:
        """Without a device that is new, a refusal is meant for the agent."""
        try:
            self._register()
        except InfrastructureFailed:
            raise
        except NasError as error:
            raise NotAdmitted(str(error)) from error

    def _register(self) -> Registration:
        devices = tuple(device for _, (device, _) in sorted(self._present.items()))
        request = RegisterRequest(agent=self._agent, devices=devices, boot_id=self._boot_id)
        reply = self._client.register(request)
        self._told = {id: device for id, (device, _) in self._present.items()}
        self._spoke_at = self._clock.monotonic()
        self._last = Registration(reply, self._last.number + 1 if self._last else 1)
        return self._last
