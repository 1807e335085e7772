"""What scripts on a device say: `supervise.sh` at the end of a run, and many files at once."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from nas.core.errors import InfrastructureFailed

_HEAD = re.compile(r"\n?^==(?:>|! (\d{1,3})) (.+) <==\n", re.MULTILINE)
_TIME = re.compile(r"(\d+)m([\d.]+)s")


@dataclass(frozen=True, slots=True)
class Ran:
    """The end of a process.

    Args:
        exit_code: negative where a signal killed it. A shell reports death by signal as 128 + signal, so a process
            that exits with such a code by itself looks the same.
        wall_s: by the device's uptime, in steps of 10 ms.
        max_rss_mb: `None` where the device has no GNU time.
        timed_out: killed at its deadline.
    """

    exit_code: int
    wall_s: float
    max_rss_mb: float | None
    timed_out: bool


@dataclass(frozen=True, slots=True)
class Report:
    """All that came over the wire.

    Args:
        output: standard output of the runner.
        errors: the end of its standard error.
        runner_cpu_s: of the runner and all it waited for.
        cpu_s: of the supervisor, the runner included.
        verdict: the supervisor's words.
        ran: those words, where a process ran to its end.
    """

    output: bytes
    errors: bytes
    runner_cpu_s: float
    cpu_s: float
    verdict: tuple[str, ...]
    ran: Ran | None


def find_report(said: bytes | bytearray, run: str) -> bool:
    """Whether the report of `run` has begun."""
    return b"\n" + run.encode() + b" " in said


def read_report(said: bytes, run: str, name: str) -> Report:
    """Parses what the supervisor of `run` on the device `name` said.

    Raises:
        InfrastructureFailed: the report is not whole.
    """
    _, begun, told = said.partition(run.encode() + b"\n")
    output, found, rest = told.rpartition(b"\n" + run.encode() + b" ")
    line, _, errors = rest.partition(b"\n")
    words = line.decode(errors="replace").split()
    try:
        if not begun or not found or len(errors) != int(words[0]):
            raise ValueError("not whole")
        times = [_seconds(word) for word in words[1:9]]
        verdict = tuple(words[9:])
        ran = _ran(verdict) if verdict[0] == "ran" else None
    except (ValueError, IndexError) as error:
        raise InfrastructureFailed(f"{name}: the connection ended during the run: {said[-200:]!r}") from error
    return Report(output, errors, sum(times[2:4]), sum(times[4:8]), verdict, ran)


def read_sections(said: str, paths: Sequence[str]) -> dict[str, str | OSError]:
    """Parses what `scripts.READ_MANY` said of `paths`: name -> text, or why there is none."""
    _, *parts = _HEAD.split(said)
    wildcards = {path for path in paths if "*" in path or "?" in path}
    found: dict[str, str | OSError] = {}
    for number, name, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        if name not in wildcards and name != os.devnull:
            found[name] = OSError(int(number), os.strerror(int(number)), name) if number else text
    return found


def _ran(verdict: tuple[str, ...]) -> Ran:
    _, code, begun, ended, late, kilobytes = verdict
    return Ran(
        exit_code=128 - int(code) if 128 < int(code) <= 192 else int(code),
        wall_s=float(ended) - float(begun),
        max_rss_mb=int(kilobytes) * 1024 / 1e6 if kilobytes.isdigit() else None,
        timed_out=late == "1",
    )


def _seconds(word: str) -> float:
    found = _TIME.fullmatch(word)
    if not found:
        raise ValueError(f"no time: {word}")
    return int(found[1]) * 60 + float(found[2])
