"""Credentials: agents and their enrolment, people's API tokens, and the name of this database.

Secrets are random, shown once and stored as hashes. An enrolment token enrols one agent once. A token for a given name
enrols that agent only, and may replace its secret. A token without a name enrols new names only, so whoever intercepts
it cannot take over an existing agent.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Row, Select, case, delete, func, select, update

from nas.core.errors import InfrastructureFailed, InvalidInput, UnknownName
from nas.infra.store.engine import insert_if_absent
from nas.infra.store.models import agent, api_token, device, enrol_token, identity
from nas.infra.store.rows import Agent, AgentAccess, ApiToken, Role
from nas.infra.store.store import Store, retried

TOKEN_S = 900.0
"""Seconds for which an enrolment token is valid."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_REVOKED = ""
_API_PREFIX = "hilnas."
_USE_STORED_EVERY_S = 60.0
"""Resolution of `last_used`, so that not every request of the API writes to the database."""
_ONLY = 1


@retried
def authority(store: Store) -> str:
    """Returns the name of this database, 32 random hex digits: an agent stores with it the epochs of its leases."""
    query = select(identity.c.name).where(identity.c.id == _ONLY)
    with store.read() as connection:
        name = connection.scalar(query)
    if name is not None:
        return str(name)
    with store.write() as connection:
        insert_if_absent(connection, identity, id=_ONLY, name=secrets.token_hex(16))
        return str(connection.scalar(query))


def turn_file(store: Store) -> Path:
    """Returns the file that is locked by the process which runs this machine's agent for this database."""
    return store.artifacts.parent / f"agent-{authority(store)[:12]}.turn"


def shares_home(store: Store) -> bool:
    """Returns whether another database was measured for in this home, whose artifacts are in the same folder."""
    return any(path != turn_file(store) for path in store.artifacts.parent.glob("agent-*.turn"))


@retried
def issue_token(store: Store, ttl_s: float = TOKEN_S, *, name: str | None = None) -> str:
    """Creates a one-time token with which one agent can enrol: `name`, or else one whose name is new.

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
    """Exchanges an enrolment token for the agent's own secret; a refused token stays valid.

    Raises:
        InvalidInput: the token is unknown, used, too old or for another name, or the name cannot be used.
    """
    _check_name(name)
    secret = secrets.token_urlsafe(32)
    with store.write() as connection:
        valid = (enrol_token.c.token_hash == _hash(token)) & (enrol_token.c.expires > store.now())
        spent = connection.execute(delete(enrol_token).where(valid).returning(enrol_token.c.agent)).first()
        if spent is None:
            raise InvalidInput(
                "the enrolment token is unknown, used or too old; get one with 'nas agent token'. If an earlier try on "
                f"this host broke off, it may have used the token: then with 'nas agent token --name {name}'"
            )
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
    """Revokes an agent's secret and the tokens for its name. Its leases expire and its jobs are leased again.

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
    """Registers an agent without a secret, which connects by the coordinator's Unix socket.

    Raises:
        InvalidInput: the name cannot be used, or belongs to an agent that enrolled.
    """
    _check_name(name)
    with store.write() as connection:
        insert_if_absent(connection, agent, name=name, created=store.now())
        if connection.scalar(select(agent.c.secret_hash).where(agent.c.name == name)) is not None:
            raise InvalidInput(f"agent {name!r} enrolled from another host; choose another name for the local one")


def authenticate(store: Store, name: str, secret: str) -> bool:
    """Returns whether `secret` is that of the agent `name`; False for a local or a revoked agent."""
    with store.read() as connection:
        secret_hash = connection.scalar(select(agent.c.secret_hash).where(agent.c.name == name))
    return matches(secret_hash, secret)


def secret_hashes(store: Store) -> dict[str, str]:
    """Returns name -> hash of the secret (see `matches`) of every agent that may authenticate."""
    query = select(agent.c.name, agent.c.secret_hash).where(agent.c.secret_hash > _REVOKED)
    return {row.name: row.secret_hash for row in store.rows(query)}


def matches(secret_hash: str | None, secret: str) -> bool:
    """Compares a secret with a stored hash in constant time."""
    return secrets.compare_digest(secret_hash or _REVOKED, _hash(secret))


def all(store: Store) -> list[Agent]:
    """Returns every agent, by name. `last_seen` covers its registration and all messages for its devices."""
    devices = select(func.max(device.c.last_seen)).where(device.c.agent == agent.c.name).scalar_subquery()
    last_seen = case((devices > agent.c.last_seen, devices), else_=agent.c.last_seen).label("last_seen")
    columns = [column for column in agent.c if column is not agent.c.last_seen]
    query: Select[Any] = select(*columns, last_seen).order_by(agent.c.name)
    return [_agent(row) for row in store.rows(query)]


@retried
def create_api_token(store: Store, name: str, role: Role) -> str:
    """Creates a token `hilnas.NAME.SECRET` for the API; it cannot be shown again.

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
    return f"{_API_PREFIX}{name}.{secret}"


def api_tokens(store: Store) -> list[ApiToken]:
    """Returns every API token, by name."""
    return [_api_token(row) for row in store.rows(select(api_token).order_by(api_token.c.name))]


@retried
def revoke_api_token(store: Store, name: str) -> None:
    """Deletes an API token, which is refused from then on; raises `UnknownName`."""
    with store.write() as connection:
        if connection.execute(delete(api_token).where(api_token.c.name == name)).rowcount == 0:
            raise UnknownName("token", name, connection.scalars(select(api_token.c.name)))


def authenticate_api_token(store: Store, token: str) -> ApiToken | None:
    """Returns the API token that `token` belongs to; None where it is not valid."""
    name, _, secret = token.removeprefix(_API_PREFIX).rpartition(".")
    if not _NAME.fullmatch(name):
        return None
    with store.read() as connection:
        row = connection.execute(select(api_token).where(api_token.c.name == name)).first()
    if row is None or not matches(row.token_hash, secret):
        return None
    now = store.now()
    if row.last_used is None or row.last_used <= now - _USE_STORED_EVERY_S:
        with contextlib.suppress(InfrastructureFailed), store.write() as connection:  # reading needs no lock
            connection.execute(update(api_token).where(api_token.c.name == name).values(last_used=now))
    return _api_token(row)


def _hash(secret: str) -> str:
    # A plain hash suffices: secrets have 256 random bits and cannot be guessed.
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()


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


def _api_token(row: Row[Any]) -> ApiToken:
    return ApiToken(row.name, row.role, row.created, row.last_used)
