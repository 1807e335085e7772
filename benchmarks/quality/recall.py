"""Recall of the layouts on the front of an archived study, which a score of text alone does not show.

    python -m benchmarks.quality.recall run [--minutes M] [ARCHIVE.jsonl.gz ...]     trains what is missing
    python -m benchmarks.quality.recall report [--page docs/measured/fronts.md] [ARCHIVE.jsonl.gz ...]

Proxies of the front and of the references learn languages of random automata (`nas.search.proxy.tasks.automata`): each
example has a language of its own, so what comes next follows from the context alone. In contrast to tasks of pure
recall, this is learned steadily. Scores are relative to the published reference's, seed by seed; one training is one
line of `RECORDED`, under its result key.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr  # type: ignore[import-untyped]

from benchmarks.page import markdown, write_part
from benchmarks.quality.studies import FOLDER, read, scratch_store
from benchmarks.quality.truth import recorded, train_missing
from nas.core.layout import Layout
from nas.core.quality_config import QualityConfig, Rung, TaskStage
from nas.model.text.corpus import refer
from nas.search.proxy.job import TrainJob
from nas.search.proxy.ladder import rung_jobs

RECORDED = Path(__file__).parents[1] / "recorded" / "recall.jsonl"
STUDIES = ("lfm2-study", "lfm2")
TASK, SEEDS = "automata", (0, 1)
GROUP = f"task/{TASK}"
_FEWEST = 3
"""Layouts below which nothing is said of their order."""


def jobs(layout: str, steps: int) -> list[TrainJob]:
    """Returns the trainings of a layout, one for each seed."""
    rung = Rung(name="recall", tasks={TASK: TaskStage(steps=steps, seeds=SEEDS)}, seeds=SEEDS)
    config = QualityConfig(rungs=(rung,))
    return rung_jobs(config, 0, Layout.parse(layout), refer(config.corpus, Path.cwd()))


def layouts(report: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns name -> row of the study's report: the references, the published one first, then the front."""
    references = sorted(report["references"], key=lambda row: row["name"] != "published")
    return {row["name"]: row for row in references} | {str(row["trial"]): row for row in report["front"]}


def table(report: Mapping[str, Any], steps: int, trained: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns recall of each layout, and how quality and recall go together on the front, as Markdown."""
    rows = {
        name: row
        for name, row in layouts(report).items()
        if all(job.key in trained for job in jobs(row["layout"], steps))
    }
    if "published" not in rows:
        return "The published reference is not trained yet, so there is nothing to compare with.\n"
    scores = {
        name: np.array([trained[job.key]["scores"][GROUP] for job in jobs(row["layout"], steps)])
        for name, row in rows.items()
    }
    ratios = {name: values / scores["published"] for name, values in scores.items()}
    cells = [
        {
            "trial": name,
            "recall": f"{ratios[name].mean():.2f}",
            "of each seed": ", ".join(f"{ratio:.2f}" for ratio in ratios[name]),
        }
        for name in rows
    ]
    front = [name for name in rows if name.isdigit()]
    return f"{markdown(cells)}\n{_summary(front, rows, ratios, len(layouts(report)), steps)}"


def _summary(
    front: Sequence[str],
    rows: Mapping[str, Mapping[str, Any]],
    ratios: Mapping[str, np.ndarray[Any, Any]],
    layout_count: int,
    steps: int,
) -> str:
    text = f"{len(rows)} of {layout_count} layouts, {steps} steps, {len(SEEDS)} seeds."
    if len(front) < _FEWEST:
        return f"{text}\n"
    table = np.array([ratios[name] for name in front])
    noise = float(np.sqrt(table.var(axis=1, ddof=1).mean() / len(SEEDS)))
    spread = float(table.mean(axis=1).std(ddof=1))
    quality = [-rows[name]["coordinates"]["quality"] for name in front]
    rank = float(spearmanr(quality, table.mean(axis=1)).statistic)
    return (
        f"{text} On the front, recall has a deviation of {spread:.3f} between layouts and of {noise:.3f} between means"
        f" of seeds; its rank correlation with quality is {rank:.2f}.\n"
    )


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    running, reporting = commands.add_parser("run"), commands.add_parser("report")
    running.add_argument("--minutes", type=float, default=600.0, help="begin no training after this time")
    reporting.add_argument("--page", type=Path, help="with places `<!-- recall NAME -->`; left out: printed")
    for command in (running, reporting):
        command.add_argument(
            "archives", type=Path, nargs="*", default=[FOLDER / f"{name}.jsonl.gz" for name in STUDIES]
        )
        command.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    with scratch_store() as store:
        reports = [read(archive, store) for archive in options.archives]
    if options.command == "run":
        rows = [row["layout"] for report in reports for row in layouts(report).values()]
        todo = {job.key: (layout, job) for layout in rows for job in jobs(layout, options.steps)}
        train_missing(todo, RECORDED, options.minutes)
        return
    for report in reports:
        write_part(options.page, f"recall {report['study']}", table(report, options.steps, recorded(RECORDED)))


if __name__ == "__main__":
    main()
