"""Refuses requests that are too large, before they are read into memory."""

from __future__ import annotations

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyLimit:
    """ASGI middleware: 413 for a request of more than `limit` bytes, whatever its headers say.

    Args:
        app: what is protected.
        limit: bytes.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, counting its bytes as they come."""
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._limit:
                raise HTTPException(413, f"more than {self._limit} bytes")
            return message

        await self._app(scope, counted, send)
