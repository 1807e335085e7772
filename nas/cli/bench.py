"""`nas bench`: measure layouts and model files with the protocol of a study."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from nas.cli.lazy import command_app
from nas.cli.options import (
    DatabaseOption,
    DeviceOption,
    QuantisationOption,
    RepsOption,
    RuntimeOption,
    ThreadCountsOption,
    numbers_of,
    open_store,
    path_of,
    read_layout,
    workload_of,
)
from nas.cli.output import Format, JsonFlag, Row, figure_text, print_fields, print_json, print_rows, print_table, say
from nas.cli.progress import activity
from nas.core.errors import InvalidInput, NasError
from nas.core.layout import Layout
from nas.core.measurement import TTFT_PARTS
from nas.core.metrics import METRICS
from nas.core.profile import ProfileSummary
from nas.core.progress import Progress
from nas.core.space import MeasurementSettings
from nas.core.tower import Media
from nas.core.units import show_figure, show_number, show_share, show_spread
from nas.core.workload import Workload
from nas.infra.store import events, studies, trials
from nas.measure.protocol.bench import BUSY, BenchOptions, bench_all
from nas.measure.runtimes import DEFAULT_RUNTIME
from nas.search.study.events import Profiled

app = command_app()


def _model_of(subject: str) -> Path | Layout:
    path = path_of(subject)
    if path is not None and path.is_file():
        return path
    if path is not None and path.is_dir():
        from nas.train.adapt.checkpoints import read_model

        return read_model(path).layout
    return read_layout(subject, "published layout, file or folder")


@app.command("bench")
def command(
    subjects: Annotated[
        list[str],
        typer.Argument(
            metavar="LAYOUT|FILE...",
            help="Layout strings, published names, model files, folders of transformers, or '-': stdin.",
        ),
    ],
    runtime: RuntimeOption = DEFAULT_RUNTIME,
    quantisation: QuantisationOption = None,
    device: DeviceOption = "local",
    prompt: Annotated[str, typer.Option("--prompt", "-p", metavar="N,...", help="Prompt lengths in tokens.")] = "512",
    gen: Annotated[
        str, typer.Option("--gen", "-n", metavar="N,...", help="Tokens to generate per repetition.")
    ] = "128",
    context: Annotated[
        int, typer.Option("--context", help="Allocated context in tokens; 0: prompt and generated ones.")
    ] = 0,
    images: Annotated[
        int | None,
        typer.Option("--images", help="Images in front of the prompt. Default: 1 where a tower reads them."),
    ] = None,
    image_height: Annotated[int, typer.Option("--image-height", help="Height of each image in pixels.")] = 512,
    image_width: Annotated[int, typer.Option("--image-width", help="Width of each image in pixels.")] = 512,
    sounds: Annotated[
        int | None,
        typer.Option("--sounds", help="Sounds in front of the prompt. Default: 1 where a tower reads them."),
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", help="Length of each sound in seconds.")] = 8.0,
    mmproj: Annotated[
        Path | None,
        typer.Option("--mmproj", help="File of the tower beside a model FILE.", exists=True, dir_okay=False),
    ] = None,
    image_tokens: Annotated[
        int, typer.Option("--image-tokens", min=1, max=4096, help="Most tokens of an image, with --mmproj.")
    ] = 256,
    threads: ThreadCountsOption = "1",
    reps: RepsOption = 10,
    format: Annotated[
        Format | None,
        typer.Option("--format", "-f", help="Format of a table.", show_default="table; details of a single result"),
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Also show the time of each layer and operator, from one more run.")
    ] = False,
    trial: Annotated[
        str | None,
        typer.Option(
            "--trial", metavar="STUDY/N", help="Keep the profile of the layout of this trial: its page shows it."
        ),
    ] = None,
    db: DatabaseOption = None,
    json: JsonFlag = False,
) -> None:
    """Measure layouts and model files on a device.

    Every combination of the lists is measured.

    Layouts, and those of folders, are exported with random weights. Earlier results are not reused. In tables, t/s is
    the mean of the repetitions and its standard deviation, as in llama-bench; the value with its 95 % interval is that
    of studies: corrected, by the reference model beside it, to a device that nothing disturbs.
    """
    lists = (numbers_of(prompt, "--prompt"), numbers_of(gen, "--gen"), numbers_of(threads, "--threads"))
    models = list(map(_model_of, subjects))
    if mmproj is not None and not all(isinstance(model, Path) for model in models):
        raise InvalidInput("is of a model file: a layout names its tower itself", where="--mmproj")
    benches = [
        BenchOptions(
            subject=model,
            runtime=runtime,
            quantisation=quantisation,
            device=device,
            workload=workload_of(
                prompt=tokens,
                gen=new,
                context=context,
                threads=count,
                images=int(_reads(model, "images", mmproj, sounds)) if images is None else images,
                image_height=image_height,
                image_width=image_width,
                sounds=int(_reads(model, "sounds", mmproj, sounds)) if sounds is None else sounds,
                seconds=seconds,
            ),
            repetitions=reps,
            protocol=MeasurementSettings(),
            db=db,
            profile=profile,
            projector=mmproj,
            image_tokens=image_tokens,
        )
        for model, tokens, new, count in itertools.product(models, *lists)
    ]
    if format is None and len(benches) > 1:
        format = Format.TABLE
    if profile and not json and format in (Format.MARKDOWN, Format.CSV):
        raise InvalidInput("profiles are shown by the format table, and by --json", where="--profile")
    recorder = None if trial is None else _trial_of(trial, benches)
    reports: list[dict[str, Any]] = []
    failed: BaseException | None = None
    with activity("preparing the device") as log:
        try:
            for number, report in enumerate(bench_all(benches, log), start=1):
                reports.append(report)
                log(Progress("measured", number, len(benches)))
        except (KeyboardInterrupt, NasError, OSError) as error:
            if not reports:
                raise
            failed = error
            log(f"stopped: {len(reports)} of {len(benches)} are measured, and below")
    if recorder is not None:
        _keep(recorder, reports[0], db)
        say(f"kept with trial {trial}")
    if json:
        print_json(reports[0] if len(benches) == 1 else {"results": reports})
    else:
        _print(reports, format)
    if failed is not None:
        raise failed


def _print(reports: Sequence[dict[str, Any]], format: Format | None) -> None:
    """Prints reports as a table, or the details of the only one."""
    if format is None:
        print_fields(_fields(reports[0]))
    else:
        rows = [row for report in reports for row in _rows(report)]
        print_rows(format, _COLUMNS, map(_cells, rows), rows, numbers=5)
    for report in reports:
        _print_profile(report)


def _trial_of(text: str, benches: Sequence[BenchOptions]) -> tuple[int, int]:
    """Returns the ids of the study and trial whose layout is measured.

    Raises:
        InvalidInput: no such text, no profile of one layout, or another layout's.
        UnknownName: no such study or trial.
    """
    study, _, number = text.rpartition("/")
    if not study or not (number.isascii() and number.isdecimal() and len(number) < 10):
        raise InvalidInput(f"{text!r} is not a trial; write STUDY/NUMBER", where="--trial")
    if len(benches) != 1 or not benches[0].profile:
        raise InvalidInput(
            "keeps the profile of one layout and request: give one of each, and --profile", where="--trial"
        )
    with open_store(benches[0].db) as store:
        row = trials.get(store, studies.find_id(store, study), int(number))
    subject = benches[0].subject
    if not isinstance(subject, Layout) or subject.id != row.layout_id:
        raise InvalidInput(f"trial {text} has another layout: {Layout.from_json(row.layout)}", where="--trial")
    return row.study, row.number


def _keep(trial: tuple[int, int], report: dict[str, Any], db: str | None) -> None:
    """Logs the profile of a report with a trial."""
    study, number = trial
    runtime, workload = report["runtime"], report["workload"]
    note = Profiled(
        number,
        report["device"]["id"],
        runtime["name"],
        runtime["build"],
        workload["prompt"],
        workload["gen"],
        workload["threads"],
        ProfileSummary.model_validate(report["profile"]),
    )
    with open_store(db) as store:
        events.append(store, study, note.to_json())


def _model(report: dict[str, Any]) -> str:
    return str(report.get("layout") or Path(report["file"]).name)


def _rows(report: dict[str, Any]) -> Iterator[Row]:
    """Yields a row each for prefill and decode, with the columns of llama-bench where both have them."""
    workload = report["workload"]
    for phase, test in (("prefill", f"pp{workload['prompt']}"), ("decode", f"tg{workload['gen']}")):
        figure = report["tokens_per_s"][phase]
        if phase == "decode" and not workload["gen"]:
            continue
        yield {
            "model": _model(report),
            "size_mb": report["file_mb"],
            "runtime": report["runtime"]["name"],
            "device": report["device"]["id"],
            "threads": workload["threads"],
            "prompt": workload["prompt"],
            "gen": workload["gen"],
            "test": test,
            "mean_ts": figure["mean"],
            "sd_ts": figure["sd"],
            "value_ts": figure["value"],
            "low_ts": figure["ci95"][0],
            "high_ts": figure["ci95"][1],
            "repetitions": figure["n"],
            "peak_rss_mb": report["peak_rss_mb"]["total"],
        }


def _cells(row: Row) -> list[str]:
    mean, sd, value, low, high = (_number(row, f"{name}_ts") for name in ("mean", "sd", "value", "low", "high"))
    return [
        str(row["model"]),
        figure_text(_number(row, "size_mb"), "MB"),
        str(row["runtime"]),
        str(row["threads"]),
        str(row["test"]),
        "unknown" if mean is None else show_spread(mean, sd),
        "unknown" if value is None else show_figure(value, low, high),
        figure_text(_number(row, "peak_rss_mb"), "MB"),
    ]


def _number(row: Row, name: str) -> float | None:
    value = row[name]
    return value if isinstance(value, (int, float)) else None


_COLUMNS = ("model", "size", "runtime", "threads", "test", "t/s", "t/s, corrected (95 %)", "peak memory")


def _print_profile(report: dict[str, Any]) -> None:
    """Prints the times of layers and operators, where the report has them."""
    if (profile := report.get("profile")) is None:
        return
    typer.echo()
    print_fields(
        [
            ("profile", f"{_model(report)}, {_requested(report['workload'])}"),
            ("  prefill", _compared(profile["prefill"], "ms")),
            ("  decode", _compared(profile["decode"], "ms/token")),
            ("  other processes", _busy(profile["foreign_cpu"])),
        ]
    )
    typer.echo()
    parts = [[part["layer"], part["block"] or part["part"], *_times(part)] for part in profile["parts"]]
    print_table(("layer", "block", *_TIMES), parts)
    typer.echo()
    print_table(("operator", *_TIMES), [[one["operator"], *_times(one)] for one in profile["operators"]])


_TIMES = ("prefill ms", "share", "decode ms/token", "share")


def _times(row: dict[str, Any]) -> list[str]:
    return [
        text
        for phase in ("prefill", "decode")
        for text in (f"{row[f'{phase}_ms']:.4f}", f"{row[f'{phase}_share']:.1%}")
    ]


def _compared(phase: dict[str, float], unit: str) -> str:
    """Formats the sum of all nodes' times beside the time of the same request without timing them."""
    whole, total = phase["whole_ms"], phase["sum_ms"]
    difference = f" ({show_share(total / whole - 1, signed=True)})" if whole else ""
    sums, untimed = show_number(total), show_number(whole)
    return f"{sums} {unit} as the sum of all operators, {untimed} {unit} when they are not timed{difference}"


