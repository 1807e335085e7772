"""Agents: who may lease jobs. Secrets are random, shown once and stored hashed."""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import Any

from sqlalchemy import Row, Select, case, delete, func, select, update

from nas.core.errors import InvalidInput
from nas.store.models import agent, device, enrol_token
from nas.store.rows import Agent
from nas.store.store import Store, retried
from nas.store.upsert import insert_if_absent

TOKEN_S = 900.0
"""Seconds an enrolment token is good for."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@retried
def issue_token(store: Store, ttl_s: float = TOKEN_S) -> str:
    """A one-time token that lets one agent enrol."""
    token = secrets.token_urlsafe(32)
    with store.write() as connection:
        connection.execute(delete(enrol_token).where(enrol_token.c.expires <= store.now()))
        connection.execute(enrol_token.insert().values(token_hash=_hash(token), expires=store.now() + ttl_s))
    return token


@retried
def enrol(store: Store, token: str, name: str) -> str:
    """Exchanges a token for the agent's own secret; enrolling again under the same name replaces the old secret.

    Raises:
        InvalidInput: the token is unknown, used or too old, or the name cannot be used.
    """
    _check_name(name)
    secret = secrets.token_urlsafe(32)
    with store.write() as connection:
        spent = connection.execute(
            delete(enrol_token).where(enrol_token.c.token_hash == _hash(token), enrol_token.c.expires > store.now())
        )
        if spent.rowcount != 1:
            raise InvalidInput("the enrolment token is unknown, used or too old; get one with 'nas agent token'")
        insert_if_absent(connection, agent, name=name, created=store.now())
        connection.execute(update(agent).where(agent.c.name == name).values(secret_hash=_hash(secret)))
    return secret


@retried
def register_local(store: Store, name: str) -> None:
    """Lets in an agent without a secret: it is on the coordinator's Unix socket, whose permissions guard it.

    Raises:
        InvalidInput: the name cannot be used, or belongs to an agent that enrolled.
    """
    _check_name(name)
    with store.write() as connection:
        insert_if_absent(connection, agent, name=name, created=store.now())
        if connection.scalar(select(agent.c.secret_hash).where(agent.c.name == name)) is not None:
            raise InvalidInput(f"agent {name!r} enrolled from another host; choose another name for the local one")


def authenticate(store: Store, name: str, secret: str) -> bool:
    """Whether `secret` is that of the agent `name`; never for a local agent."""
    with store.read() as connection:
        known = connection.scalar(select(agent.c.secret_hash).where(agent.c.name == name))
    return known is not None and secrets.compare_digest(known, _hash(secret))


def all(store: Store) -> list[Agent]:
    """Every agent, by name. It is heard from when it registers, and whenever it speaks for one of its devices."""
    devices = select(func.max(device.c.last_seen)).where(device.c.agent == agent.c.name).scalar_subquery()
    last_seen = case((devices > agent.c.last_seen, devices), else_=agent.c.last_seen).label("last_seen")
    columns = [column for column in agent.c if column is not agent.c.last_seen]
    query: Select[Any] = select(*columns, last_seen).order_by(agent.c.name)
    with store.read() as connection:
        return [_agent(row) for row in connection.execute(query)]


def _hash(secret: str) -> str:
    # A plain hash suffices: the secret has 256 random bits, so there is nothing to guess.
    return hashlib.sha256(secret.encode()).hexdigest()


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidInput(f"{name!r} is no agent name; use up to 64 letters, digits, '.', '_' and '-'")


def _agent(row: Row[Any]) -> Agent:
    return Agent(row.name, row.boot_id, row.created, row.last_seen)
