"""Executes plans on a device, with known runners only, and reads the device's condition around each run."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from nas.core.clock import Clock
from nas.core.errors import InfrastructureFailed, InvalidInput, UnknownName, Unsupported
from nas.core.plan import Conditions, InputFile, Pair, Plan, PlanFile, RawRun, Round, RoundResult, Runner
from nas.core.wire import Phase
from nas.measure.devices.probes import android, cpu, memory, power, thermal
from nas.measure.devices.probes.readings import Readings, Unread, first_of
from nas.measure.devices.transports.base import Cancelled, CommandResult, Reader, Transport, never

BEFORE = tuple(dict.fromkeys((*cpu.QUOTA_FILES, *thermal.COUNTERS, *memory.FILES, *power.ENERGY_FILES, *cpu.FILES)))
"""Read before a process. CPU time comes last, so that reading the rest is not in the interval."""

AFTER = tuple(
    dict.fromkeys(
        (
            *(*cpu.FILES, *power.ENERGY_FILES, *cpu.FREQUENCY_FILES, *thermal.FILES),
            *(*cpu.QUOTA_FILES, *thermal.COUNTERS, *thermal.THROTTLE_FILES),
            *(*cpu.LOAD_FILES, *power.FILES, *power.TEMPERATURE_FILES, *memory.FILES),
        )
    )
)
"""Read after a process. CPU time comes first, then what changes fast once the processor is idle."""

COMMANDS = (memory.DISK, *android.COMMANDS)
"""Run after a process; `dumpsys` exists on Android only, which costs nothing to find out."""

_ONE_MOMENT: dict[str, Callable[[Readings], Any]] = {
    "temperature_c": lambda now: first_of(now, thermal.temperature_c, android.temperature_c),
    "governor": cpu.governor,
    "frequency_mhz": cpu.frequency_mhz,
    "cluster_mhz": cpu.cluster_mhz,
    "load_1min": cpu.load_1min,
    "power_source": lambda now: first_of(now, power.power_source, android.power_source),
    "battery_percent": lambda now: first_of(now, power.battery_percent, android.battery_percent),
    "battery_status": lambda now: first_of(now, power.battery_status, android.battery_status),
    "battery_temperature_c": lambda now: first_of(now, power.battery_temperature_c, android.battery_temperature_c),
    "free_disk_mb": memory.free_disk_mb,
    "thermal_status": android.thermal_status,
    "charger": android.charger,
    "screen_on": android.screen_on,
    "power_saver": android.power_saver,
}


class Observer:
    """Reads the device's sensors before and after a process, in one exchange each.

    Args:
        reader: of the device's /proc and /sys.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def before(self) -> Readings:
        """Returns the readings to pass to `after`; call it last before a process starts."""
        return Readings.take(self._reader, BEFORE)

    def after(self, before: Readings, result: CommandResult) -> Conditions:
        """Reads conditions right after the process ended. What could not be read is null, with its reason in `unread`.

        Memory is what was free before; temperature and frequency are read right after, when the processor is warm.
        """
        now = Readings.take(self._reader, AFTER, COMMANDS)
        two: dict[str, Callable[[], Any]] = {
            "busy_cpu_s": lambda: cpu.busy_s(now) - cpu.busy_s(before),
            "interval_s": lambda: cpu.uptime_s(now) - cpu.uptime_s(before),
            "foreign_cpu": lambda: _foreign(before, now, result),
            "throttled": lambda: _throttled(before, now),
            "oom_kills": lambda: memory.oom_kills(now) - memory.oom_kills(before),
            "energy": lambda: power.energy_used(power.energy_counter(before), power.energy_counter(now)),
            "free_memory_mb": lambda: memory.free_memory_mb(before),
        }
        values = {name: _try(probe) for name, probe in two.items()}
        values |= {name: _try(partial(probe, now)) for name, probe in _ONE_MOMENT.items()}
        unread = {name: str(value) for name, value in values.items() if isinstance(value, Unread)}
        return Conditions(**{name: value for name, value in values.items() if name not in unread}, unread=unread)


def foreign_cpu(runs: Sequence[RawRun]) -> float | None:
    """Returns the CPU share of other processes during `runs`, in cores; None if it cannot be determined.

    Several short runs together can be long enough for the counter's ticks when each alone is not. The time between
    them, above all our own reading, does not count.
    """
    busy = runner_s = wall_s = 0.0
    for run in runs:
        conditions = run.conditions
        if conditions.busy_cpu_s is None or conditions.interval_s is None or run.cpu_s is None:
            return None
        busy += conditions.busy_cpu_s
        runner_s += run.cpu_s + run.overhead_cpu_s
        wall_s += conditions.interval_s
    share = _try(lambda: cpu.foreign_share(busy, runner_s, wall_s))
    return None if isinstance(share, Unread) else share


def _foreign(before: Readings, now: Readings, result: CommandResult) -> float:
    runner_s = None if result.cpu_s is None else result.cpu_s + result.overhead_cpu_s
    busy, wall_s = cpu.busy_s(now) - cpu.busy_s(before), cpu.uptime_s(now) - cpu.uptime_s(before)
    return cpu.foreign_share(busy, runner_s, wall_s)


