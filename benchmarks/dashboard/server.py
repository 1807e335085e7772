"""The server of `nas launch --open` in its own process, on an existing database.

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

from nas.infra.store.store import Store
from nas.serve.dashboard.local_server import dashboard_here


@dataclass(frozen=True)
class Served:
    """A running server.

    Args:
        address: of the pages, without a path.
        process: of the server.
    """

    address: str
    process: psutil.Process

    @property
    def port(self) -> int:
        """Port at 127.0.0.1."""
        return int(self.address.rpartition(":")[2])

    def cpu_s(self) -> float:
        """Returns CPU seconds so far."""
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def rss_mb(self) -> float:
        """Returns resident memory in MB."""
        return float(self.process.memory_info().rss / 1e6)


@contextlib.contextmanager
def served(url: str, folder: Path) -> Iterator[Served]:
    """Serves the pages of the database `url`."""
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
    """Serves until stdin ends."""
    url, folder = sys.argv[1:]
    store = Store.open(url, artifacts=Path(folder) / "artifacts")
    with dashboard_here(store) as address:
        print(address.removesuffix("/studies"), flush=True)
        sys.stdin.read()
    store.close()


if __name__ == "__main__":
    main()
