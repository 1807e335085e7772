"""`nas family`: a front's winners at other sizes."""

from __future__ import annotations

from typing import Annotated

import typer

from nas.cli import family_build, family_train
from nas.cli.family_view import family_fields, print_comparisons, print_decisions, print_members, print_training
from nas.cli.lazy import command_app
from nas.cli.output import JsonFlag, print_fields, print_json, print_table
from nas.service.families import family_view, list_families

app = command_app(help="Grow a front's winners into a family of sizes, and show it.")
family_build.register(app)
family_train.register(app)


@app.command()
def show(
    name: Annotated[str | None, typer.Argument(help="Family; left out: all are listed.", show_default=False)] = None,
    json: JsonFlag = False,
) -> None:
    """Show a family: members, why they are what they are, their files and training; or list all families."""
    if name is None:
        _list(json)
        return
    view = family_view(name)
    if json:
        print_json(view.model_dump(mode="json"))
        return
    print_fields(family_fields(view))
    print_members(view)
    print_decisions(view)
    print_training(view)
    print_comparisons(view)


def _list(json: bool) -> None:
    families = list_families()
    if json:
        print_json({"families": [family.model_dump(mode="json") for family in families]})
        return
    print_table(
        ("family", "study", "sizes", "made", "pattern"),
        [
            (each.name, each.study, " ".join(member.size for member in each.members), each.made, each.pattern)
            for each in families
        ],
    )
