"""`nas db`: the database itself."""

from __future__ import annotations

from nas.cli.database import DatabaseOption
from nas.cli.lazy import command_app
from nas.cli.output import JsonFlag, print_json, say
from nas.store.migrate import upgrade as upgrade_database

app = command_app(help="Maintain the database.")


@app.callback()
def database() -> None:
    """Maintain the database."""


@app.command()
def upgrade(db: DatabaseOption = None, json: JsonFlag = False) -> None:
    """Bring the database to the version that this hilnas reads and writes.

    An SQLite file is copied beside itself first. An older database that holds studies is upgraded only by this command.
    """
    done = upgrade_database(db)
    if json:
        print_json({"before": done.before, "after": done.after, "backup": str(done.backup) if done.backup else None})
    elif done.before == done.after:
        say(f"up to date: revision {done.after}")
    else:
        say(f"revision {done.before or 'none'} -> {done.after}")
        if done.backup:
            say(f"the database as it was: {done.backup}")
