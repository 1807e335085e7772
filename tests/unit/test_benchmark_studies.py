"""The table of archived studies' reliability."""

from __future__ import annotations

from benchmarks.quality.studies import FOLDER, table


def test_an_archive_is_a_row() -> None:
    head, _, row = table([FOLDER / "small.jsonl.gz"]).splitlines()
    assert head.startswith("| study | space | tried / complete | reliability | top third |")
    assert row.startswith("| small | `tiny` | 8 / 2 | - | - |")