def _throttled(before: Readings, now: Readings) -> bool:
    """Returns whether the processor was throttled: counters cover the whole interval, other sources only the end.

    A CPU quota throttles too: threads that wait for each other slow down many times over.
    """
    waits = [_try(partial(cpu.quota_waits, readings)) for readings in (before, now)]
    if not any(isinstance(wait, Unread) for wait in waits) and waits[1] > waits[0]:
        return True
    return first_of(
        now,
        lambda now: thermal.throttle_count(now) > thermal.throttle_count(before),
        lambda now: thermal.firmware_flags(now) > 0,
        lambda now: thermal.cooling_level(now) > 0,
        lambda now: android.thermal_status(now) > 0,
    )


def _try(probe: Callable[[], Any]) -> Any:
    try:
        return probe()
    except Unread as reason:
        return reason


KnownRunner = Callable[[Runner], bool]
"""Returns whether a runner is in the trusted manifest; raises `NasError` if there is no manifest to trust."""

ENV_ALLOWED = frozenset(
    {
        "GOMP_CPU_AFFINITY",
        "GOMP_SPINCOUNT",
        "KMP_AFFINITY",
        "KMP_BLOCKTIME",
        "LANG",
        "LC_ALL",
        "MALLOC_ARENA_MAX",
        "MALLOC_MMAP_THRESHOLD_",
        "MALLOC_TRIM_THRESHOLD_",
        "OMP_NUM_THREADS",
        "OMP_PLACES",
        "OMP_PROC_BIND",
        "OMP_WAIT_POLICY",
    }
)
"""Variables that a plan may set. Others (LD_PRELOAD, GGML_BACKEND_PATH) could load code that is in no manifest."""

_SLOT = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
_VALUE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,:=+@%-]*")
"""Of an option: no path, which a signed runner might write to, and no option."""
_ENV_VALUE = re.compile(r"[A-Za-z0-9_.,:=+@%{}() -]*")
"""The same; OMP_PLACES has braces and parentheses."""
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,127}")
_COOL_DOWN_SLICE_S = 1.0
_MAKE_S = 600.0
_MAKE_OUTPUT = 1 << 14


class FileSource(Protocol):
    """A source of plan files."""

    def fetch(self, file: PlanFile) -> Path:
        """Returns a local path with that content (verified again when pushed).

        Raises:
            InfrastructureFailed: it is not available now.
        """

    def doubt(self, file: PlanFile) -> None:
        """Has `fetch` check a file again that could not be pushed: it may have been damaged since."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A plan whose files are on the device, ready to run any number of times."""

    plan: Plan
    argv: tuple[str, ...]
    env: dict[str, str]


def prepare(
    plan: Plan, transport: Transport, files: FileSource, is_known: KnownRunner, cancelled: Callable[[], bool] = never
) -> Prepared:
    """Puts the plan's files on the device and fills in its arguments.

    Raises:
        Unsupported: the runner is unknown.
        InvalidInput: the plan uses arguments or variables that the runner's signed record does not allow.
        InfrastructureFailed: a file could not be fetched or pushed.
        Cancelled: on request, while the device makes a file.
    """
    runner = plan.runner
    _check(plan, is_known)

    def push(file: PlanFile) -> str:
        try:
            return transport.push(files.fetch(file), file.sha256)
        except InfrastructureFailed:
            files.doubt(file)
            raise

    for file in runner.files.values():
        push(file)
    folder = transport.bundle({name: file.sha256 for name, file in runner.files.items()})
    libraries = {"LD_LIBRARY_PATH": folder} if len(runner.files) > 1 else {}
    main = f"{folder}/{runner.main}"

    def deliver(file: InputFile) -> str:
        if file.recipe is None:
            return push(file)
        recipe = push(file.recipe)
        return transport.make(file.sha256, lambda path: _make(transport, main, libraries, recipe, path, cancelled))

    paths = {name: deliver(file) for name, file in plan.inputs.items()}
    arguments = (paths[slot[1]] if (slot := _SLOT.fullmatch(word)) else word for word in plan.args)
    return Prepared(plan, (main, *arguments), libraries | plan.env)


def _make(
    transport: Transport, runner: str, env: dict[str, str], recipe: str, path: str, cancelled: Callable[[], bool]
) -> None:
    result = transport.run(
        (runner, "--recipe", recipe, "--output", path),
        env=env,
        deadline_s=_MAKE_S,
        output_limit=_MAKE_OUTPUT,
        cancelled=cancelled,
    )
    if result.exit_code != 0 or result.truncated:
        output = (result.stdout[-400:] + result.stderr_tail[-400:]).decode(errors="replace").strip()
        why = f"not done within {_MAKE_S:g} s" if result.timed_out else f"exit code {result.exit_code}"
        raise InfrastructureFailed(f"the runner did not make the file of a recipe: {why}: {output}")


