"""Following a log of events over HTTP: by asking and waiting, or as server-sent events on one answer.

Who accepts `text/event-stream` gets a stream: each event with its id, its kind and the JSON that the page has, too;
then `event: end` once no more are due. A comment comes where nothing else does. A client that lost the connection goes
on with `Last-Event-ID`, as browsers do by themselves.
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
"""A stream ends after that, and its client asks again: by then a token that was revoked is worth nothing."""

STREAMS_OF_ONE = 8
STREAMS_OF_ALL = 64
LAST_ID = (1 << 53) - 1
_LOOK_S = 0.5
_BEAT_S = 15.0
_EXAMPLE = 'id: 211\nevent: training\ndata: {"id": 211, "at": 1763690400.0, "kind": "training", "...": "..."}\n\n'

DOCUMENTED: dict[int | str, dict[str, Any]] = {
    200: {"content": {STREAM: {"schema": {"type": "string"}, "example": _EXAMPLE}}}
}
"""`responses` of an operation that is followed, for OpenAPI."""


class Event(Protocol):
    """An entry of a log; its id is greater than those of all before it."""

    @property
    def id(self) -> int: ...
    @property
    def kind(self) -> str: ...
    def model_dump_json(self) -> str: ...


class Page(Protocol):
    """Entries behind an id, oldest first; `ended`: none are due any more."""

    @property
    def events(self) -> Sequence[Event]: ...
    @property
    def last(self) -> int: ...
    @property
    def ended(self) -> bool: ...


P = TypeVar("P", bound=Page)


async def next_page(look: Callable[[int], Awaitable[P]], after: int, wait_s: float) -> P:
    """What is behind `after`, waited for at most `wait_s`. Waiting takes no thread."""
    deadline = time.monotonic() + wait_s
    while True:
        page = await look(after)
        if page.events or page.ended or time.monotonic() >= deadline:
            return page
        await asyncio.sleep(_LOOK_S)


class Streams:
    """The streams of one application: so many at once, and none once it is to end.

    Args:
        closing: whether the coordinator is about to end.
    """

    def __init__(self, closing: Callable[[], bool]) -> None:
        self._closing = closing
        self._open: Counter[str] = Counter()

    async def open(self, request: Request, look: Callable[[int], Awaitable[Page]], after: int) -> Response:
        """A stream of what is behind `after`, or behind what the client has seen already.

        Args:
            request: whose token was found good.
            look: gives the events behind an id.
            after: as the client asked.

        Raises:
            InvalidInput: `Last-Event-ID` is none.
            HTTPException: 429, it has too many streams open, or all clients have.
            NasError: there is nothing to follow.
        """
        who, after = request.state.caller, _last_seen(request, after)
        await look(after)  # what cannot be followed is told as any error
        if self._open[who] >= STREAMS_OF_ONE or self._open.total() >= STREAMS_OF_ALL:
            raise HTTPException(429, "too many streams are open; close one", {"Retry-After": "30"})
        self._open[who] += 1
        return _Stream(self._text(request, look, after), lambda: self._release(who))

    def _release(self, who: str) -> None:
        self._open[who] -= 1
        if not self._open[who]:
            del self._open[who]

    async def _text(
        self, request: Request, look: Callable[[int], Awaitable[Page]], after: int
    ) -> AsyncIterator[str]:  # fmt: skip
        begun = told = time.monotonic()
        yield "retry: 2000\n\n"
        while not self._closing() and time.monotonic() < begun + LONGEST_STREAM_S:
            try:
                page = await look(after)
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
                told = time.monotonic()
                continue
            if time.monotonic() > told + _BEAT_S:
                yield ": nothing new\n\n"
                told = time.monotonic()
            if await request.is_disconnected():
                return
            await asyncio.sleep(_LOOK_S)


class _Stream(StreamingResponse):
    """Calls `release` at its end, whether or not it ever began."""

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
    """Whether the client accepts server-sent events."""
    return STREAM in request.headers.get("Accept", "")


def _last_seen(request: Request, after: int) -> int:
    given = request.headers.get("Last-Event-ID")
    if given is None:
        return after
    if not (given.isascii() and given.isdecimal() and len(given) <= len(str(LAST_ID))):
        raise InvalidInput("Last-Event-ID is the id of the last event that was seen", where="Last-Event-ID")
    return min(int(given), LAST_ID)
