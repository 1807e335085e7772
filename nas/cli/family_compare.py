"""`nas family compare`: members and reference models on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nas.cli.database import DatabaseOption
from nas.cli.output import JsonFlag, print_fields, print_json, print_table, say
from nas.core.family import Comparison


def compare(
    family: Annotated[str | None, typer.Option("--family", help="A built family, whose members take part.")] = None,
    reference: Annotated[
        list[str] | None,
        typer.Option("--reference", help="Reference model; repeat it. Default: those of the others' size classes."),
    ] = None,
    layout: Annotated[
        list[str] | None, typer.Option("--layout", help="One-line layout or published name; repeat it.")
    ] = None,
    size_class: Annotated[
        list[str] | None,
        typer.Option("--class", help="350M, 700M, 1B or 3B: its reference models, and only its members; repeat it."),
    ] = None,
    alone: Annotated[bool, typer.Option("--no-references", help="Only members and layouts.")] = False,
    device: Annotated[str, typer.Option("--device", "-d", help="Device; 'local' is this machine.")] = "local",
    threads: Annotated[int, typer.Option("--threads", "-t", min=1, help="Compute threads.")] = 1,
    reps: Annotated[int, typer.Option("--reps", min=1, max=100, help="Repetitions per model and prompt length.")] = 3,
    flash_attn: Annotated[bool, typer.Option("--flash-attn/--no-flash-attn", help="Fused attention.")] = True,
    accept_noise: Annotated[bool, typer.Option("--accept-noise", help="Keep refused repetitions, marked.")] = False,
    replicate: Annotated[
        int, typer.Option("--replicate", min=0, help="A higher number measures anew what was measured before.")
    ] = 0,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw speed against size into this .png, .svg or .pdf.")
    ] = None,
    db: DatabaseOption = None,
    json: JsonFlag = False,
) -> None:
    """Measure members and reference models side by side on one device.

    Prefill and decode speed and TTFT behind 1K and 4K tokens, and peak memory at 4K and 32K, with llama.cpp and Q4_0.
    Every repetition is kept: a comparison that was stopped goes on where it was, and more models cost only their own.
    """
    from nas.family.compare import CompareOptions
    from nas.family.compare import compare as measure
    from nas.family.lineup import Asked

    if plot is not None:
        from nas.family.comparison_plot import check_suffix

        check_suffix(plot)
    asked = Asked(family, tuple(reference or ()), tuple(layout or ()), tuple(size_class or ()), alone)
    options = CompareOptions(
        asked, device=device, threads=threads, repetitions=reps, flash_attn=flash_attn, accept_noise=accept_noise,
        replicate=replicate, db=db,
    )  # fmt: skip
    record, path = measure(options, say, say)
    say(f"written to {path}")
    if plot is not None:
        from nas.family.comparison_plot import draw_comparison

        draw_comparison(record, plot)
        say(f"drawn to {plot}")
    if json:
        print_json(record.model_dump(mode="json"))
    else:
        _print(record)


def _print(record: Comparison) -> None:
    from nas.family.comparison_tables import figures_table, ratios_table, reasons
    from nas.family.report_tables import HX370, S25

    print_fields(record.conditions.items())
    print_table(*figures_table(record), title="Tokens per second, ms and MB")
    if record.ratios:
        print_table(*ratios_table(record), title=f"Ratios: here / {S25} / {HX370} (of the LFM2 report)")
    for line in (*reasons(record), *record.notes):
        say(line)
