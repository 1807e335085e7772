"""Who an agent is: on a Unix socket whom its permissions let in, over TLS whom its name and secret show it to be."""

from __future__ import annotations

import asyncio
import base64
import binascii
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Protocol

from fastapi import Depends, HTTPException
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from nas.service.off_loop import off_loop
from nas.store import agents
from nas.store.store import Store

_REALM = {"WWW-Authenticate": 'Basic realm="hilnas"'}


class Access(Protocol):
    """Tells who asks."""

    async def caller(self, request: Request) -> str | None:
        """The name of the agent that asks; None for one that may speak for any.

        Raises:
            HTTPException: 401, it shows no name and secret that go together.
        """


class SocketAccess:
    """A Unix socket: whoever may open it may speak for every agent."""

    async def caller(self, request: Request) -> None:
        """Anybody."""


class SecretAccess:
    """HTTP Basic with the secrets of enrolment.

    What the database says of all secrets is read at once, and good for a while: a thousand agents cost one read. A
    secret it does not confirm is looked up, so an agent that enrolled just now is known at once.

    Args:
        store: knows the secrets' hashes.
    """

    FRESH_S = 2.0
    """How long a secret that another process revoked still opens the door."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._hashes: dict[str, str] = {}
        self._until = 0.0
        self._reading = asyncio.Lock()

    def forget(self) -> None:
        """Reads anew before the next answer; for who changed a secret."""
        self._until = 0.0

    async def caller(self, request: Request) -> str:
        """See `Access.caller`."""
        name, secret = _basic(request.headers.get("Authorization", ""))
        if not agents.matches((await self._known()).get(name), secret) and not await off_loop(
            agents.authenticate, self._store, name, secret
        ):
            raise HTTPException(401, "no such agent, or not its secret; enrol it with 'nas agent enrol'", _REALM)
        return name

    async def _known(self) -> dict[str, str]:
        async with self._reading:
            if time.monotonic() >= self._until:
                self._until = time.monotonic() + self.FRESH_S
                self._hashes = await off_loop(agents.secret_hashes, self._store)
            return self._hashes


def guarded(access: Access) -> type[APIRoute]:
    """Routes that ask `access` before they read the body of a request: a stranger's is not even parsed."""

    class Guarded(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
            handle = super().get_route_handler()

            async def ask_first(request: Request) -> Response:
                request.state.caller = await access.caller(request)
                return await handle(request)

            return ask_first

    return Guarded


async def _caller(request: Request) -> Any:  # a plain function would be called in a thread
    return request.state.caller


Caller = Annotated[str | None, Depends(_caller)]
"""Parameter of a guarded route: the agent that asks; None where it may speak for any."""


def require_own(caller: str | None, agent: str) -> None:
    """Raises `HTTPException` (403) where an agent speaks in another's name."""
    if caller not in (None, agent):
        raise HTTPException(403, f"agent {caller!r} may not speak for {agent!r}")


def _basic(header: str) -> tuple[str, str]:
    scheme, _, encoded = header.partition(" ")
    if scheme.lower() != "basic":
        raise HTTPException(401, "give the agent's name and secret (HTTP Basic)", _REALM)
    try:
        name, _, secret = base64.b64decode(encoded.strip(), validate=True).decode().partition(":")
    except (binascii.Error, ValueError):
        raise HTTPException(401, "this is no HTTP Basic authentication", _REALM) from None
    return name, secret
