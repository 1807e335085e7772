"""A `Transport` over any `Wire` to a POSIX shell: Linux machines over ssh, phones over adb.

The device executes small scripts that take their inputs as arguments. Plans are run by `supervise.sh`, which is pushed
once and enforces deadlines and fencing on the device.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nas.core.canonical import content_hash, sha256_of
from nas.core.device import show_cores
from nas.core.errors import InfrastructureFailed, Unsupported
from nas.measure.devices.transports import scripts
from nas.measure.devices.transports.base import (
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
from nas.measure.devices.transports.scripts import Ran, Report, find_report, is_pattern, read_report, read_sections
from nas.measure.devices.transports.wire import Stream, Wire

SLICE_S = 0.2
"""Interval at which a wait checks the clock."""

NOISE = 1 << 16
"""Bytes that a login shell may print before and after."""

_PIECE = 1 << 17
_SHORT_S = 30.0
LONG_S = 600.0
"""For scripts that read whole files."""


class RemoteShell:
    """Runs short scripts, connecting if needed.

    Args:
        wire: to the shell.
    """

    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    def must(self, script: str, *arguments: str, timeout_s: float = _SHORT_S) -> str:
        """Returns the output of a script.

        Raises:
            InfrastructureFailed: the connection is lost, or the exit code is not 0; the message is the output.
        """
        code, output = self.call(script, *arguments, timeout_s=timeout_s)
        text = output.decode(errors="replace")
        if code:
            raise InfrastructureFailed(f"{self.wire.name}: {text.strip()[-400:] or f'exit code {code}'}")
        return text

    def call(
        self,
        script: str,
        *arguments: str,
        timeout_s: float = _SHORT_S,
        limit: int = TEXT_LIMIT,
        sending: Iterable[bytes] = (),
    ) -> tuple[int, bytes]:
        """Returns the exit code and output of a script, standard error included.

        Args:
            script: for the device's `sh`.
            arguments: its $1, $2, ...
            timeout_s: for its end, once all is sent.
            limit: of its output, bytes.
            sending: pieces for its standard input, of which it must not read more.

        Raises:
            InfrastructureFailed: the connection is lost, or the script does not end.
        """
        answer = _Answer(self.wire.name, secrets.token_hex(8), limit)
        source = "" if sending else "</dev/null"
        command = scripts.command(scripts.with_exit_code(script, answer.mark, source), *arguments)
        with self.stream(command) as stream:
            try:
                for piece in sending:
                    stream.write(piece)
                    answer.take(stream.read(0) or b"")
                    if answer.complete:
                        break
            except InfrastructureFailed:
                # A script that ended early gives its reason; a lost connection gives none.
                with contextlib.suppress(InfrastructureFailed):
                    while rest := stream.read(SLICE_S):
                        answer.take(rest)
                if not answer.complete:
                    raise
            end = time.monotonic() + timeout_s
            while (output := stream.read(SLICE_S)) != b"":
                answer.take(output or b"")
                if time.monotonic() > end:
                    raise InfrastructureFailed(f"{self.wire.name}: {answer.why_late(timeout_s)}")
        return answer.parsed()

    @contextlib.contextmanager
    def stream(self, command: str) -> Iterator[Stream]:
        """Runs a command while the context is open."""
        with self.hanging_up_on_failure():
            self.wire.connect()
            stream = self.wire.start(command)
            try:
                yield stream
            finally:
                stream.close()

    @contextlib.contextmanager
    def hanging_up_on_failure(self) -> Iterator[None]:
        """Closes a connection that failed, so that the device notices and it is not used again."""
        try:
            yield
        except InfrastructureFailed:
            self.wire.close()
            raise


class _Answer:
    """What a device says of one script: noise of the login shell, the output between two marks, more noise.

    Args:
        name: of the device, for messages.
        mark: announces the output and its end.
        limit: of the output, bytes.
    """

    def __init__(self, name: str, mark: str, limit: int) -> None:
        self.mark = mark
        self._name, self._limit, self._data = name, limit, bytearray()

    def take(self, piece: bytes) -> None:
        """Appends what arrived."""
        self._data += piece
        if len(self._data) > self._limit + scripts.REPORT_LIMIT + NOISE:
            raise InfrastructureFailed(f"{self._name}: sent more than was asked for")

    @property
    def complete(self) -> bool:
        """Whether the exit code has arrived."""
        return self._end() is not None

    def parsed(self) -> tuple[int, bytes]:
        """Returns the exit code and the output."""
        end = self._end()
        if end is None:
            reason = "the connection ended" if self.mark.encode() + b"\n" in self._data else _LOGIN_SHELL
            raise InfrastructureFailed(f"{self._name}: {reason}{self._noise()}")
        _, _, body = bytes(self._data[: end.start()]).partition(self.mark.encode() + b"\n")
        return int(end[1]), body

    def why_late(self, timeout_s: float) -> str:
        """Describes a script that did not end."""
        if self.mark.encode() in self._data:
            return f"no answer within {timeout_s:g} s"
        return f"no answer within {timeout_s:g} s: {_LOGIN_SHELL}, or waits for input{self._noise()}"

    def _noise(self) -> str:
        text = self._data[-NOISE:].decode(errors="replace").strip()
        return f"; it said: {text[-200:]!r}" if text else ""

    def _end(self) -> re.Match[bytes] | None:
        return re.search(rb"\n%b (\d{1,3})\n" % self.mark.encode(), self._data)


_LOGIN_SHELL = "its login shell did not start `sh` (try: ssh or adb shell with the command `sh -c 'echo works'`)"


_SHELL_CODES = (1, 2, 126, 127)
"""Exit codes of shells for what is no script."""


def _taken_for_script(errors: bytes, program: str) -> bool:
    """Returns whether a shell complains of a program, which libraries try as a script after the kernel."""
    complaint = rb"(?:\S+: )?%b(?:\[\d+\])?: .*(?:[Ss]yntax error|not found|cannot execute|Exec format error)"
    return re.match(complaint % re.escape(program.encode()), errors) is not None


KEPT_KB = 8_000_000
"""Size of the device's cache."""

