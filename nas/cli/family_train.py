"""`nas family train`: a member's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nas.cli.output import JsonFlag, duration, print_fields, print_json, say
from nas.core.layout import Layout


def register(app: typer.Typer) -> None:
    """Adds the command to `nas family`."""
    app.command("train")(train)


def train(
    name: Annotated[str, typer.Argument(help="Family.", show_default=False)],
    size: Annotated[str, typer.Option("--size", help="Member, such as 350M.", show_default=False)],
    corpus: Annotated[
        list[Path],
        typer.Option("--corpus", help="Text file, or folder of them. May be given several times.", show_default=False),
    ],
    tokens: Annotated[
        int | None,
        typer.Option("--tokens", min=1, help="To train on. Default: 20 per active weight.", show_default=False),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="YAML file with a recipe's settings.", show_default=False)
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", help="tokenizer.json. Default: the member's own.", show_default=False),
    ] = None,
    teacher: Annotated[
        Path | None,
        typer.Option("--teacher", help="Checkpoint of a model to distil from, of the same vocabulary."),
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option("--from", help="Checkpoint of a smaller model, such as a trained proxy, to grow from."),
    ] = None,
    start_layout: Annotated[
        str | None,
        typer.Option("--from-layout", help="Its layout, if its header names none.", show_default=False),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers", min=1, help="Processes. Default: one per GPU, or one.", show_default=False),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option("--context", min=16, help="Tokens that it is meant for.", show_default="as its files, or 32768"),
    ] = None,
    pte: Annotated[
        bool | None,
        typer.Option("--pte/--no-pte", help="Write a standard ExecuTorch program, too.", show_default="as its files"),
    ] = None,
    pte_context: Annotated[
        int | None,
        typer.Option("--pte-context", min=16, help="Tokens of a text in it.", show_default="as its files, or 2048"),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Pre-train a member on text of yours, and write its files with the trained weights.

    The recipe is the LFM2 report's, scaled down where the training is small; docs/family-training.md has the keys of a
    settings file. May be killed at any moment: the same command goes on from the last checkpoint.
    """
    from nas.family.file_ledger import files_of
    from nas.family.file_options import kept_options
    from nas.family.member_training import Order, train_member
    from nas.family.place import find_member
    from nas.family.recipe import Settings, read_settings

    settings = Settings() if config is None else read_settings(config)
    if tokens is not None:
        settings = settings.model_copy(update={"tokens": tokens})
    folder, _, _ = find_member(name, size)
    order = Order(
        corpus=tuple(corpus),
        settings=settings,
        tokenizer=tokenizer,
        teacher=teacher,
        start=start,
        start_layout=None if start_layout is None else Layout.parse(start_layout),
        workers=workers,
        files=kept_options(files_of(folder), context, pte, pte_context),
    )
    record = train_member(name, size, order, say)
    if json:
        print_json(record.model_dump(mode="json"))
        return
    print_fields(
        (
            ("checkpoint", record.checkpoint),
            ("start", record.start),
            ("tokens", f"{record.tokens:,}"),
            ("steps", f"{record.steps:,}"),
            ("loss", f"{record.curve[0][1]:.3f} -> {record.curve[-1][1]:.3f} nats per token"),
            *((f"bits per byte, {source}", f"{bits:.4f}") for source, bits in record.held_out.items()),
            ("time", duration(record.seconds)),
            ("device", record.device),
        )
    )
