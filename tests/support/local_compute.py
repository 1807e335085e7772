"""Runs stages in threads of this process, for tests of whole studies without Ray.

`python -m tests.support.local_compute ARGUMENTS` is `nas ARGUMENTS` with launches that run their stages so, also those
that `nas serve` starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Self
from unittest import mock

from nas.cli.main import main
from nas.search.compute.ray import Kind, checked
from nas.search.compute.worker import Work
from nas.search.study.launch import launch


class LocalCompute:
    """A `Compute` without Ray; the thread of a cancelled stage runs to its end.

    Args:
        workers: stages in parallel. One where stages are not thread-safe: PyTorch's export is not.
    """

    def __init__(self, workers: int = 2) -> None:
        self.workers = workers
        self._turns = asyncio.Semaphore(workers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    async def run(self, work: Work, spec: Mapping[str, Any], kind: Kind = "short") -> dict[str, Any]:
        """Runs `work(spec)` in a thread."""
        async with self._turns:
            return checked(await asyncio.to_thread(work, dict(spec)))


@contextmanager
def without_ray() -> Iterator[None]:
    """Makes `nas launch` in this process run its stages on a `LocalCompute`."""
    local = partial(launch, compute=lambda options, _: LocalCompute(options.workers))
    with mock.patch("nas.cli.launch.launch", local):
        yield


if __name__ == "__main__":
    with without_ray(), mock.patch("nas.serve.api.submissions.PROGRAM", "tests.support.local_compute"):
        main()
