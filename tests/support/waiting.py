"""Waits with a deadline for what another thread or process does."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Waits until something is so.

    Raises:
        AssertionError: it was not so within `seconds`.
    """
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"did not happen within {seconds} s"
        time.sleep(0.01)


def until_written(path: Path, process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """Waits until a process has written a file.

    Raises:
        AssertionError: it ended before, or did not write it within four minutes.
    """

    def written() -> bool:
        assert path.exists() or process.poll() is None, "it ended before it could be killed"
        return path.exists()

    until(written, 240)
