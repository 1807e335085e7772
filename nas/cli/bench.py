"""`nas bench`: measure a layout or model file with the protocol of a study."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from nas.cli.lazy import command_app
from nas.cli.options import DatabaseOption, QuantisationOption, RuntimeOption, read_layout
from nas.cli.output import JsonFlag, print_fields, print_json, say
from nas.core.errors import InvalidInput
from nas.core.space import MeasurementSettings
from nas.core.workload import Workload
from nas.measure.bench import BenchOptions
from nas.measure.bench import bench as measure
from nas.runtimes import DEFAULT_RUNTIME

app = command_app()


@app.command("bench")
def command(
    subject: Annotated[
        str,
        typer.Argument(metavar="LAYOUT|FILE", help="Layout string, published name, model file, or '-' for stdin."),
    ],
    runtime: RuntimeOption = DEFAULT_RUNTIME,
    quantisation: QuantisationOption = None,
    device: Annotated[str, typer.Option("--device", "-d", help="Device id or tag; local: this machine.")] = "local",
    prompt: Annotated[int, typer.Option("--prompt", help="Prompt length in tokens.")] = 512,
    gen: Annotated[int, typer.Option("--gen", help="Tokens to generate per repetition.")] = 128,
    context: Annotated[int, typer.Option("--context", help="Allocated context in tokens; 0: --prompt + --gen.")] = 0,
    threads: Annotated[int, typer.Option("--threads", "-t", help="Number of compute threads.")] = 1,
    reps: Annotated[int, typer.Option("--reps", min=2, help="Number of valid repetitions.")] = 10,
    db: DatabaseOption = None,
    json: JsonFlag = False,
) -> None:
    """Measure a layout or model file on a device.

    Layouts are exported with random weights. Earlier results are not reused.
    """
    options = BenchOptions(
        subject=Path(subject) if Path(subject).is_file() else read_layout(subject, "published layout or file"),
        runtime=runtime,
        quantisation=quantisation,
        device=device,
        workload=_workload(prompt=prompt, gen=gen, context=context, threads=threads),
        repetitions=reps,
        protocol=MeasurementSettings(),
        db=db,
    )
    report = measure(options, say)
    if json:
        print_json(report)
    else:
        print_fields(_fields(report))


def _workload(**values: int) -> Workload:
    try:
        return Workload(**values)
    except ValidationError as error:
        problem = error.errors()[0]
        flag = f"--{problem['loc'][0]}" if problem["loc"] else None
        raise InvalidInput(problem["msg"].removeprefix("Value error, "), where=flag) from None


def _fields(report: dict[str, Any]) -> list[tuple[str, object]]:
    ttft, decode, memory, workload = (report[name] for name in ("ttft_ms", "decode_ms", "peak_rss_mb", "workload"))
    refused = f", {report['refused_share']:.0%} of repetitions failed" if report["refused_share"] else ""
    drift, others = report["reference"]["drift"], report["foreign_cpu"]
    return [
        ("layout", report.get("layout")),
        ("file", report.get("file")),
        ("runtime", f"{report['runtime']['name']} build {report['runtime']['build'][:12]}"),
        ("device", f"{report['device']['id']} ({report['device']['cpu']})"),
        ("workload", f"{workload['prompt']} tokens in, {workload['gen']} out, {workload['threads']} thread(s)"),
        ("TTFT", f"{_shown(ttft['value'], 'ms')}{_interval(ttft['ci95'])}, n = {ttft['n']}{refused}"),
        ("  as experienced", _shown(ttft["typical"], "ms")),
        ("prefill", _shown(report["prefill_tps"], "tokens/s")),
        ("decode p50", f"{_shown(decode['p50'], 'ms/token')}{_interval(decode['ci95'])}"),
        ("  as experienced", _shown(decode["typical"], "ms/token")),
        ("decode p95", _shown(decode["p95"], "ms/token", decode["p95_reason"])),
        ("peak memory", _shown(memory["total"], "MB")),
        ("load", _shown(report["load_ms"], "ms")),
        ("file size", _shown(report["file_mb"], "MB")),
        ("reference model", None if drift is None else f"{drift:+.1%} off its calibration"),
        ("other processes", None if others is None else f"{others:.2f} of a core meanwhile"),
    ]


def _shown(value: float | None, unit: str, reason: str | None = None) -> str:
    return f"{value:.4g} {unit}" if value is not None else f"unknown: {reason or 'not read'}"


def _interval(ends: list[float | None]) -> str:
    low, high = ends
    return "" if low is None or high is None else f" (95 %: {low:.4g} to {high:.4g})"
