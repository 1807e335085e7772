"""The pages' server in a process of its own: what `nas launch --open` starts, on a database that exists.

As a program: `python -m benchmarks.dashboard.server URL FOLDER` prints its address, and serves until its input ends.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from nas.dashboard.here import dashboard_here
from nas.store.store import Store


@dataclass(frozen=True)
class Served:
    """A server that runs.

    Args:
        address: of the pages, without a path.
        process: its own.
    """

    address: str
    process: psutil.Process

    @property
    def port(self) -> int:
        """It listens on, at 127.0.0.1."""
        return int(self.address.rpartition(":")[2])

    def cpu_s(self) -> float:
        """Seconds of CPU so far."""
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def rss_mb(self) -> float:
        """Resident memory now, in MB."""
        return float(self.process.memory_info().rss / 1e6)


@contextlib.contextmanager
def served(url: str, folder: Path) -> Iterator[Served]:
    """The pages of the database `url`, as long as the context is open."""
    argv = [sys.executable, "-m", "benchmarks.dashboard.server", url, str(folder)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdin is not None and running.stdout is not None
        try:
            address = running.stdout.readline().strip()
            assert address, "the server ended before it served"
            yield Served(address, psutil.Process(running.pid))
        finally:
            running.stdin.close()


def main() -> None:
    """Serves."""
    url, folder = sys.argv[1:]
    store = Store.open(url, artifacts=Path(folder) / "artifacts")
    with dashboard_here(store) as address:
        print(address.removesuffix("/studies"), flush=True)
        sys.stdin.read()
    store.close()


if __name__ == "__main__":
    main()
