"""`nas doctor`: diagnose problems that break hilnas or degrade its measurements, and suggest fixes."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

import typer

from nas.cli import preflight
from nas.cli.lazy import command_app
from nas.cli.options import DatabaseOption
from nas.cli.output import JsonFlag, print_json, say
from nas.core import paths
from nas.core.errors import NasError
from nas.core.logs import without_passwords
from nas.measure.devices.probes.cpu import governor
from nas.measure.devices.probes.memory import free_memory_mb
from nas.measure.devices.probes.readings import Unread
from nas.measure.devices.probes.thermal import cooling_level, temperature_c, throttle_count
from nas.measure.devices.transports.local import LocalTransport
from nas.measure.runtimes import DEFAULT_RUNTIME, RUNTIMES
from nas.measure.runtimes.base import Finding, Status, finding_of

FREE_DISK_GB = 5.0
FREE_MEMORY_MB = 2000.0

SEARCH_PACKAGES = ("torch", "ray", "sqlalchemy", "moocore", "scipy", "gguf", "llama_cpp")
GOOD_CLOCKS = ("tsc", "arch_sys_counter", "kvm-clock", "hyperv_clocksource_tsc_page")
MARKS = {"ok": "ok  ", "warning": "warn", "failure": "FAIL"}

app = command_app()


@app.command()
def doctor(db: DatabaseOption = None, json: JsonFlag = False) -> None:
    """Diagnose problems on this machine and suggest fixes.

    Exit code 1 if `nas launch` cannot work here; 0 if there are only warnings.
    """
    findings = []
    for finding in run_checks(db):
        findings.append(finding)
        if not json:
            _show(finding)
    if json:
        print_json({"status": worst(findings), "checks": [dataclasses.asdict(finding) for finding in findings]})
    if worst(findings) == "failure":
        say("hilnas cannot work here: see the fixes above")
        raise typer.Exit(1)


def run_checks(database: str | None) -> Iterator[Finding]:
    """Runs all checks and yields their findings.

    Args:
        database: URL of the database to check; None for the default one.
    """
    yield Finding("python", "ok", f"{sys.version.split()[0]} ({sys.executable})")
    yield _packages()
    yield from RUNTIMES[DEFAULT_RUNTIME].doctor()
    yield _writable("home", paths.home(), "NAS_HOME")
    yield _writable("cache", paths.cache(), "NAS_CACHE")
    yield _disk(paths.home())
    yield _database(database)
    yield finding_of("key", _signing_key)
    yield _clock()
    yield _cores()
    yield from _sensors(LocalTransport(paths.cache() / "devices"))
    for name in RUNTIMES:
        if name != DEFAULT_RUNTIME:
            yield from RUNTIMES[name].doctor()


def worst(findings: Iterable[Finding]) -> Status:
    """Returns the worst status of `findings`; "ok" if there are none."""
    order: tuple[Status, ...] = ("ok", "warning", "failure")
    return max((finding.status for finding in findings), key=order.index, default="ok")


def _show(finding: Finding) -> None:
    typer.echo(f"{MARKS[finding.status]}  {finding.name:<12}{finding.detail}")
    if finding.fix:
        typer.echo(f"      {'':<12}fix: {finding.fix}")


def _packages() -> Finding:
    missing = [name for name in SEARCH_PACKAGES if find_spec(name) is None]
    if missing:
        return Finding(
            "packages",
            "failure",
            f"not installed: {', '.join(missing)}",
            "run 'make setup', or in the checkout: pip install '.[search]'",
        )
    return Finding("packages", "ok", f"{len(SEARCH_PACKAGES)} required packages installed")


def _writable(name: str, folder: Path, variable: str) -> Finding:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return Finding(name, "ok", str(folder))
    except OSError as error:
        return Finding(
            name, "failure", f"{folder}: {error.strerror}", f"make it writable, or set {variable} to another folder"
        )


def _disk(folder: Path) -> Finding:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free / 1e9
    if free < FREE_DISK_GB:
        fix = f"free {FREE_DISK_GB - free:.1f} GB (`nas gc` removes stored files), or set NAS_HOME to another disk"
        return Finding("disk", "warning", f"{free:.1f} GB free", fix)
    return Finding("disk", "ok", f"{free:.0f} GB free")


def _database(url: str | None) -> Finding:
    from nas.infra.store.engine import database_url, sqlite_file
    from nas.infra.store.store import Store

    try:
        target = database_url(url)
        shown = without_passwords(target.render_as_string(hide_password=True))
        path = sqlite_file(target)
        if path is not None and not path.exists():
            return Finding("database", "ok", f"{shown}: none yet, created by the first launch")
        Store.open(url, create=False).close()
        return Finding("database", "ok", shown)
    except NasError as error:
        return Finding(
            "database", "failure", str(error), "see the message; `nas db upgrade` upgrades an older database"
        )


def _signing_key() -> str:
    from nas.core.trust import fingerprint
    from nas.measure.farm.trust import find_key

    key = find_key(paths.home())
    return f"signs with {fingerprint(key.public)}" if key else "none yet, created by the first launch"


def _clock() -> Finding:
    resolution = time.get_clock_info("monotonic").resolution
    source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    name = source.read_text().strip() if source.exists() else "unknown source"
    detail = f"{name}, {resolution * 1e9:.0f} ns"
    if resolution > 1e-6 or (source.exists() and name not in GOOD_CLOCKS):
        return Finding(
            "clock", "warning", detail, "token times are coarse: boot with clocksource=tsc if the CPU supports it"
        )
    return Finding("clock", "ok", detail)


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        return Finding("cores", "warning", "1 core", "the search disturbs measurements: use a host with 2 or more")
    return Finding("cores", "ok", f"{cores} cores")


def _sensors(tree: LocalTransport) -> Iterator[Finding]:
    yield _busy()
    yield _reading("memory", lambda: _enough_memory(free_memory_mb(tree)))
    yield _reading("governor", lambda: _steady(governor(tree)))
    yield _reading("temperature", lambda: Finding("temperature", "ok", f"{temperature_c(tree):.0f} C"))
    yield _reading("throttling", lambda: Finding("throttling", "ok", _throttling(tree)))


def _reading(name: str, read: Callable[[], Finding]) -> Finding:
    try:
        return read()
    except Unread as reason:
        return Finding(name, "warning", str(reason), "none needed: measurements are taken without it and marked")


def _busy() -> Finding:
    load = preflight.load()
    if load.busy:
        return Finding("load", "warning", load.text, "stop them for narrower intervals")
    return Finding("load", "ok", load.text)


def _enough_memory(free: float) -> Finding:
    if free < FREE_MEMORY_MB:
        return Finding("memory", "warning", f"{free:.0f} MB free", "large candidates will fail: close other programs")
    return Finding("memory", "ok", f"{free:.0f} MB free")


def _steady(name: str) -> Finding:
    if name != "performance":
        return Finding("governor", "warning", name, "for stable results: cpupower frequency-set -g performance")
    return Finding("governor", "ok", name)


def _throttling(tree: LocalTransport) -> str:
    try:
        return f"{throttle_count(tree)} events since boot"
    except Unread:
        return f"cooling level {cooling_level(tree)}"
