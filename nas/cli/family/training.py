"""Commands of `nas family` that pre-train members, and their tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nas.cli.family.members import peak_memory
from nas.cli.options import FamilyArgument, PriceOption, ProcessesOption, RewritePteOption, SizeOption
from nas.cli.output import JsonFlag, print_fields, print_json, print_table, say
from nas.cli.progress import activity
from nas.core.durable import output_file
from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.core.units import show_duration

if TYPE_CHECKING:
    from nas.train.pretrain.recipe import Settings


def train(
    name: FamilyArgument,
    size: SizeOption,
    corpus: Annotated[
        list[Path] | None,
        typer.Option("--corpus", "-c", help="File, folder or glob of text or records. Repeatable.", show_default=False),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens", min=1, help="Number of training tokens. Default: 20 per active parameter.", show_default=False
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="YAML file with recipe settings.", show_default=False)
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", help="tokenizer.json. Default: that of the member.", show_default=False),
    ] = None,
    teacher: Annotated[
        Path | None, typer.Option("--teacher", help="Checkpoint of a teacher model to distil from; same vocabulary.")
    ] = None,
    start: Annotated[
        Path | None, typer.Option("--from", help="Checkpoint of a smaller model to grow from, such as a trained proxy.")
    ] = None,
    start_layout: Annotated[
        str | None,
        typer.Option(
            "--from-layout", help="Layout of the --from checkpoint, if not in its header.", show_default=False
        ),
    ] = None,
    workers: ProcessesOption = None,
    context: Annotated[
        int | None,
        typer.Option("--context", min=16, help="Context length in tokens.", show_default="as before, or 32768"),
    ] = None,
    pte: RewritePteOption = None,
    pte_context: Annotated[
        int | None,
        typer.Option(
            "--pte-context", min=16, help="Context length of the ExecuTorch program.", show_default="as before, or 2048"
        ),
    ] = None,
    license: Annotated[
        str | None,
        typer.Option("--license", help="License of the model files, such as apache-2.0.", show_default="as before"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print tokens, FLOPs, memory, time and price, and exit.")
    ] = False,
    price_per_hour: PriceOption = None,
    json: JsonFlag = False,
) -> None:
    """Pre-train a family member on your own text and write its model files with the trained weights.

    The recipe follows the LFM2 report, scaled down for short trainings; see docs/how-to/family-training.md for the
    settings. After an interruption, repeat the command to continue from the last checkpoint.
    """
    from nas.train.pretrain.member_training import train_member
    from nas.train.pretrain.next_token import PretrainingRequest
    from nas.train.pretrain.recipe import Settings, read_settings
    from nas.train.release.files import files_of, find_member
    from nas.train.release.options import kept_options

    settings = Settings() if config is None else read_settings(config)
    if tokens is not None:
        settings = settings.model_copy(update={"tokens": tokens})
    folder, _, member = find_member(name, size)
    if price_per_hour is not None and not dry_run:
        raise InvalidInput("applies only with --dry-run", where="--price-per-hour")
    if dry_run:
        _print_cost(Layout.parse(member.layout), settings, price_per_hour, json)
        return
    if not corpus:
        raise InvalidInput("required, except with --dry-run", where="--corpus")
    request = PretrainingRequest(
        corpus=tuple(corpus),
        settings=settings,
        tokenizer=tokenizer,
        teacher=teacher,
        start=start,
        start_layout=None if start_layout is None else Layout.parse(start_layout),
        workers=workers,
        files=kept_options(files_of(folder), context, pte, pte_context, license),
    )
    with activity(f"preparing {name} {size}") as log:
        record = train_member(name, size, request, log)
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
            ("time", show_duration(record.seconds)),
            ("peak memory", peak_memory(record)),
            ("device", record.device),
        )
    )


def tokenizer(
    output: Annotated[Path, typer.Option("--output", "-o", help="Output file, tokenizer.json.")],
    vocab: Annotated[int, typer.Option("--vocab", help="Vocabulary size, including special tokens.")] = 65536,
    corpus: Annotated[
        list[Path] | None,
        typer.Option(
            "--corpus",
            "-c",
            help="File, folder or glob of text or records. Repeatable.",
            show_default="the default corpus",
        ),
    ] = None,
) -> None:
    """Train a byte-level BPE tokenizer with special tokens for chat, tools and fill-in-the-middle.

    Stock transformers and stock llama.cpp tokenize identically with it. Training is deterministic.
    """
    from nas.model.text.documents import files_read
    from nas.train.pretrain.tokenizer_training import train_tokenizer

    with activity("reading the corpus") as log, output_file(output, reads=files_read(corpus or [])) as file:
        vocabulary = train_tokenizer(corpus or [], vocab, file, log)
    say(f"wrote {output}: {len(vocabulary.tokens):,} tokens, including {len(vocabulary.special)} special tokens")


def _print_cost(layout: Layout, settings: Settings, price_per_hour: float | None, json: bool) -> None:
    from nas.train.pretrain.cost import UTILISATION, timed_flops_per_s, training_cost
    from nas.train.pretrain.recipe import complete

    recipe, _ = complete(settings, layout)
    cost = training_cost(layout, recipe, timed_flops_per_s(layout), price_per_hour)
    if json:
        print_json({**asdict(cost), "host_seconds": cost.host_seconds, "utilisation": UTILISATION})
        return
    print_fields(
        (
            ("tokens", f"{cost.tokens:,}"),
            ("compute", f"{cost.flops:.2g} FLOPs"),
            ("memory", f"{cost.state_bytes / 1e9:.2g} GB of weights, gradients and moments; activations come on top"),
            ("here", f"about {show_duration(cost.host_seconds, rough=True)}, by a step of two layers timed now"),
        )
    )
    print_gpus([asdict(gpu) for gpu in cost.gpus], UTILISATION, price_per_hour)


def print_gpus(costs: Iterable[Mapping[str, Any]], utilisation: float, price_per_hour: float | None) -> None:
    """Prints the time and price of a training on GPUs: fields of `nas.train.pretrain.cost.GpuCost`."""
    typer.echo()
    rows = [
        (gpu["gpu"], show_duration(gpu["hours"] * 3600, rough=True), gpu["least_gpus"])
        + (() if gpu["price"] is None else (f"{gpu['price']:,.2f}",))
        for gpu in costs
    ]
    price = () if price_per_hour is None else (f"price at {price_per_hour:g} an hour",)
    print_table(("GPU", "time of one", "least GPUs for the memory", *price), rows)
    say(f"GPUs at {utilisation:.0%} of their peak, as others report; it was not measured with hilnas")
