"""`nas study mirror`: a study in an Optuna database."""

from __future__ import annotations

from typing import Annotated

import typer

from nas.cli.arguments import StudyArgument
from nas.cli.database import DatabaseOption, open_store
from nas.cli.output import say


def register(app: typer.Typer) -> None:
    """Adds the command to `nas study`."""
    app.command("mirror")(mirror_study)


def mirror_study(
    study: StudyArgument,
    optuna: Annotated[
        str, typer.Option("--optuna", metavar="URL", help="Database to write to, such as sqlite:///optuna.db.")
    ],
    name: Annotated[str | None, typer.Option("--name", help="Name of the Optuna study, if not the study's.")] = None,
    db: DatabaseOption = None,
) -> None:
    """Copy a study's ended trials into an Optuna database, which optuna-dashboard shows. Again copies what is new."""
    from nas.service.optuna_mirror import mirror  # Optuna takes a second to load

    with open_store(db) as store:
        done = mirror(store, study, optuna, name)
    say(f"{done.name}: {done.added} trials copied to {done.url}, which has {done.trials}")
