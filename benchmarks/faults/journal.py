"""The state file: a campaign's settings and finished faults, one JSON object per line, synced before the next fault."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Terms:
    """Settings of a campaign.

    Args:
        seed: of all random choices.
        faults: number to run.
        machines: number of devices.
        longest_s: longest time that a link is down.
        folder: of homes and logs.
        database: "sqlite" or "postgresql".
        kinds: of devices (`stage.MACHINES`), in turn.
    """

    seed: int
    faults: int
    machines: int
    longest_s: float
    folder: str
    database: str = "sqlite"
    kinds: Sequence[str] = ("sshd", "adbd")


class Journal:
    """The open state file; safe for several threads, and for kills at any moment."""

    def __init__(self, path: Path, terms: Terms, lines: list[Line]) -> None:
        self.path, self.terms, self.lines = path, terms, lines
        self._lock = threading.Lock()

    @classmethod
    def begin(cls, path: Path, terms: Terms) -> Journal:
        """Creates a state file, which must not exist."""
        with path.open("x") as file:
            file.write(json.dumps({"campaign": asdict(terms)}) + "\n")
        return cls(path, terms, [])

    @classmethod
    def open(cls, path: Path) -> Journal:
        """Opens an existing state file; an incomplete last line is dropped."""
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
        """Returns the finished faults, with what became of their jobs."""
        with self._lock:
            return [line for line in self.lines if "state" in line]

    def problems(self) -> list[tuple[Line, str]]:
        """Returns all problems with their lines; not those of faults that broke off and were repeated."""
        finished = {line["number"] for line in self.faults()}
        with self._lock:
            counted = [line for line in self.lines if "state" in line or line.get("number") not in finished]
            return [(line, problem) for line in counted for problem in line.get("violations", ())]
