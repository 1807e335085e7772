"""Measures whether a teacher raises the reliability of a language-model score per second.

    python -m benchmarks.quality.teacher --out FOLDER [--layouts 8] [--seeds 3] [--steps 300] [--minutes M]

Random layouts of a space and its published reference are trained with and without a teacher (the published reference,
`--teacher-steps` long) under the same seeds. Each training is one file in FOLDER, skipped where it is there, so that
the script can be stopped and started again; with all of them a table is printed:

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

import numpy as np

from nas.core.durable import write_durably
from nas.core.layout import Layout
from nas.core.quality_config import QualityConfig, Rung, Teacher
from nas.core.space import SearchSpace
from nas.proxy.corpus import CorpusRef, refer
from nas.proxy.job import TrainJob
from nas.proxy.ladder import rung_jobs
from nas.proxy.quality import paired_spread
from nas.proxy.train import train
from nas.search import Sampler
from nas.search_spaces import load_space

WAYS = ("alone", "taught")


def jobs(arguments: argparse.Namespace, space: SearchSpace, corpus: CorpusRef) -> Iterator[tuple[str, TrainJob]]:
    """Yields every training with its name, seed by seed, so that a part of them is already a comparison."""
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
                yield f"{way}-{number}-{seed}", job


def main() -> None:
    """Runs what is missing, then prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of results")
    parser.add_argument("--space", default="lfm2-study")
    parser.add_argument("--layouts", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--teacher-steps", type=int, default=900)
    parser.add_argument("--weight", type=float, default=0.5)
    parser.add_argument("--draw", type=int, default=1, help="seed of the layouts")
    parser.add_argument("--work", type=Path, help="folder of checkpoints; FOLDER/work unless given")
    parser.add_argument("--minutes", type=float, default=1e9, help="no training is begun after them")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    space = load_space(arguments.space)
    began, corpus = time.monotonic(), refer("default", Path())
    named = dict(jobs(arguments, space, corpus))
    for name, job in named.items():
        path = arguments.out / f"{name}.json"
        if path.is_file() or time.monotonic() - began > 60 * arguments.minutes:
            continue
        work = arguments.work or arguments.out / "work"
        if job.teacher is not None:
            train(job.teacher.job, yield_hook=lambda: None, checkpoint_dir=work, device="cpu", log=lambda line: None)
        result = train(job, yield_hook=lambda: None, checkpoint_dir=work, device="cpu", log=lambda line: None)
        kept = {"layout": job.layout, "scores": result.scores, "cpu_seconds": result.cpu_seconds, "steps": job.steps}
        write_durably(path, json.dumps(kept, indent=1).encode())
        print(name, round(result.cpu_seconds, 1), flush=True)
    report(arguments)


def report(arguments: argparse.Namespace) -> None:
    """Prints the table from the files of the trainings that both ways have for every layout of a seed."""
    found = {path.stem: json.loads(path.read_text()) for path in arguments.out.glob("*-*-*.json")}
    seeds = [
        seed
        for seed in range(arguments.seeds)
        if all(f"{way}-{n}-{seed}" in found for way in WAYS for n in range(arguments.layouts))
    ]
    if len(seeds) < 2:
        print(f"{len(found)} trainings; a comparison needs two whole seeds")
        return
    groups = sorted(found["alone-0-0"]["scores"])
    print(f"{arguments.layouts} layouts, seeds {seeds}, {found['alone-0-0']['steps']} steps\n")
    print("| group | way | sd of layouts | paired sd of a seed | reliability of a seed | CPU s | per 100 CPU s |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for group in groups:
        for way in WAYS:
            table = [
                {seed: found[f"{way}-{n}-{seed}"]["scores"][group] for seed in seeds} for n in range(arguments.layouts)
            ]
            noise = paired_spread(table).sd ** 2
            means = np.var([np.mean(list(row.values())) for row in table], ddof=1)
            signal = max(0.0, means - noise / len(seeds))
            seconds = np.mean([found[f"{way}-{n}-{s}"]["cpu_seconds"] for n in range(arguments.layouts) for s in seeds])
            one = signal / (signal + noise)
            pooled = signal / (signal + noise * seconds / 100)
            print(
                f"| {group} | {way} | {signal**0.5:.4f} | {noise**0.5:.4f} | {one:.2f} | {seconds:.1f} | {pooled:.2f} |"
            )


if __name__ == "__main__":
    main()
