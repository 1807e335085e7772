"""What commands share that train a model in a folder of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nas.cli.output import print_fields, print_json, say
from nas.core.units import show_duration, show_number

if TYPE_CHECKING:
    from nas.train.posttrain.trained_folder import FolderRecord

LANGUAGE_MODEL = "FAMILY/SIZE of a trained member, a folder of transformers or of `nas adapt`, or a GGUF file."
"""In the help of arguments: what `nas.train.posttrain.start.start_model` takes."""
FolderOption = Annotated[Path, typer.Option("--output", "-o", help="Folder of the trained model.", show_default=False)]
SettingsOption = Annotated[
    Path | None, typer.Option("--config", help="YAML file with settings of the training.", show_default=False)
]


def print_training(
    output: Path, record: FolderRecord, details: dict[str, str], then: str, *, json: bool, unit: str = ""
) -> None:
    """Prints the record of a training.

    Args:
        output: folder of the model.
        record: of the training.
        details: name -> value of what only such a training has.
        then: the next command.
        json: as JSON, which needs no details.
        unit: of the loss, behind it.
    """
    if json:
        print_json(record.model_dump(mode="json"))
        return
    scores = {
        f"{name}, held out": f"{show_number(record.before[name])} -> {show_number(value)}"
        for name, value in record.after.items()
    }
    print_fields(
        (
            ("folder", output),
            ("start", record.source),
            *details.items(),
            ("steps", f"{record.steps:,}"),
            ("loss", f"{record.curve[0][1]:.4f} -> {record.curve[-1][1]:.4f}{unit}"),
            *scores.items(),
            ("time", show_duration(record.seconds)),
            ("device", record.device),
        )
    )
    say(f"next: {then}")
