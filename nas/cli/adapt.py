"""`nas adapt`: search inside a trained model for a child that keeps budgets on a device."""

from __future__ import annotations

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
    PriceOption,
    PromptOption,
    RepsOption,
    RuntimeOption,
    ThreadsOption,
)
from nas.cli.output import JsonFlag, figure_text, print_fields, print_json, print_table, say
from nas.cli.progress import activity
from nas.core.durable import require_output
from nas.core.errors import InvalidInput
from nas.core.metrics import metric
from nas.core.units import show_duration, show_number
from nas.measure.runtimes import DEFAULT_RUNTIME

app = command_app()


@app.command("adapt")
def command(
    context: typer.Context,
    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL", help="GGUF file, folder of transformers, or a checkpoint that names its layout."
        ),
    ] = None,
    budget: BudgetOption = None,
    corpus: Annotated[
        list[Path] | None, typer.Option("--corpus", "-c", help="File or folder of text to train and score on.")
    ] = None,
    own_text: Annotated[
        int,
        typer.Option(
            "--own-text",
            metavar="TOKENS",
            min=0,
            help="Conversations that a chat model writes itself, beside --corpus or instead of it.",
        ),
    ] = 0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder of results.")] = None,
    device: DeviceOption = "local",
    runtime: RuntimeOption = DEFAULT_RUNTIME,
    quantisation: Annotated[
        list[str] | None,
        typer.Option(
            "--quantisation",
            "-q",
            help="Quantisation; several times: each place chooses one, the model has the first."
            " Default: the runtime's first.",
            show_default=False,
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", help="The model's tokenizer.json or GGUF file. Default: MODEL's own.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Request and settings as YAML or JSON; options override its keys.")
    ] = None,
    hours: Annotated[
        float | None,
        typer.Option(
            "--hours",
            min=0.001,
            help="Total time budget in hours; token counts are scaled to fit. Default: token counts from --config.",
        ),
    ] = None,
    library_folder: Annotated[
        Path | None, typer.Option("--library", help="Library of trained blocks. Default: library in $NAS_HOME.")
    ] = None,
    workers: Annotated[
        int, typer.Option("--workers", min=1, help="Processes of this machine that train the library.")
    ] = 1,
    ray_address: Annotated[
        str | None, typer.Option("--ray-address", help="Address of a Ray cluster that trains the library.")
    ] = None,
    prompt: PromptOption = 512,
    gen: GenOption = 128,
    threads: ThreadsOption = 1,
    reps: RepsOption = 5,
    gguf: Annotated[list[str], typer.Option("--gguf", help="Quantisations of the GGUF files.")] = ["q4_0", "f16"],  # noqa: B006
    pte: Annotated[bool, typer.Option("--pte", help="Also write a .pte for ExecuTorch.")] = False,
    front: Annotated[
        int,
        typer.Option("--front", min=0, max=32, help="Number of further children of the front to heal, for a curve."),
    ] = 0,
    write_space: Annotated[
        Path | None,
        typer.Option(
            "--write-space",
            metavar="FILE",
            help="Write a search space of mixes of the library's blocks for `nas launch` instead of a child.",
        ),
    ] = None,
    mixes: Annotated[int, typer.Option("--mixes", min=4, help="Layouts of --write-space.")] = 256,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Time the parts, print tokens, FLOPs, memory, time and price, and exit.")
    ] = False,
    price_per_hour: PriceOption = None,
    db: DatabaseOption = None,
    json: JsonFlag = False,
) -> None:
    """Search inside a trained model for a child that keeps budgets on a device.

    Alternatives of each block are trained against the model's own, scored, and selected exactly by sums of scores and
    measured costs; the chosen child is measured, trained end to end against the model, and its files are written. A
    limit such as 0.8x is relative to the model's own figure. Kill it at any time: the same command continues. With
    --write-space, a study searches the mixes instead. MODEL, --budget, --output and --corpus or
    --own-text are required, on the command line or in the file of --config. See docs/how-to/adapting-a-model.md.
    """
    from nas.measure.devices.host_lock import HostLock, host_lock_folder
    from nas.model.nn.fit import Worker, device_of
    from nas.train.adapt.adapt import write_child
    from nas.train.adapt.device import bench_of
    from nas.train.adapt.parallel import workers_of
    from nas.train.adapt.prepare import prepare, reserved
    from nas.train.adapt.request import AdaptRequest, read_request
    from nas.train.adapt.space import check_target
    from nas.train.adapt.space import write_space as write

    if price_per_hour is not None and not dry_run:
        raise InvalidInput("applies only with --dry-run", where="--price-per-hour")
    sources = {name: context.get_parameter_source(name) for name in AdaptRequest.model_fields}
    explicit = {name: context.params[name] for name, source in sources.items() if source and source.name != "DEFAULT"}
    request = read_request(config, explicit)
    if request.write_space is not None:
        check_target(request.write_space)
        require_output(request.write_space, reads=[config] if config else [], flag="--write-space")
    trainers = workers_of(request)
    lock = HostLock(host_lock_folder())

    def wait_for_measurements() -> None:
        with lock.shared():
            pass  # not held while it computes: the agent that measures for this command asks for the whole machine

    try:
        with reserved(request.output), activity(f"preparing {request.model}") as log:
            worker = Worker(device_of(), log, wait_for_measurements)
            adaptation = prepare(request, bench_of(request, log), worker, trainers)
            adaptation.check_text()
            if dry_run:
                result = adaptation.plan(price_per_hour)
            elif request.write_space is not None:
                result = write(adaptation)
            else:
                result = adaptation.run()
                result["files"] = write_child(adaptation, result)
    except KeyboardInterrupt:
        say("interrupted; the same command continues")
        raise typer.Exit(INTERRUPTED) from None
    if json:
        print_json(result)
    elif dry_run:
        _show_plan(result, price_per_hour)
    elif request.write_space is not None:
        print_fields(result.items())
    else:
        _show(result)


