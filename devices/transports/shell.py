"""A `Transport` over any `Wire` to a POSIX shell: Linux machines over ssh, phones over adb.

Everything is done by small scripts that get their arguments as arguments. What is run for a plan is run by
`supervise.sh`, which is pushed once and sees to deadlines and fencing on the device.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nas.core.canonical import content_hash
from nas.core.errors import InfrastructureFailed, Unsupported
from nas.devices.content import file_sha256
from nas.devices.transports import scripts
from nas.devices.transports.base import (
    READING_LIMIT,
    STDERR_TAIL,
    TEXT_LIMIT,
    Cancelled,
    CommandResult,
    Lease,
    NotTrusted,
    StaleLease,
    never,
)
from nas.devices.transports.remote import LONG_S, SLICE_S, RemoteShell
from nas.devices.transports.report import Ran, Report, find_report, read_report, read_sections
from nas.devices.transports.wire import Stream, Wire

KEPT_KB = 8_000_000
"""What the device's cache may hold."""

_SUPERVISOR = Path(__file__).with_name("supervise.sh")
_GRACE_S = 10.0
"""After the deadline: up to 2 s for the lock, 1 s of rounding, and the way back."""
_NOISE = 4096
"""Bytes that a login shell may say before."""

_KILL = b"\n"


@dataclass(frozen=True, slots=True)
class _Ready:
    """What the device told when it was prepared: our folder, its PATH, whether it has GNU time, the supervisor."""

    root: str
    path: str
    timed: bool
    supervisor: str


