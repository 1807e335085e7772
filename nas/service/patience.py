"""Ends connections that are opened and then say nothing, or say it byte by byte, so that they cannot use up all."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 15.0
"""From the first byte of a connection or request to the end of the request's head."""


class PatientProtocol(H11Protocol):
    """HTTP/1.1 with a deadline for request heads, which uvicorn does not have; it times idle connections only."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._forget_deadline()
        elif self._deadline is None and self.timeout_keep_alive_task is None:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_deadline()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        self._deadline = self.loop.call_later(HEAD_S, self.transport.abort)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
