"""Kills the processes of a local Ray cluster when the process that started it is gone. Executed as a script.

Ray ends its workers when their raylet dies, but not those that are just starting, and its helpers stay another minute.
So this process waits for the end of its standard input, which closes when its parent dies in whatever way, and then
kills every process that carries the cluster's mark (argv[1], as NAME=VALUE) in its environment. It imports no package.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

_ROUNDS = 10
"""Times that processes are looked for."""
_PAUSE_S = 0.3
"""Seconds between two times."""


def main() -> None:
    """Waits for the end of standard input, then kills all processes with the mark."""
    mark = sys.argv[1].encode()
    while os.read(0, 1):
        pass
    for _ in range(_ROUNDS):
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - see below
        if not sum([_kill_marked(pid, mark) for pid in pids]):
            return
        time.sleep(_PAUSE_S)


def _kill_marked(pid: int, mark: bytes) -> bool:
    """Kills the process if it has the mark. Uses a pidfd, so that a reused process id cannot be hit."""
    with contextlib.suppress(OSError):
        process = os.pidfd_open(pid)
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123 - without pathlib it starts at once
                marked = mark in file.read().split(b"\0")
            if marked:
                signal.pidfd_send_signal(process, signal.SIGKILL)
            return marked
        finally:
            os.close(process)
    return False


if __name__ == "__main__":
    main()
