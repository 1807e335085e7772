"""`nas backup`: save a coordinator's database and files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nas.cli.lazy import command_app
from nas.cli.options import DatabaseOption
from nas.cli.output import JsonFlag, print_json, say
from nas.cli.progress import activity
from nas.core import paths
from nas.core.clock import SystemClock
from nas.core.errors import InvalidInput
from nas.infra.store.backup import write_backup
from nas.infra.store.engine import database_url

app = command_app()


@app.command("backup")
def command(
    output: Annotated[Path, typer.Argument(metavar="FILE", help="Archive to write, such as hilnas.tar.gz.")],
    db: DatabaseOption = None,
    json: JsonFlag = False,
) -> None:
    """Save the database, keys, studies and families of $NAS_HOME as one archive.

    `nas serve` and searches may run meanwhile. The archive has the coordinator's keys: keep it as secret as $NAS_HOME.
    What is made again where it is missing (artifacts, work, library) is left out, and so is a database on a PostgreSQL
    server.
    """
    url, home = database_url(db), paths.home()
    if output.exists() or not output.absolute().parent.is_dir():
        why = "exists already: name a new file" if output.exists() else "there is no such folder"
        raise InvalidInput(why, where=str(output))
    if output.resolve().is_relative_to(home):
        raise InvalidInput(f"lies in {home}, which is backed up: name a file elsewhere", where=str(output))
    with activity(f"saving {home}"):
        backup = write_backup(url, home, output.absolute(), SystemClock())
    if json:
        print_json({"file": str(output), **backup._asdict()})
        return
    say(f"{output}: {'the database and ' * backup.has_database}{backup.files} files of {home}")
    if not backup.has_database:
        say("the database is on a server: save it with that server's own tool, such as pg_dump")
