"""Processor cores as people and the kernel write them: '0-3,6'."""

from __future__ import annotations

import re
from collections.abc import Iterable

from nas.core.errors import InvalidInput

_PART = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?")


def parse_cores(text: str) -> tuple[int, ...]:
    """Sorted core numbers of a list such as '4-7' or '0,2-3'; spaces separate like commas, as in /sys.

    Raises:
        InvalidInput: another form, or no core at all.
    """
    found: set[int] = set()
    for part in text.replace(",", " ").split():
        match = _PART.fullmatch(part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise InvalidInput(f"cores {text!r}: a list such as '4-7' or '0,2-3' is wanted")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    if not found:
        raise InvalidInput("cores: the list is empty; write it such as '4-7' or '0,2-3'")
    return tuple(sorted(found))


def show_cores(cores: Iterable[int]) -> str:
    """The shortest list that `parse_cores` reads as `cores`."""
    runs: list[list[int]] = []
    for core in sorted(set(cores)):
        if runs and runs[-1][-1] == core - 1:
            runs[-1][1:] = [core]
        else:
            runs.append([core])
    return ",".join("-".join(map(str, run)) for run in runs)
