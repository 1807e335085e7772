"""Small scripts for a device's shell, and parsers of their output. Untrusted strings are only arguments."""

from __future__ import annotations

import errno
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from nas.core.errors import InfrastructureFailed

_CHUNK = 800
"""Characters of one word of a command line; csh has had a limit of 1024."""

_UNSAFE = re.compile(rb"[^ -~]|[!'\\]")
"""Bytes that some login shell interprets between single quotes: csh `!` and ends of lines, fish backslashes."""

_CLEAN = 'exec env -i "PATH=$PATH" "HOME=$HOME" LC_ALL=C sh -c "$(printf %b "$@")"'


def command(script: str, *arguments: str) -> str:
    """Returns the command line that has a POSIX `sh` run `script` with `arguments`, whatever the login shell is.

    It is one line that means the same to sh, csh and fish. The script runs with no variables of the user's but PATH
    and HOME, so that locales, CDPATH, exported functions or LD_PRELOAD do not change what it does or prints.
    """
    text = f"set -- {shlex.join(arguments)}\n{script}" if arguments else script
    octal = _UNSAFE.sub(lambda byte: b"\\0%03o" % byte[0][0], text.encode()).decode()
    # A chunk must not end within an escape.
    chunks = re.findall(rf"(?:\\0...|[^\\]){{1,{_CHUNK // 5}}}", octal)
    return " ".join(["sh", "-c", f"'{_CLEAN}'", "sh", *(f"'{chunk}'" for chunk in chunks)])


TOOLS = (
    *("cat", "chmod", "cp", "cut", "df", "env", "find", "flock", "grep", "head", "ls", "mkdir", "mv", "rm", "sed"),
    *("setsid", "sh", "sha256sum", "sleep", "tail", "taskset", "touch", "wc"),
)
"""Programs that a device must have; dash with coreutils, toybox (Android 8) or a full busybox suffice."""

REPORT_LIMIT = 1024
"""Bytes that a script may print about its own end."""


def with_exit_code(script: str, mark: str, source: str) -> str:
    """Returns a script that prints `mark`, the output of `script`, and `mark` with its exit code, a line each.

    `source` redirects the input of `script`; empty: it has that of the command line.
    """
    return f"echo {mark}\n(\n{script}\n) {source} 2>&1\nprintf '\\n%s %s\\n' {mark} $?"


PREPARE = """
umask 077
mkdir -p "$1" && cd "$1" && mkdir -p content bundles runs fences tmp || exit
shift
find tmp -mindepth 1 -maxdepth 1 -mtime +1 -exec rm -rf {} + 2>/dev/null
echo "folder: $(pwd -P)"
echo "path: $PATH"
for tool; do command -v "$tool" >/dev/null || echo "lacks: $tool"; done
cat /proc/uptime >/dev/null 2>&1 || echo "lacks: a readable /proc/uptime"
"""
"""$1: folder, others: tools. Prints lines that start with `folder:`, `path:`, and `lacks:` for each missing tool.

Apps of Android may not read /proc/uptime, the clock that times runs.
"""

RECEIVE = """
head -c "$2" >"$1" && [ "$(wc -c <"$1")" -eq "$2" ]
"""
"""Writes $2 bytes of standard input to the new file $1. Not `cat`: adb cannot end a command's input."""

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
shift 2
used=" $* "
ls -lt | while read -r mode links user group size rest; do
    [ -n "$size" ] || continue
    left=$((left - ${size%???} - 1))
    case "$used" in *" ${rest##* } "*) continue ;; esac
    [ $left -ge 0 ] || rm -f "${rest##* }"
done
cd ../bundles && ls -1t | tail -n +17 | while read -r old; do rm -rf "$old"; done
"""
"""Keeps $2 kB (mksh counts to 2^31) of content below the root $1, what the other arguments name, and 16 bundles.

