"""The recorded files of `benchmarks.quantise`, and what the page says of them."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.quantise import RECORDED, says

PAGE = Path(__file__).parents[2] / "docs/measured/quantising.md"


def test_chosen_files_lose_no_more_than_mixtures_of_their_size() -> None:
    rows = json.loads(RECORDED.read_bytes())["rows"]
    lossy = [row for row in rows if row["mixture"]["name"] != "q8_0"]
    assert len(lossy) >= 9 and all(row["chosen"]["size"] <= row["mixture"]["size"] for row in lossy)
    for importance in ("mixture", "without_matrix"):
        no_worse = [row[importance]["kl"] >= row["chosen"]["kl_ci95"][0] for row in lossy]
        fewer_bits = [row["chosen"]["bits_per_byte"] <= row[importance]["bits_per_byte"] for row in lossy]
        assert sum(no_worse) >= len(lossy) - 1 and sum(fewer_bits) >= len(lossy) - 1
    assert says(rows).strip() in PAGE.read_text(encoding="utf-8")
