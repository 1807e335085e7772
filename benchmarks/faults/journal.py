"""The state file: what a campaign is, and what it did, one JSON object a line, each on disk before the next fault."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Terms:
    """What a campaign is made of.

    Args:
        seed: of all that is drawn.
        faults: to do.
        machines: devices.
        longest_s: that a link may be down.
        folder: of homes and logs.
    """

    seed: int
    faults: int
    machines: int
    longest_s: float
    folder: str


class Journal:
    """Safe for several threads, and for death at any moment."""

    def __init__(self, path: Path, terms: Terms, lines: list[Line]) -> None:
        self.path, self.terms, self.lines = path, terms, lines
        self._lock = threading.Lock()

    @classmethod
    def begin(cls, path: Path, terms: Terms) -> Journal:
        """A new one; a file that is there is an error."""
        with path.open("x") as file:
            file.write(json.dumps({"campaign": asdict(terms)}) + "\n")
        return cls(path, terms, [])

    @classmethod
    def open(cls, path: Path) -> Journal:
        """One that was begun; a last line that was cut off is dropped."""
        text = path.read_text()
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            os.truncate(path, len(whole.encode()))
        first, *rest = (json.loads(line) for line in whole.splitlines())
        return cls(path, Terms(**first["campaign"]), rest)

    def write(self, line: Line) -> None:
        """Adds a line."""
        with self._lock, self.path.open("a") as file:
            self.lines.append(line)
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def faults(self) -> list[Line]:
        """Those that were done."""
        with self._lock:
            return [line for line in self.lines if "kind" in line]
