"""`nas export`: a layout as a model file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from nas.cli.arguments import LayoutArgument, RuntimeOption, read_layout
from nas.cli.lazy import command_app
from nas.cli.output import JsonFlag, print_fields, print_json
from nas.core.units import show_count
from nas.runtimes import RUNTIMES
from nas.runtimes.base import Artifact, RandomWeights

app = command_app()


@app.command()
def export(
    layout: LayoutArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")],
    runtime: RuntimeOption = "llama.cpp",
    quantisation: Annotated[
        str | None, typer.Option("--quantisation", "-q", help="Default: the runtime's first.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the random weights.")] = 0,
    recipe: Annotated[
        bool, typer.Option("--recipe", help="Write the recipe only, from which a runner makes the file.")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Write a layout as a model file of a runtime, with random weights.

    Speed and memory do not depend on the values of weights, so such a file is good for measuring, not for talking to.
    """
    model, target = read_layout(layout), RUNTIMES[runtime]
    artifact = target.export(model, quantisation or target.quantisations[0], RandomWeights(seed), output, recipe=recipe)
    if json:
        print_json({"file": str(output), "layout": model.format(), **artifact.model_dump(mode="json")})
        return
    print_fields(
        (
            ("file", output),
            ("size", f"{artifact.size / 1e6:.1f} MB"),
            *_recipe(artifact),
            ("weights", show_count(model.params.total)),
            ("layout", model),
            ("architecture", artifact.arch + (" (patched build)" if artifact.patched else "")),
            ("quantisation", artifact.quantisation),
            ("sha256", artifact.sha256),
        )
    )


def _recipe(artifact: Artifact) -> Iterator[tuple[str, str]]:
    if artifact.recipe:
        yield "recipe", f"{artifact.recipe.size / 1e3:.1f} kB, written in place of the file"
