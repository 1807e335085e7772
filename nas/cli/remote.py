"""`--server`: which coordinator a command talks to, if any."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from nas.cli.servers_file import known_servers, server_url
from nas.cli.users_client import UsersClient
from nas.core.errors import InvalidInput

ServerOption = Annotated[
    str | None,
    typer.Option(
        "--server", envvar="NAS_SERVER", metavar="URL", show_default=False,
        help="Ask this coordinator instead of a database; 'nas server add' makes it known.",
    ),
]  # fmt: skip


def open_server(server: str, db: str | None = None) -> UsersClient:
    """A client for a coordinator that was added; `$NAS_TOKEN` goes before the token that is kept.

    Raises:
        InvalidInput: it was not added, or a database was named as well.
    """
    if db is not None:
        raise InvalidInput("a server has its own database; give --server (or $NAS_SERVER) or --db (or $NAS_DB)")
    url = server_url(server)
    servers = known_servers()
    if url not in servers:
        known = f"; known: {', '.join(servers)}" if servers else ""
        raise InvalidInput(f"{url} is not known here; run 'nas server add {url} --token -' first{known}")
    kept = servers[url]
    return UsersClient(url, os.environ.get("NAS_TOKEN") or kept.token, kept.ca_pem)
