"""Signal and noise of evaluations: each is trained on the same layouts with several seeds, and tells them apart or not.

    python -m benchmarks.quality.reliability run --folder FOLDER [--layouts 16] [--seeds 4] [--seconds 60]
    python -m benchmarks.quality.reliability show --folder FOLDER

`run` trains one thread's worth of proxies for about `--seconds`, and writes one JSON file per training; started again,
it continues with those that are missing, so it may be killed at any moment. Layouts are of the recorded study of
`lfm2-study`: one half the best of different proxies, the other half spread over the rest. `show` prints, for each
evaluation, the standard deviation between layouts (signal), the paired one between seeds (noise), their ratio, the CPU
seconds of one training, and for all together the effective dimension: the participation ratio (sum of eigenvalues)^2 /
(sum of their squares) of the correlations between the evaluations' means.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.search.recorded import load
from nas.core.durable import write_durably
from nas.core.layout import Layout
from nas.core.quality_config import QualityConfig
from nas.core.task import Setting
from nas.model.text.corpus import refer
from nas.search.proposers import Features
from nas.search.proxy.job import TRAINER_VERSION, TrainJob
from nas.search.proxy.ladder import rung_jobs
from nas.search.proxy.quality import paired_spread
from nas.search.spaces import load_space

REPOSITORY = Path(__file__).resolve().parents[2]
RECORDED = REPOSITORY / "benchmarks" / "recorded" / "lfm2-study.json.gz"
SPACE = "lfm2-study"
_FEWEST = 2


@dataclass(frozen=True)
class Evaluation:
    """One training that an evaluation is made of; `task` '' is the language model."""

    name: str
    task: str
    steps: int
    settings: Mapping[str, Setting] = field(default_factory=dict)
    batch: int = 8

    def config(self) -> QualityConfig:
        """Returns a ladder of this training alone."""
        stage = {"task": self.task, "steps": self.steps, "settings": dict(self.settings), "batch": self.batch}
        rung: dict[str, Any] = {"name": "only"}
        rung |= {"tasks": {self.name: stage}} if self.task else {"lm_steps": self.steps}
        return QualityConfig.model_validate({"rungs": [rung], "eval_bytes": 4096})


EVALUATIONS = (
    Evaluation("selcopy-20", "selcopy", 160),
    Evaluation("lm", "", 128),
    Evaluation("automata", "automata", 120),
    Evaluation("selcopy-128", "selcopy", 120, {"items": 8, "symbols": 8, "length": 128}),
    Evaluation("mqar-4", "mqar", 120, {"pairs": 4, "length": 128}),
    Evaluation("mqar-16", "mqar", 120, {"pairs": 16, "keys": 32, "values": 32, "length": 128}),
    Evaluation("noisyrecall", "noisyrecall", 120),
    Evaluation("knowledge", "knowledge", 120, {"facts": 256}),
    Evaluation("wordproblem-s3", "wordproblem", 120),
)


def layouts(count: int) -> list[Layout]:
    """Returns the layouts, good and others in turn; fewer are a prefix of more."""
    space = load_space(SPACE)
    quality: dict[str, tuple[float, str]] = {}
    for study in load(RECORDED):
        for row in study["told"]:
            if row["status"] == "complete" and row["origin"] != "reference":
                quality.setdefault(row["proxy_id"], (-row["objectives"]["quality"], row["layout"]))
    ranked = [Layout.parse(layout) for _, layout in sorted(quality.values(), reverse=True)]
    third, features = len(ranked) // 3, Features(space)
    good = features.spread_over(ranked[:third], [], 8)
    others = features.spread_over(ranked[third:], good, 8)
    return [layout for pair in zip(good, others, strict=True) for layout in pair][:count]


def jobs(count: int, seeds: int) -> Iterator[tuple[str, TrainJob]]:
    """Yields name and job of every training: of four layouts, evaluation by evaluation, then of the next four."""
    corpus = refer("default", REPOSITORY)
    named_layouts = layouts(count)
    for first in range(0, count, 4):
        for evaluation, seed in itertools.product(EVALUATIONS, range(seeds)):
            config = evaluation.config().with_seeds((seed,))
            for layout in named_layouts[first : first + 4]:
                (job,) = rung_jobs(config, 0, layout, corpus)
                yield f"{evaluation.name}.{layout.id[:12]}.{seed}", job


def run(folder: Path, count: int, seeds: int, seconds: float) -> None:
    """Trains what is missing in `folder`, until `seconds` have passed."""
    from nas.search.proxy.train import train

    begun = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for name, job in jobs(count, seeds):
            path = folder / f"{name}.json"
            if path.exists() and json.loads(path.read_text())["trainer"] == TRAINER_VERSION:
                continue
            if time.monotonic() - begun > seconds:
                return
            result = train(
                job,
                yield_hook=lambda: None,
                checkpoint_dir=Path(scratch),
                device="cpu",
                log=lambda _: None,
                checkpoint_s=1e9,
            )
            record = {
                "evaluation": name.split(".")[0],
                "layout": name.split(".")[1],
                "seed": job.seed,
                "trainer": TRAINER_VERSION,
                "scores": result.scores,
                "accuracy": result.accuracy,
                "cpu_seconds": result.cpu_seconds,
                "tokens": result.tokens,
            }
            write_durably(path, json.dumps(record, indent=1).encode() + b"\n")
            print(f"{name}: {result.scores} in {result.cpu_seconds:.1f} CPU s", flush=True)


def summary(rows: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], float | None]:
    """Returns a row per group of an evaluation, and the effective dimension of those that share all layouts."""
    values: dict[str, dict[str, dict[int, float]]] = {}
    cost: dict[str, list[float]] = {}
    for row in rows:
        for group, score in row["scores"].items():
            name = row["evaluation"] if group.startswith("task/") else group
            values.setdefault(name, {}).setdefault(row["layout"], {})[row["seed"]] = score
            cost.setdefault(name, []).append(row["cpu_seconds"])
    table_rows, means = [], {}
    for name, by_layout in values.items():
        seeds = set.intersection(*(set(by_seed) for by_seed in by_layout.values()))
        whole = {layout: {seed: by_seed[seed] for seed in seeds} for layout, by_seed in by_layout.items()}
        spread = paired_spread([*whole.values()])
        mean = {layout: fmean(scores.values()) for layout, scores in whole.items() if scores}
        if len(mean) < _FEWEST or not spread.dof:
            continue
        between = max(0.0, float(np.var([*mean.values()], ddof=1)) - spread.sd**2 / len(seeds)) ** 0.5
        means[name] = mean
        table_rows.append(
            {
                "evaluation": name,
                "layouts": len(mean),
                "seeds": len(seeds),
                "dof": spread.dof,
                "score": fmean(mean.values()),
                "signal": between,
                "noise": spread.sd,
                "snr": between / spread.sd if spread.sd else None,
                "cpu_s": fmean(cost[name]),
            }
        )
    return table_rows, effective_dimension(means)


def effective_dimension(means: Mapping[str, Mapping[str, float]]) -> float | None:
    """Returns the participation ratio of the correlations between evaluations; None for fewer than three layouts."""
    shared = sorted(set.intersection(*(set(scores) for scores in means.values()))) if means else []
    if len(shared) <= _FEWEST:
        return None
    table = np.array([[scores[layout] for layout in shared] for scores in means.values()])
    table = table[table.std(axis=1) > 0]
    values = np.linalg.eigvalsh(np.atleast_2d(np.corrcoef(table)))
    return float(values.sum() ** 2 / np.square(values).sum())


def show(folder: Path) -> None:
    """Prints the summary of the trainings in `folder`."""
    rows = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    table_rows, dimension = summary(rows)
    trainers = ", ".join(sorted({str(row["trainer"]) for row in rows}))
    print(f"{len(rows)} trainings, {sum(row['cpu_seconds'] for row in rows):.0f} CPU s, trainer {trainers}")
    print(f"{'evaluation':16} layouts seeds dof   score  signal   noise   SNR  CPU s")
    for row in sorted(table_rows, key=lambda row: -(row["snr"] or 0)):
        snr = "" if row["snr"] is None else f"{row['snr']:5.1f}"
        print(
            f"{row['evaluation']:16} {row['layouts']:7} {row['seeds']:5} {row['dof']:3.0f} {row['score']:7.3f}"
            f" {row['signal']:7.3f} {row['noise']:7.3f} {snr} {row['cpu_s']:6.1f}"
        )
    print(f"effective dimension: {'too few layouts' if dimension is None else f'{dimension:.2f}'}")


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "show"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layouts", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    if options.what == "run":
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        run(options.folder, options.layouts, options.seeds, options.seconds)
    else:
        show(options.folder)


if __name__ == "__main__":
    main()
