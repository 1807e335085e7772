"""Evaluation groups: what each tells layouts of a space apart by, and what it costs.

    python -m benchmarks.quality.groups run SUITE [--minutes M]      trains what is missing
    python -m benchmarks.quality.groups report SUITE [--page docs/measured/truth.md]

Suites: `lfm2` has tasks of recall, on eight of its layouts; `mixers` every kind of group, on ten layouts of
benchmarks/mixers.yaml. A row is a group with its steps, as it would be trained in the top rung of the space. Scores are
relative to the published reference's of the same seed. Signal is the deviation between layouts beyond that of seeds,
noise that of a mean of the two seeds. The effective dimension of all groups is the participation ratio (sum of
eigenvalues)^2 / (sum of their squares) of the correlations between their scores.

The price is that of a candidate's trainings with the task in tokens, as a multiple of those of text alone: of
candidates that enter the first rung, as many climb as the rungs keep. That of a fresh seed is the same of a layout of
the front, which is trained on each of them from the start. Layouts are named beforehand; one training is one line of
`RECORDED`, under its result key.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, variance
from typing import Any

import numpy as np

from benchmarks.page import table, write_part
from benchmarks.quality.truth import recorded, train_missing
from nas.core.layout import Layout
from nas.core.quality_config import QualityConfig, Rung, TaskStage
from nas.core.task import make_task, text_length
from nas.model.text.corpus import refer
from nas.search.proxy.job import TaskRun, TrainJob, is_part
from nas.search.proxy.ladder import rung_jobs
from nas.search.proxy.quality import paired_spread
from nas.search.proxy.tasks.automata import Automata
from nas.search.spaces import load_space

RECORDED = Path(__file__).parents[1] / "recorded" / "groups.jsonl"
SEEDS = (0, 1)
PUBLISHED = "published"
_LFM2 = "d1024 v65536 ffn=swiglu:4608"
_MIXERS = "d512 v8192 ffn=swiglu:1536"


def _task(name: str, steps: int, batch: int = 8, **settings: int) -> Rung:
    return Rung(name="only", tasks={name: TaskStage(steps=steps, batch=batch, settings=settings)}, seeds=SEEDS)


@dataclass(frozen=True)
class Suite:
    """Groups and the layouts that they are trained on.

    Args:
        base: name or file of the space.
        layouts: name -> layout; one is `published`.
        groups: name -> the rung that trains it alone; of text, all domains together.
    """

    base: str
    layouts: Mapping[str, str]
    groups: Mapping[str, Rung]

    @cached_property
    def quality(self) -> QualityConfig:
        """The space's ladder."""
        return load_space(self.base).quality

    def jobs(self, name: str, layout: str) -> list[TrainJob]:
        """Returns the trainings of a group and a layout, one for each seed."""
        config = self.quality.model_copy(update={"rungs": (self.groups[name],)})
        return rung_jobs(config, 0, Layout.parse(self.layouts[layout]), refer(config.corpus, Path.cwd()))

    def prices(self, name: str) -> tuple[float, float] | None:
        """Returns the price of a candidate, and of a fresh seed, as multiples of those without the task; None: text."""
        share, before, text = 1.0, dict[int, int](), 0.0
        for rung in self.quality.rungs:
            text += share * sum(rung.lm_steps - before.get(seed, 0) for seed in rung.seeds)
            before = dict.fromkeys(rung.seeds, rung.lm_steps)
            top, share = share, share * (rung.keep or 1.0)
        job = self.jobs(name, PUBLISHED)[0]
        if not isinstance(job.run, TaskRun):
            return None
        length = text_length(make_task(job.run.task, job.run.settings))
        steps = job.steps * job.batch * length / (self.quality.batch * self.quality.length)  # as many tokens
        return 1 + top * len(SEEDS) * steps / text, 1 + steps / self.quality.rungs[-1].lm_steps


SUITES = {
    "lfm2": Suite(
        "lfm2",
        {
            PUBLISHED: f"{_LFM2} [C3*2 A16/8 C3*2 A16/8 C3*2 A16/8 C3 A16/8 C3 A16/8 C3 A16/8 C3]",
            "attention alone": "d1024 v65536 ffn=swiglu:4832 [A16/8*16]",
            "four": f"{_LFM2} [C3*3 A16/8 C3*3 A16/8 C3*3 A16/8 C3*3 A16/8]",
            "two": f"{_LFM2} [C3*5 A16/8 C3*5 A16/8 C3*4]",
            "one, first": f"{_LFM2} [A16/8 C3*15]",
            "one, middle": f"{_LFM2} [C3*8 A16/8 C3*7]",
            "one, last": f"{_LFM2} [C3*15 A16/8]",
            "one, experts": "d1024 v65536 ffn=moe:8x4:384 [C5+swiglu:4096 C5*6 A16/2 C5*9]",
        },
        {
            "automata, 300 x 8": _task("automata", 300),
            "automata, 200 x 4": _task("automata", 200, 4),
            "recall, 100 x 16": _task("recall", 100, 16),
        },
    ),
    "mixers": Suite(
        str(Path(__file__).parents[1] / "mixers.yaml"),
        {
            PUBLISHED: f"{_MIXERS} [C3*2 A8/4 C3 A8/4 C3]",
            "attention alone": "d512 v8192 ffn=swiglu:1664 [A8/4*6]",
            "one, last": f"{_MIXERS} [C3*5 A8/4]",
            "four layers": "d512 v8192 ffn=swiglu:2048 [C3*2 A8/4 C3]",
            "experts": "d512 v8192 ffn=moe:8x2:256 [C3+swiglu:1536 C3 A8/4 C3 A8/4 C3]",
            "windows": f"{_MIXERS} [W8/4@512*2 A8/4 W8/4@512 A8/4 W8/4@512]",
            "Mamba-2": f"{_MIXERS} [M64*2 A8/4 M64 A8/4 M64]",
            "linear attention": f"{_MIXERS} [G4*2 A8/4 G4 A8/4 G4]",
            "Gated DeltaNet": f"{_MIXERS} [D4*2 A8/4 D4 A8/4 D4]",
            "mLSTM": f"{_MIXERS} [X4*2 A8/4 X4 A8/4 X4]",
        },
        {
            "text": Rung(name="only", lm_steps=300, seeds=SEEDS),
            "recall, 100 x 16": _task("recall", 100, 16),
            "recall among noise": _task("noisyrecall", 300),
            "rules in context": _task("automata", 300),
            "selective copying": _task("selcopy", 240, items=8, length=128),
            "induction": _task("induction", 300, length=128),
            "state tracking": _task("wordproblem", 300),
            "knowledge": _task("knowledge", 300, facts=256),
            "arithmetic": _task("arithmetic", 300, length=128),
        },
    ),
}


