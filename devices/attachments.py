"""The attached devices of this host: `$NAS_HOME/agent/devices.json`, which `nas device add` writes and agents read."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nas.core import paths
from nas.core.device import GPU_FEATURES
from nas.core.durable import locked, write_durably
from nas.core.errors import InvalidInput, UnknownName
from nas.core.wire import DeviceId
from nas.measure.devices.describe import ISA_FEATURES
from nas.measure.devices.transports import TRANSPORTS
from nas.measure.devices.transports.base import Transport

log = logging.getLogger(__name__)

LOCAL = "local"
"""The address of this machine; with an instruction set, a GPU or a number of threads it is a device of its own, such as
`local:x86-64-v3`, `local:vulkan`, `local:threads=2` and `local:x86-64-v3:threads=2`."""
_LOCAL = re.compile(
    rf"{LOCAL}(?::(?P<isa>{'|'.join(map(re.escape, ISA_FEATURES))}))?(?::(?P<gpu>{'|'.join(GPU_FEATURES)}))?"
    r"(?::threads=(?P<threads>[1-9][0-9]{0,3}))?"
)

TAG = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,31}$"
Tag = Annotated[str, Field(pattern=TAG)]


class Attachment(BaseModel):
    """Connection of one device, and its owner's settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    address: str = Field(description="TRANSPORT:..., such as ssh://user@host or adb:SERIAL; 'local' is this machine")
    id: DeviceId | None = Field(None, description="who answered when it was added; none: whoever answers")
    tags: tuple[Tag, ...] = ()
    cores: tuple[Annotated[int, Field(ge=0)], ...] = Field((), description="processors to measure on; none: all")

    @property
    def isa(self) -> str | None:
        """The instruction set that this machine is restricted to; None: all that it has, or another machine."""
        return self._part("isa")

    @property
    def gpu(self) -> str | None:
        """The kind of GPU of this machine that computes, of `GPU_FEATURES`; None: none, or another machine."""
        return self._part("gpu")

    @property
    def threads(self) -> int | None:
        """Threads of every workload on this machine; None: as the workload says, or another machine."""
        threads = self._part("threads")
        return None if threads is None else int(threads)

    def _part(self, name: str) -> str | None:
        match = _LOCAL.fullmatch(self.address)
        return match[name] if match else None


THIS_MACHINE = Attachment(address=LOCAL)


class _Content(BaseModel):
    model_config = ConfigDict(extra="forbid")

    v: Literal[1] = 1
    devices: tuple[Attachment, ...] = ()


class ServeLock:
    """The lock that lets one process at a time serve the devices of a home, held until released or the process ends.

    Args:
        path: of the lock file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held: BinaryIO | None = None
        self._warned = False

    def acquire(self) -> bool:
        """Takes the lock if it is free. Returns whether this process holds it."""
        if self._held is None:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = self._path.open("ab")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                if not self._warned:
                    folder = self._path.parent
                    log.warning("another agent serves the devices of %s; this one waits until that one ends", folder)
                self._warned = True
                return False
            self._held = file
        return True

    def release(self) -> None:
        """Lets another process take it."""
        if self._held is not None:
            self._held.close()
            self._held = None


class Attachments:
    """The file; several processes may read and change it at once.

    Args:
        path: of the file; need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.serve_lock = ServeLock(path.with_suffix(".turn"))

    def read(self) -> tuple[Attachment, ...]:
        """Returns the entries, in the order they were added; none if the file does not exist.

        Raises:
            InvalidInput: the file was edited into something invalid.
        """
        try:
            return _Content.model_validate_json(self.path.read_bytes()).devices
        except FileNotFoundError:
            return ()
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"]))
            raise InvalidInput(f"{where}: {problem['msg']}", where=str(self.path)) from error

    def add(self, attachment: Attachment) -> None:
        """Writes an entry; one of the same address is replaced.

        Raises:
            InvalidInput: the same device is attached under another address.
        """
        with self._editing():
            others = [entry for entry in self.read() if entry.address != attachment.address]
            for other in others:
                if attachment.id is not None and other.id == attachment.id:
                    raise InvalidInput(
                        f"{attachment.address} is device {other.id}, which is attached as {other.address} already; "
                        f"remove that first: nas device remove {other.address}"
                    )
            self._write((*others, attachment))

    def remove(self, name: str) -> Attachment:
        """Removes and returns the entry whose address or id is `name`.

        Raises:
            UnknownName: there is none.
        """
        with self._editing():
            entries = self.read()
            for entry in entries:
                if name in (entry.address, entry.id):
                    self._write(tuple(other for other in entries if other is not entry))
                    return entry
        names = [name for entry in entries for name in (entry.address, entry.id) if name]
        raise UnknownName("attached device", name, names, where=str(self.path))

    def _editing(self) -> AbstractContextManager[None]:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return locked(self.path.with_suffix(".lock"))

    def _write(self, devices: tuple[Attachment, ...]) -> None:
        write_durably(self.path, _Content(devices=devices).model_dump_json(indent=2).encode() + b"\n")


def agent_home() -> Path:
    """Returns the folder for what an agent host must not lose: enrolment, list of devices, results not yet accepted."""
    return paths.home() / "agent"


def agent_cache() -> Path:
    """Returns the folder for files and runners, which are fetched again if missing."""
    return paths.cache() / "agent"


def own_attachments() -> Attachments:
    """Returns the attached devices of this home, `$NAS_HOME/agent/devices.json`."""
    return Attachments(agent_home() / "devices.json")


def open_transport(address: str, cache: Path) -> Transport:
    """Returns the transport for the device at `address`, not yet connected; `cache` is the agent's folder.

    Raises:
        UnknownName: no such transport.
        InvalidInput: not an address of that transport.
    """
    scheme = scheme_of(address)
    folder = cache if address == LOCAL else cache / "devices" / hashlib.sha256(address.encode()).hexdigest()[:16]
    return TRANSPORTS[scheme]("" if scheme == LOCAL else address, folder)


def scheme_of(address: str) -> str:
    """Returns the name of the transport, which every address starts with.

    Raises:
        UnknownName: no such transport.
        InvalidInput: none is named.
    """
    scheme, colon, _ = address.partition(":")
    complete = _LOCAL.fullmatch(address) is not None if scheme == LOCAL else bool(colon)
    if scheme not in TRANSPORTS or not complete:
        names = [name for name in TRANSPORTS if name != LOCAL]
        if address != LOCAL and address.isalnum() and address not in names:  # such as the serial number of a phone
            meant = " or ".join(f"{name}:{address}" for name in names)
            raise InvalidInput(f"{address!r} says no kind of device; did you mean {meant}?")
        forms = [f"{name}:..." for name in names]
        raise UnknownName("kind of device address", address, forms)
    return scheme
