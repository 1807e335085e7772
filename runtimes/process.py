"""Long-running tools of a build, line by line and with a deadline."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_TAIL_LINES = 40


def stream(
    argv: Sequence[str],
    *,
    deadline_s: float,
    env: Mapping[str, str],
    cwd: Path | None = None,
    on_line: Callable[[str], None] = lambda line: None,
) -> tuple[int, str]:
    """Runs `argv` and hands each output line (stdout and stderr together) to `on_line`.

    The whole process group is killed at the deadline and when the caller is interrupted.

    Returns:
        The exit code (negative: a signal; -9 at the deadline) and the last lines of output.
    """
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    process = subprocess.Popen(
        argv,
        cwd=cwd,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    watchdog = threading.Timer(deadline_s, _kill_group, [process.pid])
    watchdog.start()
    with process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                tail.append(line.rstrip())
                on_line(tail[-1])
            return process.wait(), "\n".join(tail)
        finally:
            watchdog.cancel()
            if process.poll() is None:
                _kill_group(process.pid)


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
