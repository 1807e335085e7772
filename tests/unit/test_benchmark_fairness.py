"""Trainings of `benchmarks.quality.fairness`: lines of a file, which a kill may cut off."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.quality import fairness
from benchmarks.quality.fairness import RATES, Start, Training, finished, gaps


def test_a_line_that_a_kill_cut_off_is_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainings = [Training("conv", "alone", 64, rate, Start()) for rate in RATES]
    lines = [json.dumps(asdict(one) | {"loss": 2 + one.rate, "cpu_s": 1.0}) + "\n" for one in trainings]
    file = tmp_path / "fairness.jsonl"
    file.write_text("".join(lines)[:-9])
    monkeypatch.setattr(fairness, "RECORDED", file)
    done = finished()
    assert done == [(one, 2 + one.rate) for one in trainings[:2]]
    assert file.read_text() == "".join(lines[:2])
    assert gaps(done) == {("conv", "alone", 64): 0.5}
