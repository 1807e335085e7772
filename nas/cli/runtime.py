"""`nas runtime`: list and build inference runtimes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from nas.cli.lazy import command_app
from nas.cli.output import JsonFlag, print_json, print_table
from nas.cli.progress import activity
from nas.core.plan import Runner
from nas.measure.runtimes import RUNTIMES
from nas.measure.runtimes.base import Build, Runtime

app = command_app(help="List and build runtimes.")


@app.command("list")
def list_runtimes(json: JsonFlag = False) -> None:
    """List runtimes with their quantisations and cached builds."""
    builds = {name: RUNTIMES[name].builds() for name in RUNTIMES}
    if json:
        print_json({"runtimes": [_as_json(RUNTIMES[name], cached) for name, cached in builds.items()]})
        return
    print_table(
        ("runtime", "quantisations", "builds"),
        [(name, ", ".join(RUNTIMES[name].quantisations), _as_text(name, cached)) for name, cached in builds.items()],
    )


def _as_json(runtime: Runtime, builds: Sequence[Build]) -> dict[str, Any]:
    return {
        "name": runtime.name,
        "quantisations": list(runtime.quantisations),
        "builds": [
            {
                "id": build.runner.build,
                "target": build.runner.target,
                "variant": build.variant,
                "patched": build.runner.patched,
                "folder": str(build.folder),
            }
            for build in builds
        ],
    }


def _as_text(name: str, builds: Sequence[Build]) -> str:
    texts = [
        f"{build.runner.build[:12]} ({_kind(build.runner)}{build.runner.target} {build.variant})" for build in builds
    ]
    return ", ".join(texts) or f"none: run `nas runtime build {name}`"


def _kind(runner: Runner) -> str:
    return "patched, " * runner.patched + "images, " * ("--mmproj" in runner.options)


@app.command("build")
def build_runtime(
    name: Annotated[str, typer.Argument(help="Runtime name, such as llama.cpp.")],
    patched: Annotated[
        bool, typer.Option("--patched", help="Apply the hilnas patches, for layouts beyond the stock architectures.")
    ] = False,
    target: Annotated[
        str, typer.Option(help="Target platform, such as aarch64-linux for phones; host: this machine.")
    ] = "host",
    variant: Annotated[
        str | None,
        typer.Option(
            help="Instruction set. Default: the best of this machine, or one that most machines of TARGET run."
        ),
    ] = None,
    tools: Annotated[
        bool,
        typer.Option("--tools", help="Also build the runtime's own programs to generate text, benchmark and quantise."),
    ] = False,
    static: Annotated[
        bool, typer.Option("--static", help="Link statically, for machines with older system libraries.")
    ] = False,
    images: Annotated[
        bool,
        typer.Option("--images", help="Also encode images and sounds, for searches of `task: vision` and `audio`."),
    ] = False,
) -> None:
    """Build a runtime and print the folder of the build; cached builds are reused.

    The first build of llama.cpp downloads 77 MB and compiles for 2-5 minutes; cross-compiled and static builds also
    download a compiler (100 MB). executorch compiles one file against the libraries of the installed package; for
    aarch64-linux it downloads the libraries (18 MB) and the same compiler.
    """
    runtime = RUNTIMES[name]
    with activity(f"building {name}") as log:
        build = runtime.build(
            target, log=log, patched=patched, variant=variant, tools=tools, static=static, images=images
        )
    typer.echo(build.folder)
