"""`nas runtime`: what models can be exported to and measured with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import typer

from nas.cli.lazy import command_app
from nas.cli.output import JsonFlag, print_json, print_table, say
from nas.core.errors import UnknownName
from nas.runtimes import RUNTIMES
from nas.runtimes.base import Runtime
from nas.runtimes.executorch import build as executorch
from nas.runtimes.executorch import builds as executorch_builds
from nas.runtimes.llama_cpp import build as llama_cpp
from nas.runtimes.llama_cpp import builds as llama_cpp_builds

Build = llama_cpp_builds.Build | executorch_builds.Build

BUILDS: dict[str, Callable[..., Build]] = {"llama.cpp": llama_cpp.build, "executorch": executorch.build}
"""Runtimes whose build hilnas makes itself."""
AT_HAND: dict[str, Callable[[], Iterator[Build]]] = {
    "llama.cpp": llama_cpp_builds.all_builds,
    "executorch": executorch_builds.all_builds,
}

app = command_app(help="List runtimes and build them.")


@app.command("list")
def list_runtimes(json: JsonFlag = False) -> None:
    """List runtimes, what they quantise to, and their builds at hand."""
    builds = {name: list(AT_HAND[name]()) if name in AT_HAND else [] for name in RUNTIMES}
    if json:
        print_json({"runtimes": [_as_json(RUNTIMES[name], found) for name, found in builds.items()]})
        return
    print_table(
        ("runtime", "quantisations", "builds"),
        [(name, ", ".join(RUNTIMES[name].quantisations), _as_text(name, found)) for name, found in builds.items()],
    )


def _as_json(runtime: Runtime, builds: Sequence[Build]) -> dict[str, Any]:
    return {
        "name": runtime.name,
        "quantisations": list(runtime.quantisations),
        "builds": [
            {
                "id": build.runner.build,
                "target": build.runner.target,
                "variant": build.details.variant,
                "patched": build.runner.patched,
                "folder": str(build.folder),
            }
            for build in builds
        ],
    }


def _as_text(name: str, builds: Sequence[Build]) -> str:
    shown = [
        f"{build.runner.build[:12]} ({'patched, ' * build.runner.patched}{build.runner.target} {build.details.variant})"
        for build in builds
    ]
    return ", ".join(shown) or f"none: run `nas runtime build {name}`"


@app.command("build")
def build_runtime(
    name: Annotated[str, typer.Argument(help="Runtime, such as llama.cpp.")],
    patched: Annotated[
        bool, typer.Option("--patched", help="With our patches: any mix of layers, not only the stock architectures.")
    ] = False,
    target: Annotated[
        str, typer.Option(help="What the devices are, such as aarch64-linux for phones; host: this machine.")
    ] = "host",
    variant: Annotated[
        str | None, typer.Option(help="Instruction set; the best of this machine, or of the target, unless given.")
    ] = None,
    tools: Annotated[
        bool, typer.Option("--tools", help="Also build the runtime's own benchmark and quantiser.")
    ] = False,
    static: Annotated[
        bool, typer.Option("--static", help="One file that needs no libraries, for machines with older ones.")
    ] = False,
) -> None:
    """Build a runtime, unless the cache holds that build already.

    The first build of llama.cpp downloads 77 MB and compiles for 2-5 minutes; for another machine, and for a static
    file, it downloads a compiler too (100 MB). That of executorch compiles one file against the libraries of the
    installed package; for aarch64-linux it downloads the libraries (18 MB) and needs the package g++-aarch64-linux-gnu
    (Debian, Ubuntu).
    """
    if name not in BUILDS:
        raise UnknownName("runtime with a build", name, BUILDS)
    build = BUILDS[name](target, log=say, patched=patched, variant=variant, tools=tools, static=static)
    typer.echo(build.folder)
