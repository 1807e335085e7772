"""Starts `supervise`, reads its output within bounds, and never leaves it running."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from nas.core.errors import InfrastructureFailed, Unsupported
from nas.measure.devices.transports import supervise
from nas.measure.devices.transports.base import STDERR_TAIL, Cancelled, CommandResult

GRACE_S = 5.0
"""Seconds after its deadline for which a process may exist before the device counts as failed."""

_CANCEL_CHECK_S = 0.5
_CHUNK = 1 << 16
_CANNOT = {
    *(errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR, errno.ELIBBAD, errno.EISDIR, errno.EINVAL),
    errno.ENOSYS,
}


@dataclass(slots=True)
class _Output:
    """The output so far; `is_wanted` becomes false when the process has to be killed."""

    limit: int
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    report: bytearray = field(default_factory=bytearray)
    truncated: bool = False
    cancelled: bool = False

    @property
    def is_wanted(self) -> bool:
        return not (self.truncated or self.cancelled)

    def take_stdout(self, chunk: bytes) -> None:
        room = self.limit - len(self.stdout)
        self.stdout += chunk[:room]
        self.truncated |= len(chunk) > room

    def take_stderr(self, chunk: bytes) -> None:
        self.stderr += chunk
        del self.stderr[:-STDERR_TAIL]


def run_supervised(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    affinity: Sequence[int],
    deadline_s: float,
    output_limit: int,
    cancelled: Callable[[], bool],
) -> CommandResult:
    """Runs one process on this machine; see `Transport.run`.

    `overhead_cpu_s` counts all that this process and its other children used meanwhile.
    """
    started_at, used_before = time.time(), _own_cpu_s()
    spec = {"argv": list(argv), "env": dict(env), "affinity": list(affinity), "deadline_s": deadline_s}
    output = _Output(output_limit)
    with _supervisor() as (process, report_from):
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(spec).encode() + b"\n")
            process.stdin.flush()
        _follow(process, report_from, output, deadline_s + GRACE_S, cancelled)
    if output.cancelled:
        raise Cancelled(f"{argv[0]}: killed on request")
    report = _read_report(bytes(output.report), argv[0])
    return CommandResult(
        exit_code=report["exit_code"],
        stdout=bytes(output.stdout),
        stderr_tail=bytes(output.stderr),
        wall_s=report["wall_s"],
        cpu_s=report["cpu_s"],
        overhead_cpu_s=max(0.0, _own_cpu_s() - used_before - report["cpu_s"]),
        timed_out=report["timed_out"],
        truncated=output.truncated,
        started_at=started_at,
    )


@contextlib.contextmanager
def _supervisor() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Yields the supervising process and the file descriptor of its report."""
    report_from, report_to = os.pipe()
    try:
        with contextlib.closing(os.fdopen(report_to, "wb")):
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", supervise.__file__, str(report_to)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(report_to,),
                env={},
                cwd="/",
                start_new_session=True,
            )
        # Leaving closes its standard input, so it kills what it runs, and then waits for it.
        with process:
            yield process, report_from
    except OSError as error:
        raise InfrastructureFailed(f"cannot start a process: {error}") from error
    finally:
        os.close(report_from)


def _follow(
    process: subprocess.Popen[bytes],
    report_from: int,
    output: _Output,
    timeout_s: float,
    cancelled: Callable[[], bool],
) -> None:
    """Reads until every stream has ended. Closing the supervisor's standard input makes it kill the process."""
    assert process.stdin is not None
    end = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as streams:
        streams.register(cast(Any, process.stdout), selectors.EVENT_READ, output.take_stdout)
        streams.register(cast(Any, process.stderr), selectors.EVENT_READ, output.take_stderr)
        streams.register(report_from, selectors.EVENT_READ, output.report.extend)
        while streams.get_map():
            for key, _ in streams.select(_CANCEL_CHECK_S):
                chunk = os.read(key.fd, _CHUNK)
                if chunk:
                    key.data(chunk)
                else:
                    streams.unregister(key.fileobj)
            output.cancelled = output.cancelled or cancelled()
            if not output.is_wanted:
                process.stdin.close()
            if time.monotonic() > end:
                process.kill()
                raise InfrastructureFailed(f"a process did not end within {timeout_s:g} s, its deadline included")


def _read_report(report: bytes, program: str) -> dict[str, Any]:
    if not report:
        raise InfrastructureFailed(f"{program}: the supervising process died without a report")
    fields: dict[str, Any] = json.loads(report)
    if "errno" in fields:
        number = fields["errno"]
        reasons = {errno.EBUSY: "some are offline now", errno.ENOSYS: "Linux 5.3 or newer is needed (pidfd_open)"}
        message = f"this device cannot run {fields['what'] or program}: {reasons.get(number, os.strerror(number))}"
        raise Unsupported(message) if number in _CANNOT else InfrastructureFailed(message)
    return fields


def _own_cpu_s() -> float:
    """Returns CPU seconds of this process and of its children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