def _fields(report: dict[str, Any]) -> list[tuple[str, object]]:
    ttft, decode, memory, workload = (report[name] for name in ("ttft_ms", "decode_ms", "peak_rss_mb", "workload"))
    refused = f", {show_share(report['refused_share'])} of repetitions failed" if report["refused_share"] else ""
    drift, others = report["reference"]["drift"], report["foreign_cpu"]
    times: list[tuple[str, object]] = [
        ("TTFT", f"{figure_text(ttft['value'], 'ms', ends=ttft['ci95'])}, n = {ttft['n']}{refused}"),
        ("  as experienced", figure_text(ttft["typical"], "ms")),
        ("prefill", _speed(report["tokens_per_s"]["prefill"], others)),
        ("decode", _speed(report["tokens_per_s"]["decode"], others)),
        ("decode p50", figure_text(decode["p50"], "ms/token", ends=decode["ci95"])),
        ("  as experienced", figure_text(decode["typical"], "ms/token")),
        ("decode p95", figure_text(decode["p95"], "ms/token", decode["p95_ci95"], decode["p95_reason"])),
    ]
    if (media := Workload(**workload).media) is not None:
        kind, titles = media.removesuffix("s"), TTFT_PARTS[media]
        more = {f"{kind}_tokens": f"{kind} tokens", **({"sound_factor": "real-time factor"} if kind == "sound" else {})}
        times[2:2] = [
            (f"  {title}", figure_text(figure["value"], figure["unit"], reason=figure["reason"]))
            for name, title in (more | titles).items()
            if (figure := report["figures"].get(name)) is not None
        ]
    if not workload["gen"]:
        figures = {name: report["figures"][name] for name in ("encoding", "documents_per_s", "index_bytes")}
        times = [
            (METRICS[name].label, figure_text(figure["value"], figure["unit"], figure["ci95"], figure["reason"]))
            for name, figure in figures.items()
        ]
        times[1:1] = [("  as experienced", figure_text(figures["encoding"]["typical"], "ms"))]
        times += [("prefill", _speed(report["tokens_per_s"]["prefill"], others))]
    return [
        ("layout", report.get("layout")),
        ("file", report.get("file")),
        ("runtime", f"{report['runtime']['name']} build {report['runtime']['build'][:12]}"),
        ("device", f"{report['device']['id']} ({report['device']['cpu']})"),
        ("workload", _requested(workload)),
        *times,
        ("peak memory", figure_text(memory["total"], "MB")),
        ("GPU", _gpu(report["gpu"])),
        ("load", figure_text(report["load_ms"], "ms")),
        ("file size", figure_text(report["file_mb"], "MB")),
        ("reference model", None if drift is None else f"{show_share(drift, signed=True)} off its calibration"),
        ("other processes", _busy(others)),
    ]


