"""Runner programs: the reports that they print, and the logits that they write for equivalence gates.

A runner prints one JSON object on stdout:

    {"v": 1, "load_ms": .., "ttft_ms": .., "decode_ns": [..], "peak_rss_mb": .., "finite": true, "info": {..}, ..,
     "reference": {"v": 1, ..}}
    {"v": 1, "error": {"kind": "out_of_memory", "message": ".."}}

The fields of a good report are those of `Sample`. Runners of other runtimes may use the same form and parse it here.

A profiler prints a `nas.core.profile.Profile` or such an error:

    {"v": 1, "finite": true, "prompt": 512, "gen": 64, "decode": {..},
     "prefill": {"whole_ns": .., "profiled_ns": .., "nodes": [[LAYER, PART, OPERATOR, COUNT, NS], ..]}}
"""

from __future__ import annotations

import itertools
import json
import math
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from nas.core.canonical import canonical_json
from nas.core.errors import CandidateFailed, FailureReason, InfrastructureFailed
from nas.core.logs import visible
from nas.core.measurement import Sample
from nas.core.plan import REFERENCE, Plan, RawRun, Runner
from nas.core.profile import Profile
from nas.core.workload import Workload
from nas.measure.runtimes.base import Artifact
from nas.measure.runtimes.recipe import splitmix64
from nas.measure.runtimes.toolchain import EMULATION, build_environment, emulator_of

# Exit codes of a runner, after sysexits.h; report.h has the same.
USAGE = 64
"""EX_USAGE: it did not take its arguments."""
LOAD_FAILED = 65
"""EX_DATAERR: it refused the model file."""
DECODE_FAILED = 70
"""EX_SOFTWARE"""
NO_MEMORY = 71
"""EX_OSERR"""
REFERENCE_FAILED = 69
"""EX_UNAVAILABLE: the reference model did not work, whatever the candidate does."""

_DEADLINE_S = 3600.0
"""Emulation is a hundred times slower than the machine that it emulates."""
_PROMPT_SEED = 0
_CLOCK_STEP_MS = 20.0
"""Step of a device's clock (10 ms), twice: at the beginning and the end of a process."""
_TEXT_OF_IMAGE = 256
"""Tokens of text that a reference model reads in place of an image, to take about as long."""
_TEXT_OF_SECOND = 32
"""The same of a second of sound."""
_NONSENSE = 1e15
"""Eleven days in nanoseconds."""
_NOT_STARTED = (126, 127)
_FROM_OUTSIDE = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGKILL, signal.SIGTERM})
"""Signals that no runner sends to itself."""
_REASON_OF_EXIT: dict[int, FailureReason] = {
    LOAD_FAILED: "export",
    DECODE_FAILED: "crash",
    NO_MEMORY: "out_of_memory",
}
M = TypeVar("M", bound=BaseModel)


class Machine(Protocol):
    """A place that runs a runner: this machine, an emulator, a device."""

    def __call__(self, arguments: Sequence[str], model: Path, rows: Path) -> RawRun:
        """Runs one process of the runner.

        Args:
            arguments: its own; {model} and {rows} in them are replaced by files on that machine.
            model: the model file here.
            rows: where to put here what the runner wrote to {rows}.
        """


@dataclass(frozen=True, slots=True)
class Feed:
    """The input of the runner: a prompt in chunks, then tokens one by one.

    Args:
        prompt: tokens of the prompt.
        gen: tokens decoded after it.
        batch: tokens of a chunk; the last may be shorter.
        seed: of the token ids.
    """

    prompt: int
    gen: int
    batch: int
    seed: int = 0

    def ids(self, vocab: int) -> NDArray[np.int64]:
        """Returns the token ids [prompt + gen], which every runner draws the same: splitmix64."""
        return (splitmix64(self.seed, self.prompt + self.gen) % np.uint64(vocab)).astype(np.int64)


