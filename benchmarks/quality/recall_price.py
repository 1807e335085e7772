"""Price and signal of a group of recall in the ladder of `lfm2`, on eight layouts.

    python -m benchmarks.quality.recall_price run [--minutes M]      trains what is missing
    python -m benchmarks.quality.recall_price report [--page docs/measured/truth.md]

A row is a task with its steps, as it would be trained in the top rung. Scores are relative to the published reference's
of the same seed. Signal is the deviation between layouts beyond that of seeds, noise that of a mean of the top rung's
two seeds. The price is that of a candidate's trainings with the task in tokens, as a multiple of those of text alone:
of candidates that enter the first rung, as many climb as the rungs keep. That of a fresh seed is the same of a layout
of the front, which is trained on each of them from the start. Layouts are named beforehand; one training is one line
of `RECORDED`, under its result key.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from benchmarks.page import fill, table
from benchmarks.quality.truth import recorded, train_missing
from nas.core.layout import Layout
from nas.core.quality_config import QualityConfig, Rung, TaskStage
from nas.core.task import make_task, text_length
from nas.model.text.corpus import CorpusRef
from nas.search.proxy.job import TaskRun, TrainJob
from nas.search.proxy.ladder import rung_jobs
from nas.search.proxy.quality import paired_spread

RECORDED = Path(__file__).parents[1] / "recorded" / "recall-price.jsonl"
SEEDS = (0, 1)
_DENSE = "d1024 v65536 ffn=swiglu:4608"
PUBLISHED = "published"
LAYOUTS = {
    PUBLISHED: f"{_DENSE} [C3*2 A16/8 C3*2 A16/8 C3*2 A16/8 C3 A16/8 C3 A16/8 C3 A16/8 C3]",
    "attention alone": "d1024 v65536 ffn=swiglu:4832 [A16/8*16]",
    "four": f"{_DENSE} [C3*3 A16/8 C3*3 A16/8 C3*3 A16/8 C3*3 A16/8]",
    "two": f"{_DENSE} [C3*5 A16/8 C3*5 A16/8 C3*4]",
    "one, first": f"{_DENSE} [A16/8 C3*15]",
    "one, middle": f"{_DENSE} [C3*8 A16/8 C3*7]",
    "one, last": f"{_DENSE} [C3*15 A16/8]",
    "one, experts": "d1024 v65536 ffn=moe:8x4:384 [C5+swiglu:4096 C5*6 A16/2 C5*9]",
}
"""Layers of attention -> layout."""
TASKS: dict[str, dict[str, TaskStage]] = {
    "automata, 300 x 8": {"automata": TaskStage(steps=300)},
    "automata, 200 x 4": {"automata": TaskStage(steps=200, batch=4)},
    "recall, 100 x 16": {"recall": TaskStage(steps=100, batch=16)},
}
"""Task, steps x examples."""


def jobs(name: str, layout: str) -> list[TrainJob]:
    """Returns the trainings of a cell."""
    config = QualityConfig(rungs=(Rung(name="recall", tasks=TASKS[name], seeds=SEEDS),))
    return rung_jobs(config, 0, Layout.parse(LAYOUTS[layout]), CorpusRef(source="default", hash="0" * 64))


def prices(name: str) -> tuple[float, float]:
    """Returns the price of a candidate, and of a fresh seed, as multiples of those without the task."""
    config, share, before, text = QualityConfig(), 1.0, dict[int, int](), 0.0
    for rung in config.rungs:
        text += share * sum(rung.lm_steps - before.get(seed, 0) for seed in rung.seeds)
        before = dict.fromkeys(rung.seeds, rung.lm_steps)
        top, share = share, share * (rung.keep or 1.0)
    job = jobs(name, PUBLISHED)[0]
    assert isinstance(job.run, TaskRun)
    length = text_length(make_task(job.run.task, job.run.settings))
    steps = job.steps * job.batch * length / (config.batch * config.length)  # as many tokens
    return 1 + top * len(SEEDS) * steps / text, 1 + steps / config.rungs[-1].lm_steps


def report(trained: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns a row for each task, with the layouts that are trained, in Markdown."""

    def rows(name: str) -> dict[str, list[Mapping[str, Any]]]:
        trainings = {layout: [trained.get(job.key) for job in jobs(name, layout)] for layout in LAYOUTS}
        return {layout: [row for row in runs if row] for layout, runs in trainings.items() if all(runs)}

    cells = []
    for name in TASKS:
        if (of_layouts := rows(name)).keys() <= {PUBLISHED} or PUBLISHED not in of_layouts:
            continue
        scores = {
            layout: {row["seed"]: fmean(row["scores"].values()) for row in of_layouts[layout]} for layout in of_layouts
        }
        published = scores[PUBLISHED]
        ratios = {layout: {seed: of[seed] / published[seed] for seed in of} for layout, of in scores.items()}
        noise = paired_spread([*ratios.values()]).sd / math.sqrt(len(SEEDS))
        means = {layout: fmean(of.values()) for layout, of in ratios.items()}
        signal = math.sqrt(max(0.0, variance(means.values()) - noise**2))
        shown = [f"{means[layout]:.2f}" if layout in means else "-" for layout in LAYOUTS if layout != PUBLISHED]
        numbers = (f"{number:.2f}" for number in (signal, noise, *prices(name)))
        cells.append((name, f"{fmean(published.values()):.2f}", *shown, *numbers))
    others = [layout for layout in LAYOUTS if layout != PUBLISHED]
    return table(("task", "nats of published", *others, "signal", "noise", "price", "fresh seed"), cells)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    commands.add_parser("run").add_argument("--minutes", type=float, default=600.0, help="begin no training after")
    commands.add_parser("report").add_argument("--page", type=Path)
    options = parser.parse_args()
    if options.command == "run":
        todo = {job.key: (layout, job) for name in TASKS for layout in LAYOUTS for job in jobs(name, layout)}
        train_missing(todo, RECORDED, options.minutes)
    elif options.page:
        fill(options.page, "recall-price", report(recorded(RECORDED)))
    else:
        print(report(recorded(RECORDED)))


if __name__ == "__main__":
    main()
