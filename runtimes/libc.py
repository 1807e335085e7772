"""Which C library a build asks for, and whether a device has it: what asks for a newer one does not even start."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

B = TypeVar("B")

_ASKED = re.compile(rb"\0GLIBC_2\.(\d+)(?=\0)")
_GLIBC = re.compile(r"glibc 2\.(\d+)")


@lru_cache(maxsize=256)
def needed_glibc(files: tuple[Path, ...]) -> str | None:
    """The newest version of GNU's C library that one of the files asks for, such as "2.36"; None: none asks for it."""
    minors = [int(minor) for path in files for minor in _ASKED.findall(path.read_bytes())]
    return f"2.{max(minors)}" if minors else None


def has_glibc(libc: str | None, needed: str | None) -> bool | None:
    """Whether a device with the C library `libc` (`Device.libc`) runs what asks for GNU's of version `needed`.

    None where it does not tell what it has.
    """
    if needed is None:
        return True
    if libc is None:
        return None
    found = _GLIBC.fullmatch(libc)
    return found is not None and int(found[1]) >= int(needed.removeprefix("2."))


def first_that_runs(builds: Iterable[B], libc: str | None, needed: Callable[[B], str | None]) -> B | None:
    """The first build that runs with this C library; else the first of which that is not known."""
    unknown: B | None = None
    for build in builds:
        runs = has_glibc(libc, needed(build))
        if runs:
            return build
        if runs is None and unknown is None:
            unknown = build
    return unknown
