"""What a run left behind, told apart: the candidate's failure, the infrastructure's, or a sample."""

from __future__ import annotations

import json

import pytest

from nas.core.errors import CandidateFailed, InfrastructureFailed
from nas.core.plan import Conditions, RawRun
from nas.measure.runtimes.runner import read_sample, read_timed_sample

GOOD = {"v": 1, "load_ms": 1.5, "ttft_ms": 20.0, "decode_ns": [5, 6], "peak_rss_mb": 100.0}


def run(stdout: object = "", exit_code: int = 0, **fields: object) -> RawRun:
    text = stdout if isinstance(stdout, str) else json.dumps(stdout)
    return RawRun.model_validate({"exit_code": exit_code, "stdout": text, "wall_s": 1.0, "started_at": 0.0, **fields})


def test_good_report() -> None:
    sample = read_sample(run(GOOD | {"prefill_rss_mb": None, "info": {"phase_rss_reason": "not here"}}))
    assert (sample.ttft_ms, sample.decode_ns, sample.prefill_rss_mb) == (20.0, [5, 6], None)
    assert sample.info["phase_rss_reason"] == "not here"


@pytest.mark.parametrize(
    ("raw", "reason", "message"),
    [
        (run(exit_code=-9, timed_out=True), "timeout", "deadline"),
        (run(exit_code=-9, conditions=Conditions(oom_kills=1)), "out_of_memory", "kernel"),
        (run(exit_code=-9, truncated=True), "garbage_output", "more output"),
        (run(GOOD | {"prefill_cpu_ms": float("nan")}), "garbage_output", "no report"),
        (run(GOOD | {"info": {"note": "\ud800"}}), "garbage_output", "no report"),
        (run(GOOD | {"decode_ns": [10**400]}), "garbage_output", "beyond"),
        (run(GOOD | {"decode_cpu_ns": [10**400, 6]}), "garbage_output", "beyond"),
        (run({"v": 1, "error": {"kind": "out_of_memory", "message": "no 9 GB"}}, 71), "out_of_memory", "no 9 GB"),
        (run(exit_code=-6, stderr_tail="what(): std::bad_alloc"), "out_of_memory", "bad_alloc"),
        (run(exit_code=-6, stderr_tail="GGML_ASSERT(buffer) failed"), "crash", "GGML_ASSERT"),
        (run(exit_code=-11), "crash", "signal 11"),
        (run({"v": 1, "error": {"kind": "decode", "message": "returned -3"}}, 70), "crash", "returned -3"),
        (run({"v": 1, "error": {"kind": "load", "message": "bad magic"}}, 65), "export", "bad magic"),
        (run(exit_code=3, stderr_tail="odd"), "crash", "exit code 3: odd"),
        (run("not json"), "garbage_output", "not json"),
        (run(GOOD | {"v": 2}), "garbage_output", "version 1"),
        (run({"v": 1, "ttft_ms": 1}), "garbage_output", "load_ms"),
        (run(GOOD | {"decode_ns": ["x"]}), "garbage_output", "decode_ns.0"),
        (run(GOOD | {"extra": 1}), "garbage_output", "extra"),
        (run(GOOD, truncated=True), "garbage_output", "more output"),
        (run(GOOD | {"finite": False}), "not_finite", "NaN"),
    ],
)
def test_candidates_failures(raw: RawRun, reason: str, message: str) -> None:
    with pytest.raises(CandidateFailed, match=message) as failure:
        read_sample(raw)
    assert failure.value.reason == reason


@pytest.mark.parametrize("exit_code", [64, 126, 127])
def test_a_runner_that_does_not_work_here_is_no_candidates_fault(exit_code: int) -> None:
    with pytest.raises(InfrastructureFailed, match="libggml"):
        read_sample(run(exit_code=exit_code, stderr_tail="cannot open libggml.so"))


def test_a_reference_model_without_memory_is_no_candidates_fault() -> None:
    """Both models write to one stderr."""
    with pytest.raises(InfrastructureFailed, match="the reference model failed"):
        read_sample(run(exit_code=69, stderr_tail="what(): std::bad_alloc"))


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999", "-1.0"])
def test_times_that_are_no_numbers_are_garbage(value: str) -> None:
    text = json.dumps(GOOD).replace("20.0", value)
    with pytest.raises(CandidateFailed) as failure:
        read_sample(run(text))
    assert failure.value.reason == "garbage_output"


def test_times_that_are_longer_than_the_process_lived_are_nobodys_fault() -> None:
    """A clock jumped: 5 + 1000 + 2 ms of work."""
    report = GOOD | {"load_ms": 5.0, "ttft_ms": 1000.0, "decode_ns": [1_000_000, 1_000_000]}
    assert read_timed_sample(run(report).model_copy(update={"wall_s": 1.01})).ttft_ms == 1000.0
    with pytest.raises(InfrastructureFailed, match="impossible times: 1007 ms of work in a process of 900 ms"):
        read_timed_sample(run(report).model_copy(update={"wall_s": 0.9}))
