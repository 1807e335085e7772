"""Refuses requests that are too large, before they are read into memory, and ends those that never come whole."""

from __future__ import annotations

import asyncio

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyLimit:
    """ASGI middleware: 413 for a request of more than `limit` bytes, whatever its headers say; 408 for one too slow.

    Args:
        app: what is protected.
        limit: bytes.
        seconds: in which the whole body must have come once it is asked for.
    """

    def __init__(self, app: ASGIApp, limit: int, seconds: float) -> None:
        self._app = app
        self._limit, self._seconds = limit, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, counting its bytes as they come."""
        read, whole, deadline = 0, False, 0.0

        async def counted() -> Message:
            nonlocal read, whole, deadline
            if whole:
                return await receive()  # which ends when the client goes
            now = asyncio.get_running_loop().time()
            deadline = deadline or now + self._seconds
            try:
                message = await asyncio.wait_for(receive(), deadline - now)
            except TimeoutError:
                raise HTTPException(408, f"not whole after {self._seconds:g} s", {"Connection": "close"}) from None
            read += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if read > self._limit:
                raise HTTPException(413, f"more than {self._limit} bytes")
            return message

        await self._app(scope, counted, send)
