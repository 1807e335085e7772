"""Who gets the next free worker: the lowest trial number, so references come first and candidates finish in order."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """A semaphore that serves by rank instead of by arrival.

    Args:
        places: held at the same time.
    """

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._arrivals = 0

    @asynccontextmanager
    async def turn(self, rank: int) -> AsyncIterator[None]:
        """A place, for as long as the context is open; lower ranks go first, equals in the order they came."""
        self._arrivals += 1
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (rank, self._arrivals, turn))
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave()
            raise
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        self._free += 1
        self._serve()

    def _serve(self) -> None:
        while self._free and self._waiting:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.cancelled():
                self._free -= 1
                turn.set_result(None)
