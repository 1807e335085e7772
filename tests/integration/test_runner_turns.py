"""Turns of two models and what goes wrong in them: `report.h` in C and C++, with a model that computes nothing."""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.measure.runtimes.toolchain import find_compiler

HEADERS = LLAMA_CPP.runner_sources[0].parents[1]
GEN = 150


@pytest.fixture(scope="module", params=["c", "c++"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler, output = find_compiler(), tmp_path_factory.mktemp("turns") / "program"
    of_c, of_cxx = [compiler.cc, "-std=c11", "-D_GNU_SOURCE"], [compiler.cxx, "-std=c++17"]
    flags = ["-Wall", "-Wextra", "-Werror", f"-I{HEADERS}", "-x", request.param]
    source = Path(__file__).with_name("turns_check.c")
    subprocess.run(
        [*(of_c if request.param == "c" else of_cxx), *flags, str(source), "-o", str(output), "-lm"], check=True
    )
    return output


def run(program: Path, folder: Path, fault: str, gen: int = GEN) -> tuple[int, dict[str, Any], list[str]]:
    """Returns the exit code, what was printed, and what both models did in its order."""
    argv = [str(program), str(folder / "lines"), str(gen), fault]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, json.loads(done.stdout), (folder / "lines").read_text().splitlines()


def expected_lines(passes: int, turns: Sequence[int]) -> Iterator[str]:
    """Yields what the two models do."""
    for role in ["reference", "candidate"] * passes:
        yield from (f"{role} wakes and forgets", f"{role} prompt", f"{role} rests")
    for count in turns:
        for role in ("reference", "candidate"):
            yield from (f"{role} wakes", *[f"{role} token"] * count, f"{role} rests")


def test_the_reference_is_first_in_each_turn_and_takes_as_many_tokens(program: Path, tmp_path: Path) -> None:
    code, report, lines = run(program, tmp_path, "none")
    turns, passes = report["turns"], len(report["prefill_ns"])
    assert code == 0
    assert lines == list(expected_lines(passes, turns)), "threads of the model that waits sleep"
    assert passes == 5, "a second is not spent on five passes that compute nothing"
    assert turns[0] == 4 and sum(turns) == GEN
    assert all(size == turns[1] and 4 <= size <= 64 for size in turns[1:-1]) and 1 <= turns[-1] <= turns[1]
    for part in (report, report["reference"]):
        assert part["turns"] == turns and len(part["prefill_ns"]) == len(part["prefill_cpu_ns"]) == passes
        assert len(part["decode_ns"]) == len(part["decode_cpu_ns"]) == GEN
        assert part["ttft_ms"] * 1e6 == pytest.approx(part["prefill_ns"][0], abs=1)
    assert report["reference"].get("reference") is None


@pytest.mark.parametrize(("gen", "turns"), [(0, []), (3, [3]), (4, [4]), (5, [4, 1])])
def test_few_tokens(program: Path, tmp_path: Path, gen: int, turns: list[int]) -> None:
    code, report, _ = run(program, tmp_path, "none", gen)
    assert code == 0 and report["turns"] == report["reference"]["turns"] == turns


@pytest.mark.parametrize(("gen", "turns"), [(0, []), (GEN, [GEN])])
def test_a_model_alone_is_not_interrupted(program: Path, tmp_path: Path, gen: int, turns: list[int]) -> None:
    code, report, lines = run(program, tmp_path, "alone", gen)
    assert code == 0 and report["turns"] == turns and "reference" not in report
    assert [line for line in lines if line.split()[1] in ("prompt", "token")] == [
        *["candidate prompt"] * 5,
        *["candidate token"] * gen,
    ]


def test_logits_are_of_one_pass(program: Path, tmp_path: Path) -> None:
    _, report, lines = run(program, tmp_path, "once")
    assert len(report["prefill_ns"]) == lines.count("candidate prompt") == 1


DEATHS = ("dies at the prompt", "dies at a token", "dies at its end", "fails at its end", "prints no report")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        *itertools.product(DEATHS, ["it ended without a report"]),
        ("reports", 'no "room" for {{caches}} \\'),
        ("prints too much", "its report is longer than 1 MiB"),
    ],
)
def test_a_reference_that_fails_is_told(program: Path, tmp_path: Path, fault: str, message: str) -> None:
    """As one report on stdout, whenever it happens."""
    code, report, _ = run(program, tmp_path, fault)
    assert code == 69 and report["error"] == {"kind": "reference", "message": message}


def test_a_candidates_failure_is_its_own(program: Path, tmp_path: Path) -> None:
    code, report, _ = run(program, tmp_path, "candidate")
    assert code == 70 and report["error"] == {"kind": "decode", "message": "the candidate's own"}
