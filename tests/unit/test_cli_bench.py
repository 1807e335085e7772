"""`nas bench`: lists of what to measure, and the formats of the results."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from cli_runner import nas

from nas.core.errors import InfrastructureFailed
from nas.core.layout import Layout
from nas.core.progress import Log
from nas.measure.protocol.bench import BenchOptions, Json

A, B = "d256 v512 ffn=swiglu:512 [C3 A4/2]", "d256 v512 ffn=swiglu:256 [C3 A4/2]"


@pytest.fixture(autouse=True)
def requests(monkeypatch: pytest.MonkeyPatch) -> list[BenchOptions]:
    """Replaces the measurement; returns what it was asked for."""
    requests: list[BenchOptions] = []

    def measure(benches: Sequence[BenchOptions], log: Log) -> Iterator[Json]:
        for options in benches:
            requests.append(options)
            yield report(options)

    monkeypatch.setattr("nas.cli.bench.bench_all", measure)
    return requests


def report(options: BenchOptions) -> dict[str, Any]:
    assert isinstance(options.subject, Layout)
    rate = {"value": 100.0, "ci95": [95.0, 105.0], "mean": 97.5, "sd": 1.25, "n": 2}
    time = {"value": 8.6, "typical": 8.8, "ci95": [8.0, 9.2], "n": 2}
    decode = {
        "p50": 10.0,
        "typical": 10.2,
        "p95": None,
        "p95_reason": "too few",
        "p95_ci95": [None, None],
        "ci95": [9.5, 10.5],
    }
    return {
        "layout": options.subject.format(), "file_mb": 1.5, "runtime": {"name": "llama.cpp", "build": "b" * 64},
        "device": {"id": "box", "cpu": "CPU"}, "workload": options.workload.key(), "ttft_ms": time,
        "prefill_tps": 100.0, "tokens_per_s": {"prefill": rate, "decode": {**rate, "sd": None}}, "decode_ms": decode,
        "peak_rss_mb": {"total": 12.0}, "gpu": {"memory_mb": None}, "load_ms": 3.0, "refused_share": 0.0,
        "foreign_cpu": 0.5, "reference": {"drift": 0.01},
    }  # fmt: skip


def test_every_combination_is_measured(requests: list[BenchOptions]) -> None:
    done = nas("bench", A, B, "-p", "512,1024", "-n", "16", "-t", "1,2")
    assert done.code == 0
    workloads = [(request.workload.prompt, request.workload.gen, request.workload.threads) for request in requests]
    assert workloads == [(512, 16, 1), (512, 16, 2), (1024, 16, 1), (1024, 16, 2)] * 2
    assert [str(request.subject) for request in requests] == [A] * 4 + [B] * 4
    assert len(done.out.splitlines()) == 1 + 2 * len(requests)


def test_formats_hold_the_same_figures() -> None:
    markdown = nas("bench", A, "-f", "md").out.splitlines()
    assert markdown[0].startswith("| model | size | runtime | threads | test | t/s |")
    assert markdown[2] == f"| {A} | 1.5 MB | llama.cpp | 1 | pp512 | 98 ± 1 | 100 (95 to 105) | 12 MB |"
    assert "| tg128 | 97.5 | 100 (95 to 105) |" in markdown[3]
    (prefill, decode) = csv.DictReader(io.StringIO(nas("bench", A, "-f", "csv").out))
    assert (prefill["test"], prefill["mean_ts"], prefill["sd_ts"]) == ("pp512", "97.5", "1.25")
    assert (decode["test"], decode["sd_ts"], decode["low_ts"]) == ("tg128", "", "95.0")
    assert json.loads(nas("bench", A, "--json").out)["tokens_per_s"]["decode"]["value"] == 100.0
    both = json.loads(nas("bench", A, B, "--json").out)["results"]
    assert [result["layout"] for result in both] == [A, B]


def test_one_result_is_shown_with_its_details() -> None:
    lines = [" ".join(line.split()) for line in nas("bench", A).out.splitlines()]
    assert "decode 100 tokens/s (95 to 105); mean 97.5" in lines
    assert "prefill 100 tokens/s (95 to 105); mean 98 ± 1" in lines


@pytest.mark.parametrize(("error", "code"), [(InfrastructureFailed("gone"), 4), (KeyboardInterrupt(), 130)])
def test_what_is_measured_is_shown_before_the_failure_of_another(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(benches: Sequence[BenchOptions], log: Log) -> Iterator[Json]:
        yield report(benches[0])
        raise error

    monkeypatch.setattr("nas.cli.bench.bench_all", measure)
    done = nas("bench", A, B, "--json")
    assert done.code == code
    assert [result["layout"] for result in json.loads(done.out)["results"]] == [A]
    assert "1 of 2 are measured" in done.err
    assert A in nas("bench", A, B).out


def test_options_are_named_as_they_are_written() -> None:
    done = nas("bench", A, "--image-height", "0")
    assert done.code == 3 and "--image-height: " in done.err


def test_on_a_busy_machine_what_was_seen_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(benches: Sequence[BenchOptions], log: Log) -> Iterator[Json]:
        yield from (report(options) | {"foreign_cpu": 1.6} for options in benches)

    monkeypatch.setattr("nas.cli.bench.bench_all", busy)
    lines = [" ".join(line.split()) for line in nas("bench", A).out.splitlines()]
    assert "decode 97.5 tokens/s; on an idle machine about 100 tokens/s (95 to 105)" in lines


@pytest.mark.parametrize("numbers", ["", "512,", "1e3", "-5", "a", "512 1024", "9" * 30])
def test_what_is_no_list_of_numbers_is_refused(numbers: str, requests: list[BenchOptions]) -> None:
    done = nas("bench", A, f"--prompt={numbers}")
    assert done.code == 3 and "--prompt: whole numbers" in done.err and not requests


@pytest.mark.parametrize("trial", ["study", "/3", "study/x", f"study/{'9' * 30}"])
def test_what_is_no_trial_is_refused(trial: str, requests: list[BenchOptions]) -> None:
    done = nas("bench", A, "--profile", "--trial", trial)
    assert done.code == 3 and "is not a trial" in done.err and not requests


def test_a_layout_may_be_longer_than_a_file_s_name(requests: list[BenchOptions]) -> None:
    layers = " ".join(f"C3+swiglu:{256 + 32 * number}" for number in range(20))
    assert nas("bench", f"d256 v512 ffn=swiglu:512 [{layers}]").code == 0
    assert isinstance(requests[0].subject, Layout) and requests[0].subject.depth == 20
