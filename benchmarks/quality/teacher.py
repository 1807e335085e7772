"""Measures whether a teacher raises the reliability of a language-model score per second.

    python -m benchmarks.quality.teacher run [--layouts 8] [--seeds 3] [--steps 300] [--minutes M]
    python -m benchmarks.quality.teacher report [--page docs/measured/proxies.md]

Random layouts of a space and its published reference are trained with and without a teacher (the published reference,
`--teacher-steps` long) under the same seeds. Each training is one line of `RECORDED`, skipped where it is there, so
that the script can be stopped and started again. The table, of all seeds that have every training:

- variance of the layouts' means, and the paired seed variance (without each layout's mean and each seed's shift);
- reliability of one seed: the share of the variance of a single score that is the layouts' own;
- seconds of processor time per training, the teacher's own training and predictions apart.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from scipy.stats import kendalltau

from benchmarks.quality.page import fill, markdown
from nas.core.layout import Layout
from nas.core.quality_config import QualityConfig, Rung, Teacher
from nas.core.space import SearchSpace
from nas.model.text.corpus import CorpusRef, refer
from nas.search.proposers import Sampler
from nas.search.proxy.job import TrainJob, TrainResult
from nas.search.proxy.ladder import rung_jobs
from nas.search.proxy.quality import paired_spread
from nas.search.proxy.train import train
from nas.search.spaces import load_space

RECORDED = Path(__file__).parents[1] / "recorded" / "proxy-teacher.jsonl"
WAYS = ("alone", "taught")
ALL = "mean"


def jobs(
    arguments: argparse.Namespace, space: SearchSpace, corpus: CorpusRef
) -> Iterator[tuple[str, int, int, TrainJob]]:
    """Yields way, number of the layout, seed and training; seed by seed, so that a part is already a comparison."""
    sampler, rng = Sampler(space), np.random.default_rng(arguments.draw)
    layouts = [Layout.parse(space.references.published)]
    layouts += [sampler.draw(rng) for _ in range(arguments.layouts - 1)]
    teacher = Teacher(layout=space.references.published, steps=arguments.teacher_steps, weight=arguments.weight)
    for seed in range(arguments.seeds):
        for number, layout in enumerate(layouts):
            for way in WAYS:
                rung = Rung(
                    name="lm", lm_steps=arguments.steps, seeds=(seed,), teacher=teacher if way == "taught" else None
                )
                config = space.quality.model_copy(update={"rungs": (rung,)})
                (job,) = rung_jobs(QualityConfig.model_validate(config.model_dump()), 0, layout, corpus)
                yield way, number, seed, job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run", help="train what has no result yet")
    running.add_argument("--space", default="lfm2-study")
    running.add_argument("--layouts", type=int, default=8)
    running.add_argument("--seeds", type=int, default=3)
    running.add_argument("--steps", type=int, default=300)
    running.add_argument("--teacher-steps", type=int, default=900)
    running.add_argument("--weight", type=float, default=0.5)
    running.add_argument("--draw", type=int, default=1, help="seed of the layouts")
    running.add_argument("--work", type=Path, default=Path("/tmp/hilnas-teacher"), help="folder of checkpoints")
    running.add_argument("--minutes", type=float, default=1e9, help="no training is begun after them")
    running.set_defaults(handle=run)
    reporting = commands.add_parser("report", help="print the table of what is on file")
    reporting.add_argument("--page", type=Path, help="also write the table there")
    reporting.set_defaults(handle=report)
    options = parser.parse_args()
    options.handle(options)


def run(options: argparse.Namespace) -> None:
    """Trains what has no result yet, until the time is over."""
    began, corpus = time.monotonic(), refer("default", Path())
    done = {(row["way"], row["number"], row["seed"]) for row in recorded()}
    for way, number, seed, job in jobs(options, load_space(options.space), corpus):
        if (way, number, seed) in done or time.monotonic() - began > 60 * options.minutes:
            continue
        if job.teacher is not None:
            _trained(job.teacher.job, options.work)
        result = _trained(job, options.work)
        row = {"way": way, "number": number, "seed": seed, "layout": Layout.from_json(job.layout).format()}
        row |= {"steps": job.steps, "cpu_s": round(result.cpu_seconds, 1), "scores": result.scores}
        with RECORDED.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(way, number, seed, row["cpu_s"], flush=True)


def _trained(job: TrainJob, work: Path) -> TrainResult:
    return train(job, yield_hook=lambda: None, checkpoint_dir=work, device="cpu", log=lambda line: None)


def recorded() -> list[dict[str, Any]]:
    """Returns every training on file."""
    return [json.loads(line) for line in RECORDED.read_text().splitlines()] if RECORDED.is_file() else []


def report(options: argparse.Namespace) -> None:
    """Prints the table, and how alike both ways order the layouts."""
    text = markdown([*rows(recorded())]) + "\n" + order(recorded())
    print(text, end="")
    if options.page:
        fill(options.page, "teacher", text)


Scores = list[dict[int, float]]
"""Layout -> seed -> score."""


def tables(done: list[dict[str, Any]]) -> dict[tuple[str, str], Scores]:
    """Returns (group, way) -> scores, of the seeds that have every training: whole domains, and their mean."""
    found = {
        (row["way"], row["number"], row["seed"]): {k: v for k, v in row["scores"].items() if "." not in k}
        for row in done
    }
    layouts = range(1 + max(number for _, number, _ in found))
    seeds = [
        seed
        for seed in sorted({seed for *_, seed in found})
        if all((way, number, seed) in found for way in WAYS for number in layouts)
    ]
    groups = sorted(next(iter(found.values())))
    return {
        (group, way): [
            {
                seed: fmean(found[way, number, seed].values()) if group == ALL else found[way, number, seed][group]
                for seed in seeds
            }
            for number in layouts
        ]
        for group in (*groups, ALL)
        for way in WAYS
    }


def rows(done: list[dict[str, Any]]) -> Iterator[dict[str, str]]:
    """Yields the rows of the table."""
    seconds = {way: fmean(row["cpu_s"] for row in done if row["way"] == way) for way in WAYS}
    for (group, way), table in tables(done).items():
        noise = paired_spread(table).sd ** 2
        means = np.var([fmean(each.values()) for each in table], ddof=1)
        signal = max(0.0, means - noise / len(table[0]))
        yield {
            "group": group,
            "way": way,
            "sd of layouts": f"{signal**0.5:.4f}",
            "paired sd of a seed": f"{noise**0.5:.4f}",
            "reliability of a seed": f"{signal / (signal + noise):.3f}",
            "CPU s": f"{seconds[way]:.1f}",
            "reliability per 100 CPU s": f"{signal / (signal + noise * seconds[way] / 100):.3f}",
        }


def order(done: list[dict[str, Any]]) -> str:
    """Returns a sentence on how alike the layouts' order is with and without the teacher, over all seeds."""
    found = tables(done)
    alone, taught = ([fmean(each.values()) for each in found[ALL, way]] for way in WAYS)
    tau = kendalltau(alone, taught).statistic
    return (
        f"{len(alone)} layouts, {len(found[ALL, WAYS[0]][0])} seeds: Kendall's tau between the mean scores"
        f" of both ways is {tau:.2f}.\n"
    )


if __name__ == "__main__":
    main()
