"""Runs stages in threads of this process, for tests of whole studies without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Self

from nas.compute.ray import Kind, Work, checked


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

    def close(self) -> None:
        """Does nothing: no worker was started."""
