"""Commands of `nas family` that train models with a tower: of images, or of sound."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nas.cli.family.folders import LANGUAGE_MODEL, FolderOption, SettingsOption, print_training
from nas.cli.options import CheckpointOption
from nas.cli.output import JsonFlag, print_fields, print_json
from nas.cli.progress import activity
from nas.core.errors import InvalidInput

if TYPE_CHECKING:
    from nas.train.towers.training import Data, TowerSettings

_StageOption = Annotated[
    str | None, typer.Option("--stage", help="connector, mid or joint.", show_default="that of --config")
]
_EvaluationOption = Annotated[
    list[Path] | None,
    typer.Option("--evaluate", help="As --data, but only scored, before and after. Repeatable."),
]
_MimiOption = Annotated[
    Path | None, typer.Option("--mimi", help="Folder of Mimi, to use its codes.", show_default=False, file_okay=False)
]


def vision(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Model to start from: a folder of `nas family vision` or LFM2-VL, or a language model: "
            + LANGUAGE_MODEL,
            show_default=False,
        ),
    ],
    data: Annotated[
        list[Path],
        typer.Option(
            "--data",
            help="JSON lines of conversations about images, or folder with metadata.jsonl. Repeatable.",
            show_default=False,
        ),
    ],
    output: FolderOption,
    stage: _StageOption = None,
    text: Annotated[
        list[Path] | None, typer.Option("--text", help="JSON lines of conversations without images. Repeatable.")
    ] = None,
    evaluate: _EvaluationOption = None,
    encoder: Annotated[
        Path | None,
        typer.Option(
            "--encoder",
            help="Folder of SigLIP2 (NaFlex) whose image encoder is used.",
            show_default="as in MODEL, or random",
        ),
    ] = None,
    config: SettingsOption = None,
    checkpoint: CheckpointOption = 60.0,
    json: JsonFlag = False,
) -> None:
    """Train a stage of a model that reads images and text, from a trained model (LFM2 report, section 5).

    The stages are connector, mid and joint, each from the folder of the one before; see docs/how-to/vision.md. Where a
    stock class of transformers holds the layout, the folder opens there. After an interruption, repeat the command to
    continue from the last checkpoint.
    """
    from nas.train.towers.training import Data
    from nas.train.towers.vision import VisionSettings

    files = Data(data, text or (), evaluate or ())
    _train_tower(VisionSettings, model, files, output, stage, config, encoder, checkpoint, json)


def audio(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help=f"Model to start from: a folder of `nas family audio`, or a language model: {LANGUAGE_MODEL}",
            show_default=False,
        ),
    ],
    data: Annotated[
        list[Path],
        typer.Option(
            "--data",
            help="JSON lines of conversations about WAV and FLAC files, or folder with metadata.jsonl. Repeatable.",
            show_default=False,
        ),
    ],
    output: FolderOption,
    stage: _StageOption = None,
    text: Annotated[
        list[Path] | None, typer.Option("--text", help="JSON lines of conversations without sound. Repeatable.")
    ] = None,
    evaluate: _EvaluationOption = None,
    encoder: Annotated[
        Path | None,
        typer.Option(
            "--encoder",
            help="Folder of Parakeet whose FastConformer encoder is used.",
            show_default="as in MODEL, or random",
        ),
    ] = None,
    codec: Annotated[
        Path | None,
        typer.Option(
            "--codec",
            help="Folder of `nas family codec`: the model learns to speak.",
            show_default="as in MODEL, or none",
        ),
    ] = None,
    mimi: _MimiOption = None,
    config: SettingsOption = None,
    checkpoint: CheckpointOption = 60.0,
    json: JsonFlag = False,
) -> None:
    """Train a stage of a model that reads sound and text, from a trained model (LFM2 report, section 6).

    The stages are connector, mid and joint, each from the folder of the one before; see docs/how-to/audio.md. After an
    interruption, repeat the command to continue from the last checkpoint.
    """
    from nas.train.towers.audio import AudioSettings
    from nas.train.towers.training import Data

    files = Data(data, text or (), evaluate or ())
    _train_tower(AudioSettings, model, files, output, stage, config, encoder, checkpoint, json, codec, mimi)


def codec(
    sounds: Annotated[
        list[Path],
        typer.Argument(metavar="SOUNDS...", help="WAV and FLAC files, and folders of them.", show_default=False),
    ],
    output: FolderOption,
    mimi: _MimiOption = None,
    config: SettingsOption = None,
    checkpoint: CheckpointOption = 60.0,
    json: JsonFlag = False,
) -> None:
    """Train a codec for models that speak: sound as codes, and codes as sound of 24 kHz (LFM2 report, section 6.1.3).

    With --mimi, codes are those of Mimi and the detokenizer alone is trained. After an interruption, repeat the command
    to continue from the last checkpoint.
    """
    from nas.search.spaces.problems import read_model
    from nas.train.towers.codec_training import CodecSettings, train_codec

    settings = CodecSettings() if config is None else read_model(config, CodecSettings)
    with activity(f"preparing {output}") as log:
        record = train_codec(sounds, settings, output, log, mimi, checkpoint)
    details = {"sound": f"{record.hours:.2f} h in {record.examples:,} files"}
    print_training(output, record, details, f"nas family audio MODEL --codec {shlex.quote(str(output))}", json=json)


def merge(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="FOLDER...",
            help="Two or more folders of `nas family vision` or `audio`, of one layout and tower.",
            exists=True,
            file_okay=False,
            show_default=False,
        ),
    ],
    output: FolderOption,
    base: Annotated[
        Path | None,
        typer.Option(
            "--base",
            help="Folder that they were trained from, for every method but soup.",
            exists=True,
            file_okay=False,
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="YAML file: method, weights, density ... as of a merge of post-training."),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Merge runs of a model with a tower into one: by default the mean of all their weights."""
    from nas.search.spaces.problems import read_model
    from nas.train.posttrain.merging import MergeSettings
    from nas.train.towers.merging import merge_runs

    settings = MergeSettings() if config is None else read_model(config, MergeSettings)
    record = merge_runs(folders, base, settings, output)
    if json:
        print_json(record.model_dump(mode="json"))
        return
    print_fields((("folder", output), ("method", settings.method), ("weights", record.weights[:12])))


def _train_tower(
    settings_kind: type[TowerSettings],
    model: str,
    data: Data,
    output: Path,
    stage: str | None,
    config: Path | None,
    encoder: Path | None,
    checkpoint: float,
    json: bool,
    codec: Path | None = None,
    mimi: Path | None = None,
) -> None:
    """Trains a stage with a tower and prints its record."""
    from nas.search.spaces.problems import read_model
    from nas.train.towers.training import train_tower

    settings = settings_kind.of_stage(stage) if config is None else read_model(config, settings_kind)
    if stage not in (None, settings.stage):
        raise InvalidInput(f"{config} is for the stage {settings.stage}", where="--stage")
    with activity(f"preparing {output}") as log:
        record = train_tower(model, data, settings, output, log, encoder, checkpoint, codec, mimi)
    modality = settings.modality
    counts = f"{record.examples:,} about {modality.noun}s, {record.texts:,} without; {record.left_out:,} left out"
    details = {"stage": settings.stage, "conversations": counts}
    then = f"nas chat {shlex.quote(str(output))} --{modality.kind} {modality.kind.upper()}"
    print_training(output, record, details, then, json=json, unit=" nats per token")
