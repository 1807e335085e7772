"""The command `nas family compare`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runner import nas
from test_compare_tables import GRANITE, GRANITE_H, LFM2, MEMBER, record

from nas.core.errors import InfrastructureFailed
from nas.core.family import Comparison
from nas.core.progress import Log
from nas.train.compare import compare


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[compare.CompareOptions]:
    """What the command asks for; it is answered with a record that was measured before."""
    calls: list[compare.CompareOptions] = []

    def answer(options: compare.CompareOptions, log: Log) -> tuple[Comparison, Path]:
        calls.append(options)
        if options.device == "gone":
            raise InfrastructureFailed("gone: offline. What was measured is kept: the same command resumes")
        return record(MEMBER, LFM2, GRANITE, GRANITE_H), tmp_path / "comparison-box.json"

    monkeypatch.setattr(compare, "compare", answer)
    return calls


def test_options_are_passed_on(requests: list[compare.CompareOptions]) -> None:
    outcome = nas(
        "family", "compare", "--family", "demo", "--class", "350M", "--class", "1B", "--layout", "LFM2-350M",
        "--reference", "Qwen3-0.6B", "-d", "phone", "-t", "4", "--reps", "5", "--no-flash-attn",
        "--replicate", "2",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    (options,) = requests
    assert options.models == compare.ModelSelection("demo", ("Qwen3-0.6B",), ("LFM2-350M",), ("350M", "1B"))
    assert (options.device, options.threads, options.repetitions, options.replicate) == ("phone", 4, 5, 2)
    assert not options.flash_attn


def test_tables_go_to_stdout_and_explanations_to_stderr(requests: list[compare.CompareOptions]) -> None:
    outcome = nas("family", "compare", "--family", "demo")
    assert "LFM2-350M\tGranite-4.0-350M\t2.00 / 2.02 / 1.37" in outcome.out
    assert "demo-350M (member)\t350M\t300" in outcome.out
    assert "out_of_memory: too much" in outcome.err
    assert "why" in outcome.err


def test_json_is_the_record(requests: list[compare.CompareOptions]) -> None:
    outcome = nas("family", "compare", "--family", "demo", "--json")
    assert Comparison.model_validate(json.loads(outcome.out)) == record(MEMBER, LFM2, GRANITE, GRANITE_H)


def test_the_plot_is_drawn(requests: list[compare.CompareOptions], tmp_path: Path) -> None:
    outcome = nas("family", "compare", "--family", "demo", "--plot", str(tmp_path / "speed.svg"))
    assert outcome.code == 0, outcome.err
    assert (tmp_path / "speed.svg").stat().st_size > 0


def test_an_unknown_plot_format_is_refused_before_anything_is_measured(requests: list[compare.CompareOptions]) -> None:
    outcome = nas("family", "compare", "--family", "demo", "--plot", "speed.gif")
    assert (outcome.code, requests) == (3, [])
    assert "--plot" in outcome.err


def test_a_device_that_is_gone_has_the_exit_code_of_a_retry(requests: list[compare.CompareOptions]) -> None:
    outcome = nas("family", "compare", "--family", "demo", "--device", "gone")
    assert outcome.code == 4
    assert "the same command resumes" in outcome.err
