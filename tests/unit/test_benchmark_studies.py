"""The table of archived studies' reliability."""

from __future__ import annotations

from pathlib import Path

from study_support import archived_lines

from benchmarks.quality.studies import table


def test_an_archive_is_a_row(tmp_path: Path) -> None:
    archived_lines(tmp_path)
    head, _, row = table([tmp_path / "study.jsonl.gz"]).splitlines()
    assert head.startswith("| study | space | tried / complete | reliability | top third |")
    assert row.startswith("| study | `")
