"""`nas token`: who may use this coordinator's API. Works on its database, so on its host."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from nas.cli.database import DatabaseOption, open_store
from nas.cli.lazy import command_app
from nas.cli.output import JsonFlag, print_json, print_table, say, when
from nas.store import api_tokens
from nas.store.rows import Role

app = command_app(help="Create, list and revoke the API tokens of people.")

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Whose token; letters, digits, '.', '_' and '-'.")]


@app.command()
def create(
    name: NameArgument,
    role: Annotated[
        Role, typer.Option("--role", help="read: look; operate: also steer and submit; admin: also remove and revoke.")
    ] = Role.READ,
    db: DatabaseOption = None,
) -> None:
    """Make a token and print it; it cannot be shown again."""
    with open_store(db, create=True) as store:
        token = api_tokens.create(store, name, role)
    typer.echo(token)
    say(f"role {role.value}; on their machine: nas server add https://HOST:7711 --token -")


@app.command("list")
def list_tokens(db: DatabaseOption = None, json: JsonFlag = False) -> None:
    """List tokens, their roles and when they were last used; not the tokens themselves."""
    with open_store(db) as store:
        tokens = api_tokens.all(store)
    if json:
        print_json({"tokens": [asdict(token) for token in tokens]})
    else:
        rows = [[token.name, token.role.value, when(token.last_used)] for token in tokens]
        print_table(("name", "role", "last used"), rows)


@app.command()
def revoke(name: NameArgument, db: DatabaseOption = None) -> None:
    """End a token at once."""
    with open_store(db) as store:
        api_tokens.revoke(store, name)
    say(f"{name}: revoked")
