"""Reading values from a device's files: one set of readings, parsers, and the error for a missing value."""

from __future__ import annotations

import errno
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeVar

from nas.measure.devices.transports.base import Reader, Tree

T = TypeVar("T")
R = TypeVar("R", bound=Tree)


class Unread(Exception):
    """A value that this device does not provide; the message is the reason."""


class OtherKind(Unread):
    """A value that devices of this kind never provide: where there is another reason, this one is not told."""


def first_of(tree: R, *probes: Callable[[R], T]) -> T:
    """Returns the value of the first probe that can be read.

    Raises:
        Unread: none can; with all reasons.
    """
    reasons = []
    for probe in probes:
        try:
            return probe(tree)
        except OtherKind:
            continue
        except Unread as reason:
            reasons.append(str(reason))
    raise Unread("; ".join(reasons))


def matched(pattern: str, text: str, otherwise: str) -> str:
    """Returns the group of the first match in a text of several lines; raises `Unread(otherwise)` if there is none."""
    if match := re.search(pattern, text, re.MULTILINE):
        return match[1]
    raise Unread(otherwise)


def read(tree: Tree, path: str) -> str:
    """Returns the stripped text of a file."""
    try:
        return tree.read_text(path).strip()
    except OSError as error:
        raise Unread(f"{path}: {error.strerror}") from error


def read_or_empty(tree: Tree, path: str) -> str:
    """Returns the stripped text of a file, without the zero that ends it in a device tree; empty if it is unread."""
    try:
        return read(tree, path).rstrip("\0")
    except Unread:
        return ""


_PLAUSIBLE: Mapping[str, tuple[float, float]] = {
    "C": (1.0, 150.0),
    "V": (2.0, 100.0),
    "Ah": (0.03, 1000.0),
    "Wh": (0.1, 10_000.0),
}
"""Unit -> least and greatest value that a sensor of a running device has.

Drivers that report other units than the kernel's documentation asks for (degrees or tenths instead of thousandths,
milli instead of micro) are a thousand or a hundred times off, and those without a reading report 0 or -1.
"""


def plausible(value: float, unit: str, path: str) -> float:
    """Returns a value in a unit of the table above.

    Raises:
        Unread: no running device has such a value, so the file is in another unit or holds no reading.
    """
    least, greatest = _PLAUSIBLE[unit]
    if not least <= value <= greatest:
        raise Unread(f"{path}: {value:g} {unit} is not plausible: it is in another unit, or no reading")
    return value


def names(tree: Tree, folder: str, accepts: Callable[[str], bool] = lambda name: True) -> list[str]:
    """Returns the names in a folder that it `accepts`; none if the folder does not exist."""
    try:
        return [name for name in tree.names(folder) if accepts(name)]
    except OSError:
        return []


def first_number(tree: Tree, path: str) -> float:
    """Returns the first word of a file as a number.

    Raises:
        Unread: it is not a finite number, or cannot be read.
    """
    text = read(tree, path)
    try:
        value = float(text.split()[0])
    except (ValueError, IndexError):
        raise Unread(f"{path}: {text[:40]!r} does not start with a number") from None
    if not math.isfinite(value):
        raise Unread(f"{path}: {text[:40]!r} does not start with a number")
    return value


def number(tree: Tree, path: str) -> int:
    """Returns the whole number that a file holds."""
    text = read(tree, path)
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise Unread(f"{path}: {text[:40]!r} is not a number")
    return int(text)


@dataclass(frozen=True, slots=True)
class Readings:
    """Files and command output of a device, read in one exchange; a `Tree` of them.

    Args:
        requested: paths and commands.
        contents: the answer of `Reader.read_many`.
    """

    requested: tuple[str, ...]
    contents: Mapping[str, str | OSError]

    @classmethod
    def take(cls, reader: Reader, paths: Sequence[str], commands: Sequence[str] = ()) -> Readings:
        """Reads everything in one exchange, in this order."""
        return cls((*paths, *commands), reader.read_many(paths, commands))

    def read_text(self, path: str) -> str:
        """Returns the content of a path that was requested."""
        assert any(path == name or fnmatchcase(path, name) for name in self.requested), f"{path} was not asked for"
        answer = self.contents.get(path, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path))
        if isinstance(answer, OSError):
            raise OSError(answer.errno, answer.strerror, path)
        return answer

    def output(self, command: str) -> str:
        """Returns what a command printed; raises `Unread` where there is no such command."""
        try:
            return self.read_text(command)
        except OSError as error:
            raise Unread(f"{command}: {error.strerror}") from error

    def names(self, folder: str) -> list[str]:
        """Returns the names of the files in a folder that were read."""
        inside = (path[len(folder) + 1 :] for path in self._existing_paths() if path.startswith(f"{folder}/"))
        entries = sorted({name.partition("/")[0] for name in inside})
        if not entries:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder)
        return entries

    def _existing_paths(self) -> list[str]:
        return [
            path
            for path, answer in self.contents.items()
            if not (isinstance(answer, OSError) and answer.errno == errno.ENOENT)
        ]
