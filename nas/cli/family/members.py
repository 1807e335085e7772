"""Commands of `nas family` that build, compare and show families."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nas.cli.options import (
    INTERRUPTED,
    ContextOption,
    DatabaseOption,
    DeviceOption,
    FamilyArgument,
    OutputOption,
    SeedOption,
    ThreadsOption,
    YesOption,
    read_layout,
)
from nas.cli.output import JsonFlag, figure_text, print_fields, print_json, print_table, say
from nas.cli.progress import activity
from nas.core.durable import write_output
from nas.core.family import (
    PRETRAININGS,
    Comparison,
    MeasuredModel,
    MemberFiles,
    MemberTraining,
    RecordedFigure,
)
from nas.core.metrics import METRICS
from nas.core.units import show_count, show_duration
from nas.serve.views.family import FamilyView, family_view, list_families

if TYPE_CHECKING:
    from nas.train.scaling.build import BuildOptions, FilesWriter


def build(
    sizes: Annotated[
        str, typer.Option("--sizes", help="Member sizes, such as 350M,700M,1.2B,8B-A1B (total and active).")
    ],
    study: Annotated[
        str | None,
        typer.Option("--study", help="Study whose Pareto front and objectives are used.", show_default=False),
    ] = None,
    layout: Annotated[
        list[str] | None, typer.Option("--layout", help="Layout or published name to scale instead. Repeatable.")
    ] = None,
    space: Annotated[
        str, typer.Option("--space", help="Search space whose objectives are used when --study is not given.")
    ] = "lfm2",
    name: Annotated[
        str | None, typer.Option("--name", help="Family name.", show_default="the study's, or 'family'")
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option("--device", "-d", help="Device to measure on. Repeatable.", show_default="the study's"),
    ] = None,
    runtime: Annotated[
        str | None, typer.Option("--runtime", "-r", help="Runtime name.", show_default="the study's")
    ] = None,
    vocab: Annotated[
        int | None, typer.Option("--vocab", min=2, help="Vocabulary size.", show_default="the winner's")
    ] = None,
    candidates: Annotated[
        int, typer.Option("--candidates", min=1, max=64, help="Maximum candidates to measure per size.")
    ] = 4,
    measure: Annotated[
        bool,
        typer.Option("--measure/--no-measure", help="Measure candidates, or select them by computed metrics only."),
    ] = True,
    reps: Annotated[
        int | None,
        typer.Option("--reps", min=2, help="Number of valid repetitions.", show_default="those of the first screening"),
    ] = None,
    files: Annotated[bool, typer.Option("--files/--no-files", help="Write model files of the members.")] = True,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", help="tokenizer.json for the model files.", show_default="bytes")
    ] = None,
    context: ContextOption = 32768,
    pte: Annotated[bool, typer.Option("--pte", help="Also write a standard ExecuTorch program.")] = False,
    pte_context: Annotated[
        int, typer.Option("--pte-context", min=16, help="Context length of the ExecuTorch program.")
    ] = 2048,
    license: Annotated[
        str | None, typer.Option("--license", help="License of the model files, such as apache-2.0.")
    ] = None,
    seed: SeedOption = 0,
    db: DatabaseOption = None,
    json: JsonFlag = False,
    yes: YesOption = False,
) -> None:
    """Scale the best layouts of a Pareto front to other sizes, with a small measured search per size.

    All decisions are recorded. After an interruption, repeat the command to continue.
    """
    from nas.train.scaling.build import BuildOptions
    from nas.train.scaling.build import build as build_family
    from nas.train.scaling.candidates import parse_sizes

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
        seed=seed,
        db=db,
        files=_writer(tokenizer, context, pte_context if pte else None, license) if files else None,
    )
    if sys.stdin.isatty() and not (yes or json):
        _show_candidates(options)
        typer.confirm("Start?", default=True, abort=True, err=True)
    try:
        with activity(f"building {options.name}") as log:
            family = build_family(options, log)
    except KeyboardInterrupt:
        say("interrupted; repeat the command to continue")
        raise typer.Exit(INTERRUPTED) from None
    if json:
        print_json(family.model_dump(mode="json"))
        return
    print_table(
        ("size", "weights", "active", "layout"),
        [
            (member.size, show_count(member.parameters), show_count(member.active), member.layout)
            for member in family.members
        ],
    )
    say(f"next: nas family show {family.name}        decisions and measurements")


def compare(
    family: Annotated[str | None, typer.Option("--family", help="Built family whose members are compared.")] = None,
    reference: Annotated[
        list[str] | None,
        typer.Option("--reference", help="Reference model. Repeatable. Default: those of the same size classes."),
    ] = None,
    layout: Annotated[
        list[str] | None, typer.Option("--layout", help="Layout string or published name. Repeatable.")
    ] = None,
    size_class: Annotated[
        list[str] | None, typer.Option("--class", help="Restrict to a size class: 350M, 700M, 1B or 3B. Repeatable.")
    ] = None,
    alone: Annotated[bool, typer.Option("--no-references", help="Compare members and layouts only.")] = False,
    device: DeviceOption = "local",
    threads: ThreadsOption = 1,
    reps: Annotated[int, typer.Option("--reps", min=1, max=100, help="Repetitions per model and prompt length.")] = 3,
    flash_attn: Annotated[bool, typer.Option("--flash-attn/--no-flash-attn", help="Use fused attention.")] = True,
    replicate: Annotated[
        int, typer.Option("--replicate", min=0, help="Use a higher number to repeat earlier measurements.")
    ] = 0,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Plot speed against size to this .png, .svg or .pdf file.")
    ] = None,
    db: DatabaseOption = None,
    json: JsonFlag = False,
) -> None:
    """Compare family members with reference models on one device.

    Measures prefill and decode speed and TTFT at 1K and 4K tokens, and peak memory at 4K and 32K, with llama.cpp and
    Q4_0. Results are stored: a stopped comparison continues, and only new models are measured.
    """
    from nas.train.compare.compare import CompareOptions, ModelSelection
    from nas.train.compare.compare import compare as measure
    from nas.train.compare.tables import check_plot, draw_comparison

    if plot is not None:
        check_plot(plot)
    models = ModelSelection(family, tuple(reference or ()), tuple(layout or ()), tuple(size_class or ()), alone)
    options = CompareOptions(
        models, device=device, threads=threads, repetitions=reps, flash_attn=flash_attn, replicate=replicate, db=db
    )
    with activity("preparing the device") as log:
        record, path = measure(options, log)
    say(f"wrote {path}")
    if plot is not None:
        draw_comparison(record, plot)
        say(f"wrote {plot}")
    if json:
        print_json(record.model_dump(mode="json"))
    else:
        _print_comparison(record)


def show(
    name: Annotated[
        str | None, typer.Argument(help="Family name. Default: list all families.", show_default=False)
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Show the members, decisions, files and training of a family, or list all families."""
    if name is None:
        _print_families(json)
        return
    view = family_view(name)
    if json:
        print_json(view.model_dump(mode="json"))
        return
    print_fields(_family_fields(view))
    _print_members(view)
    _print_decisions(view)
    _print_training(view)
    _print_comparisons(view)