class ShellTransport:
    """See `Transport`. For one thread; connects by itself, and anew after a lost connection.

    Args:
        wire: the way to the shell.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire, self._shell = wire, RemoteShell(wire)
        self._lease: Lease | None = None
        self._ready: _Ready | None = None

    def connect(self) -> None:
        """See `Transport.connect`. Asks the device each time, as a connection may have died unnoticed."""
        known = self._ready is not None
        try:
            self._prepare()
        except (NotTrusted, Unsupported):
            raise
        except InfrastructureFailed:
            if not known:
                raise
            self._prepare()

    def close(self) -> None:
        """See `Transport.close`."""
        self._ready = None
        self._wire.close()

    def _prepare(self) -> None:
        with self._shell.hanging_up_on_failure():
            self._wire.connect()
        said = self._shell.must(scripts.PREPARE, self._wire.folder, *scripts.TOOLS)
        root, path, timed, *missing = said.splitlines()
        if missing:
            raise Unsupported(f"{self._wire.name} lacks {', '.join(missing)}")
        self._ready = _Ready(root, path, timed == "timed", "")
        self._ready = _Ready(root, path, timed == "timed", self.push(_SUPERVISOR, file_sha256(_SUPERVISOR)))

    def claim(self, lease: Lease) -> None:
        """See `Transport.claim`."""
        self._lease = lease
        there, run = self._there(), secrets.token_hex(8)
        words = ("claim", there.root, run, lease.authority, str(lease.epoch))
        verdict = self._shell.must('exec sh "$@"', there.supervisor, *words).split()
        if verdict != ["claimed"]:
            raise self._refusal(verdict)

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
        """See `Transport.run`. The deadline is rounded up to whole seconds, all that every `sleep` understands."""
        run, seconds = secrets.token_hex(8), math.ceil(deadline_s)
        words = self._command(run, argv, env, seconds, output_limit, cpu_affinity)
        started_at = time.time()
        with self._shell.stream(scripts.join(words)) as stream:
            said = self._follow(stream, run, seconds + _GRACE_S, output_limit, cancelled)
        report = read_report(said, run, self._wire.name)
        ran = self._ran(report, argv[0], cpu_affinity)
        return CommandResult(
            exit_code=ran.exit_code,
            stdout=report.output[:output_limit],
            stderr_tail=report.errors,
            wall_s=ran.wall_s,
            cpu_s=report.runner_cpu_s,
            overhead_cpu_s=max(0.0, report.cpu_s - report.runner_cpu_s),
            max_rss_mb=ran.max_rss_mb,
            timed_out=ran.timed_out,
            truncated=len(report.output) > output_limit,
            started_at=started_at,
        )

    def _command(
        self, run: str, argv: Sequence[str], env: Mapping[str, str], seconds: int, limit: int, cpus: Sequence[int]
    ) -> list[str]:
        there, lease = self._there(), self._lease
        mask = f"{sum(1 << cpu for cpu in set(cpus)):x}" if cpus else "-"
        fence = (lease.authority, str(lease.epoch)) if lease else ("-", "0")
        bounds = (str(seconds), str(limit + 1), str(STDERR_TAIL), mask, argv[0])
        timer = ["env", "time", "-f", "%M", "-o", f"{there.root}/runs/{run}/rss"] if there.timed else []
        pin = ["taskset", mask] if cpus else []
        variables = {"PATH": there.path, "LANG": "C.UTF-8"} | dict(env)
        exactly = ["env", "-i", *(f"{name}={value}" for name, value in variables.items())]
        return ["sh", there.supervisor, "run", there.root, run, *fence, *bounds, *timer, *pin, *exactly, *argv]

    def _follow(self, stream: Stream, run: str, patience_s: float, limit: int, cancelled: Callable[[], bool]) -> bytes:
        """All that the supervisor said, which asks the wire for no more than the limits allow."""
        said, end, killed, unwanted = bytearray(), time.monotonic() + patience_s, False, False
        while True:
            piece = stream.read(SLICE_S)
            if piece == b"":
                break
            said += piece or b""
            unwanted = unwanted or cancelled()
            if not killed and (unwanted or (len(said) > limit + _NOISE and not find_report(said, run))):
                stream.write(_KILL)
                killed, end = True, min(end, time.monotonic() + _GRACE_S)
            if len(said) > limit + _NOISE + STDERR_TAIL + scripts.REPORT_LIMIT:
                raise InfrastructureFailed(f"{self._wire.name}: says more than it was asked for")
            if time.monotonic() > end:
                raise InfrastructureFailed(f"{self._wire.name}: no word within {patience_s:g} s, the deadline included")
        if unwanted:
            raise Cancelled("killed on request")
        return bytes(said)

    def _ran(self, report: Report, program: str, cpus: Sequence[int]) -> Ran:
        if report.ran is None:
            raise self._refusal(report.verdict, program, cpus)
        if report.ran.exit_code in (126, 127) and report.errors.startswith((b"env:", b"toybox:")):
            raise Unsupported(f"{self._wire.name} cannot run {program}: {report.errors.decode(errors='replace')}")
        return report.ran

    def _refusal(
        self, verdict: Sequence[str], program: str = "", cpus: Sequence[int] = ()
    ) -> Unsupported | InfrastructureFailed:
        match verdict:
            case ["missing"]:
                return Unsupported(f"{self._wire.name} cannot run {program}: no such program")
            case ["processors"]:
                return Unsupported(f"{self._wire.name} cannot run {program} on processors {list(cpus)}")
            case ["stale", last] if self._lease:
                lease, name = self._lease, self._wire.name
                return StaleLease(f"{name}: epoch {lease.epoch} of {lease.authority} is over: {last} was here")
            case ["busy", *process]:
                return InfrastructureFailed(f"{self._wire.name}: in use by another, process {' '.join(process)} there")
        return InfrastructureFailed(f"{self._wire.name}: the run ended without a result")

    def push(self, local: Path, sha256: str) -> str:
        """See `Transport.push`. Damaged content is replaced."""
        path = self._content(sha256)
        if not self._has(path, sha256):
            with self._temporary() as temporary:
                try:
                    self._wire.put(local, temporary)
                except InfrastructureFailed as error:
                    raise InfrastructureFailed(f"{error}{self._space_left()}") from error
                self._settle(temporary, sha256, path)
            self._trim()
        return path

    def make(self, sha256: str, produce: Callable[[str], None]) -> str:
        """See `Transport.make`."""
        path = self._content(sha256)
        if not self._has(path, sha256):
            with self._temporary() as temporary:
                produce(temporary)
                self._settle(temporary, sha256, path)
            self._trim()
        return path

    def bundle(self, files: Mapping[str, str]) -> str:
        """See `Transport.bundle`."""
        assert all(name == os.path.basename(name) and name not in ("", ".", "..") for name in files), files  # noqa: PTH119
        root = self._there().root
        folder, temporary = f"{root}/bundles/{content_hash(dict(files))}", f"{root}/tmp/{secrets.token_hex(8)}"
        pairs = [part for pair in files.items() for part in pair]
        self._shell.must(scripts.BUNDLE, root, folder, temporary, *pairs, timeout_s=LONG_S)
        return folder

    def pull(self, remote: str, local: Path) -> None:
        """See `Transport.pull`; verified by its hash."""
        sha256 = self.hash(remote)
        temporary = local.with_name(f".{local.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                self._shell.copy(remote, file)
            if file_sha256(temporary) != sha256:
                raise InfrastructureFailed(f"{self._wire.name}: {remote} was damaged on its way")
            temporary.replace(local)
        except OSError as error:
            raise InfrastructureFailed(f"{local}: {error.strerror}") from error
        finally:
            temporary.unlink(missing_ok=True)

    def hash(self, remote: str) -> str:
        """See `Transport.hash`."""
        return self._shell.must(scripts.HASH, remote, timeout_s=LONG_S).strip()

    def read_text(self, path: str) -> str:
        """See `Tree.read_text`."""
        return self._read(scripts.READ, path).decode(errors="replace")

    def names(self, folder: str) -> list[str]:
        """See `Tree.names`."""
        return sorted(self._read(scripts.NAMES, folder).decode(errors="replace").splitlines())

    def read_many(self, paths: Sequence[str], commands: Sequence[str] = ()) -> dict[str, str | OSError]:
        """See `Reader.read_many`."""
        assert not any("\n" in line or "\\" in line for line in commands), commands
        arguments = ("\n".join(paths), "\n".join(commands), self._there().root)
        _, said = self._shell.call(scripts.READ_MANY, *arguments, limit=READING_LIMIT)
        return read_sections(said.decode(errors="replace"), paths)

    def _read(self, script: str, path: str) -> bytes:
        code, said = self._shell.call(script, path, limit=4 * TEXT_LIMIT)
        if code:
            number = code if code in (errno.ENOENT, errno.EACCES, errno.ENOTDIR) else errno.EIO
            raise OSError(number, os.strerror(number), path)
        return said

    def _content(self, sha256: str) -> str:
        return f"{self._there().root}/content/{sha256}"

    def _has(self, path: str, sha256: str) -> bool:
        return self._shell.call(scripts.VERIFY, path, sha256, timeout_s=LONG_S)[0] == 0

    def _settle(self, temporary: str, sha256: str, path: str) -> None:
        self._shell.must(scripts.SETTLE, temporary, sha256, path, timeout_s=LONG_S)

    def _trim(self) -> None:
        self._shell.must(scripts.TRIM, self._there().root, str(KEPT_KB))

    @contextlib.contextmanager
    def _temporary(self) -> Iterator[str]:
        """A free name on the device; gone at the end, or a day later where the connection is lost meanwhile."""
        folder = f"{self._there().root}/tmp/{secrets.token_hex(8)}"
        self._shell.must('mkdir "$1"', folder)
        try:
            yield f"{folder}/file"
        finally:
            with contextlib.suppress(InfrastructureFailed):
                self._shell.call('rm -rf "$1"', folder)

    def _space_left(self) -> str:
        try:
            return f" ({int(self._shell.must(scripts.SPACE, self._there().root)) / 1e3:.0f} MB are free there)"
        except (InfrastructureFailed, ValueError):
            return ""

    def _there(self) -> _Ready:
        if self._ready is None:
            self._prepare()
        assert self._ready is not None
        return self._ready