def _show_plan(plan: dict[str, Any], price_per_hour: float | None) -> None:
    from nas.cli.family.training import print_gpus

    tokens, disk, state = plan["tokens"], plan["disk_bytes"] / 1e9, plan["state_bytes"] / 1e9
    flops = ", ".join(f"{name} {value:.2g}" for name, value in plan["flops"].items())
    print_fields(
        (
            ("alternatives", f"{plan['alternatives']:,} at {plan['places']:,} places"),
            ("tokens", f"{tokens['library']:,} for each alternative, {tokens['healing']:,} for the child"),
            *((name, f"about {show_duration(seconds)}") for name, seconds in plan["seconds"].items()),
            ("compute", f"{sum(plan['flops'].values()):.2g} FLOPs: {flops}"),
            ("disk", f"{disk:,.1f} GB"),
            ("memory", f"{state:,.1f} GB for weights, gradients and moments of the healing; activations come on top"),
        )
    )
    print_gpus(plan["gpus"], plan["utilisation"], price_per_hour)
    say("blocks that are trained alone reach less of it")


def _show(report: dict[str, Any]) -> None:
    names = list(report["budgets"])
    rows = [
        (
            f"{child['predicted']['loss']:.4f}",
            *(show_number(child["measured"][name]) for name in names),
            child["layout"],
        )
        for child in report["front"]
    ]
    heads = [f"{name} [{unit}]" if (unit := metric(name).unit) else name for name in names]
    print_table(("summed score", *heads, "layout"), rows, "front, before healing")
    if report["curve"]:
        rows = [
            (
                _change(*child["bits_per_byte_change"]["all"]),
                *(show_number(child["measured"][name]) for name in names),
                child["layout"],
            )
            for child in report["curve"]
        ]
        print_table(("bits per byte", *heads, "layout"), rows, "curve, after healing")
    teacher, child = report["teacher"], report["child"]
    changes = {name: _change(*change) for name, change in child["bits_per_byte_change"].items()}
    bits = f"{child['bits_per_byte']:.4f}, model {teacher['bits_per_byte']:.4f}, {changes['all']}"
    windows = report["windows"]
    print_fields(
        (
            ("child", child["layout"]),
            *((name, _figure(child, teacher, name)) for name in names),
            ("bits per byte", bits),
            *([("  as stored", _stored(child, teacher))] if "stored" in child else []),
            *((f"  of {name}", changes[name]) for name in changes if name != "all"),
            (
                "context",
                f"scored on {windows['scores']:,} tokens, healed on {windows['healing']:,};"
                " losses in longer texts are unknown",
            ),
            *(("file", path) for path in report["files"]),
        )
    )


def _stored(child: dict[str, Any], teacher: dict[str, Any]) -> str:
    """Formats bits per byte of the child's and the model's file."""
    score, teacher_score = child["stored"], teacher["stored"]
    change = _change(*score["bits_per_byte_change"]["all"])
    return f"{score['bits_per_byte']:.4f}, {change}; model {teacher_score['bits_per_byte']:.4f}"


def _change(value: float, low: float | None, high: float | None) -> str:
    """Formats a change of bits per byte with its interval."""
    return f"{value:+z.1%}" if low is None or high is None else f"{value:+z.1%} ({low:+z.1%} to {high:+z.1%})"


def _figure(child: dict[str, Any], teacher: dict[str, Any], name: str) -> str:
    """Formats a budget's figure of the child and of the model, and the chance that the child keeps the budget."""
    chance = child["chances"].get(name)
    odds = "" if chance is None else f", kept with a chance of {chance:.1%}"
    texts = (figure_text(one["measured"][name], metric(name).unit) for one in (child, teacher))
    return f"{', model '.join(texts)}{odds}"