def report(name: FamilyArgument, output: OutputOption) -> None:
    """Write a report of a family to send: one HTML file with its members, comparisons, scores and decisions."""
    from nas.serve.dashboard.study_report import family_report_html  # matplotlib takes a second to load

    write_output(output, family_report_html(name).encode())
    say(f"wrote {output}")


def _writer(tokenizer: Path | None, context: int, pte_context: int | None, license: str | None) -> FilesWriter:
    """Returns the writer of model files; imports torch, which a build without files does not need."""
    from nas.train.release.files import MemberFilesWriter
    from nas.train.release.options import FileOptions

    return MemberFilesWriter(
        FileOptions(tokenizer=tokenizer, context=context, pte_context=pte_context, license=license)
    )


def _show_candidates(options: BuildOptions) -> None:
    """Prints the candidates of each size."""
    from nas.train.scaling.build import candidates_of

    print_table(
        ("size", "weights", "active", "candidate"),
        [
            (size.name, show_count(scaled.layout.params.total), show_count(scaled.layout.params.active), scaled.layout)
            for size, candidates in candidates_of(options)
            for scaled in candidates
        ],
    )


def _print_comparison(record: Comparison) -> None:
    from nas.train.compare.lfm2_report import HX370, S25
    from nas.train.compare.tables import figures_table, ratios_table, reasons

    print_fields(record.conditions.items())
    print_table(*figures_table(record), title="Tokens per second, ms and MB")
    if record.ratios:
        print_table(*ratios_table(record), title=f"Ratios: here / {S25} / {HX370} (of the LFM2 report)")
    for line in (*reasons(record), *record.notes):
        say(line)


def _print_families(json: bool) -> None:
    families = list_families()
    if json:
        print_json({"families": [family.model_dump(mode="json") for family in families]})
        return
    print_table(
        ("family", "study", "sizes", "made", "pattern"),
        [
            (family.name, family.study, " ".join(member.size for member in family.members), family.made, family.pattern)
            for family in families
        ],
    )


def _family_fields(view: FamilyView) -> list[tuple[str, object]]:
    """Returns (name, value) for the properties of a family."""
    family = view.family
    sources = [
        ("given" if source.trial is None else f"trial {source.trial}") + f": {source.layout}"
        for source in family.sources
    ]
    return [
        ("family", family.name),
        ("study", family.study or "none: from given layouts"),
        ("made", family.made),
        ("pattern", family.pattern),
        *(("winner", source) for source in sources),
        *((f"  {name}", value) for name, value in family.provenance.items()),
        ("folder", view.folder),
    ]