def ceiling(job: TrainJob) -> str:
    """Returns the most nats above chance that a task allows; that of text is not known."""
    if not isinstance(job.run, TaskRun):
        return "-"
    task = make_task(job.run.task, job.run.settings)
    return f"{task.chance_nats - (math.log(task.branches) if isinstance(task, Automata) else 0.0):.2f}"


def scores(suite: Suite, name: str, trained: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, dict[int, float]]]:
    """Returns group (one, or each domain of text) -> layout -> seed -> score, of layouts that have all seeds."""
    groups: dict[str, dict[str, dict[int, float]]] = {}
    for layout in suite.layouts:
        rows = [trained.get(job.key) for job in suite.jobs(name, layout)]
        for row in rows if all(rows) else []:
            assert row is not None
            for group, score in row["scores"].items():
                if not is_part(group, row["scores"]):
                    label = f"{name}: {group.partition('/')[2]}" if group.startswith("lm/") else name
                    groups.setdefault(label, {}).setdefault(layout, {})[row["seed"]] = score
    return groups


def report(suite: Suite, trained: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns a row for each group, with the layouts that are trained, in Markdown; and the effective dimension."""
    cells, dimensions = list[tuple[str, ...]](), dict[str, dict[str, float]]()
    others = [layout for layout in suite.layouts if layout != PUBLISHED]
    for name in suite.groups:
        job = suite.jobs(name, PUBLISHED)[0]
        for group, of_layouts in scores(suite, name, trained).items():
            if PUBLISHED not in of_layouts or len(of_layouts) == 1:
                continue
            published = of_layouts[PUBLISHED]
            ratios = {layout: {seed: of[seed] / published[seed] for seed in of} for layout, of in of_layouts.items()}
            noise = paired_spread([*ratios.values()]).sd / math.sqrt(len(SEEDS))
            means = {layout: fmean(of.values()) for layout, of in ratios.items()}
            dimensions[group] = means
            signal = math.sqrt(max(0.0, variance(means.values()) - noise**2))
            mean_cells = [f"{means[layout]:.2f}" if layout in means else "-" for layout in others]
            prices = suite.prices(name) or ()
            seconds = fmean(trained[run.key].get("cpu_seconds", 0.0) for run in suite.jobs(name, PUBLISHED))
            numbers = [f"{number:.2f}" for number in (signal, noise)]
            numbers += [f"{price:.2f}" for price in prices] or ["-", "-"]
            cells.append(
                (group, f"{fmean(published.values()):.2f}", ceiling(job), *mean_cells, *numbers, f"{seconds:.0f}")
            )
    head = ("group", "published", "ceiling", *others, "signal", "noise", "price", "fresh seed", "CPU s")
    dimension = effective_dimension(dimensions)
    return table(head, cells) + ("" if dimension is None else f"\nEffective dimension: {dimension:.1f}.\n")


def effective_dimension(means: Mapping[str, Mapping[str, float]]) -> float | None:
    """Returns the participation ratio of the correlations between groups; None for fewer than three layouts.

    Args:
        means: group -> layout -> score.
    """
    shared = sorted(set.intersection(*(set(of_group) for of_group in means.values()))) if means else []
    if len(shared) <= 2:
        return None
    values = np.array([[of_group[layout] for layout in shared] for of_group in means.values()])
    eigenvalues = np.linalg.eigvalsh(np.atleast_2d(np.corrcoef(values[values.std(axis=1) > 0])))
    return float(eigenvalues.sum() ** 2 / np.square(eigenvalues).sum())


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    running, reporting = commands.add_parser("run"), commands.add_parser("report")
    for command in (running, reporting):
        command.add_argument("suite", choices=SUITES)
    running.add_argument("--minutes", type=float, default=600.0, help="begin no training after")
    reporting.add_argument("--page", type=Path)
    options = parser.parse_args()
    suite = SUITES[options.suite]
    if options.command == "run":
        todo = {
            job.key: (layout, job)
            for layout in suite.layouts  # whole layouts first, so that all groups soon have rows
            for name in suite.groups
            for job in suite.jobs(name, layout)
        }
        train_missing(todo, RECORDED, options.minutes)
    else:
        write_part(options.page, f"groups-{options.suite}", report(suite, recorded(RECORDED)))


if __name__ == "__main__":
    main()
