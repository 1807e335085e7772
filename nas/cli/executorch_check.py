"""What `nas doctor` says of ExecuTorch: its packages, its runner, its lowered programs."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

from nas.cli.checks import Finding
from nas.core.errors import NasError
from nas.runtimes.executorch.builds import find_build
from nas.runtimes.executorch.templates import PACKAGES, templates_folder

_NAME = "executorch"
_INSTALL = "install hilnas[executorch]; spaces that measure with llama.cpp alone do without"


def executorch_findings() -> Iterator[Finding]:
    """Its checks: none is a failure, because llama.cpp does without all of it."""
    wanted, found = _wanted(), _installed()
    missing = [name for name in PACKAGES if name not in found]
    if missing:
        yield Finding(_NAME, "warning", f"not installed: {', '.join(missing)}", _INSTALL)
        return
    other = [f"{name} {found[name]} instead of {version}" for name, version in wanted.items() if found[name] != version]
    if other:
        # Lowering leans on private parts of just these versions.
        yield Finding(_NAME, "warning", ", ".join(other), "install hilnas[executorch] anew, which pins them")
    else:
        yield Finding(_NAME, "ok", ", ".join(f"{name} {found[name]}" for name in PACKAGES))
    yield _runner(found[_NAME])
    kept = [path.stat().st_size for path in templates_folder().glob("[0-9a-f]*")]
    yield Finding("et-programs", "ok", f"{len(kept)} lowered for ExecuTorch, {sum(kept) / 1e6:.1f} MB")


def _wanted() -> dict[str, str]:
    """Package -> the version that our own metadata pins."""
    pins = [line.partition(";")[0].strip().partition("==") for line in importlib.metadata.requires("hilnas") or ()]
    return {name: version for name, _, version in pins if name in PACKAGES and version}


def _installed() -> dict[str, str]:
    """Package -> its version, without what marks a build of it such as "+cpu"."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _runner(version: str) -> Finding:
    make = "run `nas runtime build executorch`"
    try:
        build = find_build()
    except NasError as error:
        problem, _, remedy = str(error).partition(": ")
        return Finding("et-runner", "warning", problem, remedy or make)
    if build.details.executorch != version:
        problem = f"build {build.runner.build[:12]} is of ExecuTorch {build.details.executorch}, {version} is installed"
        return Finding("et-runner", "warning", problem, make)
    return Finding("et-runner", "ok", f"build {build.runner.build[:12]} ({build.details.variant})")
