"""`nas restore`: a coordinator's database and files as they were saved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nas.cli.lazy import command_app
from nas.cli.output import JsonFlag, print_json, say
from nas.cli.progress import activity
from nas.core import paths
from nas.infra.store.backup import restore_backup
from nas.infra.store.store import Store

app = command_app()


@app.command("restore")
def command(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="Archive that `nas backup` wrote.")],
    json: JsonFlag = False,
) -> None:
    """Restore what `nas backup` saved, as a new $NAS_HOME.

    The folder must be empty or missing; set NAS_HOME to another one to keep what is there. Agents and people keep their
    enrolments and tokens. Devices report the leases that were granted after the backup, so that none is used twice.
    """
    home = paths.home()
    with activity(f"restoring {home}"):
        backup = restore_backup(source, home)
    if backup.has_database:
        Store.open(create=False).close()
    if json:
        print_json({"home": str(home), **backup._asdict()})
        return
    say(f"{home}: {'the database and ' * backup.has_database}{backup.files} files, of hilnas {backup.hilnas}")
    if not backup.has_database:
        say("the database was on a server: restore it there, and name it with --db or NAS_DB")
