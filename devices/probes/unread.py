"""What a probe says when it has no value."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from nas.devices.transports.base import Tree


class Unread(Exception):
    """A value that this device does not tell; the message is the reason."""


def read(tree: Tree, path: str) -> str:
    """The stripped text of a file.

    Raises:
        Unread: it is not there or may not be read.
    """
    try:
        return tree.read_text(path).strip()
    except OSError as error:
        raise Unread(f"{path}: {error.strerror}") from error


def names(tree: Tree, folder: str, wanted: Callable[[str], bool] = lambda name: True) -> list[str]:
    """Names in a folder that are `wanted`; none where the folder is not there."""
    try:
        return [name for name in tree.names(folder) if wanted(name)]
    except OSError:
        return []


def first_number(tree: Tree, path: str) -> float:
    """The first word of a file.

    Raises:
        Unread: it is no number that makes sense, or cannot be read.
    """
    text = read(tree, path)
    try:
        value = float(text.split()[0])
    except (ValueError, IndexError):
        raise Unread(f"{path}: {text[:40]!r} begins with no number") from None
    if not math.isfinite(value):
        raise Unread(f"{path}: {text[:40]!r} begins with no number")
    return value


def number(tree: Tree, path: str) -> int:
    """A file that holds one whole number.

    Raises:
        Unread: it does not, or cannot be read.
    """
    text = read(tree, path)
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise Unread(f"{path}: {text[:40]!r} is not a number")
    return int(text)
