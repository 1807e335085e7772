"""Measured blocks: a result belongs to a build."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import blocks


def times(number: int, build: str, decode_ms: float) -> list[blocks.Row]:
    """A round with one kind beside attention."""
    return [
        {
            "round": number, "runtime": "executorch", "build": build, "block": name, "context": context,
            "prefill_cpu_ms": 10.0, "decode_cpu_ms": ms, "peak_rss_mb": 9.0,
        }
        for context in blocks.CONTEXTS
        for name, ms in (("gqa", 1.0), ("swiglu", 1.0), ("gla", decode_ms))
    ]  # fmt: skip


def test_ratios_are_of_rounds_of_the_latest_build() -> None:
    rows = [*times(1, "old", 0.5), *times(2, "new", 0.25), *times(3, "new", 0.25)]
    page = "\n".join(blocks.time_tables(rows))
    assert "executorch, 2 rounds" in page
    assert "| gla | 1.00 (1.00 to 1.00) | 0.25 (0.25 to 0.25) |" in page and "0.50" not in page


def test_a_file_is_compared_again_with_another_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Build:
        runner = type("Runner", (), {"build": "first" * 8})

    monkeypatch.setattr(blocks, "RECORDED", tmp_path)
    monkeypatch.setattr(blocks, "EXAMPLES", {})
    monkeypatch.setattr(blocks, "FILES", {"conv": "d64 v64 ffn=none [C3]"})
    for runtime in ("LLAMA_CPP", "EXECUTORCH"):
        monkeypatch.setattr(blocks, runtime, SimpleNamespace(build=lambda *_, **__: Build))
    monkeypatch.setattr(blocks, "file_parity", lambda *_: {"passed": True})
    for build, lines in (("first", 3), ("first", 3), ("second", 6)):
        Build.runner.build = build * 8
        blocks.measure_parity("aarch64-linux", ("conv",))
        assert len(blocks.recorded("parity")) == lines
    assert [row["build"] for row in blocks.recorded("parity")] == ["firstfirstfi"] * 3 + ["secondsecond"] * 3


def trained(number: int, torch: str, formula_ms: float) -> list[blocks.Row]:
    """A round of all blocks, whose forms take 2 ms."""
    return [
        {"round": number, "torch": torch, "block": name, "form": form, "tokens": tokens, "cpu_ms": ms}
        for name in (*blocks.MIXERS, *blocks.FEED_FORWARDS)
        for form, tokens, ms in (
            ("module", blocks.TRAINED, 2.0), ("module", blocks.SHORT, 2.0), ("formula", blocks.SHORT, formula_ms)
        )
    ]  # fmt: skip


def test_training_is_compared_within_rounds_of_the_latest_pytorch() -> None:
    rows = [*trained(1, "old", 8.0), *trained(2, "new", 20.0), *trained(3, "new", 40.0)]
    (heading, lines) = blocks.train_tables(rows)
    assert heading == "### Forward and backward in PyTorch new, 2 rounds"
    assert "| mla (`L8/128`) | gqa | 1.00 (1.00 to 1.00) | 15.00 (10.00 to 20.00) |" in lines


def test_a_round_of_training_has_every_form_of_every_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RECORDED", tmp_path), ("TRAINED", 3), ("SHORT", 2), ("TIMED_WIDTH", 64)):
        monkeypatch.setattr(blocks, name, value)
    monkeypatch.setattr(blocks, "MIXERS", {"gqa": "A4/2", "gla": "G4"})
    monkeypatch.setattr(blocks, "FEED_FORWARDS", {"swiglu": "swiglu:32"})
    blocks.measure_training(0.01)
    rows = blocks.recorded("train")
    forms_of_round = {(row["block"], row["form"], row["tokens"]) for row in rows if row["round"] == 1}
    forms = (("module", 3), ("module", 2), ("formula", 2))
    assert forms_of_round == {(name, *form) for name in ("gqa", "gla", "swiglu") for form in forms}
