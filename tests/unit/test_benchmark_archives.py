"""The page of recorded studies is what its command writes today."""

from __future__ import annotations

from pathlib import Path

from benchmarks.archives import tables

PAGE = Path(__file__).resolve().parents[2] / "docs/measured/recorded-studies.md"


def test_the_page_is_what_the_command_writes() -> None:
    page, written = PAGE.read_text(encoding="utf-8"), tables()
    for name, text in written.items():
        assert f"<!-- {name} -->\n{text}<!-- end -->" in page, "run `python -m benchmarks.archives --page ...`"
    assert written["headlines"].count("\n") == 16
