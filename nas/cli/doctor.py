"""`nas doctor`: diagnose problems that break hilnas or degrade its measurements, and suggest fixes."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import typer

from nas.cli import preflight
from nas.cli.lazy import command_app, extras, pip_line
from nas.cli.options import DatabaseOption
from nas.cli.output import JsonFlag, print_json, say
from nas.core import paths
from nas.core.errors import NasError
from nas.core.logs import visible, without_passwords
from nas.measure.devices.probes.cpu import governor
from nas.measure.devices.probes.memory import free_memory_mb
from nas.measure.devices.probes.readings import Unread, read_or_empty
from nas.measure.devices.probes.thermal import cooling_level, firmware_flags, temperature_c, throttle_count
from nas.measure.devices.transports.base import Tree
from nas.measure.devices.transports.local import LocalTransport
from nas.measure.runtimes import DEFAULT_RUNTIME, RUNTIMES
from nas.measure.runtimes.base import Finding, Status, finding_of

FREE_DISK_GB = 5.0
FREE_MEMORY_MB = 2000.0

FREE_SHARED_MB = 128.0
"""Ray's store of objects is there."""
FEW_FILES = 4096

EXTRAS = {
    "corpora": "corpora in Parquet, Arrow or Zstandard",
    "vision": "models that read images",
    "audio": "models that listen",
    "judge": "reward models that judge answers",
    "evaluation": "public benchmarks of family members",
    "languages": "filtering of conversations by language",
    "postgres": "databases on a PostgreSQL server",
    "usb": "phones on a USB port without adb",
}
"""Extra -> what works with its packages alone; the runtimes' own are checked by `Runtime.doctor`."""
NETWORK_FILE_SYSTEMS = (
    *("nfs", "cifs", "smb", "9p", "afs", "ceph", "lustre", "glusterfs", "beegfs", "gpfs"),
    "fuse.sshfs",
)
"""Beginnings of their types."""

GOOD_CLOCKS = ("tsc", "arch_sys_counter", "kvm-clock", "hyperv_clocksource_tsc_page")
MARKS = {"ok": "ok  ", "warning": "warn", "failure": "FAIL"}

app = command_app()


