"""`nas import`: turn a trained model of transformers into a layout and a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nas.cli.lazy import command_app
from nas.cli.output import JsonFlag, print_fields, print_json
from nas.core.units import show_count

app = command_app()


@app.command("import")
def command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder with config.json and safetensors files.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Checkpoint to write, a safetensors file.")],
    json: JsonFlag = False,
) -> None:
    """Import a trained model of Hugging Face's transformers as a layout and a checkpoint in float32.

    Nothing is downloaded, pickled weights are not read, and no code of the folder runs. A model that no layout can say
    is refused with a list of what is missing. See docs/how-to/adapting-a-model.md for the families that are read.
    """
    from nas.train.adapt.checkpoints import import_model

    model = import_model(folder, output)
    layout = model.layout
    if json:
        counts = {"parameters": layout.params.total, "active_parameters": layout.params.active}
        print_json({"file": str(output), "family": model.family, "layout": layout.format(), **counts})
        return
    print_fields(
        (
            ("file", output),
            ("family", model.family),
            ("layout", layout),
            ("weights", f"{layout.params.total:,} ({show_count(layout.params.total)})"),
        )
    )
