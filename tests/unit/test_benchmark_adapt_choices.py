"""Ways of choosing blocks, compared on a tiny trained model."""

from __future__ import annotations

from pathlib import Path

import pytest
from adapt_lab import LAYOUT, RECALLING, adaptation, work_of, write_lab

from benchmarks import adapt_choices
from benchmarks.adapt_choices import compared_choices, table_of, tau_of
from nas.core.replacement import Slot, parsed, with_blocks


@pytest.mark.exhaustive  # ten seconds
def test_each_way_of_choosing_keeps_the_budget_and_is_healed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAS_CACHE", str(tmp_path / "cache"))
    for name, value in {"_RANDOM": 3, "_TOKENS": 64, "_BATCH": 32}.items():
        monkeypatch.setattr(adapt_choices, name, value)
    settings = RECALLING.model_copy(update={"recall": 1.0})
    lab = write_lab(tmp_path / "lab")
    adapted = adaptation(lab, tmp_path / "out", tmp_path / "library", settings=settings, budget="decode_p50<=0.92x")
    (tmp_path / "run").mkdir()
    stopped = compared_choices(adapted, tmp_path / "run", seeds=1, minutes=0)
    assert stopped["missing"] == 10 and not stopped["rows"], "no healing begins when time is over"
    report = compared_choices(adapted, tmp_path / "run", seeds=1, minutes=60)
    rows = {row["name"]: row for row in report["rows"]}
    ways = {"sums", "sums of text alone", "sums and pairs", "layers dropped", "SMART", "KL-guided", "uniform"}
    assert rows.keys() == ways | {f"random#{number}" for number in range(3)} and not report["missing"]
    limit = 0.92 * work_of(LAYOUT)["decode_p50"]
    for row in rows.values():
        choice = {Slot(depth, part): parsed(name, part) for depth, part, name in row["choice"]}
        layout, _ = with_blocks(LAYOUT, choice)
        assert work_of(layout)["decode_p50"] == pytest.approx(row["predicted"], rel=0.05)
        assert row["predicted"] <= limit * (1 + 1e-6)
        assert row["summed"] >= rows["sums"]["summed"] - 1e-9, "the sums are the least"
        assert 0 < row["divergence"] <= row["divergence_before"] + 1e-6
    assert "KL-guided" in table_of(report) and "different children" in tau_of(report)
