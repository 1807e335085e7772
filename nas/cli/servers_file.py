"""Coordinators this user has been given access to: `servers.json` below the user's configuration folder, mode 0600."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import platformdirs
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nas.core.durable import locked, write_durably
from nas.core.errors import InvalidInput, UnknownName

DEFAULT_PORT = 7711


class KnownServer(BaseModel):
    """What is kept of a coordinator: its certificate authority, and the token to show there."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ca_pem: str
    token: str = Field(repr=False)


class _Servers(BaseModel):
    model_config = ConfigDict(extra="forbid")

    servers: dict[str, KnownServer] = {}


def servers_file() -> Path:
    """Where they are kept; `$NAS_CONFIG` names another folder."""
    folder = os.environ.get("NAS_CONFIG") or platformdirs.user_config_dir("hilnas")
    return Path(folder).expanduser() / "servers.json"


def known_servers() -> dict[str, KnownServer]:
    """URL -> what is kept of it.

    Raises:
        InvalidInput: the file is damaged.
    """
    path = servers_file()
    try:
        return _Servers.model_validate_json(path.read_bytes()).servers
    except FileNotFoundError:
        return {}
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise InvalidInput(f"damaged ({problem}); remove it and add the servers anew", where=str(path)) from None


def keep_server(url: str, server: KnownServer) -> None:
    """Adds a coordinator or replaces what was kept of it."""
    _change(lambda servers: servers | {url: server})


def forget_server(url: str) -> None:
    """Removes a coordinator.

    Raises:
        UnknownName: it is not kept.
    """

    def without(servers: dict[str, KnownServer]) -> dict[str, KnownServer]:
        if url not in servers:
            raise UnknownName("server", url, servers)
        return {known: server for known, server in servers.items() if known != url}

    _change(without)


def server_url(text: str) -> str:
    """`https://host:port`, as servers are named; a bare `host:port` is taken for one.

    Raises:
        InvalidInput: anything else.
    """
    parts = urlsplit(text if "://" in text else f"https://{text}")
    try:
        port = parts.port or DEFAULT_PORT
    except ValueError:
        port = 0
    if (
        not port
        or parts.scheme != "https"
        or not parts.hostname
        or parts.path.strip("/")
        or parts.query
        or parts.username
    ):
        raise InvalidInput(f"{text!r} is no server; write https://host:port", where="--server")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"https://{host}:{port}"


def _change(change: Callable[[dict[str, KnownServer]], dict[str, KnownServer]]) -> None:
    path = servers_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_suffix(".lock")):
        content = _Servers(servers=change(known_servers()))
        write_durably(path, content.model_dump_json(indent=1).encode())
