"""The commands of `nas agent` for whoever runs the coordinator: list, revoke."""

from __future__ import annotations

from typing import Annotated

import typer

from nas.cli.database import DatabaseOption
from nas.cli.fleet import open_fleet
from nas.cli.output import JsonFlag, print_json, print_table, say, when
from nas.cli.remote import ServerOption


def register(app: typer.Typer) -> None:
    """Adds the commands to `nas agent`."""
    app.command("list")(list_agents)
    app.command()(revoke)


def list_agents(server: ServerOption = None, db: DatabaseOption = None, json: JsonFlag = False) -> None:
    """List agents, how they are let in, and the devices they serve."""
    with open_fleet(server, db) as fleet:
        found = fleet.agents()
    if json:
        print_json(found)
        return
    rows = [[agent["name"], agent["access"], when(agent["last_seen"]), " ".join(agent["devices"])]
            for agent in found["agents"]]  # fmt: skip
    print_table(("agent", "access", "last seen", "devices"), rows)


def revoke(
    agent: Annotated[str, typer.Argument(metavar="AGENT", help="Name of an agent.")],
    server: ServerOption = None,
    db: DatabaseOption = None,
) -> None:
    """Take an agent's secret away, at once; with a new token it may enrol again."""
    with open_fleet(server, db) as fleet:
        fleet.revoke(agent)
    say(f"{agent}: revoked")
