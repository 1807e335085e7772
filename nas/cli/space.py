"""`nas space`: search spaces, before anything is searched."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import numpy as np
import typer

from nas.cli.arguments import SpaceArgument
from nas.cli.lazy import command_app
from nas.cli.output import JsonFlag, print_fields, print_json, print_table, say
from nas.cli.space_support import RuntimeSupport, sampler, survey
from nas.cli.space_view import space_fields
from nas.core.units import show_count
from nas.search_spaces import list_spaces, load_space, space_json, space_key

app = command_app(help="List, show, validate and sample search spaces.")
_SHOWN_REASONS = 8


@app.command("list")
def list_packaged(json: JsonFlag = False) -> None:
    """List the search spaces that ship with hilnas."""
    spaces = list_spaces()
    if json:
        print_json({"spaces": [{"name": name, "doc": doc} for name, doc in spaces.items()]})
    else:
        print_table(("space", "what for"), spaces.items())


@app.command()
def show(
    space: SpaceArgument,
    support: Annotated[
        bool, typer.Option("--support", help="Sample layouts and tell what each runtime refuses.")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Show what a search space leaves open, its budgets and its references."""
    found = load_space(space)
    surveys = survey(found) if support else []
    if json:
        extra = {"support": [dataclasses.asdict(one) for one in surveys]} if support else {}
        print_json({"key": space_key(found), "doc": found.doc, **space_json(found), **extra})
        return
    print_fields([*space_fields(found), *(field for one in surveys for field in _support_fields(one))])


@app.command()
def validate(space: SpaceArgument, json: JsonFlag = False) -> None:
    """Check a search space; every mistake is told with its file and line. Exit code 3 where there is one."""
    found = load_space(space)
    if json:
        print_json({"valid": True, "name": found.name, "key": space_key(found)})
    else:
        say(f"{found.name}: valid")


@app.command()
def sample(
    space: SpaceArgument,
    number: Annotated[int, typer.Option("--number", "-n", min=1, max=10_000, help="How many layouts.")] = 5,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Equal seeds give equal layouts.")] = 0,
    json: JsonFlag = False,
) -> None:
    """Draw random layouts that the space's runtimes carry."""
    rng, draws = np.random.default_rng(seed), sampler(load_space(space))
    layouts = [draws.draw(rng) for _ in range(number)]
    if json:
        print_json(
            {"layouts": [{"id": one.id, "layout": one.format(), **dataclasses.asdict(one.params)} for one in layouts]}
        )
        return
    print_table(
        ("weights", "active", "layout"),
        [(show_count(one.params.total), show_count(one.params.active), one) for one in layouts],
    )


def _support_fields(one: RuntimeSupport) -> list[tuple[str, str]]:
    refused = 1 - one.admitted / one.sampled
    told = f"{one.runtime}: refuses {refused:.0%} of {one.sampled} sampled layouts"
    builds = f"{one.stock} run on the stock build, {one.patched} more on the patched one"
    blocks = [f"{kind}: {ok} of {total} layouts with it" for kind, (total, ok) in one.blocks.items()]
    return [
        ("support", f"{told}; {builds}"),
        *(("  carried", text) for text in blocks),
        *(("  refused", text) for text in _commonest(one.refused_for)),
        *(("  patched", text) for text in _commonest(one.patched_for)),
    ]


def _commonest(reasons: dict[str, int]) -> list[str]:
    return [f"{reason} ({count} layouts)" for reason, count in reasons.items()][:_SHOWN_REASONS]
