"""Engines of PostgreSQL, by psycopg 3: how it is connected to, and what every session is told."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, create_engine, event
from sqlalchemy.engine import URL

from nas.core.canonical import canonical_json
from nas.core.errors import InvalidInput

DRIVER = "postgresql+psycopg"

CONNECTIONS = 16
"""Most connections of one process; a server's default is 100 for everybody."""

_POOL_WAIT_S = 30.0

_CONNECT = {
    "connect_timeout": "10",
    "application_name": "hilnas",
    # A server that vanished without a word is noticed within half a minute.
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "4",
    "tcp_user_timeout": "30000",
}
"""libpq's settings where the URL has none of its own."""

_SESSION = """
SET default_transaction_isolation = 'read committed';
SET lock_timeout = '{lock_s:.0f}s';
-- What a stopped or unreachable client has locked is let go.
SET idle_in_transaction_session_timeout = '300s';
SET tcp_keepalives_idle = 30;
SET tcp_keepalives_interval = 10;
SET tcp_keepalives_count = 3
"""


def make_engine(url: URL, *, lock_s: float) -> Engine:
    """An engine that finds out that the server was away, and connects anew, before it begins a transaction.

    Args:
        url: of a database that its administrator has made.
        lock_s: longest wait for a lock.

    Raises:
        InvalidInput: the driver is not installed, or is another one.
    """
    if url.drivername != DRIVER:
        raise InvalidInput(f"the driver of {url.drivername!r} is not supported; write postgresql://user@host/name")
    settings = {name: value for name, value in _CONNECT.items() if name not in url.query}
    pool = {"pool_size": CONNECTIONS, "max_overflow": 0, "pool_timeout": _POOL_WAIT_S, "pool_pre_ping": True}
    try:
        engine = create_engine(url, json_serializer=canonical_json, connect_args=settings, **pool)
    except ImportError as error:
        raise InvalidInput(f"PostgreSQL needs its driver: install hilnas[postgres] ({error})") from None

    @event.listens_for(engine, "connect")
    def configure(connection: Any, record: Any) -> None:
        connection.autocommit = True
        connection.execute(_SESSION.format(lock_s=lock_s))
        connection.autocommit = False

    return engine