@app.command()
def doctor(db: DatabaseOption = None, json: JsonFlag = False) -> None:
    """Diagnose problems on this machine and suggest fixes.

    Exit code 1 if `nas launch` cannot work here, 0 if there are only warnings. Where the packages for searching are
    not installed, this machine is checked as a device host only.
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
    """Runs all checks and yields their findings; a check that fails itself is a finding, too.

    Args:
        database: URL of the database to check; None for the default one.
    """
    for name, check in _checks(database):
        try:
            yield from check()
        except Exception as error:
            problem = str(error) if isinstance(error, (NasError, OSError)) else f"{type(error).__name__}: {error}"
            yield Finding(name, "failure", problem, "run 'nas --debug doctor' and report what it prints")


def _checks(database: str | None) -> Iterator[tuple[str, Callable[[], Iterable[Finding]]]]:
    searches = True
    try:
        required = extras()["search"]
        searches = any(map(_installed, required))
    except (PackageNotFoundError, KeyError):
        required = []
    yield "python", lambda: [Finding("python", "ok", f"{sys.version.split()[0]} ({sys.executable})")]
    yield "packages", lambda: [_packages(required)]
    if searches:
        yield DEFAULT_RUNTIME, lambda: RUNTIMES[DEFAULT_RUNTIME].doctor()
    yield "home", lambda: _home_checks(paths.home())
    yield "cache", lambda: [_writable("cache", paths.cache(), "NAS_CACHE")]
    if searches:
        yield "database", lambda: [_database(database)]
        yield "tmpdir", lambda: [finding_of("tmpdir", _short_sockets)]
        yield "shm", _shared_memory
    yield "key", lambda: [finding_of("key", _signing_key)]
    yield "files", lambda: [_open_files()]
    yield "clock", lambda: [_clock()]
    yield "cores", lambda: [_cores()]
    yield "container", lambda: _container(LocalTransport(Path(tempfile.gettempdir())))
    yield "load", lambda: [_busy()]
    yield "sensors", lambda: _sensors(LocalTransport(Path(tempfile.gettempdir())))
    if searches:
        for name in RUNTIMES:
            if name != DEFAULT_RUNTIME:
                yield name, RUNTIMES[name].doctor
        yield "extras", _extras


def worst(findings: Iterable[Finding]) -> Status:
    """Returns the worst status of `findings`; "ok" if there are none."""
    order: tuple[Status, ...] = ("ok", "warning", "failure")
    return max((finding.status for finding in findings), key=order.index, default="ok")


def _show(finding: Finding) -> None:
    detail = visible(finding.detail, keep="\n")  # it may name processes of others
    typer.echo(f"{MARKS[finding.status]}  {finding.name:<12}{detail}")
    if finding.fix:
        typer.echo(f"      {'':<12}fix: {finding.fix}")


def _graded(name: str, detail: str, problem: object, fix: str) -> Finding:
    """Returns a warning with its fix where there is a problem."""
    return Finding(name, "warning", detail, fix) if problem else Finding(name, "ok", detail)


def _installed(distribution: str) -> bool:
    try:
        return bool(version(distribution))
    except PackageNotFoundError:
        return False


def _packages(required: list[str]) -> Finding:
    if not required:
        return Finding("packages", "failure", "hilnas is not installed", "in the checkout: make setup")
    if missing := [name for name in required if not _installed(name)]:
        text = f"not installed: {', '.join(missing)}"
        if len(missing) < len(required):
            return Finding("packages", "failure", text, pip_line("search"))
        return Finding(
            "packages",
            "warning",
            "agents and attached devices work; searches, exports and databases do not",
            f"none needed on a host of devices; else {pip_line('search')}",
        )
    return Finding("packages", "ok", f"{len(required)} required packages installed")


def _extras() -> Iterator[Finding]:
    for extra, purpose in EXTRAS.items():
        if missing := [name for name in extras()[extra] if not _installed(name)]:
            yield Finding(extra, "ok", f"{purpose} would need {', '.join(missing)}: {pip_line(extra)}")


def _home_checks(home: Path) -> Iterator[Finding]:
    yield _writable("home", home, "NAS_HOME")
    yield _disk(home)


def _writable(name: str, folder: Path, variable: str) -> Finding:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return Finding(name, "ok", str(folder))
    except OSError as error:
        return Finding(
            name, "failure", f"{folder}: {error.strerror}", f"make it writable, or set {variable} to another folder"
        )


def _disk(folder: Path) -> Finding:
    place = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(place).free / 1e9
    fix = f"free {FREE_DISK_GB - free:.1f} GB (`nas gc` removes stored files), or set NAS_HOME to another disk"
    return _graded("disk", f"{free:.1f} GB free", free < FREE_DISK_GB, fix)


def _database(url: str | None) -> Finding:
    from nas.infra.store.engine import database_url, sqlite_file
    from nas.infra.store.store import Store

    try:
        target = database_url(url)
        safe_url = without_passwords(target.render_as_string(hide_password=True))
        path = sqlite_file(target)
        if path is not None and not path.exists():
            return Finding("database", "ok", f"{safe_url}: none yet, created by the first launch")
        Store.open(url, create=False).close()
        kind = "" if path is None else _file_system(path)
        problem = f": {kind} does not lock SQLite files reliably" * kind.startswith(NETWORK_FILE_SYSTEMS)
        fix = "use it from one machine at a time, or a PostgreSQL server; or set NAS_HOME to a local disk"
        return _graded("database", f"{safe_url}{problem}", problem, fix)
    except NasError as error:
        fix = "an older one: run 'nas db upgrade'; a damaged one: restore a backup, or name another with --db"
        return Finding("database", "failure", str(error), fix)


def _file_system(path: Path) -> str:
    """Returns the type of the file system that a path is on, such as 'ext4'."""
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    return next((mounts[folder] for folder in path.resolve().parents if folder in mounts), "")


def _short_sockets() -> str:
    paths.require_short_sockets()
    return tempfile.gettempdir()


def _shared_memory() -> Iterator[Finding]:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return
    free = shutil.disk_usage(folder).free / 1e6
    if not os.access(folder, os.W_OK):
        yield Finding("shm", "failure", f"{folder} cannot be written", "mount a tmpfs of mode 1777")
    else:
        fix = f"mount one of {FREE_SHARED_MB:.0f} MB or more (Docker: --shm-size=1g); without it Ray is slower"
        yield _graded("shm", f"{free:.0f} MB free in {folder}", free < FREE_SHARED_MB, fix)


def _open_files() -> Finding:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = hard == resource.RLIM_INFINITY
    fix = "raise it (ulimit -Hn; systemd: LimitNOFILE=; Docker: --ulimit nofile=65536)"
    detail = f"a process may open {'any number' if unlimited else hard}"
    return _graded("files", detail, not unlimited and hard < FEW_FILES, fix)


def _signing_key() -> str:
    from nas.core.trust import fingerprint
    from nas.measure.farm.trust import find_key

    key = find_key(paths.home())
    return f"signs with {fingerprint(key.public)}" if key else "none yet, created by the first launch"


def _clock() -> Finding:
    resolution = time.get_clock_info("monotonic").resolution
    source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    name = source.read_text(encoding="utf-8").strip() if source.exists() else "unknown source"
    problem = resolution > 1e-6 or (source.exists() and name not in GOOD_CLOCKS)
    fix = "token times are coarse: boot with clocksource=tsc if the CPU supports it"
    return _graded("clock", f"{name}, {resolution * 1e9:.0f} ns", problem, fix)


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0))
    fix = "the search disturbs measurements: use a host with 2 or more"
    return _graded("cores", f"{cores} core{'s' * (cores != 1)}", cores < 2, fix)


_CGROUP = "/sys/fs/cgroup"


def _container(tree: Tree) -> Iterator[Finding]:
    """Yields limits that the control group of this process has and a container cannot see otherwise."""
    path = read_or_empty(tree, "/proc/self/cgroup").rpartition("0::/")[2].partition("\n")[0]
    folders = [f"{_CGROUP}/{path}".rstrip("/"), _CGROUP]
    limits = {
        name: next(filter(None, (read_or_empty(tree, f"{folder}/{name}") for folder in folders)), "max")
        for name in ("cpu.max", "memory.max")
    }
    quota, _, period = limits["cpu.max"].partition(" ")
    if quota.isdecimal() and period.isdecimal() and int(period):
        cores = int(quota) / int(period)
        detail = f"at most the time of {cores:.3g} cores: processes wait meanwhile, which figures count as the model's"
        yield Finding("CPU quota", "warning", detail, "run without a quota (docker: --cpuset-cpus in place of --cpus)")
    if limits["memory.max"].isdecimal():
        limit = int(limits["memory.max"]) / 1e6
        fix = "large candidates will be killed: raise the container's limit"
        yield _graded("memory limit", f"{limit:,.0f} MB", limit < FREE_MEMORY_MB, fix)


def _sensors(tree: LocalTransport) -> Iterator[Finding]:
    yield _reading("memory", lambda: _enough_memory(free_memory_mb(tree)))
    yield _reading("governor", lambda: _steady(governor(tree)))
    yield _reading("temperature", lambda: Finding("temperature", "ok", f"{temperature_c(tree):.0f} C"))
    yield _reading("throttling", lambda: _throttling(tree))


def _reading(name: str, read: Callable[[], Finding]) -> Finding:
    try:
        return read()
    except Unread as reason:
        return Finding(name, "warning", str(reason), "none needed: measurements are taken without it and marked")


def _busy() -> Finding:
    load = preflight.load()
    return _graded("load", load.text, load.busy, "stop them for narrower intervals")


def _enough_memory(free: float) -> Finding:
    fix = "large candidates will fail: close other programs"
    return _graded("memory", f"{free:.0f} MB free", free < FREE_MEMORY_MB, fix)


def _steady(name: str) -> Finding:
    fix = "for stable results: cpupower frequency-set -g performance"
    return _graded("governor", name, name != "performance", fix)


_FLAGS = ("undervoltage", "a capped frequency", "throttling", "the soft temperature limit")
"""Of a Raspberry Pi's firmware, from bit 0."""


def _throttling(tree: Tree) -> Finding:
    """Returns whether the processor is slowed down now; else how often it was, where that is counted."""
    fix = "let it cool down, and see to its fan and power supply: repetitions meanwhile do not count"
    texts, reasons = [], []
    for probe in (_flags, cooling_level, throttle_count):
        try:
            value = probe(tree)
        except Unread as reason:
            reasons.append(str(reason))
            continue
        if probe is throttle_count:
            texts.append(f"{value} events since boot")
        elif value:
            what = value if isinstance(value, str) else f"cooling level {value}"
            return Finding("throttling", "warning", f"the processor is slowed down now: {what}", fix)
        else:
            texts.append("none now")
    if not texts:
        raise Unread("; ".join(reasons))
    return Finding("throttling", "ok", texts[-1])


def _flags(tree: Tree) -> str:
    flags = firmware_flags(tree)
    return ", ".join(name for bit, name in enumerate(_FLAGS) if flags >> bit & 1)
