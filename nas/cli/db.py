"""`nas db`: manage the database."""

from __future__ import annotations

from nas.cli.lazy import command_app
from nas.cli.options import DatabaseOption
from nas.cli.output import JsonFlag, print_json, say
from nas.infra.store.migrate import upgrade as upgrade_database

app = command_app(help="Manage the database.")


@app.callback()
def database() -> None:
    """Manage the database."""


@app.command()
def upgrade(db: DatabaseOption = None, json: JsonFlag = False) -> None:
    """Upgrade the database schema to this version of hilnas.

    An SQLite file is backed up to the same folder first. Databases with studies are only upgraded by this command.
    """
    done = upgrade_database(db)
    if json:
        print_json({"before": done.before, "after": done.after, "backup": str(done.backup) if done.backup else None})
    elif done.before == done.after:
        say(f"up to date: revision {done.after}")
    else:
        say(f"revision {done.before or 'none'} -> {done.after}")
        if done.backup:
            say(f"backup: {done.backup}")