def _gpu(gpu: dict[str, Any]) -> str | None:
    if gpu["memory_mb"] is None:
        return None
    software = (
        "; a driver on the processor: it shows that files work, never how fast they are" if gpu["software"] else ""
    )
    return f"{figure_text(gpu['memory_mb'], 'MB')} on {gpu['name']} ({gpu['description']}){software}"


def _reads(model: Path | Layout, media: Media, mmproj: Path | None, sounds: int | None) -> bool:
    """Returns whether a request has something to read by default; a file's tower is one of images unless told."""
    if isinstance(model, Layout):
        return model.tower is not None and model.tower.media == media
    return mmproj is not None and media == "images" and not sounds


def _busy(cores: float | None) -> str | None:
    return None if cores is None else f"{cores:.2f} of a core meanwhile"


def _requested(workload: dict[str, Any]) -> str:
    out = f"{workload['gen']} out" if workload["gen"] else "a vector for each"
    media = ""
    if (load := Workload(**workload)).media:
        media = f"{load.described_media()}, "
    return f"{media}{workload['prompt']} tokens in, {out}, {workload['threads']} thread(s)"


def _speed(figure: dict[str, Any], others: float | None) -> str:
    """Formats tokens per second with its interval, and mean and deviation of the repetitions; these first if busy.

    Args:
        figure: tokens per second.
        others: cores that other processes used meanwhile.
    """
    idle = figure_text(figure["value"], "tokens/s", ends=figure["ci95"])
    if figure["mean"] is None:
        return idle
    mean = show_spread(figure["mean"], figure["sd"])
    return f"{mean} tokens/s; on an idle machine about {idle}" if (others or 0.0) > BUSY else f"{idle}; mean {mean}"
