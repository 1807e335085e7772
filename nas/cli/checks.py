"""What `nas doctor` looks at on this machine. A check returns findings; each that is not ok carries its remedy."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from nas.core import paths
from nas.core.errors import NasError
from nas.core.logs import without_passwords
from nas.devices.probes.cpu import busy_s
from nas.devices.probes.frequency import governor
from nas.devices.probes.memory import free_memory_mb
from nas.devices.probes.thermal import temperature_c
from nas.devices.probes.throttle import cooling_level, throttle_count
from nas.devices.probes.unread import Unread
from nas.devices.transports.local import LocalTransport
from nas.runtimes.llama_cpp.builds import find_build
from nas.runtimes.toolchain import find_toolchain

FREE_DISK_GB, FREE_MEMORY_MB = 5.0, 2000.0
BUSY_SHARE = 0.2
"""CPU share of other processes, in cores, over the look of a quarter second, above which runs will be refused."""

SEARCH_PACKAGES = ("torch", "ray", "sqlalchemy", "moocore", "scipy", "gguf", "llama_cpp")
GOOD_CLOCKS = ("tsc", "arch_sys_counter", "kvm-clock", "hyperv_clocksource_tsc_page")

Status = Literal["ok", "warning", "failure"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check.

    Args:
        name: of the check.
        status: a failure keeps `nas launch` from working; a warning makes its numbers worse or fewer.
        detail: what was found.
        fix: what to do about it; None where the status is ok.
    """

    name: str
    status: Status
    detail: str
    fix: str | None = None


def run_checks(database: str | None) -> Iterator[Finding]:
    """Every check's finding.

    Args:
        database: URL of the database to look at; None for the default one.
    """
    yield Finding("python", "ok", f"{sys.version.split()[0]} ({sys.executable})")
    yield _packages()
    yield _told_by_error("compiler", lambda: find_toolchain().version)
    yield _told_by_error("llama.cpp", lambda: f"build {find_build().runner.build[:12]}")
    yield _writable("home", paths.home(), "NAS_HOME")
    yield _writable("cache", paths.cache(), "NAS_CACHE")
    yield _disk(paths.home())
    yield _database(database)
    yield _told_by_error("key", _signing_key)
    yield _clock()
    yield _cores()
    yield from _sensors(LocalTransport(paths.cache() / "devices"))


def _packages() -> Finding:
    missing = [name for name in SEARCH_PACKAGES if find_spec(name) is None]
    if missing:
        return Finding("packages", "failure", f"not installed: {', '.join(missing)}", "install hilnas[search]")
    return Finding("packages", "ok", f"{len(SEARCH_PACKAGES)} that a search needs")


def _told_by_error(name: str, look: Callable[[], str]) -> Finding:
    """For what raises an error that names its own remedy, as 'problem: remedy'."""
    try:
        return Finding(name, "ok", look())
    except NasError as error:
        problem, _, remedy = str(error).partition(": ")
        return Finding(name, "failure", problem, remedy or None)


def _writable(name: str, folder: Path, variable: str) -> Finding:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return Finding(name, "ok", str(folder))
    except OSError as error:
        return Finding(
            name, "failure", f"{folder}: {error.strerror}", f"make it writable, or set {variable} to another"
        )


def _disk(folder: Path) -> Finding:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free / 1e9
    if free < FREE_DISK_GB:
        fix = f"free {FREE_DISK_GB - free:.1f} GB (`nas gc` removes stored files), or set NAS_HOME to another disk"
        return Finding("disk", "warning", f"{free:.1f} GB free", fix)
    return Finding("disk", "ok", f"{free:.0f} GB free")


def _database(url: str | None) -> Finding:
    from nas.store.engine import database_url, sqlite_file
    from nas.store.store import Store

    try:
        target = database_url(url)
        shown = without_passwords(target.render_as_string(hide_password=True))
        path = sqlite_file(target)
        if path is not None and not path.exists():
            return Finding("database", "ok", f"{shown}: none yet, the first launch makes it")
        Store.open(url, create=False).close()
        return Finding("database", "ok", shown)
    except NasError as error:
        return Finding(
            "database", "failure", str(error), "see the message; `nas db upgrade` brings an older one up to date"
        )


def _signing_key() -> str:
    from nas.core.manifest import fingerprint
    from nas.service.signing import find_key

    key = find_key(paths.home())
    return f"signs with {fingerprint(key.public)}" if key else "none yet, the first launch makes it"


def _clock() -> Finding:
    resolution = time.get_clock_info("monotonic").resolution
    source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    name = source.read_text().strip() if source.exists() else "unknown source"
    detail = f"{name}, {resolution * 1e9:.0f} ns"
    if resolution > 1e-6 or (source.exists() and name not in GOOD_CLOCKS):
        return Finding(
            "clock", "warning", detail, "times per token will be coarse: boot with clocksource=tsc if the CPU allows"
        )
    return Finding("clock", "ok", detail)


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        return Finding("cores", "warning", "1 core", "measuring shares it with the search: use a host with 2 or more")
    return Finding("cores", "ok", f"{cores} cores")


def _sensors(tree: LocalTransport) -> Iterator[Finding]:
    yield _busy(tree)
    yield _reading("memory", lambda: _enough_memory(free_memory_mb(tree)))
    yield _reading("governor", lambda: _steady(governor(tree)))
    yield _reading("temperature", lambda: Finding("temperature", "ok", f"{temperature_c(tree):.0f} C"))
    yield _reading("throttling", lambda: Finding("throttling", "ok", _throttling(tree)))


def _reading(name: str, look: Callable[[], Finding]) -> Finding:
    try:
        return look()
    except Unread as reason:
        return Finding(name, "warning", str(reason), "measurements go on without it and say so")


def _busy(tree: LocalTransport) -> Finding:
    def look() -> Finding:
        before, began = busy_s(tree) - time.process_time(), time.monotonic()
        time.sleep(0.25)
        share = (busy_s(tree) - time.process_time() - before) / (time.monotonic() - began)
        detail = f"other processes use {max(0.0, share):.2f} cores"
        if share > BUSY_SHARE:
            return Finding("load", "warning", detail, "stop them: repetitions measured beside them are refused")
        return Finding("load", "ok", detail)

    return _reading("load", look)


def _enough_memory(free: float) -> Finding:
    if free < FREE_MEMORY_MB:
        return Finding("memory", "warning", f"{free:.0f} MB free", "large candidates will fail: close other programs")
    return Finding("memory", "ok", f"{free:.0f} MB free")


def _steady(name: str) -> Finding:
    if name != "performance":
        return Finding("governor", "warning", name, "for steadier numbers: cpupower frequency-set -g performance")
    return Finding("governor", "ok", name)


def _throttling(tree: LocalTransport) -> str:
    try:
        return f"{throttle_count(tree)} events since boot"
    except Unread:
        return f"cooling level {cooling_level(tree)}"


def worst(findings: Iterable[Finding]) -> Status:
    """The worst status among `findings`."""
    order: tuple[Status, ...] = ("ok", "warning", "failure")
    return max((finding.status for finding in findings), key=order.index, default="ok")