def _print_members(view: FamilyView) -> None:
    """Prints the members and their measurements."""
    print_table(
        ("size", "weights", "active", "files", "layout"),
        [
            (member.size, show_count(member.parameters), show_count(member.active), _files(row.files), member.layout)
            for row in view.members
            for member in (row.member,)
        ],
        title="members",
    )
    rows = [
        (
            row.member.size,
            measured.device + ("" if measured.searched else " (not searched)"),
            _runtime(measured),
            METRICS[figure.metric].label,
            figure.prompt,
            _figure_text(figure),
        )
        for row in view.members
        for measured in row.member.measured
        for figure in measured.figures
    ]
    if rows:
        print_table(("size", "device", "runtime", "figure", "tokens", "value"), rows, title="measured")


def _print_decisions(view: FamilyView) -> None:
    """Prints the recorded decisions and the candidates of each size."""
    owners = [("family", view.family.decisions), *((row.member.size, row.member.decisions) for row in view.members)]
    rows = [(owner, one.what, one.value, one.reason) for owner, decisions in owners for one in decisions]
    print_table(("of", "what", "decided", "because"), rows, title="decisions")
    candidates = [
        (row.member.size, "*" * candidate.chosen, show_count(candidate.parameters), candidate.verdict, candidate.layout)
        for row in view.members
        for candidate in row.member.tried
    ]
    print_table(("size", "", "weights", "verdict", "layout"), candidates, title="candidates")


def _print_training(view: FamilyView) -> None:
    """Prints the training results of the members."""
    for row in view.members:
        if (training := row.training) is not None:
            last = f", last loss {training.curve[-1][1]:.3f} nats" if training.curve else ""
            print_fields(
                [
                    (
                        f"{row.member.size} trained",
                        f"{show_count(training.tokens)} tokens, {training.steps} steps{last}",
                    ),
                    ("  from", training.start),
                    ("  held out", _scores(training) or None),
                ]
            )
            if training.before:
                print_stages(training, f"stages of {row.member.size}")


def print_stages(training: MemberTraining, title: str) -> None:
    """Prints all trainings up to one."""
    rows = [
        (
            stage.label,
            f"{stage.steps:,}",
            f"{stage.tokens:,}",
            f"{stage.curve[0][1]:.3f} -> {stage.curve[-1][1]:.3f}" if stage.curve else "",
            _scores(stage),
            _times(stage),
            peak_memory(stage),
        )
        for stage in training.history
    ]
    print_table(("stage", "steps", "tokens", "loss", "scores", "time", "peak memory"), rows, title=title)


def _times(training: MemberTraining) -> str:
    """Returns the time of a training, and of its parts where they are on record."""
    parts = ", ".join(f"{name} {show_duration(seconds)}" for name, seconds in training.spent.items() if seconds >= 1)
    return show_duration(training.whole_s) + (f" ({parts})" if parts else "")


def peak_memory(training: MemberTraining) -> str:
    """Formats the peak memory of a training, and of its preparation."""
    if training.peak_memory_mb is None:
        return "-"
    prepared = training.prepare_memory_mb
    return f"{training.peak_memory_mb:,.0f} MB" + (f", before {prepared:,.0f} MB" if prepared else "")


def _scores(training: MemberTraining) -> str:
    """Returns the scores of a training on held-out data; pre-trainings have bits per byte."""
    counts = training.config.get("counts", {})
    scores = ", ".join(
        f"{name} {value:.3f}" + (f" of {counts[name]:,}" if name in counts else "")
        for name, value in training.held_out.items()
    )
    return f"{scores} bits per byte" if scores and training.kind in PRETRAININGS else scores


def _print_comparisons(view: FamilyView) -> None:
    """Prints the comparisons with reference models."""
    for comparison in view.comparisons:
        rows = [
            (
                model.name,
                "member" if model.member else "reference",
                show_count(model.parameters),
                model.architecture,
                METRICS[figure.metric].label,
                figure.prompt,
                _figure_text(figure),
            )
            for model in comparison.models
            for figure in model.measured.figures
        ]
        columns = ("model", "", "weights", "architecture", "figure", "tokens", "value")
        print_table(columns, rows, title=f"on {comparison.device}")


def _figure_text(figure: RecordedFigure) -> str:
    """Formats a figure with its unit and confidence interval, or the reason it is unknown."""
    return figure_text(figure.value, METRICS[figure.metric].unit, figure.ci95 or (None, None), figure.reason)


def _runtime(measured: MeasuredModel) -> str:
    return f"{measured.runtime} {measured.quantisation}, {measured.threads} thread{'s' * (measured.threads != 1)}"


def _files(files: MemberFiles | None) -> str:
    if files is None:
        return "none"
    kinds = dict.fromkeys(f"{file.kind} {file.quantisation}".strip() for file in files.files)
    return ", ".join(kinds)
