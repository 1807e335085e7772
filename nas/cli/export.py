"""`nas export`: export a layout to a model file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from nas.cli.lazy import command_app
from nas.cli.options import LayoutArgument, OutputOption, QuantisationOption, RuntimeOption, SeedOption, read_layout
from nas.cli.output import JsonFlag, print_fields, print_json
from nas.core.errors import InvalidInput, Unsupported
from nas.core.units import show_count
from nas.measure.runtimes import DEFAULT_RUNTIME, RUNTIMES
from nas.measure.runtimes.base import Artifact, Checkpoint, RandomWeights, Weights, WholeExporter

app = command_app()


@app.command()
def export(
    layout: LayoutArgument,
    output: OutputOption,
    runtime: RuntimeOption = DEFAULT_RUNTIME,
    quantisation: QuantisationOption = None,
    seed: SeedOption = 0,
    recipe: Annotated[
        bool, typer.Option("--recipe", help="Write only the recipe from which a runner builds the file.")
    ] = False,
    checkpoint: Annotated[
        Path | None,
        typer.Option("--checkpoint", help="Trained weights, a safetensors file of the PyTorch model."),
    ] = None,
    whole: Annotated[
        int | None,
        typer.Option(
            "--whole",
            metavar="CONTEXT",
            min=16,
            help="Write a standalone program for apps (executorch: .pte), for up to CONTEXT tokens.",
        ),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Export a layout to a model file of a runtime, with random weights unless --checkpoint is given.

    Speed and memory do not depend on weight values, so random weights are enough for benchmarks. With --whole the file
    is in the runtime's own format and does not depend on hilnas; compiling it takes minutes at full size. See
    docs/how-to/releasing-a-model.md for its use in an app.
    """
    if not output.absolute().parent.is_dir():
        raise InvalidInput(f"there is no folder {output.parent}", where="--output")
    model, target = read_layout(layout), RUNTIMES[runtime]
    weights = _weights(checkpoint, seed)
    name = quantisation or target.quantisations[0]
    if whole is None:
        artifact = target.export(model, name, weights, output, recipe=recipe)
    elif isinstance(target, WholeExporter):
        artifact = target.export_whole(model, name, weights, whole, output)
    else:
        raise Unsupported(f"files of {runtime} can be used in apps without it", where="--whole")
    if json:
        counts = {"parameters": model.params.total, "active_parameters": model.params.active}
        print_json({"file": str(output), "layout": model.format(), **counts, **artifact.model_dump(mode="json")})
        return
    print_fields(
        (
            ("file", output),
            ("size", f"{artifact.size / 1e6:.1f} MB"),
            *_recipe(artifact),
            ("weights", f"{model.params.total:,} ({show_count(model.params.total)})"),
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
        yield "recipe", f"{artifact.recipe.size / 1e3:.1f} kB, written instead of the file"