_FULL = "No space left on device"

_SUPERVISOR = Path(__file__).with_name("supervise.sh")
_GRACE_S = 10.0
"""After the deadline: up to 2 s for the lock, 1 s of rounding, and the transfer."""
_KILL = b"\n"


@dataclass(frozen=True, slots=True)
class _Ready:
    """Facts about the prepared device: our folder, its PATH, the supervisor's path."""

    root: str
    path: str
    supervisor: str


class ShellTransport:
    """A `Transport` over any `Wire`, for one thread; connects by itself, again after a lost connection.

    Args:
        wire: to the shell.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire, self._shell = wire, RemoteShell(wire)
        self._lease: Lease | None = None
        self._used: set[str] = set()
        self._ready: _Ready | None = None

    def connect(self) -> None:
        """Prepares the device each time, because a connection may have died unnoticed."""
        was_ready = self._ready is not None
        try:
            self._prepare()
        except (NotTrusted, Unsupported):
            raise
        except InfrastructureFailed:
            if not was_ready:
                raise
            self._prepare()

    def close(self) -> None:
        self._ready = None
        self._wire.close()

    def _prepare(self) -> None:
        with self._shell.hanging_up_on_failure():
            self._wire.connect()
        output = self._shell.must(scripts.PREPARE, self._wire.folder, *scripts.TOOLS)
        lines = re.findall(r"^(folder|path|lacks): (.*)$", output, re.MULTILINE)
        if missing := [tool for word, tool in lines if word == "lacks"]:
            raise Unsupported(f"{self._wire.name} lacks {', '.join(missing)}")
        facts = dict(lines)
        if "folder" not in facts or "path" not in facts:
            raise InfrastructureFailed(f"{self._wire.name}: no folder for hilnas there: {output.strip()[-200:]!r}")
        self._ready = _Ready(facts["folder"], facts["path"], "")
        self._ready = _Ready(facts["folder"], facts["path"], self.push(_SUPERVISOR, sha256_of(_SUPERVISOR)))

    def claim(self, lease: Lease) -> None:
        self._lease = lease
        self._used = {sha256_of(_SUPERVISOR)}  # `connect` has pushed it
        ready, run = self._prepared(), secrets.token_hex(8)
        words = ("claim", ready.root, run, lease.authority, str(lease.epoch))
        verdict = self._shell.must('exec sh "$@"', ready.supervisor, *words).split()
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
        """Runs a program; the deadline is rounded up to whole seconds, which every `sleep` understands."""
        run, seconds = secrets.token_hex(8), math.ceil(deadline_s)
        words = self._command(run, argv, env, seconds, output_limit, cpu_affinity)
        started_at = time.time()
        with self._shell.stream(scripts.command('exec sh "$@"', *words)) as stream:
            answer = self._follow(stream, run, seconds + _GRACE_S, output_limit, cancelled)
        report = read_report(answer, run, self._wire.name)
        ran = self._ran(report, argv[0], cpu_affinity)
        return CommandResult(
            exit_code=ran.exit_code,
            stdout=report.output[:output_limit],
            stderr_tail=report.errors,
            wall_s=ran.wall_s,
            cpu_s=report.runner_cpu_s,
            overhead_cpu_s=max(0.0, report.cpu_s - report.runner_cpu_s),
            timed_out=ran.timed_out,
            truncated=len(report.output) > output_limit,
            started_at=started_at,
        )

    def _command(
        self, run: str, argv: Sequence[str], env: Mapping[str, str], seconds: int, limit: int, cpus: Sequence[int]
    ) -> list[str]:
        ready, lease = self._prepared(), self._lease
        mask, cores = (f"{sum(1 << cpu for cpu in set(cpus)):x}", show_cores(cpus)) if cpus else ("-", "-")
        fence = (lease.authority, str(lease.epoch)) if lease else ("-", "0")
        bounds = (str(seconds), str(limit + 1), str(STDERR_TAIL), mask, cores, argv[0])
        pin = ["taskset", mask] if cpus else []
        variables = {"PATH": ready.path, "LANG": "C.UTF-8"} | dict(env)
        exactly = ["env", "-i", *(f"{name}={value}" for name, value in variables.items())]
        return [ready.supervisor, "run", ready.root, run, *fence, *bounds, *pin, *exactly, *argv]

    def _follow(self, stream: Stream, run: str, timeout_s: float, limit: int, cancelled: Callable[[], bool]) -> bytes:
        """Returns the supervisor's output, reading no more than the limits allow."""
        answer, end, killed, unwanted = bytearray(), time.monotonic() + timeout_s, False, False
        while True:
            piece = stream.read(SLICE_S)
            if piece == b"":
                break
            answer += piece or b""
            unwanted = unwanted or cancelled()
            if not killed and (unwanted or (len(answer) > limit + NOISE and not find_report(answer, run))):
                stream.write(_KILL)
                killed, end = True, min(end, time.monotonic() + _GRACE_S)
            if len(answer) > limit + NOISE + STDERR_TAIL + scripts.REPORT_LIMIT:
                raise InfrastructureFailed(f"{self._wire.name}: sent more than was asked for")
            if time.monotonic() > end:
                raise InfrastructureFailed(
                    f"{self._wire.name}: no answer within {timeout_s:g} s, the deadline included"
                )
        if unwanted:
            raise Cancelled("killed on request")
        return bytes(answer)

    def _ran(self, report: Report, program: str, cpus: Sequence[int]) -> Ran:
        if report.ran is None:
            raise self._refusal(report.verdict, program, cpus)
        if report.ran.exit_code in (126, 127) and report.errors.startswith((b"env:", b"toybox:")):
            raise Unsupported(f"{self._wire.name} cannot run {program}: {report.errors.decode(errors='replace')}")
        if report.ran.exit_code in _SHELL_CODES and not report.output and _taken_for_script(report.errors, program):
            raise Unsupported(f"{self._wire.name} cannot run {program}: it is a program of another ABI")
        return report.ran

    def _refusal(
        self, verdict: Sequence[str], program: str = "", cpus: Sequence[int] = ()
    ) -> Unsupported | InfrastructureFailed:
        match verdict:
            case ["missing"]:
                return Unsupported(f"{self._wire.name} cannot run {program}: no such program")
            case ["processors", *allowed]:
                return self._no_processors(program, cpus, " ".join(allowed))
            case ["stale", last] if self._lease and last.isdecimal():
                return StaleLease(self._wire.name, self._lease, int(last))
            case ["busy", *process]:
                return InfrastructureFailed(f"{self._wire.name}: in use by another, process {' '.join(process)} there")
        return InfrastructureFailed(f"{self._wire.name}: the run ended without a result")

    def _no_processors(self, program: str, cpus: Sequence[int], allowed: str) -> Unsupported | InfrastructureFailed:
        states = {cpu: f"/sys/devices/system/cpu/cpu{cpu}/online" for cpu in cpus}
        answers = self.read_many(list(states.values()))
        if offline := [cpu for cpu, path in states.items() if str(answers.get(path)).strip() == "0"]:
            return InfrastructureFailed(
                f"{self._wire.name}: cores {show_cores(offline)} are offline now; keep them online, or choose others: "
                "nas device add ADDRESS --cores LIST"
            )
        return Unsupported(
            f"{self._wire.name} cannot run {program} on cores {show_cores(cpus)}: it has, or a cpuset allows, cores "
            f"{allowed or '(it does not say which)'}"
        )

    def push(self, local: Path, sha256: str) -> str:
        """Copies a file to the device unless it has it; damaged content is replaced."""
        return self.make(sha256, partial(self._send, local))

    def _send(self, local: Path, remote: str) -> None:
        """Copies a file through the shell; on failure a part of it may be left at `remote`."""
        try:
            with local.open("rb") as file:
                size, pieces = os.fstat(file.fileno()).st_size, iter(lambda: file.read(_PIECE), b"")
                code, output = self._shell.call(scripts.RECEIVE, remote, str(size), timeout_s=LONG_S, sending=pieces)
            if code:
                why = output.decode(errors="replace").strip()[-400:]
                raise InfrastructureFailed(f"{self._wire.name}: {why or 'it kept only a part of the file'}")
        except InfrastructureFailed as error:
            raise InfrastructureFailed(f"{error}{self._space_left()}") from error

    def make(self, sha256: str, produce: Callable[[str], None]) -> str:
        root = self._prepared().root
        path = f"{root}/content/{sha256}"
        self._used.add(sha256)
        if self._shell.call(scripts.VERIFY, path, sha256, timeout_s=LONG_S)[0] != 0:
            self._with_room(partial(self._fill, path, sha256, produce))
            self._trim(KEPT_KB)
        return path

    def _with_room(self, step: Callable[[], object]) -> None:
        """Takes a step; on a device that is full, again without the content that this job does not use."""
        try:
            step()
        except InfrastructureFailed as error:
            if _FULL not in str(error):
                raise
            self._trim(0)
            step()

    def _fill(self, path: str, sha256: str, produce: Callable[[str], None]) -> None:
        with self._temporary() as temporary:
            produce(temporary)
            self._shell.must(scripts.SETTLE, temporary, sha256, path, timeout_s=LONG_S)

    def _trim(self, kb: int) -> None:
        """Removes the least recently used content but `kb`, and nothing that this job has pushed."""
        self._shell.must(scripts.TRIM, self._prepared().root, str(kb), *sorted(self._used))

    def bundle(self, files: Mapping[str, str]) -> str:
        assert all(name == os.path.basename(name) and name not in ("", ".", "..") for name in files), files  # noqa: PTH119
        root = self._prepared().root
        folder, temporary = f"{root}/bundles/{content_hash(dict(files))}", f"{root}/tmp/{secrets.token_hex(8)}"
        pairs = [part for pair in files.items() for part in pair]
        words = (root, folder, temporary, *pairs)
        self._with_room(lambda: self._shell.must(scripts.BUNDLE, *words, timeout_s=LONG_S))
        return folder

    def read_many(self, paths: Sequence[str], commands: Sequence[str] = ()) -> dict[str, str | OSError]:
        assert not any("\n" in line or "\\" in line for line in commands), commands
        first = next((place for place, path in enumerate(paths) if is_pattern(path)), len(paths))
        arguments = ("\n".join(paths[:first]), "\n".join(paths[first:]), "\n".join(commands), self._prepared().root)
        _, output = self._shell.call(scripts.READ_MANY, *arguments, limit=READING_LIMIT)
        return read_sections(output.decode(errors="replace"), paths)

    @contextlib.contextmanager
    def _temporary(self) -> Iterator[str]:
        """Yields a free name on the device; removed at the end, or a day later if the connection is lost meanwhile."""
        folder = f"{self._prepared().root}/tmp/{secrets.token_hex(8)}"
        self._shell.must('mkdir "$1"', folder)
        try:
            yield f"{folder}/file"
        finally:
            with contextlib.suppress(InfrastructureFailed):
                self._shell.call('rm -rf "$1"', folder)

    def _space_left(self) -> str:
        try:
            return f" ({int(self._shell.must(scripts.SPACE, self._prepared().root)) / 1e3:.0f} MB are free there)"
        except (InfrastructureFailed, ValueError):
            return ""

    def _prepared(self) -> _Ready:
        if self._ready is None:
            self._prepare()
        assert self._ready is not None
        return self._ready
