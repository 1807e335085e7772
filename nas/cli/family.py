"""`nas family`: a model family."""

from __future__ import annotations

from nas.cli.family_train import train
from nas.cli.lazy import command_app

app = command_app(help="Build a model family from winners, train and compare its members.")
app.command("train")(train)


@app.callback()
def _group() -> None:
    pass
