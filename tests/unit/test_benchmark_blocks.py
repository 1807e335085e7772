"""Measured blocks: a result belongs to a build."""

from __future__ import annotations

from pathlib import Path

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
    class Made:
        runner = type("Runner", (), {"build": "first" * 8})

    monkeypatch.setattr(blocks, "RECORDED", tmp_path)
    monkeypatch.setattr(blocks, "EXAMPLES", {})
    monkeypatch.setattr(blocks, "FILES", {"conv": "d64 v64 ffn=none [C3]"})
    monkeypatch.setattr(blocks.llama_cpp_build, "build", lambda *_, **__: Made)
    monkeypatch.setattr(blocks.executorch_build, "build", lambda *_, **__: Made)
    monkeypatch.setattr(blocks, "file_parity", lambda *_: {"passed": True})
    for build, lines in (("first", 3), ("first", 3), ("second", 6)):
        Made.runner.build = build * 8
        blocks.measure_parity("aarch64-linux")
        assert len(blocks.recorded("parity")) == lines
    assert [row["build"] for row in blocks.recorded("parity")] == ["firstfirstfi"] * 3 + ["secondsecond"] * 3
