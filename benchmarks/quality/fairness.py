"""Compares each kind of block at the default start values and learning rate with its own best; resumes.

A proxy of four layers holds the kind in every layer (alone), in the first, or in the last among convolutions, and is
trained as a study trains it. A kind is treated fairly where the default's loss is within 0.02 bits per byte of the best
over learning rates and start values.

    python -m benchmarks.quality.fairness run --widths 64 --seconds 600    # a line of RECORDED per training; continues
    python -m benchmarks.quality.fairness report --page docs/measured/proxies.md
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from benchmarks.lines import read_lines
from benchmarks.page import markdown, write_part
from benchmarks.runs import say
from nas.core.layout import Layout, narrow
from nas.core.quality_config import QualityConfig
from nas.model.nn.model import Model
from nas.model.nn.primitives import ExpertLinear, Linear
from nas.model.text.corpus import BYTE_VOCAB, refer
from nas.search.proxy.job import LmRun, TrainJob
from nas.search.proxy.train import train

RECORDED = Path(__file__).parents[1] / "recorded" / "fairness.jsonl"
CONFIG = QualityConfig()
LIMIT = 0.02
"""Bits per byte by which the default may be behind a kind's own best."""

KINDS = {
    "conv": "C3",
    "gqa": "A16/8",
    "gqa, 1 key-value head": "A16/1",
    "gqa, Canon": "A16/8(canon=4)",
    "swa, sinks": "W16/8@1024(sink=1)",
    "mla": "L16/256",
    "mamba2": "M",
    "gdn": "D4",
    "gla": "G4",
    "mlstm": "X4",
    "conv + moe": "C3+moe:8x2:1536",
    "feed-forward alone": "-",
    "conv & gqa": "C3&A16/8",
}
"""Kind -> one layer at width 1024."""
PLACES = ("alone", "first", "last")
STEPS = 400


@dataclass(frozen=True)
class Start:
    """Factors on default start values.

    Args:
        embedding: of the embedding table.
        residual: of projections into the residual stream.
    """

    embedding: float = 1.0
    residual: float = 1.0


STARTS = (Start(), Start(embedding=0.3), Start(embedding=3.0), Start(residual=0.3), Start(residual=3.0))
RATES = (1.0, 0.5, 2.0)
"""Factors on the default learning rate."""


@dataclass(frozen=True)
class Training:
    """One training: a kind at a place, a width, and what differs from the default."""

    kind: str
    place: str
    width: int
    rate: float = 1.0
    start: Start = Start()
    seed: int = 0
    steps: int = STEPS

    @property
    def cell(self) -> tuple[str, str, int]:
        """What is compared within."""
        return self.kind, self.place, self.width

    def layout(self) -> Layout:
        """Returns the proxy of the stack."""
        layer = KINDS[self.kind]
        others = ["A16/8"] * 3 if self.kind == "conv" else ["C3"] * 3
        stack = {"alone": [layer] * 4, "first": [layer, *others], "last": [*others, layer]}[self.place]
        deployed = Layout.parse(f"d1024 v65536 ffn=swiglu:4608 [{' '.join(stack)}]")
        return narrow(deployed, self.width, BYTE_VOCAB, context=CONFIG.context, length=CONFIG.length)


def trainings(widths: list[int], seeds: list[int]) -> Iterator[Training]:
    """Yields the grid; what matters most first: all defaults, then learning rates, then start values."""
    cells = list(itertools.product(seeds, widths, KINDS, PLACES))
    settings = [(rate, STARTS[0]) for rate in RATES] + [(1.0, start) for start in STARTS[1:]]
    settings += [(rate, start) for rate in RATES[1:] for start in STARTS[1:]]
    for rate, start in settings:
        for seed, width, kind, place in cells:
            yield Training(kind, place, width, rate, start, seed)


def run_one(training: Training) -> None:
    """Trains as a study does, from start values scaled by `training.start`, and records the loss."""
    job = TrainJob(
        layout=training.layout().to_json(),
        run=LmRun(corpus=refer(CONFIG.corpus, Path()), length=CONFIG.length, eval_bytes=CONFIG.eval_bytes),
        steps=training.steps,
        lr=CONFIG.lr * training.rate,
        seed=training.seed,
        **CONFIG.model_dump(include={"batch", "warmup", "weight_decay", "clip", "ema"}),
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch("nas.search.proxy.train.Model", partial(scaled_model, start=training.start)),
    ):
        result = train(job, yield_hook=lambda: None, checkpoint_dir=Path(folder), device="cpu", log=lambda line: None)
    loss = round(statistics.mean(result.losses.values()), 5)
    row = asdict(training) | {"loss": loss, "cpu_s": round(result.cpu_seconds, 1)}
    with RECORDED.open("a") as file:
        file.write(json.dumps(row) + "\n")


