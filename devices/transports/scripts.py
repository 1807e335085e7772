"""Small scripts for a device's shell, and parsers of their output. Untrusted strings are only arguments."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from nas.core.errors import InfrastructureFailed

join = shlex.join

TOOLS = (
    *("cat", "chmod", "cp", "cut", "df", "env", "find", "flock", "grep", "head", "ls", "mkdir", "mv", "rm", "sed"),
    *("setsid", "sh", "sha256sum", "sleep", "tail", "taskset", "touch", "true", "wc"),
)
"""Programs that a device must have; dash with coreutils, toybox (Android 8) or a full busybox suffice."""

REPORT_LIMIT = 1024
"""Bytes that a script may print about its own end."""


def with_exit_code(script: str, mark: str) -> str:
    """Returns a script that prints `mark`, the output of `script`, and `mark` with its exit code, a line each."""
    return f"echo {mark}\n(\n{script}\n) </dev/null 2>&1\nprintf '\\n%s %s\\n' {mark} $?"


PREPARE = """
umask 077
mkdir -p "$1" && cd "$1" && mkdir -p content bundles runs fences tmp || exit
shift
find tmp -mindepth 1 -maxdepth 1 -mtime +1 -exec rm -rf {} + 2>/dev/null
pwd -P
echo "$PATH"
for tool; do command -v "$tool" >/dev/null || echo "$tool"; done
"""
"""$1: folder, others: tools. Prints the folder's full path, PATH, and missing tools."""

VERIFY = """
[ -e "$1" ] || exit 3
[ "$(sha256sum <"$1" | cut -c1-64)" = "$2" ] && touch "$1" && exit
rm -f "$1"
exit 4
"""
"""Checks that the file $1 exists and has hash $2; removes a damaged one."""

SETTLE = """
found=$(sha256sum <"$1" | cut -c1-64)
[ "$found" = "$2" ] || { echo "the bytes have SHA-256 $found instead of $2"; exit 4; }
chmod 444 "$1" && mv -f "$1" "$3"
"""
"""Moves the temporary file $1 to $3 if it has hash $2."""

BUNDLE = """
root=$1 folder=$2 temporary=$3
shift 3
fill() {
    while [ $# -gt 0 ]; do
        cp "$root/content/$2" "$temporary/$1" && chmod 555 "$temporary/$1" || return
        shift 2
    done
}
check() {
    while [ $# -gt 0 ]; do
        [ "$(sha256sum <"$folder/$1" | cut -c1-64)" = "$2" ] || return
        shift 2
    done
}
if [ ! -d "$folder" ]; then
    mkdir "$temporary" && fill "$@" && mv "$temporary" "$folder" || { rm -rf "$temporary"; exit 3; }
fi
check "$@" || { rm -rf "$folder"; echo "$folder: damaged; removed"; exit 4; }
touch "$folder"
"""
"""Creates the folder $2 below the root $1 by way of $3 from pairs of name and hash."""

TRIM = """
cd "$1/content" || exit
left=$2
ls -lt | while read -r mode links user group size rest; do
    [ -n "$size" ] || continue
    left=$((left - ${size%???} - 1))
    [ $left -ge 0 ] || rm -f "${rest##* }"
done
cd ../bundles && ls -1t | tail -n +17 | while read -r old; do rm -rf "$old"; done
"""
"""Keeps $2 kB (mksh counts to 2^31) of content below the root $1, and 16 bundles; the least recently used go."""

