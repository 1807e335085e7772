"""Ends connections that are opened and then say nothing, or say it byte by byte, so that they cannot use up all."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 15.0
"""From the first byte of a connection or request to the end of the request's head; also for the rest of a body whose
request was refused before it was read."""


class PatientProtocol(H11Protocol):
    """HTTP/1.1 with a deadline for what a client owes, which uvicorn does not have; it times idle connections only."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_deadline()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        owes_head = self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None
        if not (owes_head or self.conn.our_state is h11.DONE):
            self._forget_deadline()
        elif self._deadline is None:
            self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_deadline()
        super().connection_lost(exc)

    def _set_deadline(self) -> None:
        self._deadline = self.loop.call_later(HEAD_S, self.transport.abort)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
