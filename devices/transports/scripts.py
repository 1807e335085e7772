"""Small scripts for a device's shell. Untrusted strings are their arguments, never their text."""

from __future__ import annotations

import shlex

join = shlex.join

TOOLS = (
    *("cat", "chmod", "cp", "cut", "df", "env", "find", "flock", "grep", "head", "ls", "mkdir", "mv", "rm", "sed"),
    *("setsid", "sh", "sha256sum", "sleep", "tail", "taskset", "touch", "true", "wc"),
)
"""What a device must have; dash and coreutils, toybox (Android 8) and a full busybox do."""

REPORT_LIMIT = 1024
"""Bytes that a script may say about its own end."""


def with_exit_code(script: str, mark: str) -> str:
    """A line of `mark`, `script`, a line of `mark` and the exit code.

    Not every wire brings the code itself, and before the first line a login shell may have said something.
    """
    return f"echo {mark}\n(\n{script}\n) </dev/null 2>&1\nprintf '\\n%s %s\\n' {mark} $?"


PREPARE = """
umask 077
mkdir -p "$1" && cd "$1" && mkdir -p content bundles runs fences tmp || exit
shift
find tmp -mindepth 1 -maxdepth 1 -mtime +1 -exec rm -rf {} + 2>/dev/null
pwd -P
echo "$PATH"
env time -f %M -o /dev/null sh -c 'kill -9 $$' 2>/dev/null
if [ $? = 137 ]; then echo timed; else echo untimed; fi
for tool; do command -v "$tool" >/dev/null || echo "$tool"; done
"""
"""$1: folder, others: tools. Prints the folder's full path, PATH, whether there is a `time` that
tells memory without hiding death by signal (GNU's does, busybox's not), and missing tools."""

VERIFY = """
[ -e "$1" ] || exit 3
[ "$(sha256sum <"$1" | cut -c1-64)" = "$2" ] && touch "$1" && exit
rm -f "$1"
exit 4
"""
"""Whether the file $1 is there and has hash $2; a damaged one is removed."""

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
"""Makes the folder $2 below the root $1 by way of $3 from pairs of name and hash."""

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
"""Keeps $2 kB (mksh counts to 2^31) of content below the root $1, and 16 bundles; what was used longest ago goes."""

HASH = '[ -f "$1" ] && [ -r "$1" ] || { echo "$1: no file that can be read"; exit 2; }; sha256sum <"$1" | cut -c1-64'

READ = """
[ -e "$1" ] || exit 2
[ -r "$1" ] || exit 13
head -c 65536 "$1" 2>/dev/null
"""
"""The start of the file $1; exit codes are those of errno."""

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
"""The files of $1 and what the commands of $2 print, one a line, from the folder $3.

Each stands under a line `==> NAME <==`, as `head` says it for several files; where there is nothing, `==! ERRNO NAME
<==` is said instead. One `head` reads all files, and `echo` is part of every shell: a process for each file would cost
more than all the rest. Commands have no backslashes, which some shells' `echo` would interpret."""

NAMES = """
[ -e "$1" ] || exit 2
[ -d "$1" ] || exit 20
[ -r "$1" ] || exit 13
ls -1A "$1" 2>/dev/null
"""

SPACE = 'df -Pk "$1" | tail -n 1 | { read -r device size used free rest; echo "$free"; }'
"""Free kB below $1."""
