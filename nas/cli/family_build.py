"""`nas family build`: from winners to members."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nas.cli.arguments import read_layout
from nas.cli.database import DatabaseOption
from nas.cli.output import JsonFlag, print_json, print_table, say
from nas.core.units import show_count

if TYPE_CHECKING:
    from nas.family.build import BuildOptions

INTERRUPTED = 130


def register(app: typer.Typer) -> None:
    """Adds the command to `nas family`."""
    app.command("build")(build)


def build(
    sizes: Annotated[
        str, typer.Option("--sizes", help="Such as 350M,700M,1.2B,8B-A1B: weights, and active ones of experts.")
    ],
    study: Annotated[
        str | None,
        typer.Option("--study", "-s", help="Study whose front and objectives are taken.", show_default=False),
    ] = None,
    layout: Annotated[
        list[str] | None,
        typer.Option("--layout", "-l", help="Layout or published name to scale instead; may be given again."),
    ] = None,
    space: Annotated[str, typer.Option("--space", help="Whose objectives are taken without a study.")] = "lfm2",
    name: Annotated[
        str | None, typer.Option("--name", help="Of the family.", show_default="the study's, or 'family'")
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option("--device", "-d", help="Device to measure on; may be given again.", show_default="the study's"),
    ] = None,
    runtime: Annotated[str | None, typer.Option("--runtime", "-r", help="Runtime.", show_default="the study's")] = None,
    vocab: Annotated[
        int | None, typer.Option("--vocab", min=2, help="Tokens of the vocabulary.", show_default="the winner's")
    ] = None,
    candidates: Annotated[int, typer.Option("--candidates", min=1, max=64, help="Measured at most at a size.")] = 4,
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Measure candidates; else what can be computed decides.")
    ] = True,
    reps: Annotated[
        int | None,
        typer.Option("--reps", min=2, help="Repetitions that must be valid.", show_default="the first screen's"),
    ] = None,
    accept_noise: Annotated[bool, typer.Option("--accept-noise", help="Keep refused repetitions, marked.")] = False,
    files: Annotated[bool, typer.Option("--files/--no-files", help="Write members' files.")] = True,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", help="tokenizer.json for the files.", show_default="bytes")
    ] = None,
    context: Annotated[int, typer.Option("--context", min=16, help="Tokens that members are meant for.")] = 32768,
    pte: Annotated[bool, typer.Option("--pte", help="Write a standard ExecuTorch program, too.")] = False,
    pte_context: Annotated[int, typer.Option("--pte-context", min=16, help="Tokens of a text in it.")] = 2048,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the members' random weights.")] = 0,
    db: DatabaseOption = None,
    json: JsonFlag = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before starting.")] = False,
) -> None:
    """Scale a front's winners to chosen sizes: a small measured search at each, every decision recorded.

    Killed or interrupted, the same command goes on where it was.
    """
    from nas.family.build import BuildOptions
    from nas.family.build import build as build_family
    from nas.family.file_options import FileOptions
    from nas.family.member_files import MemberFilesWriter
    from nas.family.sizes import parse_sizes

    wanted = FileOptions(tokenizer=tokenizer, context=context, pte_context=pte_context if pte else None)
    options = BuildOptions(
        name=name or study or "family",
        sizes=parse_sizes(sizes),
        study=study,
        layouts=tuple(map(read_layout, layout or ())),
        space=space,
        devices=tuple(device or ()),
        runtime=runtime,
        vocab=vocab,
        candidates=candidates,
        measure=measure,
        repetitions=reps,
        accept_noise=accept_noise,
        seed=seed,
        db=db,
        files=MemberFilesWriter(wanted) if files else None,
    )
    if sys.stdin.isatty() and not (yes or json):
        _show_plan(options)
        typer.confirm("start?", default=True, abort=True, err=True)
    try:
        family = build_family(options, say)
    except KeyboardInterrupt:
        say("interrupted; the same command goes on where it was")
        raise typer.Exit(INTERRUPTED) from None
    if json:
        print_json(family.model_dump(mode="json"))
        return
    rows = [(each.size, show_count(each.parameters), show_count(each.active), each.layout) for each in family.members]
    print_table(("size", "weights", "active", "layout"), rows)
    say(f"next: nas family show {family.name}        why each is what it is, and what was measured")


def _show_plan(options: BuildOptions) -> None:
    """The candidates of each size."""
    from nas.family.build import plan

    print_table(
        ("size", "weights", "active", "candidate"),
        [
            (size.name, show_count(each.layout.params.total), show_count(each.layout.params.active), each.layout)
            for size, shapes in plan(options)
            for each in shapes
        ],
    )
