"""`nas adapt`: search inside a trained model for a child that keeps budgets on a device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nas.cli.lazy import command_app
from nas.cli.options import DatabaseOption, QuantisationOption, RuntimeOption
from nas.cli.output import JsonFlag, print_fields, print_json, print_table, say
from nas.core.errors import InvalidInput
from nas.measure.runtimes import DEFAULT_RUNTIME

if TYPE_CHECKING:
    from nas.measure.protocol.bench import BenchOptions
    from nas.train.adapt.costs import Measure

app = command_app()


@app.command("adapt")
def command(
    model: Annotated[
        Path,
        typer.Argument(metavar="MODEL", help="Folder of transformers, or a checkpoint that names its layout."),
    ],
    budget: Annotated[
        list[str],
        typer.Option("--budget", "-b", metavar="METRIC<=LIMIT", help="Limit to keep, such as decode_p50<=20ms."),
    ],
    corpus: Annotated[list[Path], typer.Option("--corpus", "-c", help="File or folder of text to train and score on.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of results.")],
    device: Annotated[str, typer.Option("--device", "-d", help="Device id or tag; local: this machine.")] = "local",
    runtime: RuntimeOption = DEFAULT_RUNTIME,
    quantisation: QuantisationOption = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", help="The model's tokenizer.json. Default: that in MODEL.", show_default=False),
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help="Settings, a JSON file.", show_default=False)] = None,
    hours: Annotated[
        float | None,
        typer.Option(
            "--hours",
            min=0.001,
            help="Time for the whole: training is scaled to it. Default: --config's tokens.",
            show_default=False,
        ),
    ] = None,
    library: Annotated[
        Path | None,
        typer.Option("--library", help="Library of trained blocks. Default: library in $NAS_HOME.", show_default=False),
    ] = None,
    workers: Annotated[
        int, typer.Option("--workers", min=1, help="Processes of this machine that train the library.")
    ] = 1,
    ray_address: Annotated[
        str | None,
        typer.Option("--ray-address", help="Address of a Ray cluster that trains the library.", show_default=False),
    ] = None,
    prompt: Annotated[int, typer.Option("--prompt", min=1, help="Prompt length in tokens.")] = 512,
    gen: Annotated[int, typer.Option("--gen", min=1, help="Tokens to generate per repetition.")] = 128,
    threads: Annotated[int, typer.Option("--threads", "-t", min=1, help="Number of compute threads.")] = 1,
    reps: Annotated[int, typer.Option("--reps", min=2, help="Number of valid repetitions.")] = 5,
    gguf: Annotated[list[str], typer.Option("--gguf", help="Quantisations of the GGUF files.")] = ["q4_0", "f16"],  # noqa: B006
    pte: Annotated[bool, typer.Option("--pte", help="Also write a .pte for ExecuTorch.")] = False,
    space: Annotated[
        Path | None,
        typer.Option(
            "--write-space",
            metavar="FILE",
            help="Write a search space of mixes of the library's blocks for `nas launch` instead of a child.",
            show_default=False,
        ),
    ] = None,
    mixes: Annotated[int, typer.Option("--mixes", min=4, help="Layouts of --write-space.")] = 256,
    db: DatabaseOption = None,
    json: JsonFlag = False,
) -> None:
    """Search inside a trained model for a child that keeps budgets on a device.

    Alternatives of each block are trained against the model's own, scored, and selected exactly by sums of scores and
    measured costs; the chosen child is measured, trained end to end against the model, and its files are written. Kill
    it at any time: the same command continues. With --write-space, a study searches the mixes instead. See
    docs/how-to/adapting-a-model.md.
    """
    import torch

    from nas.core import paths
    from nas.core.limit import Limit
    from nas.core.workload import Workload
    from nas.measure.protocol.bench import BenchOptions
    from nas.model.nn.fit import Worker
    from nas.model.nn.weights import checkpoint_layout
    from nas.train.adapt.adapt import Adaptation, require_writable, write_child
    from nas.train.adapt.checkpoints import read_model
    from nas.train.adapt.parallel import Workers
    from nas.train.adapt.settings import AdaptSettings, read_settings
    from nas.train.adapt.space import check_target, write_space

    if ray_address is not None and workers > 1:
        raise InvalidInput("cannot be combined with --ray-address: the cluster has its own", where="--workers")
    local = Workers.here(workers) if workers > 1 else None
    limits = [Limit.parse(text) for text in budget]
    settings = AdaptSettings() if config is None else read_settings(config)
    words = tokenizer or model / "tokenizer.json"
    if not words.is_file():
        raise InvalidInput(f"{words}: no such file; name the model's tokenizer.json", where="--tokenizer")
    blocks = library or paths.home() / "library"
    require_writable(output, "--output")
    require_writable(blocks, "--library")
    if space is not None:
        check_target(space)
        require_writable(space.parent, "--write-space")
    layout = read_model(model).layout if model.is_dir() else checkpoint_layout(model)
    options = BenchOptions(
        subject=layout,
        runtime=runtime,
        quantisation=quantisation,
        device=device,
        workload=Workload(prompt=prompt, gen=gen, threads=threads),
        repetitions=reps,
        db=db,
    )
    place = {"device": device, "runtime": runtime, "quantisation": quantisation or "", "repetitions": reps,
             "workload": options.workload.model_dump(mode="json")}  # fmt: skip
    accelerator = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    one = Adaptation(
        output, blocks, model, words, corpus, limits, _measured(options), place,
        settings, Worker(accelerator, say), hours,
        local if ray_address is None else Workers.of_cluster(ray_address),
    )  # fmt: skip
    one.check_text()
    if space is not None:
        written = write_space(one, space, mixes)
        if json:
            print_json(written)
        else:
            print_fields(tuple(written.items()))
        return
    report = one.run()
    report["files"] = write_child(one, report, gguf, pte_context=2048 if pte else None)
    if json:
        print_json(report)
        return
    _show(report)


def _measured(options: BenchOptions) -> Measure:
    """Returns what measures a layout with random weights as `nas bench` does."""
    from dataclasses import replace

    from nas.core.layout import Layout
    from nas.measure.protocol.bench import bench

    def measure(layout: Layout) -> dict[str, float]:
        say(f"measuring {layout}")
        report = bench(replace(options, subject=layout), say)
        figures = {name: figure["value"] for name, figure in report["figures"].items()}
        return {name: value for name, value in figures.items() if value is not None}

    return measure


def _show(report: dict[str, Any]) -> None:
    names = list(report["budgets"])
    rows = [
        (
            f"{each['predicted']['loss']:.4f}",
            *(f"{each['measured'][name]:.4g}" for name in names),
            each["layout"],
        )
        for each in report["front"]
    ]
    print_table(("summed score", *names, "layout"), rows, "front, before healing")
    teacher, child = report["teacher"], report["child"]
    lost = child["bits_per_byte"] / teacher["bits_per_byte"] - 1
    print_fields(
        (
            ("child", child["layout"]),
            *((name, f"{child['measured'][name]:.4g}, model {teacher['measured'][name]:.4g}") for name in names),
            ("bits per byte", f"{child['bits_per_byte']:.4f}, model {teacher['bits_per_byte']:.4f} ({lost:+.1%})"),
            ("text", ", ".join(report["text"])),
            *(("file", path) for path in report["files"]),
        )
    )
