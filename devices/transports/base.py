"""What a device must be able to do, whatever the wire: run a process, take files by content, read small text files.

Errors tell whether a retry can help:

- `InfrastructureFailed`: the wire, the device or its disk failed; another try, or another device, can help.
    - `NotTrusted`: device and agent do not know each other; only a person, or another device, can help.
    - `StaleLease`: the device was given to another holder; a job leased anew can help.
- `Unsupported`: this device cannot do that, and will not the next time either.
- `Cancelled`: the caller asked for it.
- `OSError` (of what reads files): it is not there or may not be read; for probes that is an answer.

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
"""Bytes of stderr kept."""

TEXT_LIMIT = 1 << 16
"""Bytes that `read_text` reads at most, and `read_many` of each file."""

READING_LIMIT = 1 << 20
"""Bytes of all that one `read_many` may bring."""

_AUTHORITY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Cancelled(NasError):
    """The process was killed because the caller no longer wants it."""


class NotTrusted(InfrastructureFailed):
    """The device is not the one that was pinned, or does not accept this agent's key."""


class StaleLease(InfrastructureFailed):
    """A newer epoch ran on the device, so this lease is over."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to use a device.

    Args:
        authority: who counts the epochs: the name of one coordinator's database. Epochs of
            different authorities say nothing about each other.
        epoch: grows with every holder.

    Raises:
        InvalidInput: `authority` is no plain name of up to 64 characters.
    """

    authority: str
    epoch: int

    def __post_init__(self) -> None:
        if not _AUTHORITY.fullmatch(self.authority):
            raise InvalidInput(f"authority of a lease {self.authority!r}: up to 64 letters, digits and ._- only")


def never() -> bool:
    """The answer of a caller that does not cancel."""
    return False


@dataclass(frozen=True, slots=True)
class CommandResult:
    """What one process left behind.

    Args:
        exit_code: negative where a signal killed it.
        stdout: at most `output_limit` bytes.
        stderr_tail: the last `STDERR_TAIL` bytes.
        wall_s: from fork to exit.
        cpu_s: user and system time of the process and of children it waited for; `None` where not told.
        overhead_cpu_s: what the transport itself used on the device in between.
        max_rss_mb: largest resident set, MiB; `None` where not told.
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
    max_rss_mb: float | None
    timed_out: bool
    truncated: bool
    started_at: float


class Tree(Protocol):
    """Reads the small text files of /proc, /sys and /etc."""

    def read_text(self, path: str) -> str:
        """The text of the file at absolute `path`, at most `TEXT_LIMIT` bytes of it.

        Raises:
            OSError: it is not there, or may not be read.
        """

    def names(self, folder: str) -> list[str]:
        """Sorted names in `folder`.

        Raises:
            OSError: it is not there, or may not be read.
        """


class Reader(Tree, Protocol):
    """A `Tree` over a wire, where what is wanted at one moment is better asked for at once."""

    def read_many(self, paths: Sequence[str], commands: Sequence[str] = ()) -> dict[str, str | OSError]:
        """Files, in this order, and then what commands of the device print: one exchange.

        Args:
            paths: absolute. `*` and `?` in one stand for parts of names, as in a shell; one that matches nothing is not
                in the answer.
            commands: lines for the device's shell, run in the folder of the transport's files. Constants of ours only,
                never made of anything else.

        Returns:
            Path or command -> text, at most `TEXT_LIMIT` bytes of it, or why there is none.

        Raises:
            InfrastructureFailed: the device failed, or it is more than `READING_LIMIT` in all.
        """


class Transport(Reader, Protocol):
    """A wire to one device. Remote paths are plain strings, made by `push`, `make` and `bundle` only."""

    def connect(self) -> None:
        """Reaches the device; harmless when connected.

        Raises:
            InfrastructureFailed: it cannot be reached.
        """

    def close(self) -> None:
        """Lets the device go; harmless when closed."""

    def claim(self, lease: Lease) -> None:
        """What is run from here on, is run under `lease`. What an older one of its authority left running is killed.

        Without a claim nothing is fenced: for a person at the device.

        Raises:
            StaleLease: a newer epoch of the same authority was here, as `run` also tells from now on.
            InfrastructureFailed: somebody else's process does not leave.
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

        At the deadline, and when this side dies in whatever way, the process and all its descendants are killed.

        Raises:
            Unsupported: the device cannot execute `argv[0]`, or lacks a processor of `cpu_affinity`.
            InfrastructureFailed: the device failed.
            StaleLease: the claimed lease is over.
            Cancelled: `cancelled()` became true.
        """

    def push(self, local: Path, sha256: str) -> str:
        """Puts a file into the device's cache, once per content, and verifies its hash there. The remote path.

        Raises:
            InfrastructureFailed: the content is not `sha256`, or the device's disk failed.
        """

    def make(self, sha256: str, produce: Callable[[str], None]) -> str:
        """Content that is made on the device instead of pushed, once, and verified as if it had been. The remote path.

        Args:
            sha256: of the content.
            produce: writes the content to a remote path where nothing is yet; not called if the content is there.

        Raises:
            InfrastructureFailed: what was produced is not `sha256`, or the device's disk failed.
        """

    def bundle(self, files: Mapping[str, str]) -> str:
        """A remote folder where each pushed file stands under its name, executable and read-only.

        Args:
            files: plain file name -> SHA-256 of a file that was pushed.

        Raises:
            InfrastructureFailed: a file was not pushed, or the device's disk failed.
        """

    def pull(self, remote: str, local: Path) -> None:
        """Copies a remote file to `local`, atomically.

        Raises:
            InfrastructureFailed: it is not there or the copy failed.
        """

    def hash(self, remote: str) -> str:
        """SHA-256 of a remote file, computed on the device.

        Raises:
            InfrastructureFailed: it cannot be read.
        """


class Connect(Protocol):
    """What is registered in `TRANSPORTS`: makes the transport of one device."""

    def __call__(self, address: str, cache: Path) -> Transport:
        """A transport, not yet connected.

        Args:
            address: where the device is, in the transport's own form; empty for this machine.
            cache: folder on this machine for the transport's use.
        """
