"""Tokens with which people use the coordinator's API: random, shown once, stored hashed, each with a role."""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import Any

from sqlalchemy import Row, delete, select, update

from nas.core.errors import InvalidInput, UnknownName
from nas.store.models import api_token
from nas.store.rows import ApiToken, Role
from nas.store.store import Store, retried
from nas.store.upsert import insert_if_absent

_PREFIX = "hilnas."
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NOTED_EVERY_S = 60.0
"""`last_used` is no finer than this, so that reading needs no write each time."""


@retried
def create(store: Store, name: str, role: Role) -> str:
    """A new token, `hilnas.NAME.SECRET`; it cannot be shown again.

    Raises:
        InvalidInput: the name is taken or cannot be used.
    """
    if not _NAME.fullmatch(name):
        raise InvalidInput(f"{name!r} is no name of a token; use up to 64 letters, digits, '.', '_' and '-'")
    secret = secrets.token_urlsafe(32)
    with store.write() as connection:
        values = {"token_hash": _hash(secret), "role": role, "created": store.now()}
        if not insert_if_absent(connection, api_token, name=name, **values):
            raise InvalidInput(f"a token named {name!r} exists; revoke it first, or choose another name")
    return f"{_PREFIX}{name}.{secret}"


def all(store: Store) -> list[ApiToken]:
    """Every token, by name."""
    with store.read() as connection:
        return [_token(row) for row in connection.execute(select(api_token).order_by(api_token.c.name))]


@retried
def revoke(store: Store, name: str) -> None:
    """Ends a token at once.

    Raises:
        UnknownName: there is none of that name.
    """
    with store.write() as connection:
        if connection.execute(delete(api_token).where(api_token.c.name == name)).rowcount == 0:
            raise UnknownName("token", name, connection.scalars(select(api_token.c.name)))


def authenticate(store: Store, token: str) -> ApiToken | None:
    """Whose token this is; None where it is nobody's. Secrets are compared in constant time."""
    name, _, secret = token.removeprefix(_PREFIX).rpartition(".")
    if not _NAME.fullmatch(name):
        return None
    with store.read() as connection:
        row = connection.execute(select(api_token).where(api_token.c.name == name)).first()
    if row is None or not secrets.compare_digest(row.token_hash, _hash(secret)):
        return None
    _note_use(store, row)
    return _token(row)


def _note_use(store: Store, row: Row[Any]) -> None:
    now = store.now()
    if row.last_used is None or row.last_used <= now - _NOTED_EVERY_S:
        with store.write() as connection:
            connection.execute(update(api_token).where(api_token.c.name == row.name).values(last_used=now))


def _hash(secret: str) -> str:
    # A plain hash suffices: the secret has 256 random bits, so there is nothing to guess.
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()


def _token(row: Row[Any]) -> ApiToken:
    return ApiToken(row.name, Role(row.role), row.created, row.last_used)
