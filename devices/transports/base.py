"""The protocol of devices, however they are reached: run a process, store files by content, read small text files.

The error class says whether a retry can help:

- `InfrastructureFailed`: the connection, the device or its disk failed; a retry, or another device, can help.
    - `NotTrusted`: device and agent do not trust each other; only a person, or another device, can help.
    - `StaleLease`: the device was leased to another holder; a new lease can help.
- `Unsupported`: this device cannot do that, and a retry will not help.
- `Cancelled`: the caller asked for it.
- `OSError` (when reading files): the file does not exist or may not be read; for probes that is an answer.

What a process does (exit code, death by signal, deadline, too much output) is a result, never an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from nas.core.errors import InfrastructureFailed, InvalidInput, NasError

STDERR_TAIL = 8192
"""Bytes of stderr that are kept."""

TEXT_LIMIT = 1 << 16
"""Bytes that `read_text` reads at most, and `read_many` of each file."""

READING_LIMIT = 1 << 20
"""Bytes that one `read_many` may return in all."""

_AUTHORITY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Cancelled(NasError):
    """The process was killed because the caller cancelled it."""


class NotTrusted(InfrastructureFailed):
    """The device is not the pinned one, or does not accept this agent's key. Trying again does not help."""

    exit_code = 3


class StaleLease(InfrastructureFailed):
    """A newer epoch ran on the device, so this lease has expired.

    Args:
        where: the device or folder that refused it.
        lease: the refused one.
        last: the newest epoch of the same authority that ran there.
    """

    def __init__(self, where: str, lease: Lease, last: int) -> None:
        super().__init__(f"{where}: epoch {lease.epoch} of {lease.authority} is over: {last} was here")
        self.last = last


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to use a device.

    Args:
        authority: who counts the epochs: the name of one coordinator's database. Epochs of
            different authorities are not comparable.
        epoch: grows with every holder.

    Raises:
        InvalidInput: `authority` is not a plain name of up to 64 characters.
    """

    authority: str
    epoch: int

    def __post_init__(self) -> None:
        if not _AUTHORITY.fullmatch(self.authority):
            raise InvalidInput(f"authority of a lease {self.authority!r}: up to 64 letters, digits and ._- only")


def never() -> bool:
    """Returns False: for callers that do not cancel."""
    return False


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of one process.

    Args:
        exit_code: negative if a signal killed it.
        stdout: at most `output_limit` bytes.
        stderr_tail: the last `STDERR_TAIL` bytes.
        wall_s: from fork to exit.
        cpu_s: user and system time of the process and of children it waited for; `None` if unknown.
        overhead_cpu_s: CPU time that the transport used on the device meanwhile.
        timed_out: killed at its deadline.
        truncated: killed because it wrote more than `output_limit`.
        started_at: seconds since the epoch, by the agent's clock.
    """

    exit_code: int
    stdout: bytes
    stderr_tail: bytes
    wall_s: float
    cpu_s: float | None
    overhead_cpu_s: float
    timed_out: bool
    truncated: bool
    started_at: float


class Tree(Protocol):
    """Reads the small text files of /proc, /sys and /etc."""

    def read_text(self, path: str) -> str:
        """Returns the text of the file at absolute `path`, at most `TEXT_LIMIT` bytes of it.

        Raises:
            OSError: it does not exist, or may not be read.
        """

    def names(self, folder: str) -> list[str]:
        """Returns the sorted names in `folder`.

        Raises:
            OSError: it does not exist, or may not be read.
        """


class Reader(Protocol):
    """Reads many files of a device in one exchange."""

    def read_many(self, paths: Sequence[str], commands: Sequence[str] = ()) -> dict[str, str | OSError]:
        """Reads files, in this order, and then the output of commands on the device, in one exchange.

        Args:
            paths: absolute. `*` and `?` match parts of names, as in a shell; a pattern without a match is not in the
                answer.
            commands: lines for the device's shell, run in the folder of the transport's files. Constants of ours only,
                never built from input.

        Returns:
            Path or command -> text, at most `TEXT_LIMIT` bytes of it, or the error.

        Raises:
            InfrastructureFailed: the device failed, or the answer exceeds `READING_LIMIT`.
        """


class Transport(Reader, Protocol):
    """A connection to one device. Remote paths are plain strings, returned by `push`, `make` and `bundle` only.

    Example:
        >>> transport = LocalTransport(cache)
        >>> transport.connect()
        >>> remote = transport.push(Path("hello"), sha256)
        >>> folder = transport.bundle({"hello": sha256})
        >>> transport.run([f"{folder}/hello"], env={}, deadline_s=5, output_limit=1000).exit_code
        0
    """

    def connect(self) -> None:
        """Connects; does nothing if connected.

        Raises:
            InfrastructureFailed: the device cannot be reached.
        """

    def close(self) -> None:
        """Disconnects; does nothing if closed."""

    def claim(self, lease: Lease) -> None:
        """Runs everything from now on under `lease`. Kills what an older lease of its authority left running.

        Without a claim nothing is fenced: for interactive use.

        Raises:
            StaleLease: a newer epoch of the same authority was here, as `run` also reports from now on.
            InfrastructureFailed: another authority's process does not end.
        """

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        deadline_s: float,
        output_limit: int,
        cpu_affinity: Sequence[int] = (),
        cancelled: Callable[[], bool] = never,
    ) -> CommandResult:
        """Runs one process with exactly `env` (besides a plain PATH and LANG) and waits for it.

        At the deadline, and when the agent dies, the process and all its descendants are killed.

        Raises:
            Unsupported: the device cannot execute `argv[0]`, or lacks a processor of `cpu_affinity`.
            InfrastructureFailed: the device failed.
            StaleLease: the claimed lease has expired.
            Cancelled: `cancelled()` became true.
        """

    def push(self, local: Path, sha256: str) -> str:
        """Puts a file into the device's cache, once per content, and verifies its hash there. The remote path.

        Raises:
            InfrastructureFailed: the content is not `sha256`, or the device's disk failed.
        """

    def make(self, sha256: str, produce: Callable[[str], None]) -> str:
        """Makes content on the device instead of pushing it, once, and verifies it. Returns the remote path.

        Args:
            sha256: of the content.
            produce: writes the content to a remote path where nothing is yet; not called if the content is there.

        Raises:
            InfrastructureFailed: what was produced is not `sha256`, or the device's disk failed.
        """

    def bundle(self, files: Mapping[str, str]) -> str:
        """Returns a remote folder in which each pushed file has its name, executable and read-only.

        Args:
            files: plain file name -> SHA-256 of a file that was pushed.

        Raises:
            InfrastructureFailed: a file was not pushed, or the device's disk failed.
        """


class Connect(Protocol):
    """A registered transport factory (`TRANSPORTS`)."""

    def __call__(self, address: str, cache: Path) -> Transport:
        """Returns a transport, not yet connected.

        Args:
            address: of the device, in the transport's own form; empty for this machine.
            cache: folder on this machine for the transport's use.
        """
