"""`nas import`: turn a trained model of transformers, or a GGUF file, into a layout and a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nas.cli.lazy import command_app
from nas.cli.output import JsonFlag, print_fields, print_json, say
from nas.cli.progress import activity
from nas.core.durable import output_file
from nas.core.units import show_count

app = command_app()


@app.command("import")
def command(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL", help="GGUF file (the first one of several), or folder with config.json and safetensors."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Checkpoint to write, a safetensors file.")],
    json: JsonFlag = False,
) -> None:
    """Import a trained model: a GGUF file, or a folder of Hugging Face's transformers.

    It becomes a layout and a checkpoint of float32; weights of a quantised GGUF file are what it rounded them to.
    Tokenizer and chat template are kept beside the checkpoint, in a folder with its name and the ending .tokenizer,
    where `nas export` finds them. Nothing is downloaded, pickled weights are not read, and no code of the model runs.
    A model that no layout can say is refused with a list of what is missing. See docs/reference/model-types.md for
    the types that are read.
    """
    from nas.train.adapt.checkpoints import import_model
    from nas.train.release.found_tokenizer import FoundTokenizer, keep, tokenizer_to_keep

    with activity(f"importing {source}"), output_file(output, reads=[source]) as file:
        tokenizer = tokenizer_to_keep(source)
        model = import_model(source, file)
    folder = keep(tokenizer, output) if isinstance(tokenizer, FoundTokenizer) else None
    layout = model.layout
    if json:
        counts = {"parameters": layout.params.total, "active_parameters": layout.params.active}
        names = {"tokenizer": folder and str(folder), "tokenizer_reason": None if folder else tokenizer}
        rest = {"left_out": model.left_out or None}
        print_json({"file": str(output), **names, "family": model.family, "layout": layout.format(), **counts, **rest})
        return
    print_fields(
        (
            ("file", output),
            ("family", model.family),
            ("layout", layout),
            ("weights", f"{layout.params.total:,} ({show_count(layout.params.total)})"),
            ("tokenizer", folder or f"none: {tokenizer}"),
            *((("left out", model.left_out),) if model.left_out else ()),
        )
    )
    if isinstance(tokenizer, FoundTokenizer):
        say(tokenizer.describe())
