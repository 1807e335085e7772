"""`nas study hardware`: how well a study's devices are foretold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from nas.cli.arguments import StudyArgument
from nas.cli.database import DatabaseOption, open_store
from nas.cli.output import JsonFlag, print_json, print_table
from nas.service.hardware_report import ModelError, hardware_report

StartOption = Annotated[
    str | None,
    typer.Option("--from", metavar="STUDY", help="An earlier study, on any device, whose models these start from."),
]


def register(app: typer.Typer) -> None:
    """Adds the command to `nas study`."""
    app.command()(hardware)


def hardware(
    study: StudyArgument, start: StartOption = None, db: DatabaseOption = None, json: JsonFlag = False
) -> None:
    """Show the hardware models of a study with their errors; with --json also each candidate's forecast.

    Errors are of layouts that a model has not seen: each measured layout in turn is left out.
    """
    with open_store(db) as store:
        report = hardware_report(store, study, start)
    if json:
        print_json(report.model_dump(mode="json"))
        return
    columns = ("device", "runtime", "figure", "measured", "mean error", "worst", "inside 95 %", "Spearman", "from")
    print_table(columns, [list(_row(model)) for model in report.models])


def _row(model: ModelError) -> Iterator[str]:
    yield from (model.device, model.runtime, f"{model.metric}@{model.workload}", str(model.measurements))
    if model.mape is None or model.worst is None or model.inside is None or model.correlation is None:
        yield from (model.reason or "", "", "", "", "")
        return
    yield from (f"{model.mape:.1%}", f"{model.worst:.1%}", f"{model.inside:.0%}")
    found = model.correlation.spearman
    yield f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]" if found else model.correlation.reason or ""
    yield model.start or ""