def plan_run(
    artifact: Artifact,
    runner: Runner,
    workload: Workload,
    deadline_s: float,
    options: Mapping[str, object],
    reference: Artifact | None = None,
) -> Plan:
    """Returns one repetition of `workload` as one fresh process of a runner with these options.

    Of a model without a tower, which only reference models are under a workload with images or sounds, text stands for
    these.
    """
    instead = _TEXT_OF_IMAGE * workload.images + math.ceil(_TEXT_OF_SECOND * workload.sounds * workload.seconds)
    text = 0 if artifact.projector is not None else instead
    first = {"prompt": workload.prompt + text, "gen": workload.gen, "context": workload.window + text}
    models = {"model": artifact.file} | ({} if reference is None else {REFERENCE: reference.file})
    if workload.media and artifact.projector is not None:
        models["mmproj"] = artifact.projector
        if reference is not None:
            first["reference-prompt"] = workload.prompt + instead
    every = {**first, **options, "seed": _PROMPT_SEED}
    args = [word for name, value in every.items() for word in (f"--{name}", str(value))]
    files = [text for name in models for text in (f"--{name}", f"{{{name}}}")]
    return Plan(
        runner=runner,
        inputs=models,
        args=(*files, *args),
        threads=workload.threads,
        affinity=workload.affinity,
        deadline_s=deadline_s,
    )


def read_sample(raw: RawRun) -> Sample:
    """Returns the sample that a run reported.

    Raises:
        CandidateFailed: timeout, out_of_memory, crash, export (the runtime refused the model file), garbage_output,
            not_finite.
        InfrastructureFailed: the runner did not start, or did not take its arguments.
    """
    sample = _read(raw, Sample)
    _require_plausible(sample)
    if sample.reference is not None:
        _require_plausible(sample.reference)
        if sample.reference.turns != sample.turns:
            raise CandidateFailed("garbage_output", "report: the reference model took other turns")
    _require_finite(sample.finite)
    return sample


def _require_plausible(sample: Sample) -> None:
    numbers = (sample.load_ms, sample.ttft_ms, sample.peak_rss_mb or 0.0, sample.prefill_cpu_ms or 0.0)
    times = (sample.decode_ns, sample.prefill_ns, sample.decode_cpu_ns or [], sample.prefill_cpu_ns or [])
    if not all(0 <= number < _NONSENSE for number in (*numbers, *itertools.chain.from_iterable(times))):
        raise CandidateFailed("garbage_output", "report: a time or size is negative or beyond all measure")
    pairs = (sample.decode_cpu_ns, sample.decode_ns), (sample.prefill_cpu_ns, sample.prefill_ns)
    if any(cpu is not None and len(cpu) != len(wall) for cpu, wall in pairs):
        raise CandidateFailed("garbage_output", "report: other numbers of times on the two clocks")
    if sample.turns and (min(sample.turns) < 1 or sum(sample.turns) != len(sample.decode_ns)):
        raise CandidateFailed("garbage_output", "report: turns are not of all decoded tokens")


def read_profile(raw: RawRun) -> Profile:
    """Returns the profile that a profiler reported; raises what `read_sample` raises."""
    profile = _read(raw, Profile)
    _require_finite(profile.finite)
    return profile


def _require_finite(finite: bool) -> None:
    if not finite:
        raise CandidateFailed("not_finite", "the logits hold NaN or infinity")


def _read(raw: RawRun, form: type[M]) -> M:
    if raw.timed_out:
        raise CandidateFailed("timeout", f"killed at its deadline after {raw.wall_s:.1f} s")
    if raw.truncated:
        raise CandidateFailed("garbage_output", f"more output than allowed: {len(raw.stdout)} characters kept")
    if raw.exit_code != 0:
        raise _failure(raw)
    report = _report(raw.stdout)
    beside = report.get("reference") if report else None
    if report is None or any(part.pop("v", None) != 1 for part in (report, beside) if isinstance(part, dict)):
        raise CandidateFailed("garbage_output", f"no report of version 1 on stdout: {raw.stdout[:80]!r}")
    try:
        return form.model_validate(report)
    except ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(map(str, problem["loc"])) or "report"
        raise CandidateFailed("garbage_output", f"report: {field}: {problem['msg']}") from error


def read_timed_sample(raw: RawRun) -> Sample:
    """Returns the sample of a runner that timed itself with the device's clock.

    Raises what `read_sample` raises, and `InfrastructureFailed` where the timed work is longer than the process lived.
    """
    sample = read_sample(raw)
    timed = [part for part in (sample, sample.reference) if part is not None]
    timed_ms = sample.load_ms + math.fsum(
        max(part.ttft_ms, sum(part.prefill_ns) / 1e6) + sum(part.decode_ns) / 1e6 for part in timed
    )
    lived_ms = raw.wall_s * 1e3
    if timed_ms > lived_ms + _CLOCK_STEP_MS:
        raise InfrastructureFailed(f"impossible times: {timed_ms:.0f} ms of work in a process of {lived_ms:.0f} ms")
    return sample


