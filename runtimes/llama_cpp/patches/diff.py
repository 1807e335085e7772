"""Applies a unified diff exactly: the source is pinned, so a hunk that is off by a line is an error, not a guess."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nas.core.errors import InfrastructureFailed

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")


@dataclass(frozen=True, slots=True)
class Hunk:
    """One change.

    Args:
        start: first line of the old text, counted from 1; 0 for a file that is new.
        old: lines that must be there.
        new: lines that take their place.
    """

    start: int
    old: tuple[str, ...]
    new: tuple[str, ...]


def apply_diff(patch: Path, tree: Path) -> None:
    """Changes the files below `tree`, each in whole or not at all.

    Args:
        patch: a diff whose names start with one folder, as `git diff` writes them ("a/src/x.cpp", "b/src/x.cpp").
        tree: the folder that this first one stands for.

    Raises:
        InfrastructureFailed: a hunk does not fit, or a file is missing.
    """
    for name, hunks in read_diff(patch):
        path = tree / name
        assert path.resolve().is_relative_to(tree.resolve()), f"{patch.name} names {name}"
        new = not any(hunk.old for hunk in hunks) and not path.exists()
        try:
            lines = [] if new else _lines(path)
        except FileNotFoundError as error:
            raise InfrastructureFailed(f"{patch.name} does not fit the source: no {name} there") from error
        changed = _changed(lines, hunks, f"{patch.name} does not fit the source: {name}")
        path.write_text("".join(changed), newline="\n")


def read_diff(patch: Path) -> Iterator[tuple[str, list[Hunk]]]:
    """File names (without the first folder) and their hunks."""
    lines = deque(_lines(patch))
    while lines:
        if lines.popleft().startswith("--- "):
            header = lines.popleft()
            assert header.startswith("+++ "), header
            yield header.removeprefix("+++ ").split("\t")[0].strip().partition("/")[2], list(_hunks(lines))


def _hunks(lines: deque[str]) -> Iterator[Hunk]:
    """Takes the hunks that stand in front. A removed line may look like a header, so lengths tell where one ends."""
    while lines and (match := _HUNK.match(lines[0])):
        lines.popleft()
        old: list[str] = []
        new: list[str] = []
        while len(old) < int(match[2] or 1) or len(new) < int(match[3] or 1):
            line = lines.popleft()
            old += [line[1:]] if line[0] != "+" else []
            new += [line[1:]] if line[0] != "-" else []
        yield Hunk(int(match[1]), tuple(old), tuple(new))


def _changed(lines: list[str], hunks: list[Hunk], problem: str) -> list[str]:
    out: list[str] = []
    done = 0
    for hunk in hunks:
        start = max(hunk.start - 1, 0)
        if lines[start : start + len(hunk.old)] != list(hunk.old):
            raise InfrastructureFailed(f"{problem}: other text at line {hunk.start}")
        out += lines[done:start] + list(hunk.new)
        done = start + len(hunk.old)
    return out + lines[done:]


def _lines(path: Path) -> list[str]:
    """Lines as diff(1) sees them: they end in a newline and nothing else does."""
    with path.open(newline="\n") as file:
        return list(file)
