"""`nas compare`: which of my model files, with which settings, is best on a device under budgets."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from nas.cli.lazy import command_app
from nas.cli.options import DatabaseOption, numbers_of, workload_of
from nas.cli.output import JsonFlag, Output, Row, print_json, print_rows, say
from nas.core.errors import InvalidInput, NasError
from nas.core.limit import Limit
from nas.measure.protocol.bench import BenchOptions, bench_each
from nas.measure.protocol.file_choice import (
    Candidate,
    Check,
    bits_of,
    check_limits,
    figures_of,
    ranked,
    runtime_of,
    sentence,
)

app = command_app()


@app.command("compare")
def command(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Model files, GGUF or .pte.")],
    budget: Annotated[
        list[str] | None,
        typer.Option(
            "--budget",
            "-b",
            metavar="METRIC<=LIMIT",
            help="Limit to keep, such as decode_p50<=20ms.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[str, typer.Option("--device", "-d", help="Device id or tag; local: this machine.")] = "local",
    threads: Annotated[str, typer.Option("--threads", "-t", metavar="N,...", help="Numbers of compute threads.")] = "1",
    context: Annotated[
        str,
        typer.Option("--context", metavar="N,...", help="Allocated contexts in tokens; 0: prompt and generated ones."),
    ] = "0",
    kv: Annotated[
        str, typer.Option("--kv", metavar="TYPE,...", help="Number formats of the key-value cache: f16, q8_0.")
    ] = "f16",
    prompt: Annotated[int, typer.Option("--prompt", "-p", help="Prompt length in tokens.")] = 512,
    gen: Annotated[int, typer.Option("--gen", "-n", help="Tokens to generate per repetition.")] = 128,
    reps: Annotated[int, typer.Option("--reps", min=2, help="Number of valid repetitions.")] = 10,
    corpus: Annotated[
        list[Path] | None,
        typer.Option(
            "--corpus", "-c", help="File or folder of text, to compare bits per byte on its end.", show_default=False
        ),
    ] = None,
    text_bytes: Annotated[int, typer.Option("--bytes", min=1024, help="Most bytes of text that are scored.")] = 1 << 16,
    output: Annotated[Output, typer.Option("--output", "-o", help="Format.")] = Output.TABLE,
    db: DatabaseOption = None,
    json: JsonFlag = False,
) -> None:
    """Show which of several model files, with which settings, is best on a device under budgets.

    Every file is measured with every combination of the lists, as by `nas bench`. The best one comes first: what keeps
    all budgets, then bits per byte where text is given, then speed. For members of a family and published models,
    see `nas family compare`. See docs/how-to/choosing-a-file.md.
    """
    limits = [Limit.parse(text) for text in budget or ()]
    check_limits(limits)
    files = list(dict.fromkeys(files))
    runtimes = {file: runtime_of(file) for file in files}
    texts = _texts(corpus, text_bytes) if corpus else []
    lists = (numbers_of(threads, "--threads"), numbers_of(context, "--context"), _kinds(kv))
    benches = [
        BenchOptions(
            subject=file,
            runtime=runtimes[file],
            quantisation=None,
            device=device,
            workload=workload_of(prompt=prompt, gen=gen, context=window, threads=count, kv_type=kind),
            repetitions=reps,
            db=db,
        )
        for file, count, window, kind in itertools.product(files, *lists)
    ]
    bits = {file: bits_of(file, texts, len(os.sched_getaffinity(0)), say) if texts else (None, "") for file in files}
    found, place = [], device
    for options, report in zip(benches, bench_each(benches, say), strict=True):
        one = _candidate(options, report, limits)
        found.append(replace(one, bits_per_byte=bits[one.file][0], why_no_bits=bits[one.file][1]))
        if not isinstance(report, NasError):
            place = report["device"]["id"]
    found = ranked(found)
    advice = sentence(found, limits, place)
    if json or output is Output.JSON:
        print_json({"device": place, "advice": advice, "candidates": [_json(one) for one in found]})
        return
    columns = ("file", "settings", "size", "prompt t/s", "ms/token (95 %)", "peak memory",
               *(("bits/byte",) if texts else ()), *map(str, limits))  # fmt: skip
    print_rows(output, columns, [_cells(one, bool(texts)) for one in found], [_row(one) for one in found],
               numbers=len(columns) - 2)  # fmt: skip
    if output is Output.TABLE:
        typer.echo(advice)


def _kinds(text: str) -> list[str]:
    kinds = list(dict.fromkeys(part.strip() for part in text.split(",")))
    if unknown := [kind for kind in kinds if kind not in ("f16", "q8_0")]:
        raise InvalidInput(f"no such number format: {unknown[0]!r}; f16 and q8_0 are known", where="--kv")
    return kinds


def _texts(corpus: Sequence[Path], limit: int) -> list[str]:
    """Returns the end of each source that `nas adapt` would hold out, `limit` bytes in all."""
    from nas.model.text.documents import HELD_OUT, first_bytes, read_sources

    documents = (document for source in read_sources(corpus, HELD_OUT) for document in source.documents)
    return list(first_bytes((document.held_out for document in documents), limit))


def _candidate(options: BenchOptions, report: dict[str, Any] | NasError, limits: Sequence[Limit]) -> Candidate:
    assert isinstance(options.subject, Path)
    if isinstance(report, NasError):
        return Candidate(options.subject, options.workload, {}, failure=str(report))
    figures = figures_of(report)
    checks = tuple(Check.of(limit, figures[limit.metric]) for limit in limits)
    return Candidate(options.subject, options.workload, figures, checks)


def _cells(one: Candidate, scored: bool) -> list[str]:
    if one.failure:
        start = [str(one.file), one.settings, one.failure.splitlines()[0]]
        return start + [""] * (3 + scored + len(one.checks))
    figures = one.figures
    bits = [one.why_no_bits if one.bits_per_byte is None else f"{one.bits_per_byte:.4f}"] if scored else []
    return [
        str(one.file), one.settings, _shown(one, "file_size", " MB"), _shown(one, "prefill_tps", ""),
        f"{_shown(one, 'decode_p50', '')}{_interval(figures['decode_p50'].low, figures['decode_p50'].high)}",
        _shown(one, "peak_rss", " MB"), *bits, *map(_verdict, one.checks),
    ]  # fmt: skip


def _shown(one: Candidate, name: str, unit: str) -> str:
    figure = one.figures[name]
    if figure.value is None:
        return f"unknown: {figure.reason or 'not read'}"
    return f"{figure.value:,.0f}{unit}" if figure.value >= 1e4 else f"{figure.value:.4g}{unit}"


def _interval(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f" ({low:.4g} to {high:.4g})"


def _verdict(check: Check) -> str:
    if check.chance is None:
        return f"unknown: {check.figure.reason or 'not read'}"
    return check.verdict if check.verdict != "open" else f"open (kept with a chance of {check.chance:.0%})"


def _row(one: Candidate) -> Row:
    figures = {name: one.figures[name].value if one.figures else None
               for name in ("file_size", "prefill_tps", "ttft", "decode_p50", "decode_p95", "peak_rss")}  # fmt: skip
    decode = one.figures.get("decode_p50")
    workload = one.workload
    return {
        "file": str(one.file), "threads": workload.threads, "kv_type": workload.kv_type, "context": workload.window,
        **figures, "decode_p50_low": decode and decode.low, "decode_p50_high": decode and decode.high,
        "bits_per_byte": one.bits_per_byte, "verdict": "failed" if one.failure else one.verdict,
        "reason": one.failure or one.why_no_bits,
    }  # fmt: skip


def _json(one: Candidate) -> dict[str, Any]:
    return {
        "file": str(one.file),
        "workload": one.workload.key(),
        "verdict": "failed" if one.failure else one.verdict,
        "failure": one.failure or None,
        "budgets": [check.to_json() for check in one.checks],
        "bits_per_byte": one.bits_per_byte,
        "bits_per_byte_reason": one.why_no_bits or None,
        "figures": {name: figure.model_dump(mode="json") for name, figure in one.figures.items()},
    }
