"""Runs plans on a device: only known runners, only files of the plan, and nothing is interpreted here."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from nas.core.clock import Clock
from nas.core.errors import InfrastructureFailed, InvalidInput, UnknownName, Unsupported
from nas.core.plan import InputFile, Pair, Plan, PlanFile, RawRun, Round, RoundResult, Runner
from nas.core.protocol import Phase
from nas.devices.condition import Observer, foreign_cpu
from nas.devices.transports.base import Cancelled, Transport, never

KnownRunner = Callable[[Runner], bool]
"""Whether a runner is in the manifest that this agent trusts; raises `NasError` where there is none to trust."""

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
"""What a plan may set. Others (LD_PRELOAD, GGML_BACKEND_PATH) would let it load code that no manifest names."""

_SLOT = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,127}")
_COOL_DOWN_SLICE_S = 1.0
_MAKE_S = 600.0
_MAKE_OUTPUT = 1 << 14


class FileSource(Protocol):
    """Where plan files come from."""

    def fetch(self, file: PlanFile) -> Path:
        """A local path with that content (verified again when pushed).

        Raises:
            InfrastructureFailed: it cannot be had now.
        """


@dataclass(frozen=True, slots=True)
class Prepared:
    """A plan whose files are on the device: what is left is to run it, any number of times."""

    plan: Plan
    argv: tuple[str, ...]
    env: dict[str, str]


def prepare(plan: Plan, transport: Transport, files: FileSource, known: KnownRunner) -> Prepared:
    """Puts the plan's files on the device and fills in its arguments.

    Raises:
        Unsupported: the runner is not a known one.
        InvalidInput: the plan names an input it does not have, or sets an environment variable that it may not.
        InfrastructureFailed: a file could not be had or pushed.
    """
    runner = plan.runner
    _check(plan, known)
    for file in runner.files.values():
        transport.push(files.fetch(file), file.sha256)
    folder = transport.bundle({name: file.sha256 for name, file in runner.files.items()})
    libraries = {"LD_LIBRARY_PATH": folder} if len(runner.files) > 1 else {}
    main = f"{folder}/{runner.main}"

    def deliver(file: InputFile) -> str:
        if file.recipe is None:
            return transport.push(files.fetch(file), file.sha256)
        recipe = transport.push(files.fetch(file.recipe), file.recipe.sha256)
        return transport.make(file.sha256, lambda path: _make(transport, main, libraries, recipe, path))

    paths = {name: deliver(file) for name, file in plan.inputs.items()}
    arguments = (_SLOT.sub(lambda slot: paths[slot[1]], argument) for argument in plan.args)
    return Prepared(plan, (main, *arguments), libraries | plan.env)


def _make(transport: Transport, runner: str, env: dict[str, str], recipe: str, path: str) -> None:
    result = transport.run(
        (runner, "--recipe", recipe, "--output", path), env=env, deadline_s=_MAKE_S, output_limit=_MAKE_OUTPUT
    )
    if result.exit_code != 0 or result.truncated:
        told = (result.stdout[-400:] + result.stderr_tail[-400:]).decode(errors="replace").strip()
        why = f"not done within {_MAKE_S:g} s" if result.timed_out else f"exit code {result.exit_code}"
        raise InfrastructureFailed(f"the runner did not make the file of a recipe: {why}: {told}")


def _check(plan: Plan, known: KnownRunner) -> None:
    runner = plan.runner
    if not known(runner):
        raise Unsupported(f"runner {runner.runtime} {runner.build[:12]} is not in the coordinator's runner manifest")
    for name in runner.files:
        if not _FILE_NAME.fullmatch(name):
            raise InvalidInput(f"runner file name {name!r}: letters, digits and ._+- only")
    if runner.main not in runner.files:
        raise UnknownName("runner file", runner.main, runner.files)
    for variable in plan.env:
        if variable not in ENV_ALLOWED:
            raise UnknownName("environment variable of a plan", variable, ENV_ALLOWED)
    if any("\0" in word for word in (*plan.args, *plan.env.values())):
        raise InvalidInput("an argument or variable of the plan has a NUL character, which no process can be given")
    for slot in (slot for argument in plan.args for slot in _SLOT.findall(argument)):
        if slot not in plan.inputs:
            raise UnknownName("input of the plan", slot, plan.inputs)


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
        max_rss_mb=result.max_rss_mb,
        timed_out=result.timed_out,
        truncated=result.truncated,
        started_at=result.started_at,
        conditions=observer.after(before, result),
    )


def run_round(
    batch: Round,
    transport: Transport,
    files: FileSource,
    known: KnownRunner,
    *,
    observer: Observer,
    clock: Clock,
    enter: Callable[[Phase], None] = lambda phase: None,
    cancelled: Callable[[], bool] = never,
) -> RoundResult:
    """Runs reference and candidate in turn (R, C, R, C, ...), after pushing files and cooling down.

    The round ends early after a run that failed (exit code, deadline, output limit): repeating it tells nothing new.
    `pairs` then ends with that run, and the coordinator judges it.

    Args:
        batch: what to run.
        transport: the device.
        files: where files come from.
        known: the runners that may run.
        observer: reads the device's condition around each process.
        clock: times the push and the cool-down.
        enter: told of each phase as it begins.
        cancelled: asked during the cool-down and while a process runs.

    Raises:
        Unsupported, InvalidInput: this agent will not run the plan.
        InfrastructureFailed: the device or a file failed.
        Cancelled: on request.
    """
    enter("preparing")
    begun = clock.monotonic()
    candidate = prepare(batch.candidate, transport, files, known)
    reference = prepare(batch.reference, transport, files, known) if batch.reference else None
    push_s = clock.monotonic() - begun

    if batch.cool_down_s:
        enter("cooling")
        _cool_down(batch.cool_down_s, clock, cancelled)
    enter("running")
    pairs: list[Pair] = []
    for _ in range(batch.repetitions):
        drift = execute(reference, transport, observer, cancelled) if reference else None
        measured = execute(candidate, transport, observer, cancelled)
        foreign = foreign_cpu([*([drift] if drift else []), measured])
        pairs.append(Pair(reference=drift, candidate=measured, foreign_cpu=foreign))
        if _failed(measured) or (drift and _failed(drift)):
            break
    return RoundResult(pairs=pairs, push_s=push_s, wall_s=clock.monotonic() - begun)


def _failed(raw: RawRun) -> bool:
    return raw.exit_code != 0 or raw.timed_out or raw.truncated


def _cool_down(seconds: float, clock: Clock, cancelled: Callable[[], bool]) -> None:
    end = clock.monotonic() + seconds
    while (left := end - clock.monotonic()) > 0:
        if cancelled():
            raise Cancelled("cancelled while the device cooled down")
        clock.sleep(min(left, _COOL_DOWN_SLICE_S))
