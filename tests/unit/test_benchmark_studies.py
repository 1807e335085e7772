"""Tables of archived studies' reliability."""

from __future__ import annotations

from pathlib import Path

from study_support import archived_lines

from benchmarks.quality.studies import group_rows, tables
from nas.search.proxy.quality import Anchors, fix_scale


def test_an_archive_is_tabulated(tmp_path: Path) -> None:
    archived_lines(tmp_path)
    head, _, row, *rest = tables([tmp_path / "study.jsonl.gz"]).splitlines()
    assert head.startswith("| study | space | tried / complete | reliability | top third |")
    assert row.startswith("| study | `")
    assert not any(rest), "without anchors there are no signals"


def test_groups_that_do_not_count_have_no_weight() -> None:
    layouts = [
        {seed: {"lm/a": 1.0 + 0.1 * number, "task/b": 1.0 + 0.5 * (seed == number)} for seed in range(3)}
        for number in range(5)
    ]
    scale = fix_scale("long", layouts[0], minimum=0.1, anchors=Anchors(layouts, {"lm": 2, "task/b": 1}))
    rows = group_rows("one", scale)
    assert [(row["group"], row["weight"]) for row in rows] == [("lm/a", "1.00"), ("task/b", "0.00")]
