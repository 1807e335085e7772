"""Quality of the layouts, from a short training of their proxies: two seeds each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.quality.truth import recorded, train_missing
from nas.core.layout import Layout
from nas.core.quality_config import QualityConfig, Rung
from nas.model.text.corpus import refer
from nas.search.proxy.job import is_part
from nas.search.proxy.ladder import rung_jobs

PROTOCOL = QualityConfig(proxy_d_model=64, rungs=(Rung(name="short", lm_steps=200, seeds=(0, 1)),))
"""Language models of width 64; the layouts that this study compares are many, and only their order is used."""


def train(layouts: Sequence[Layout], path: Path, minutes: float) -> None:
    """Trains what has no line in `path` yet; begins no training after `minutes`."""
    corpus = refer(PROTOCOL.corpus, Path.cwd())
    todo = {job.key: (layout.format(), job) for layout in layouts for job in rung_jobs(PROTOCOL, 0, layout, corpus)}
    train_missing(todo, path, minutes)


def scores(layouts: Sequence[Layout], path: Path) -> list[list[float]]:
    """Returns the mean score over domains, of each seed, of each layout; nothing of one that was not trained."""
    by_layout: dict[str, dict[int, float]] = {}
    for row in recorded(path).values():
        groups = [score for name, score in row["scores"].items() if not is_part(name, row["scores"])]
        by_layout.setdefault(row["layout"], {})[row["seed"]] = round(fmean(groups), 6)
    return [[score for _, score in sorted(by_layout.get(layout.format(), {}).items())] for layout in layouts]
