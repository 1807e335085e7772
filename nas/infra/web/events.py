"""Follows a log of events over HTTP: by long polls, or as server-sent events.

A client that accepts `text/event-stream` gets a stream: each event with its id, its kind and the same JSON as in pages;
then `event: end` when the log is complete. Comments keep idle streams open. After a lost connection, a client
resumes with `Last-Event-ID`, as browsers do.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

from fastapi import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from nas.core.errors import InvalidInput, NasError

log = logging.getLogger(__name__)

STREAM = "text/event-stream"
LONGEST_STREAM_S = 300.0
"""A stream ends after that and its client reconnects, so that a revoked token ends it, too."""

STREAMS_OF_ONE = 8
"""Most open streams of one client."""
STREAMS_OF_ALL = 64
"""Most open streams of all clients."""
LAST_ID = (1 << 53) - 1
_POLL_S = 0.5
_COMMENT_S = 15.0
_EXAMPLE = 'id: 211\nevent: training\ndata: {"id": 211, "at": 1763690400.0, "kind": "training", "...": "..."}\n\n'

DOCUMENTED: dict[int | str, dict[str, Any]] = {
    200: {"content": {STREAM: {"schema": {"type": "string"}, "example": _EXAMPLE}}}
}
"""`responses` of an operation with streams, for OpenAPI."""


class Event(Protocol):
    """An entry of a log; ids ascend."""

    @property
    def id(self) -> int: ...
    @property
    def kind(self) -> str: ...
    def model_dump_json(self) -> str: ...


class Page(Protocol):
    """Entries after an id, oldest first; `ended`: the log is complete."""

    @property
    def events(self) -> Sequence[Event]: ...
    @property
    def last(self) -> int: ...
    @property
    def ended(self) -> bool: ...


P = TypeVar("P", bound=Page)


class Streams:
    """The streams and long polls of one application: a limited number of streams, and none of both once it stops.

    Args:
        closing: whether the coordinator is about to stop.
    """

    def __init__(self, closing: Callable[[], bool]) -> None:
        self._closing = closing
        self._open: Counter[str] = Counter()

    async def open(self, request: Request, fetch: Callable[[int], Awaitable[Page]], after: int) -> Response:
        """Returns a stream of the entries after `after`, or after the last one that the client received.

        Raises:
            InvalidInput: `Last-Event-ID` is not an id.
            HTTPException: 429, too many streams are open, of this client or of all.
            NasError: the log does not exist.
        """
        client, after = request.state.caller, _last_seen(request, after)
        await fetch(after)  # raises if the log does not exist
        if self._open[client] >= STREAMS_OF_ONE or self._open.total() >= STREAMS_OF_ALL:
            raise HTTPException(429, "too many streams are open; close one", {"Retry-After": "30"})
        self._open[client] += 1
        return _Stream(self._text(request, fetch, after), lambda: self._release(client))

    async def next_page(self, fetch: Callable[[int], Awaitable[P]], after: int, wait_s: float) -> P:
        """Returns the entries after `after`, waiting for at most `wait_s`, without a thread."""
        deadline = time.monotonic() + wait_s
        while True:
            page = await fetch(after)
            if page.events or page.ended or time.monotonic() >= deadline:
                return page
            await asyncio.sleep(_POLL_S)
            if self._closing():
                deadline = 0.0

    def _release(self, client: str) -> None:
        self._open[client] -= 1
        if not self._open[client]:
            del self._open[client]

    async def _text(self, request: Request, fetch: Callable[[int], Awaitable[Page]], after: int) -> AsyncIterator[str]:
        started = sent = time.monotonic()
        yield "retry: 2000\n\n"
        while not self._closing() and time.monotonic() < started + LONGEST_STREAM_S:
            try:
                page = await fetch(after)
            except NasError as error:
                log.warning("a stream of events ends: %s", error)
                return
            for event in page.events:
                yield f"id: {event.id}\nevent: {event.kind}\ndata: {event.model_dump_json()}\n\n"
            after = page.last
            if page.ended:
                yield "event: end\ndata: {}\n\n"
                return
            if page.events:
                sent = time.monotonic()
                continue
            if time.monotonic() > sent + _COMMENT_S:
                yield ": nothing new\n\n"
                sent = time.monotonic()
            if await request.is_disconnected():
                return
            await asyncio.sleep(_POLL_S)


class _Stream(StreamingResponse):
    """Calls `release` at its end, even if it never started."""

    media_type = STREAM

    def __init__(self, content: AsyncIterator[str], release: Callable[[], None]) -> None:
        super().__init__(content, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except ClientDisconnect:
            log.debug("a stream of events was closed by its client")
        finally:
            self._release()


def wants_stream(request: Request) -> bool:
    """Returns whether the client accepts server-sent events."""
    return STREAM in request.headers.get("Accept", "")


def _last_seen(request: Request, after: int) -> int:
    header = request.headers.get("Last-Event-ID")
    if header is None:
        return after
    if not (header.isascii() and header.isdecimal() and len(header) <= len(str(LAST_ID))):
        raise InvalidInput("Last-Event-ID must be the id of the last received event", where="Last-Event-ID")
    return min(int(header), LAST_ID)
