"""`nas export`: export a layout to a model file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nas.cli.lazy import command_app
from nas.cli.options import LayoutArgument, OutputOption, QuantisationOption, RuntimeOption, SeedOption, read_layout
from nas.cli.output import JsonFlag, print_fields, print_json, say
from nas.cli.progress import activity
from nas.core.canonical import sha256_of
from nas.core.durable import output_file
from nas.core.errors import InvalidInput, Unsupported
from nas.core.units import show_count
from nas.measure.runtimes import DEFAULT_RUNTIME, RUNTIMES
from nas.measure.runtimes.base import Checkpoint, RandomWeights, WholeExporter, projector_path
from nas.measure.runtimes.llama_cpp.runtime import LlamaCpp

if TYPE_CHECKING:
    from nas.train.release.found_tokenizer import FoundTokenizer

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
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer",
            help="tokenizer.json for the file, with its settings and chat template beside it.",
            show_default="what `nas import` kept beside the checkpoint",
        ),
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
    model, target = read_layout(layout), RUNTIMES[runtime]
    weights = RandomWeights(seed) if checkpoint is None else Checkpoint(checkpoint, sha256_of(checkpoint))
    of_gguf = checkpoint if isinstance(target, LlamaCpp) and whole is None and not recipe else None
    carried = _tokenizer(of_gguf, tokenizer)
    name, model = quantisation or model.quantisation or target.quantisations[0], model.architecture
    if whole is not None and recipe:
        raise InvalidInput("cannot be combined with --whole: such a program has no recipe", where="--recipe")
    if whole is not None and not isinstance(target, WholeExporter):
        raise Unsupported(f"files of {runtime} can be used in apps without it", where="--whole")
    with (
        activity(f"exporting {model} to {output}"),
        output_file(output, reads=[checkpoint] if checkpoint else []) as file,
    ):
        if isinstance(weights, Checkpoint) and isinstance(target, LlamaCpp) and not recipe:
            vocabulary = None if carried is None else carried.tokenizer.vocabulary(model.vocab)
            context = 0 if carried is None else carried.context
            artifact = target.export_trained(model, name, weights, file, output.stem, vocabulary, context)
        elif whole is None:
            artifact = target.export(model, name, weights, file, recipe=recipe)
            if artifact.projector is not None:
                projector_path(file).replace(projector_path(output))
        else:
            assert isinstance(target, WholeExporter), "checked above"
            artifact = target.export_whole(model, name, weights, whole, file)
    if json:
        counts = {"parameters": model.params.total, "active_parameters": model.params.active}
        print_json({"file": str(output), "layout": model.format(), **counts, **artifact.model_dump(mode="json")})
        return
    lacking = "none: the file knows token ids only; name one with --tokenizer"
    print_fields(
        (
            ("file", output),
            ("size", f"{artifact.size / 1e6:.1f} MB"),
            *([("tower", projector_path(output))] if artifact.projector else []),
            ("recipe", artifact.recipe and f"{artifact.recipe.size / 1e3:.1f} kB, written instead of the file"),
            ("weights", f"{model.params.total:,} ({show_count(model.params.total)})"),
            ("layout", model),
            ("architecture", artifact.arch + (" (patched build)" if artifact.patched else "")),
            ("quantisation", artifact.quantisation),
            ("tokenizer", lacking if of_gguf is not None and carried is None else None),
            ("sha256", artifact.sha256),
        )
    )
    if carried is not None:
        say(carried.describe())


def _tokenizer(checkpoint: Path | None, option: Path | None) -> FoundTokenizer | None:
    """Returns the tokenizer for the GGUF file of a checkpoint; None: there is none, or no such file is written."""
    if checkpoint is None:
        if option is not None:
            raise InvalidInput("only GGUF files of a --checkpoint hold a tokenizer", where="--tokenizer")
        return None
    from nas.train.release.found_tokenizer import beside, found_tokenizer

    path = option or beside(checkpoint)
    return found_tokenizer(path) if option or path.is_dir() else None
