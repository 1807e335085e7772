"""adb as a `Wire`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Protocol

from nas.core import paths
from nas.core.errors import InfrastructureFailed, InvalidInput
from nas.devices.transports.adb import sync
from nas.devices.transports.adb.connection import AdbConnection
from nas.devices.transports.adb.key import AdbKey
from nas.devices.transports.adb.server import AdbServer
from nas.devices.transports.shell import ShellTransport
from nas.devices.transports.wire import Stream

_SERIAL = re.compile(r"[A-Za-z0-9._-]+")
_HOST_PORT = re.compile(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")


def connect(address: str, cache: Path) -> ShellTransport:
    """The transport of the device at `address`; the agent's key is `$NAS_HOME/keys/adb`.

    Raises:
        InvalidInput: neither `adb:HOST:PORT` nor `adb:SERIAL`.
    """
    return ShellTransport(AdbWire(address, paths.home() / "keys"))


class _Services(Protocol):
    """A way to the services of a device."""

    def open(self, service: str) -> Stream: ...

    def close(self) -> None: ...


class AdbWire:
    """See `Wire`.

    Args:
        address: `adb:HOST:PORT` straight to the device, `adb:SERIAL` through the adb server.
        keys: folder of the agent's keys.
    """

    folder = "/data/local/tmp/hilnas"

    def __init__(self, address: str, keys: Path) -> None:
        self.name = address
        self._keys = keys
        scheme, _, self._where = address.partition(":")
        if scheme != "adb" or not (_SERIAL.fullmatch(self._where) or _HOST_PORT.fullmatch(self._where)):
            raise InvalidInput(f"device address {address!r}: adb:SERIAL or adb:HOST:PORT is wanted")
        self._services: _Services | None = None

    def connect(self) -> None:
        """See `Wire.connect`."""
        if self._services is None:
            direct = _HOST_PORT.fullmatch(self._where)
            if direct:
                key = AdbKey.load(self._keys / "adb")
                self._services = AdbConnection(direct["host"].strip("[]"), int(direct["port"]), key)
            else:
                self._services = AdbServer(self._where)

    def close(self) -> None:
        """See `Wire.close`."""
        if self._services is not None:
            self._services.close()
            self._services = None

    def start(self, command: str) -> Stream:
        """See `Wire.start`."""
        return self._open(f"exec:{command}")

    def put(self, local: Path, remote: str) -> None:
        """See `Wire.put`."""
        stream = self._open("sync:")
        try:
            sync.push(stream, local, remote, self.name)
        finally:
            stream.close()

    def _open(self, service: str) -> Stream:
        if self._services is None:
            raise InfrastructureFailed(f"{self.name}: not connected")
        return self._services.open(service)