The least recently used go first.
"""

READ_MANY = """
cd "$4" || exit
first=$1 rest=$2 commands=$3
IFS='
'
show() { { said=$(head -c 65536 /dev/null "$@" 2>&1 >&3 3>&-); } 3>&1 && return; errors="$errors$IFS$said"; }
errors=
[ "$first" ] && show $first
[ "$rest" ] && show $rest
printf '\\n==> errors <==\\n%s\\n' "$errors"
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
"""The files of $1, then those of $2, then the output of the commands of $3, one a line, in the folder $4.

Each comes under a line `==> NAME <==`, as `head` prints it for several files. What `head` says of files that it cannot
read follows as `errors`. One `head` reads them all: a process for each file would cost more than all the rest, and
nothing is done for each file, so that even the thousands of files of a server cost little. Those of $1 are read
before patterns are expanded, which takes time. Commands have no backslashes, which some shells' `echo` would
interpret."""

SPACE = 'df -Pk "$1" | tail -n 1 | { read -r device size used free rest; echo "$free"; }'
"""Free kB below $1."""


_HEAD = re.compile(r"\n?^==(?:>|! (\d{1,3})) (.+) <==\n", re.MULTILINE)
_CANNOT = re.compile(r"^\S*head: (?:cannot open |error reading )?'?(/.+?)'?(?: for reading)?: ([^:]+)$", re.MULTILINE)
"""What GNU, busybox and toybox say of a file: the first quotes its name."""
_NUMBERS = {os.strerror(number): number for number in errno.errorcode}
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


def find_report(answer: bytes | bytearray, run: str) -> bool:
    """Returns whether the report of `run` has begun."""
    return b"\n" + run.encode() + b" " in answer


def read_report(answer: bytes, run: str, name: str) -> Report:
    """Parses the output of the supervisor of `run` on the device `name`.

    Raises:
        InfrastructureFailed: the report is incomplete.
    """
    _, mark, body = answer.partition(run.encode() + b"\n")
    output, separator, rest = body.rpartition(b"\n" + run.encode() + b" ")
    line, _, errors = rest.partition(b"\n")
    words = line.decode(errors="replace").split()
    try:
        if not mark or not separator or len(errors) < int(words[0]):
            raise ValueError("incomplete")
        errors = errors[: int(words[0])]  # what follows is said by the login shell
        times = [_seconds(word) for word in words[1:9]]
        verdict = tuple(words[9:])
        ran = _ran(verdict) if verdict[0] == "ran" else None
    except (ValueError, IndexError) as error:
        raise InfrastructureFailed(f"{name}: the connection ended during the run: {answer[-200:]!r}") from error
    return Report(output, errors, sum(times[2:4]), sum(times[4:8]), verdict, ran)


def read_sections(output: str, paths: Sequence[str]) -> dict[str, str | OSError]:
    """Parses the output of `READ_MANY` for `paths`: name -> text, or the error."""
    _, *parts = _HEAD.split(output)
    contents: dict[str, str | OSError] = {}
    for number, name, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        contents[name] = OSError(int(number), os.strerror(int(number)), name) if number else text
    contents.pop(os.devnull, None)
    for name, reason in _CANNOT.findall(str(contents.pop("errors", ""))):
        contents[name] = OSError(_NUMBERS.get(reason, errno.EIO), reason, name)
    return {name: answer for name, answer in contents.items() if not (name in paths and is_pattern(name))}


def is_pattern(path: str) -> bool:
    """Returns whether a path stands for those that it matches."""
    return "*" in path or "?" in path


def _ran(verdict: tuple[str, ...]) -> Ran:
    _, code, start, end, late = verdict
    return Ran(
        exit_code=128 - int(code) if 128 < int(code) <= 192 else int(code),
        wall_s=float(end) - float(start),
        timed_out=late == "1",
    )


def _seconds(word: str) -> float:
    match = _TIME.fullmatch(word)
    if not match:
        raise ValueError(f"not a time: {word}")
    return int(match[1]) * 60 + float(match[2])
