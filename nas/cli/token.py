"""`nas token`: manage API tokens in the database of a coordinator."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from nas.cli.lazy import command_app
from nas.cli.options import DatabaseOption, open_store
from nas.cli.output import JsonFlag, print_json, print_table, say, when
from nas.infra.store import agents
from nas.infra.store.rows import Role

app = command_app(help="Create, list and revoke API tokens.")

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="User name: letters, digits, '.', '_' and '-'.")]


@app.command()
def create(
    name: NameArgument,
    role: Annotated[
        Role, typer.Option("--role", help="read: view; operate: also control and submit; admin: also revoke.")
    ] = Role.READ,
    db: DatabaseOption = None,
) -> None:
    """Create a token and print it. It cannot be shown again."""
    from nas.serve.api.serve import last_address

    with open_store(db, create=True) as store:
        token, address = agents.create_api_token(store, name, role), last_address(store.artifacts.parent)
    typer.echo(token)
    url = (address.web_url or address.url) if address else "https://HOST:7711"
    say(f"role {role.value}; on the user's machine: nas server add {url} --token -")


@app.command("list")
def list_tokens(db: DatabaseOption = None, json: JsonFlag = False) -> None:
    """List tokens with their roles and last use. Secrets are not shown."""
    with open_store(db) as store:
        tokens = agents.api_tokens(store)
    if json:
        print_json({"tokens": [asdict(token) for token in tokens]})
    else:
        rows = [[token.name, token.role.value, when(token.last_used)] for token in tokens]
        print_table(("name", "role", "last used"), rows)


@app.command()
def revoke(name: NameArgument, db: DatabaseOption = None) -> None:
    """Revoke a token immediately."""
    with open_store(db) as store:
        agents.revoke_api_token(store, name)
    say(f"{name}: revoked")