def _failure(raw: RawRun) -> CandidateFailed | InfrastructureFailed:
    error = (_report(raw.stdout) or {}).get("error")
    reported = error.get("message") if isinstance(error, dict) else None
    message = visible(str(reported or raw.stderr_tail.strip()[-400:] or "no message"), keep="\n")
    if raw.exit_code == REFERENCE_FAILED:  # first: both models write to one stderr
        return InfrastructureFailed(f"the reference model failed: {message}")
    out_of_memory = isinstance(error, dict) and error.get("kind") == "out_of_memory"
    if out_of_memory or "std::bad_alloc" in raw.stderr_tail:  # an uncaught C++ exception ends in SIGABRT
        return CandidateFailed("out_of_memory", message)
    if -raw.exit_code in _FROM_OUTSIDE:
        # The device reports its own kills as `timed_out`; others are the kernel's, or somebody's on the device.
        if raw.exit_code == -signal.SIGKILL and raw.conditions.oom_kills:
            return CandidateFailed("out_of_memory", f"killed by the kernel for memory: {message}")
        return InfrastructureFailed(f"the runner was killed from outside: {message}")
    if raw.exit_code < 0:
        return CandidateFailed("crash", f"killed by signal {-raw.exit_code}: {message}")
    if raw.exit_code in _REASON_OF_EXIT:
        return CandidateFailed(_REASON_OF_EXIT[raw.exit_code], message)
    if raw.exit_code == USAGE or raw.exit_code in _NOT_STARTED:
        return InfrastructureFailed(f"the runner did not work here (exit code {raw.exit_code}): {message}")
    return CandidateFailed("crash", f"exit code {raw.exit_code}: {message}")


def _report(stdout: str) -> dict[str, Any] | None:
    """Returns the report, or None; refuses NaN, infinity and broken characters, because results are stored as JSON."""
    try:
        value = json.loads(stdout)
        canonical_json(value).encode()
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def runner_logits(
    machine: Machine, model: Path, vocab: int, feed: Feed, scratch: Path, options: Sequence[str] = ()
) -> NDArray[np.float32]:
    """Returns the logits [gen + 1, V]: of the prompt's last token, then of each decoded one.

    `scratch` is a folder for the runner's file, `options` are more of its arguments.

    Raises:
        CandidateFailed: the runner died on the file, or what it wrote is no logits.
        InfrastructureFailed: the runner could not work there.
    """
    rows = scratch / "rows"
    sizes = {"prompt": feed.prompt, "gen": feed.gen, "batch": feed.batch, "seed": feed.seed}
    numbers = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
    read_sample(machine(["--model", "{model}", "--logits", "{rows}", *numbers, *options], model, rows))
    logits = np.fromfile(rows, "<f4")
    if logits.size != (feed.gen + 1) * vocab:
        raise CandidateFailed("garbage_output", f"{logits.size} logits where {feed.gen + 1} x {vocab} were due")
    return logits.reshape(-1, vocab).astype(np.float32, copy=False)


def relative_l2(logits: NDArray[np.float32], oracle: NDArray[np.float32]) -> NDArray[np.float64]:
    """Returns the relative L2 error of logits [T, V] at each position [T]."""
    difference = np.linalg.norm(logits.astype(np.float64) - oracle, axis=-1)
    errors: NDArray[np.float64] = difference / np.linalg.norm(oracle.astype(np.float64), axis=-1)
    return errors


def local_machine(executable: Path, target: str) -> Machine:
    """Returns a function that runs a runner on this machine, by emulation where it is for another `target`.

    Raises:
        InfrastructureFailed: no emulator is installed.
    """
    emulator = emulator_of(target, executable)
    if emulator is None:
        raise InfrastructureFailed(f"logits of {target} need an emulator on this machine (Debian: {EMULATION})")

    def run(arguments: Sequence[str], model: Path, rows: Path) -> RawRun:
        paths = {"{model}": str(model), "{rows}": str(rows)}
        argv = [*emulator, str(executable), *(paths.get(argument, argument) for argument in arguments)]
        return _run(argv)

    return run


def _run(argv: Sequence[str]) -> RawRun:
    started_at, start = time.time(), time.monotonic()
    try:
        done = subprocess.run(
            argv,
            env=build_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_DEADLINE_S,
        )
    except subprocess.TimeoutExpired:  # subprocess.run has killed it
        return RawRun(exit_code=-9, stdout="", wall_s=_DEADLINE_S, started_at=started_at, timed_out=True)
    return RawRun(
        exit_code=done.returncode,
        stdout=done.stdout,
        stderr_tail=done.stderr[-4096:],
        wall_s=time.monotonic() - start,
        started_at=started_at,
    )
