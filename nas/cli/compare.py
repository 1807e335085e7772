"""`nas compare`: which of my model files, with which settings, is best on a device under budgets."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from nas.cli.lazy import command_app
from nas.cli.options import (
    INTERRUPTED,
    BudgetOption,
    DatabaseOption,
    DeviceOption,
    GenOption,
    PromptOption,
    RepsOption,
    ThreadCountsOption,
    numbers_of,
    workload_of,
)
from nas.cli.output import Format, JsonFlag, Row, figure_text, print_json, print_rows, print_table
from nas.cli.progress import activity
from nas.core.durable import scratch_folder
from nas.core.errors import InvalidInput, NasError
from nas.core.limit import Limit
from nas.core.logs import visible
from nas.core.progress import Log, Progress
from nas.core.units import show_figure, show_number
from nas.measure.protocol.bench import BUSY, BenchOptions, bench_each
from nas.measure.protocol.file_choice import (
    Bits,
    Candidate,
    Check,
    Loss,
    bits_of,
    figures_of,
    problem_of,
    ranked,
    require_measured,
    runtime_of,
    sentence,
)
from nas.model.text.documents import HELD_OUT, first_bytes, read_sources

app = command_app()
_FEW = 5
"""Repetitions below which a verdict says how many there were."""


@app.command("compare")
def command(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Model files, GGUF or .pte.")],
    types: Annotated[
        str | None,
        typer.Option("--types", metavar="TYPE,...", help="Types of llama.cpp to make from one GGUF file and compare."),
    ] = None,
    budget: BudgetOption = None,
    device: DeviceOption = "local",
    threads: ThreadCountsOption = "1",
    context: Annotated[
        str,
        typer.Option("--context", metavar="N,...", help="Allocated contexts in tokens; 0: prompt and generated ones."),
    ] = "0",
    kv: Annotated[
        str, typer.Option("--kv", metavar="TYPE,...", help="Number formats of the key-value cache: f16, q8_0.")
    ] = "f16",
    prompt: PromptOption = 512,
    gen: GenOption = 128,
    reps: RepsOption = 10,
    corpus: Annotated[
        list[Path] | None,
        typer.Option(
            "--corpus", "-c", help="File or folder of text, to compare bits per byte on its end.", show_default=False
        ),
    ] = None,
    text_bytes: Annotated[int, typer.Option("--bytes", min=1024, help="Most bytes of text that are scored.")] = 1 << 16,
    windows: Annotated[
        int, typer.Option("--windows", min=2, help="Windows of 256 tokens on which --types are compared.")
    ] = 16,
    importance: Annotated[
        bool,
        typer.Option(
            "--importance/--no-importance", help="Weigh errors of --types by an importance matrix of --corpus."
        ),
    ] = True,
    format: Annotated[Format, typer.Option("--format", "-f", help="Format of the table.")] = Format.TABLE,
    db: DatabaseOption = None,
    json: JsonFlag = False,
) -> None:
    """Show which of several model files, with which settings, is best on a device under budgets.

    Every file is measured with every combination of the lists, as by `nas bench`. The best one comes first: what keeps
    all budgets, then bits per byte where text is given, then speed. With --types, files of these types are made from
    one file, kept in the cache, and compared with it; half of the text is for their importance matrix. For members of a
    family and published models, see `nas family compare`. See docs/how-to/choosing-a-file.md.
    """
    limits = [Limit.parse(text) for text in budget or ()]
    files = list(dict.fromkeys(files))
    runtimes = {file: runtime_of(file) for file in files}
    workloads = [
        workload_of(prompt=prompt, gen=gen, context=window, threads=count, kv_type=kind)
        for count, window, kind in product(
            numbers_of(threads, "--threads"), numbers_of(context, "--context"), _kinds(kv)
        )
    ]
    for limit in limits:
        require_measured(limit.metric, workloads[0], "--budget")
    # Where files are made, nothing was trained on the text: half of it is compared on, as by `nas quantise`.
    sources = read_sources(corpus, HELD_OUT if types is None else 0.5) if corpus else ()
    share = text_bytes // max(len(sources), 1)
    held_out = ((document.held_out for document in source.documents) for source in sources)
    texts = [text for source in held_out for text in first_bytes(source, share)]
    if corpus and not texts:
        raise InvalidInput("too short: no text is left at its end to compare on", where="--corpus")
    device_id, measured = device, 0
    with activity("preparing the device") as log, scratch_folder("compare") as scratch, ExitStack() as stack:
        if types is None:
            unread = {file: problem for file in files if (problem := problem_of(file))}
            bits_under: Callable[[Path], Bits] = partial(_bits, texts, len(os.sched_getaffinity(0)), log)
        else:
            from nas.train.adapt.made_types import MadeTypes, require_one, types_of
            from nas.train.adapt.quantise import MOST_BYTES

            file, names = require_one(files), types_of(types)
            train = ((document.train for document in source.documents) for source in sources if importance)
            rest = [text for source in train for text in first_bytes(source, MOST_BYTES // len(sources))]
            family = stack.enter_context(
                MadeTypes(file, names, "\n\n".join(texts), "\n\n".join(rest), windows, scratch, log)
            )
            files, unread, bits_under = list(family.files), family.make(), family.bits
        every = [
            BenchOptions(
                subject=file,
                runtime=runtimes.get(file, "llama.cpp"),
                quantisation=None,
                device=device,
                workload=workload,
                repetitions=reps,
                db=db,
            )
            for file, workload in product(files, workloads)
        ]
        candidates = [
            Candidate(file, workload, {}, failure=unread[file])
            for file, workload in product(files, workloads)
            if file in unread
        ]
        benches = [bench for bench in every if bench.subject not in unread]
        bits: dict[Path, Bits] = {}
        failed: NasError | OSError | None = None
        try:
            for options, report in zip(benches, bench_each(benches, log) if benches else (), strict=True):
                candidate = _candidate(options, report, limits)
                if candidate.file not in bits:
                    bits[candidate.file] = bits_under(candidate.file)
                candidates.append(bits[candidate.file].of(candidate))
                measured += 1
                log(f"measured {_line(candidates[-1])}")
                log(Progress("measured", measured, len(benches)))
                if not isinstance(report, NasError):
                    device_id = report["device"]["id"]
        except (KeyboardInterrupt, NasError, OSError) as error:
            if not measured:
                raise
            failed = None if isinstance(error, KeyboardInterrupt) else error
            why = "" if failed is None else f": {failed}"
            log(f"stopped{why}: {measured} of {len(benches)} are measured, and below")
    _show(candidates, limits, device_id, format=format, json=json, scored=bool(texts), by_type=types is not None)
    if failed is not None:
        raise failed
    if measured < len(benches):
        raise typer.Exit(INTERRUPTED)


def _show(
    candidates: Sequence[Candidate],
    limits: Sequence[Limit],
    device: str,
    *,
    format: Format,
    json: bool,
    scored: bool,
    by_type: bool,
) -> None:
    candidates = ranked(candidates)
    advice = sentence(candidates, limits, device)
    if json:
        print_json({"device": device, "advice": advice, "candidates": list(map(_json, candidates))})
        return
    loads = [candidate.others for candidate in candidates if candidate.others is not None]
    busy = max(loads, default=0.0) > BUSY
    columns = ["size", "prompt t/s", *["ms/token seen"] * busy, "idle (95 %)" if busy else "ms/token (95 %)"]
    columns += ["peak memory", *["bits/byte"] * scored, *["KL (95 %)"] * (scored and by_type), *map(str, limits)]
    cells = [_cells(candidate, len(columns), scored=scored, by_type=by_type, busy=busy) for candidate in candidates]
    names = [(one.file.name if by_type else str(one.file), _settings(one)) for one in candidates]
    if format is not Format.TABLE:
        rows = [[*name, *row] for name, row in zip(names, cells, strict=True)]
        print_rows(format, ["file", "settings", *columns], rows, list(map(_row, candidates)), numbers=len(columns))
        return
    numbered = [
        [place, *row, ", ".join(name)] for place, (row, name) in enumerate(zip(cells, names, strict=True), start=1)
    ]
    print_table(("", *columns, "file, settings"), numbered)
    if busy:
        typer.echo(
            f"Other processes used up to {max(loads):.1f} cores meanwhile; order, budgets and all other figures are of"
            " an idle device."
        )
    if by_type and not candidates[0].failure:
        advice += f"\nIt is {candidates[0].file}"
    typer.echo(visible(advice, keep="\n"))


def _kinds(text: str) -> list[str]:
    kinds = list(dict.fromkeys(part.strip() for part in text.split(",")))
    if unknown := [kind for kind in kinds if kind not in ("f16", "q8_0")]:
        raise InvalidInput(f"no such number format: {unknown[0]!r}; f16 and q8_0 are known", where="--kv")
    return kinds


def _bits(texts: Sequence[str], threads: int, log: Log, file: Path) -> Bits:
    return bits_of(file, texts, threads, log) if texts else Bits()


def _candidate(options: BenchOptions, report: dict[str, Any] | NasError, limits: Sequence[Limit]) -> Candidate:
    assert isinstance(options.subject, Path)
    if isinstance(report, NasError):
        return Candidate(options.subject, options.workload, {}, failure=str(report))
    figures = figures_of(report)
    checks = tuple(Check.of(limit, figures[limit.metric]) for limit in limits)
    return Candidate(options.subject, options.workload, figures, checks, others=report["foreign_cpu"])


def _settings(candidate: Candidate) -> str:
    """Returns what tells candidates of a file apart, and what went wrong."""
    problem = candidate.failure or candidate.why_no_bits
    return f"{candidate.settings}{problem and f': {problem.splitlines()[0]}'}"


def _line(candidate: Candidate) -> str:
    """Returns what is said of a candidate once it is measured."""
    name = f"{candidate.file.name}, {_settings(candidate)}"
    if candidate.failure:
        return name
    bits = "" if candidate.bits_per_byte is None else f", {candidate.bits_per_byte:.4f} bits/byte"
    speeds = f"{_text(candidate, 'decode_p50', 'ms/token')}, {_text(candidate, 'prefill_tps', 'prompt tokens/s')}"
    return f"{name}: {speeds}{bits}"


def _cells(candidate: Candidate, count: int, *, scored: bool, by_type: bool, busy: bool) -> list[str]:
    if candidate.failure:
        return ["failed", *[""] * (count - 1)]
    decode, bits = candidate.figures["decode_p50"], candidate.bits_per_byte
    return [
        _text(candidate, "file_size", "MB"),
        _text(candidate, "prefill_tps"),
        *["" if decode.typical is None else show_number(decode.typical)] * busy,
        figure_text(decode.value, ends=(decode.low, decode.high), reason=decode.reason),
        _text(candidate, "peak_rss", "MB"),
        *["unknown" if bits is None else f"{bits:.4f}"] * scored,
        *[_loss(candidate.loss)] * (scored and by_type),
        *map(_verdict, candidate.checks),
    ]


def _loss(loss: Loss | None) -> str:
    return "" if loss is None else show_figure(loss.kl, loss.kl - loss.half, loss.kl + loss.half)


def _text(candidate: Candidate, name: str, unit: str = "") -> str:
    figure = candidate.figures[name]
    return figure_text(figure.value, unit, reason=figure.reason)


def _verdict(check: Check) -> str:
    if check.verdict == "unknown":
        return f"unknown: {check.figure.reason or 'not read'}"
    if check.verdict != "open":
        few = check.figure.log_sd is not None and check.figure.n < _FEW
        return f"{check.verdict}, n = {check.figure.n}" if few else check.verdict
    return "open (no interval)" if check.chance is None else f"open (kept with a chance of {check.chance:.0%})"


def _row(candidate: Candidate) -> Row:
    names = ("file_size", "prefill_tps", "ttft", "decode_p50", "decode_p95", "peak_rss")
    decode = candidate.figures.get("decode_p50")
    workload = candidate.workload
    return {
        "file": str(candidate.file),
        "threads": workload.threads,
        "kv_type": workload.kv_type,
        "context": workload.window,
        **{name: candidate.figures[name].value if candidate.figures else None for name in names},
        "decode_p50_seen": decode and decode.typical,
        "other_processes": candidate.others,
        "decode_p50_low": decode and decode.low,
        "decode_p50_high": decode and decode.high,
        "bits_per_byte": candidate.bits_per_byte,
        "kl": candidate.loss and candidate.loss.kl,
        "verdict": "failed" if candidate.failure else candidate.verdict,
        "reason": candidate.failure or candidate.why_no_bits,
    }


def _json(candidate: Candidate) -> dict[str, Any]:
    return {
        "file": str(candidate.file),
        "workload": candidate.workload.key(),
        "verdict": "failed" if candidate.failure else candidate.verdict,
        "failure": candidate.failure or None,
        "budgets": [check.to_json() for check in candidate.checks],
        "bits_per_byte": candidate.bits_per_byte,
        "bits_per_byte_reason": candidate.why_no_bits or None,
        "other_processes": candidate.others,
        "loss": candidate.loss and candidate.loss.to_json(),
        "figures": {name: figure.model_dump(mode="json") for name, figure in candidate.figures.items()},
    }
