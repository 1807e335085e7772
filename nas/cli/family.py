"""`nas family`: from winners to a family of models."""

from __future__ import annotations

from nas.cli.family_compare import compare
from nas.cli.lazy import command_app

app = command_app(help="Build, train and compare families of models.")
app.command("compare")(compare)


@app.callback()
def group() -> None:
    """Build, train and compare families of models."""
