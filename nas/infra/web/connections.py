"""Connections of a server: what they may take, and which one ends where there are too many.

A connection is a stranger's until a request on it was authenticated. Strangers have few resources: a time limit from
the moment they connect, before TLS, to the end of the first head, and a number of connections, for each address and in
all. Nobody is turned away for the number: the oldest connection ends, of the address that has most of them. So an
address that opens many keeps none of the others out, and connections that were authenticated are not counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import traceback
from typing import Any

import h11
import uvicorn
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 10.0
"""Time limit of a head, in seconds: of the first one from the connection's beginning, of others from their own."""
STALLED_S = 60.0
"""Seconds after which a connection ends whose peer takes nothing of an answer."""
STRANGERS_OF_ONE = 256
"""Most connections of one address that nobody was authenticated on."""
STRANGERS_OF_ALL = 2048
_AT_ONCE = 64
"""Connections that are accepted before others are served."""
_PAUSE_S = 0.5
"""Pause of accepting where no file is free."""
_STATE = "connection"
_NETWORK = 64
"""Bits of an IPv6 address that tell hosts' networks apart: one host has all addresses of its network."""


def authenticated(scope: Scope) -> None:
    """Notes that a request was authenticated: its connection is no stranger's any more."""
    connection = scope.get("state", {}).get(_STATE)
    if connection is not None:
        connection.trust()


class Strangers:
    """The connections that nobody was authenticated on, by address, oldest first.

    Args:
        of_one: most of one address.
        of_all: most in all.
    """

    def __init__(self, of_one: int = STRANGERS_OF_ONE, of_all: int = STRANGERS_OF_ALL) -> None:
        self._of_one, self._of_all = of_one, of_all
        self._by_address: dict[str, dict[Connection, None]] = {}
        self._count = 0

    def add(self, connection: Connection) -> None:
        """Adds a new one; the oldest of its address, or of the address with most, ends if there are too many."""
        same = self._by_address.setdefault(connection.address, {})
        same[connection] = None
        self._count += 1
        if len(same) > self._of_one:
            next(iter(same)).end()
        elif self._count > self._of_all:
            most = max(self._by_address.values(), key=len)
            next(iter(most)).end()

    def remove(self, connection: Connection) -> None:
        """Removes one that has ended or was authenticated."""
        same = self._by_address.get(connection.address, {})
        if connection in same:
            del same[connection]
            self._count -= 1
        if not same:
            self._by_address.pop(connection.address, None)


class Connection(H11Protocol):
    """One connection, from its beginning.

    Args:
        server: that accepted it.
        sock: its socket.
        address: of the peer, as `address_of` returns it; empty on a Unix socket, whose peers are no strangers.
    """

    def __init__(self, server: AcceptingServer, sock: socket.socket, address: str) -> None:
        super().__init__(server.config, server.server_state, {_STATE: self})
        self.address = address
        self._sock, self._strangers = sock, server.strangers
        self._head: asyncio.TimerHandle | None = self.loop.call_later(HEAD_S, self.end)
        self._stalled: asyncio.TimerHandle | None = None
        if address:
            self._strangers.add(self)

    def trust(self) -> None:
        """Notes that a request on it was authenticated."""
        self._strangers.remove(self)

    def end(self) -> None:
        """Ends it at once, also in the middle of the TLS handshake: what uses the socket sees its end."""
        self.trust()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """Frees what counts it. Called once it has ended, or if the handshake failed."""
        self._strangers.remove(self)
        for timer in (self._head, self._stalled):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Takes bytes of requests; a head that is not whole has `HEAD_S`."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            if self._head is not None:
                self._head.cancel()
                self._head = None
        elif self._head is None:
            self._head = self.loop.call_later(HEAD_S, self.end)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the transport at the end."""
        super().connection_lost(exc)
        self.forget()

    def pause_writing(self) -> None:
        """Called by the transport when the peer takes too little of an answer."""
        super().pause_writing()
        self._stalled = self.loop.call_later(STALLED_S, self.end)

    def resume_writing(self) -> None:
        """Called by the transport when the peer has taken most of it."""
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None


class AcceptingServer(uvicorn.Server):
    """Accepts connections itself, so that they are limited from their beginning, not from the end of the handshake.

    Args:
        config: of uvicorn.
        listening: the socket.
        tls: certificate and settings; None for none.
        strangers: counts connections that nobody was authenticated on.
    """

    def __init__(
        self, config: uvicorn.Config, listening: socket.socket, tls: ssl.SSLContext | None, strangers: Strangers
    ) -> None:
        super().__init__(config)
        self.strangers = strangers
        self._listening = listening
        self._handshake: dict[str, Any] = {"ssl": tls, "ssl_handshake_timeout": HEAD_S} if tls else {}
        self._beginning: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to accept."""
        self._listening.listen(self.config.backlog)
        self._listening.setblocking(False)
        await super().startup(sockets=[])
        self._watch()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops accepting and waits for the requests in progress."""
        asyncio.get_running_loop().remove_reader(self._listening)
        self._listening.close()
        for task in self._beginning:
            task.cancel()
        await super().shutdown(sockets=[])

    def _watch(self) -> None:
        if not self.should_exit:
            asyncio.get_running_loop().add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(_AT_ONCE):
            try:
                sock, peer = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # no file is free
                loop.remove_reader(self._listening)
                loop.call_later(_PAUSE_S, self._watch)
                return
            sock.setblocking(False)
            connection = Connection(self, sock, address_of(peer[0]) if peer else "")
            task = loop.create_task(self._begin(connection, sock))
            self._beginning.add(task)
            task.add_done_callback(self._beginning.discard)

    async def _begin(self, connection: Connection, sock: socket.socket) -> None:
        try:
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(lambda: connection, sock, **self._handshake)
        except OSError as error:  # the handshake failed, took too long or was ended
            # Its frames refer to it: until the next full collection it would keep 256 KiB of each failed handshake.
            traceback.clear_frames(error.__traceback__)
            connection.forget()
            sock.close()


def address_of(host: str) -> str:
    """Returns the address that a client is counted by: IPv4 also if it came by IPv6, and the network of an IPv6 one."""
    ip = plain_ip(host)
    if isinstance(ip, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((int(ip), _NETWORK), strict=False))
    return str(ip)


def plain_ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Returns the address of a client; an IPv4 one that a socket of both families shows as IPv6 is IPv4."""
    ip = ipaddress.ip_address(host.partition("%")[0])
    return (ip.ipv4_mapped or ip) if isinstance(ip, ipaddress.IPv6Address) else ip