@torch.no_grad()
def scaled_model(layout: Layout, seed: int, start: Start) -> Model:
    """Returns a model whose start values are the default's times the factors of `start`."""
    model = Model(layout, seed)
    model.embed.weight.mul_(start.embedding)
    for module in model.modules():
        if isinstance(module, Linear | ExpertLinear) and module.residual:
            module.weight.mul_(start.residual)
    return model


def finished() -> list[tuple[Training, float]]:
    """Returns every training on file with its loss, in bits per byte: the mean over domains."""
    trainings_done = []
    for row in read_lines(RECORDED):
        fields = {name: row[name] for name in ("kind", "place", "width", "rate", "seed", "steps")}
        trainings_done.append((Training(**fields, start=Start(**row["start"])), float(row["loss"])))
    return trainings_done


def gaps(done: list[tuple[Training, float]]) -> dict[tuple[str, str, int], float]:
    """Returns by how much the default is behind the best setting, for each kind, place and width; one seed each."""
    cells: dict[tuple[str, str, int], dict[tuple[float, Start], float]] = {}
    for training, loss in done:
        if training.seed == 0 and training.steps == STEPS:
            cells.setdefault(training.cell, {})[training.rate, training.start] = loss
    return {
        cell: round(losses[1.0, Start()] - min(losses.values()), 3)
        for cell, losses in cells.items()
        if (1.0, Start()) in losses and len(losses) > 1
    }


def table(behind: Mapping[tuple[str, str, int], float]) -> str:
    """Returns a row for each kind, and how many cells keep the limit."""
    columns = sorted({(width, place) for _, place, width in behind}, key=lambda cell: (cell[0], PLACES.index(cell[1])))
    rows = [
        {"kind": kind}
        | {
            f"width {width}, {place}": f"{behind[kind, place, width]:.3f}" if (kind, place, width) in behind else ""
            for width, place in columns
        }
        for kind in KINDS
    ]
    fair = sum(gap <= LIMIT for gap in behind.values())
    worst = max(behind.values(), default=0.0)
    return (
        f"{markdown(rows)}\n{fair} of {len(behind)} within {LIMIT} bits per byte of their own best; the worst is"
        f" {worst:.3f} behind.\n"
    )


def rates(done: list[tuple[Training, float]]) -> str:
    """Returns for each width and learning rate how many cells it serves as their best one does, at default starts."""
    cells: dict[tuple[str, str, int], dict[float, float]] = {}
    for training, loss in done:
        if training.seed == 0 and training.steps == STEPS and training.start == Start():
            cells.setdefault(training.cell, {})[training.rate] = loss
    lines = []
    for width in sorted({cell[2] for cell in cells}):
        on_width = [losses for cell, losses in cells.items() if cell[2] == width]
        for rate in sorted(RATES):
            behind = [losses[rate] - min(losses.values()) for losses in on_width if rate in losses]
            lines.append(
                f"- width {width}, rate x {rate:g}: {sum(gap <= LIMIT for gap in behind)} of {len(behind)} within"
                f" {LIMIT} of the best rate, {sum(gap == 0 for gap in behind)} have it as the best, the worst is"
                f" {max(behind):.3f} behind\n"
            )
    return "".join(lines)


def run(options: argparse.Namespace) -> None:
    """Trains what has no result yet, until the time is over."""
    torch.set_num_threads(1)
    until = time.monotonic() + options.seconds
    number, count = options.part
    done = {training for training, _ in finished()}
    for training in itertools.islice(trainings(options.widths, options.seeds), number, None, count):
        if time.monotonic() > until:
            return
        if training not in done:
            run_one(training)
            say(str(training))


def report(options: argparse.Namespace) -> None:
    """Prints the table of what is on file."""
    done = finished()
    write_part(options.page, "fairness", f"{table(gaps(done))}\n{rates(done)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run", help="train what has no result yet")
    running.add_argument("--widths", type=int, nargs="+", default=[64, 128])
    running.add_argument("--seeds", type=int, nargs="+", default=[0])
    running.add_argument("--seconds", type=float, default=float("inf"), help="start no training after this time")
    running.add_argument("--part", type=int, nargs=2, default=[0, 1], help="number and count of processes that share")
    running.set_defaults(handle=run)
    reporting = commands.add_parser("report", help="print the table of what is on file")
    reporting.add_argument("--page", type=Path, help="that gets the table; left out: printed")
    reporting.set_defaults(handle=report)
    options = parser.parse_args()
    options.handle(options)


if __name__ == "__main__":
    main()
