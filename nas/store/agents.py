"""Agents: who may lease jobs. Secrets are random, shown once and stored hashed.

A token enrols one agent once. Issued for a name, it enrols that name only, also anew: the old secret is worth nothing
then. Issued for none, it enrols only names that nobody has, so whoever intercepts it cannot step into another's place.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import Any

from sqlalchemy import Connection, Row, Select, case, delete, func, select, update

from nas.core.errors import InvalidInput, UnknownName
from nas.store.models import agent, device, enrol_token
from nas.store.rows import Agent, AgentAccess
from nas.store.store import Store, retried
from nas.store.upsert import insert_if_absent

TOKEN_S = 900.0
"""Seconds an enrolment token is good for."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_REVOKED = ""


@retried
def issue_token(store: Store, ttl_s: float = TOKEN_S, *, name: str | None = None) -> str:
    """A one-time token that lets one agent enrol: `name`, or else one whose name is new.

    Raises:
        InvalidInput: the name cannot be used, or is that of a local agent.
    """
    token = secrets.token_urlsafe(32)
    with store.write() as connection:
        if name is not None:
            _check_name(name)
            _require_not_local(name, _access(connection, name))
        connection.execute(delete(enrol_token).where(enrol_token.c.expires <= store.now()))
        values = {"token_hash": _hash(token), "expires": store.now() + ttl_s, "agent": name}
        connection.execute(enrol_token.insert().values(**values))
    return token


@retried
def enrol(store: Store, token: str, name: str) -> str:
    """Exchanges a token for the agent's own secret, and spends it; a refusal does not.

    Raises:
        InvalidInput: the token is unknown, used, too old or for another name, or the name cannot be used.
    """
    _check_name(name)
    secret = secrets.token_urlsafe(32)
    with store.write() as connection:
        known = (enrol_token.c.token_hash == _hash(token)) & (enrol_token.c.expires > store.now())
        spent = connection.execute(delete(enrol_token).where(known).returning(enrol_token.c.agent)).first()
        if spent is None:
            raise InvalidInput("the enrolment token is unknown, used or too old; get one with 'nas agent token'")
        if spent.agent not in (None, name):
            raise InvalidInput(f"the enrolment token is for agent {spent.agent!r}, not for {name!r}")
        new = insert_if_absent(connection, agent, name=name, created=store.now())
        _require_not_local(name, None if new else _access(connection, name))
        if not new and spent.agent is None:
            raise InvalidInput(
                f"there is an agent {name!r} already; choose another name, or, if this is to take its place, "
                f"get a token for it with 'nas agent token --name {name}'"
            )
        connection.execute(update(agent).where(agent.c.name == name).values(secret_hash=_hash(secret)))
    return secret


@retried
def revoke(store: Store, name: str) -> None:
    """Makes an agent's secret, and tokens for its name, worth nothing. What it holds runs out and is granted anew.

    Raises:
        UnknownName: no such agent.
        InvalidInput: it is a local one, which has no secret.
    """
    with store.write() as connection:
        access = _access(connection, name)
        if access is None:
            raise UnknownName("agent", name, connection.scalars(select(agent.c.name)))
        _require_not_local(name, access)
        connection.execute(delete(enrol_token).where(enrol_token.c.agent == name))
        connection.execute(update(agent).where(agent.c.name == name).values(secret_hash=_REVOKED))


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
    """Whether `secret` is that of the agent `name`; never for a local or a revoked agent."""
    with store.read() as connection:
        known = connection.scalar(select(agent.c.secret_hash).where(agent.c.name == name))
    return matches(known, secret)


def secret_hashes(store: Store) -> dict[str, str]:
    """What `matches` compares secrets with, of every agent that may authenticate."""
    query = select(agent.c.name, agent.c.secret_hash).where(agent.c.secret_hash > _REVOKED)
    with store.read() as connection:
        return {row.name: row.secret_hash for row in connection.execute(query)}


def matches(known: str | None, secret: str) -> bool:
    """Whether `secret` has the hash `known`; the time it takes tells nothing of it."""
    return secrets.compare_digest(known or _REVOKED, _hash(secret))


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


def _access(connection: Connection, name: str) -> AgentAccess | None:
    query = select(agent).where(agent.c.name == name)
    row = connection.execute(query.with_for_update(key_share=True)).first()
    return _agent(row).access if row else None


def _require_not_local(name: str, access: AgentAccess | None) -> None:
    if access is AgentAccess.LOCAL:
        raise InvalidInput(f"agent {name!r} runs on the coordinator's own machine and has no secret; use another name")


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidInput(f"{name!r} is no agent name; use up to 64 letters, digits, '.', '_' and '-'")


def _agent(row: Row[Any]) -> Agent:
    enrolled = AgentAccess.REVOKED if row.secret_hash == _REVOKED else AgentAccess.ENROLLED
    access = AgentAccess.LOCAL if row.secret_hash is None else enrolled
    return Agent(row.name, row.boot_id, row.created, row.last_seen, access)
