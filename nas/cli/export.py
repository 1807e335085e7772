"""`nas export`: a layout as a model file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from nas.cli.arguments import LayoutArgument, RuntimeOption, read_layout
from nas.cli.lazy import command_app
from nas.cli.output import JsonFlag, print_fields, print_json
from nas.core.errors import InvalidInput, Unsupported
from nas.core.units import show_count
from nas.runtimes import RUNTIMES
from nas.runtimes.base import Artifact, Checkpoint, RandomWeights, Weights, WholeExporter

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
    checkpoint: Annotated[
        Path | None,
        typer.Option("--checkpoint", help="Trained weights: a safetensors file of the layout's PyTorch model."),
    ] = None,
    whole: Annotated[
        int | None,
        typer.Option(
            "--whole",
            metavar="CONTEXT",
            min=16,
            help="Write one program for apps (executorch: a .pte), for texts of up to CONTEXT tokens.",
        ),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Write a layout as a model file of a runtime, with random weights unless given a checkpoint.

    Speed and memory do not depend on the values of weights, so a file of random ones is good for measuring, not for
    talking to. With --whole the file is in the runtime's own format and needs nothing of hilnas; lowering it takes
    minutes at full size. docs/releasing-a-model.md tells how an app calls it.
    """
    model, target = read_layout(layout), RUNTIMES[runtime]
    weights = _weights(checkpoint, seed)
    name = quantisation or target.quantisations[0]
    if whole is None:
        artifact = target.export(model, name, weights, output, recipe=recipe)
    elif isinstance(target, WholeExporter):
        artifact = target.export_whole(model, name, weights, whole, output)
    else:
        raise Unsupported(f"{runtime} writes every file for apps already", where="--whole")
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


def _weights(checkpoint: Path | None, seed: int) -> Weights:
    if checkpoint is None:
        return RandomWeights(seed)
    try:
        content = checkpoint.read_bytes()
    except OSError as error:
        raise InvalidInput(str(error), where="--checkpoint") from error
    return Checkpoint(checkpoint, hashlib.sha256(content).hexdigest())


def _recipe(artifact: Artifact) -> Iterator[tuple[str, str]]:
    if artifact.recipe:
        yield "recipe", f"{artifact.recipe.size / 1e3:.1f} kB, written in place of the file"
