"""The form in which a runner reports: one JSON object on stdout, and what its exit code means.

    {"v": 1, "load_ms": .., "ttft_ms": .., "decode_ns": [..], "peak_rss_mb": .., "finite": true, "info": {..}, ..}
    {"v": 1, "error": {"kind": "out_of_memory", "message": ".."}}

The fields of a good report are those of `Sample`. Runners of other runtimes may use the same form and parse it here.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError

from nas.core.canonical import canonical_json
from nas.core.errors import CandidateFailed, FailureReason, InfrastructureFailed
from nas.core.measurement import Sample
from nas.core.plan import RawRun

USAGE, LOAD_FAILED, DECODE_FAILED, NO_MEMORY = 64, 65, 70, 71
"""Exit codes of a runner, after sysexits.h: EX_USAGE, EX_DATAERR, EX_SOFTWARE, EX_OSERR."""

_NONSENSE = 1e15
"""Eleven days in nanoseconds."""
_NOT_STARTED = (126, 127)
_SIGKILL = -9
_REASON_OF_EXIT: dict[int, FailureReason] = {
    LOAD_FAILED: "export",
    DECODE_FAILED: "crash",
    NO_MEMORY: "out_of_memory",
}


def read_sample(raw: RawRun) -> Sample:
    """The sample that a run reported.

    Raises:
        CandidateFailed: timeout, out_of_memory, crash, export (the runtime refused the model file), garbage_output,
            not_finite.
        InfrastructureFailed: the runner did not start, or did not take its arguments.
    """
    if raw.timed_out:
        raise CandidateFailed("timeout", f"killed at its deadline after {raw.wall_s:.1f} s")
    if raw.truncated:
        raise CandidateFailed("garbage_output", f"more output than allowed: {len(raw.stdout)} characters kept")
    if raw.exit_code != 0:
        raise _failure(raw)
    report = _report(raw.stdout)
    if report is None or report.pop("v", None) != 1:
        raise CandidateFailed("garbage_output", f"no report of version 1 on stdout: {raw.stdout[:80]!r}")
    try:
        sample = Sample.model_validate(report)
    except ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(map(str, problem["loc"])) or "report"
        raise CandidateFailed("garbage_output", f"report: {field}: {problem['msg']}") from error
    numbers = (sample.load_ms, sample.ttft_ms, sample.peak_rss_mb or 0.0, *sample.decode_ns)
    if not all(0 <= number < _NONSENSE for number in numbers):
        raise CandidateFailed("garbage_output", "report: a time or size is negative or beyond all measure")
    if not sample.finite:
        raise CandidateFailed("not_finite", "the logits hold NaN or infinity")
    return sample


def _failure(raw: RawRun) -> CandidateFailed | InfrastructureFailed:
    error = (_report(raw.stdout) or {}).get("error")
    told = error.get("message") if isinstance(error, dict) else None
    message = str(told or raw.stderr_tail.strip()[-400:] or "no message")
    told_memory = isinstance(error, dict) and error.get("kind") == "out_of_memory"
    if told_memory or "std::bad_alloc" in raw.stderr_tail:  # an uncaught C++ exception ends in SIGABRT
        return CandidateFailed("out_of_memory", message)
    if raw.exit_code == _SIGKILL:
        # The device tells its own kills by `timed_out`; what is left is the kernel's, or somebody's on the device.
        if raw.conditions.oom_kills:
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
    """The report, if it is one; NaN, infinity and broken characters are refused, because results are kept as JSON."""
    try:
        value = json.loads(stdout)
        canonical_json(value).encode()
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