READ_MANY = """
cd "$3" || exit
commands=$2
IFS='
'
set -- $1
for path; do
    shift
    if [ ! -e "$path" ]; then
        echo "==! 2 $path <=="
    elif [ ! -r "$path" ]; then
        echo "==! 13 $path <=="
    else
        set -- "$@" "$path"
    fi
done
head -c 65536 /dev/null "$@" 2>/dev/null
set -f
for line in $commands; do
    if command -v "${line%% *}" >/dev/null; then
        echo
        echo "==> $line <=="
        (unset IFS; set +f; eval "$line") 2>/dev/null | head -c 65536
    else
        echo
        echo "==! 2 $line <=="
    fi
done
"""
"""The files of $1 and the output of the commands of $2, one a line, run in the folder $3.

Each comes under a line `==> NAME <==`, as `head` prints it for several files; if it cannot be read, `==! ERRNO NAME
<==` is printed instead. One `head` reads all files, and `echo` is built into every shell: a process for each file
would cost more than all the rest. Commands have no backslashes, which some shells' `echo` would interpret."""

SPACE = 'df -Pk "$1" | tail -n 1 | { read -r device size used free rest; echo "$free"; }'
"""Free kB below $1."""


_HEAD = re.compile(r"\n?^==(?:>|! (\d{1,3})) (.+) <==\n", re.MULTILINE)
_TIME = re.compile(r"(\d+)m([\d.]+)s")


@dataclass(frozen=True, slots=True)
class Ran:
    """The end of a process.

    Args:
        exit_code: negative if a signal killed it. A shell reports death by signal as 128 + signal, so a process
            that exits with such a code by itself looks the same.
        wall_s: by the device's uptime, in steps of 10 ms.
        timed_out: killed at its deadline.
    """

    exit_code: int
    wall_s: float
    timed_out: bool


@dataclass(frozen=True, slots=True)
class Report:
    """The parsed output of `supervise.sh`.

    Args:
        output: standard output of the runner.
        errors: the end of its standard error.
        runner_cpu_s: of the runner and all children it waited for.
        cpu_s: of the supervisor, the runner included.
        verdict: the words of the supervisor's last line.
        ran: those words parsed, if a process ran to its end.
    """

    output: bytes
    errors: bytes
    runner_cpu_s: float
    cpu_s: float
    verdict: tuple[str, ...]
    ran: Ran | None


def find_report(said: bytes | bytearray, run: str) -> bool:
    """Returns whether the report of `run` has begun."""
    return b"\n" + run.encode() + b" " in said


def read_report(said: bytes, run: str, name: str) -> Report:
    """Parses the output of the supervisor of `run` on the device `name`.

    Raises:
        InfrastructureFailed: the report is incomplete.
    """
    _, begun, body = said.partition(run.encode() + b"\n")
    output, separator, rest = body.rpartition(b"\n" + run.encode() + b" ")
    line, _, errors = rest.partition(b"\n")
    words = line.decode(errors="replace").split()
    try:
        if not begun or not separator or len(errors) != int(words[0]):
            raise ValueError("incomplete")
        times = [_seconds(word) for word in words[1:9]]
        verdict = tuple(words[9:])
        ran = _ran(verdict) if verdict[0] == "ran" else None
    except (ValueError, IndexError) as error:
        raise InfrastructureFailed(f"{name}: the connection ended during the run: {said[-200:]!r}") from error
    return Report(output, errors, sum(times[2:4]), sum(times[4:8]), verdict, ran)


def read_sections(output: str, paths: Sequence[str]) -> dict[str, str | OSError]:
    """Parses the output of `READ_MANY` for `paths`: name -> text, or the error."""
    _, *parts = _HEAD.split(output)
    wildcards = {path for path in paths if "*" in path or "?" in path}
    contents: dict[str, str | OSError] = {}
    for number, name, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        if name not in wildcards and name != os.devnull:
            contents[name] = OSError(int(number), os.strerror(int(number)), name) if number else text
    return contents


def _ran(verdict: tuple[str, ...]) -> Ran:
    _, code, begun, ended, late = verdict
    return Ran(
        exit_code=128 - int(code) if 128 < int(code) <= 192 else int(code),
        wall_s=float(ended) - float(begun),
        timed_out=late == "1",
    )


def _seconds(word: str) -> float:
    match = _TIME.fullmatch(word)
    if not match:
        raise ValueError(f"not a time: {word}")
    return int(match[1]) * 60 + float(match[2])