def _check(plan: Plan, is_known: KnownRunner) -> None:
    runner = plan.runner
    if not is_known(runner):
        raise Unsupported(f"runner {runner.runtime} {runner.build[:12]} is not in the coordinator's runner manifest")
    for name in runner.files:
        if not _FILE_NAME.fullmatch(name):
            raise InvalidInput(f"runner file name {name!r}: letters, digits and ._+- only")
    if runner.main not in runner.files:
        raise UnknownName("runner file", runner.main, runner.files)
    _check_words(plan)


def _check_words(plan: Plan) -> None:
    """Refuses arguments and variables that the signed record of the runner does not allow.

    A runner that the coordinator signed can still be told to write files, so whoever writes plans without the signing
    key could write any file of the agent's user. An argument is an option of the runner's record, an input of the plan
    in braces, or a value that is no path.

    Raises:
        InvalidInput: an option, variable or value is not allowed, or an input is not in the plan.
    """
    runner = plan.runner
    for word in plan.args:
        if slot := _SLOT.fullmatch(word):
            if slot[1] not in plan.inputs:
                raise UnknownName("input of the plan", slot[1], plan.inputs)
        elif word.startswith("-"):
            if word not in runner.options:
                raise UnknownName(f"option of runner {runner.runtime} {runner.build[:12]}", word, runner.options)
        elif not _VALUE.fullmatch(word):
            raise InvalidInput(
                f"argument {word[:80]!r} of a plan: values are letters, digits and _.,:=+@%-, inputs {{NAME}}"
            )
    for variable, value in plan.env.items():
        if variable not in ENV_ALLOWED:
            raise UnknownName("environment variable of a plan", variable, ENV_ALLOWED)
        if not _ENV_VALUE.fullmatch(value):
            raise InvalidInput(
                f"variable {variable}={value[:80]!r} of a plan: letters, digits and _.,:=+@%{{}}() - only"
            )


def execute(
    prepared: Prepared, transport: Transport, observer: Observer, cancelled: Callable[[], bool] = never
) -> RawRun:
    """Runs a prepared plan once.

    Raises:
        Unsupported: the device cannot execute the runner.
        InfrastructureFailed: the device failed.
        Cancelled: on request.
    """
    plan = prepared.plan
    before = observer.before()
    result = transport.run(
        prepared.argv,
        env=prepared.env,
        deadline_s=plan.deadline_s,
        output_limit=plan.output_limit,
        cpu_affinity=plan.affinity,
        cancelled=cancelled,
    )
    return RawRun(
        exit_code=result.exit_code,
        stdout=result.stdout.decode(errors="replace"),
        stderr_tail=result.stderr_tail.decode(errors="replace"),
        wall_s=result.wall_s,
        cpu_s=result.cpu_s,
        overhead_cpu_s=result.overhead_cpu_s,
        timed_out=result.timed_out,
        truncated=result.truncated,
        started_at=result.started_at,
        conditions=observer.after(before, result),
    )


def run_round(
    batch: Round,
    transport: Transport,
    files: FileSource,
    is_known: KnownRunner,
    *,
    observer: Observer,
    clock: Clock,
    enter: Callable[[Phase], None] = lambda phase: None,
    cancelled: Callable[[], bool] = never,
) -> RoundResult:
    """Runs the processes of each repetition in order, after pushing files and cooling down.

    The round ends early after a run that failed (exit code, deadline, output limit): repeating it would show nothing
    new. `pairs` then ends with that run, and the coordinator judges it.

    Raises:
        Unsupported, InvalidInput: this agent does not run the plan.
        InfrastructureFailed: the device or a file failed.
        Cancelled: on request, while a process runs or the device makes a file, or during the cool-down.
    """
    enter("preparing")
    start = clock.monotonic()
    candidate = prepare(batch.candidate, transport, files, is_known, cancelled)
    reference = prepare(batch.reference, transport, files, is_known, cancelled) if batch.reference else None
    alone = prepare(batch.alone, transport, files, is_known, cancelled) if batch.alone else None

    if batch.cool_down_s:
        enter("cooling")
        _cool_down(batch.cool_down_s, clock, cancelled)
    enter("running")
    pairs: list[Pair] = []
    for _ in range(batch.repetitions):
        pair = Pair(
            reference=execute(reference, transport, observer, cancelled) if reference else None,
            alone=execute(alone, transport, observer, cancelled) if alone else None,
            candidate=execute(candidate, transport, observer, cancelled),
        )
        pairs.append(pair.model_copy(update={"foreign_cpu": foreign_cpu(pair.runs)}))
        if any(map(_failed, pair.runs)):
            break
    return RoundResult(pairs=pairs, wall_s=clock.monotonic() - start)


def _failed(raw: RawRun) -> bool:
    return raw.exit_code != 0 or raw.timed_out or raw.truncated


def _cool_down(seconds: float, clock: Clock, cancelled: Callable[[], bool]) -> None:
    end = clock.monotonic() + seconds
    while (remaining := end - clock.monotonic()) > 0:
        if cancelled():
            raise Cancelled("cancelled while the device cooled down")
        clock.sleep(min(remaining, _COOL_DOWN_SLICE_S))
