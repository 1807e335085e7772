"""Processor time of a training step of proxies: seeds in one pass against one by one, bfloat16 against float32.

    python -m benchmarks.quality.throughput [--rounds 5] [--steps 3] [--seeds 2,4,8] [--device cpu] [--page PAGE]

Steps are those of `nas.model.nn.fit`, with optimiser and weight average, without reading data, on one thread. A round
runs every way of training in turn; figures are the least over rounds, per seed and step, so that a busy machine
disturbs the ratios little. `ratio` is the time of one seed alone in float32 over that of this way: above 1 is faster.
Eight seeds cost as much as 8 / ratio single ones. On a GPU, wall time is taken instead of processor time.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.page import fill, markdown
from nas.core.layout import Layout
from nas.model.nn.fit import TrainingCheckpoint, TrainingPhase, TrainingState, Worker, fit, precision_of
from nas.model.nn.model import Model
from nas.model.nn.optimisers import Optimiser, OptimiserKind
from nas.model.nn.seeds import stacked

LAYOUTS = {
    "hybrid": "d64 v256 ffn=swiglu:256 [C3*2 A4/2 C3*2 A4/2 C3 A4/2]",
    "attention": "d64 v256 ffn=swiglu:256 [A4/2*8]",
    "Mamba-2": "d64 v256 ffn=swiglu:256 [M*8]",
    "experts": "d64 v256 ffn=moe:8x2:128 [C3*2 A4/2 C3*2 A4/2 C3 A4/2]",
}
SIZES = {"text": (4, 128), "task": (8, 20)}
"""What is trained -> sequences in a step, and their length."""
Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Way:
    """A way to train.

    Args:
        seeds: in one pass.
        precision: of matrix products.
        optimiser: kind.
    """

    seeds: int = 1
    precision: Precision = "float32"
    optimiser: OptimiserKind = "adamw"

    def __str__(self) -> str:
        extra = [self.precision] * (self.precision != "float32") + [self.optimiser] * (self.optimiser != "adamw")
        return ", ".join([f"{self.seeds} in one pass" if self.seeds > 1 else "alone", *extra])


ALONE = Way()


@dataclass(frozen=True)
class Row:
    """A measured way; times are of one seed and step."""

    layout: str
    data: str
    way: str
    ms: float
    ratio: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seeds", default="2,4,8")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--page", type=Path, help="write a table there, such as docs/measured/proxies.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ways = [ALONE, *(Way(seeds=int(count)) for count in options.seeds.split(","))]
    ways += [Way(precision="bfloat16"), Way(optimiser="muon")]
    table: dict[tuple[str, str], dict[str, str]] = {}
    for layout in options.layouts.split(","):
        for row in measured(layout, ways, options.rounds, options.steps, options.device):
            print(json.dumps(asdict(row)), flush=True)
            cells = table.setdefault((row.layout, row.data), {"layout": row.layout, "data": row.data})
            cells["alone, ms" if row.way == str(ALONE) else row.way] = (
                f"{row.ms:.1f}" if row.way == str(ALONE) else f"{row.ratio:.2f}"
            )
    if options.page:
        fill(options.page, "throughput", markdown([*table.values()]))


def measured(layout: str, ways: list[Way], rounds: int, steps: int, device: str) -> Iterator[Row]:
    """Yields the rows of a layout."""
    for data in SIZES:
        times: dict[Way, list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way in ways:
                times[way].append(step_seconds(LAYOUTS[layout], *SIZES[data], way, steps, torch.device(device)))
        least = {way: min(seconds) for way, seconds in times.items()}
        for way in ways:
            yield Row(layout, data, str(way), 1e3 * least[way], least[ALONE] / least[way])


def step_seconds(text: str, batch: int, length: int, way: Way, steps: int, device: torch.device) -> float:
    """Returns the seconds of a step, over the number of seeds; the first step, which allocates, does not count."""
    layout, seeds = Layout.parse(text), way.seeds if way.seeds > 1 else None
    models = [Model(layout, seed) for seed in range(way.seeds)]
    model = (models[0] if seeds is None else stacked(models)).to(device)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, layout.vocab, (2, way.seeds * batch, length), generator=generator).to(device)

    def loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        token_losses = F.cross_entropy(model(inputs).flatten(0, 1).float(), labels.flatten(), reduction="none")
        return token_losses.mean() if seeds is None else token_losses.view(seeds, -1).mean(1)

    state = TrainingState(model, Optimiser(0.05, 1.0, 0.01, kind=way.optimiser), 1 + steps, 0.99, seeds)
    marks: list[float] = []

    def spent() -> float:
        return state.seconds if device.type == "cuda" else state.cpu_seconds

    def rate(step: int) -> float:
        marks.append(spent())
        return 1e-3

    phase = TrainingPhase("steps", 1 + steps, batch * length, lambda step: [(tokens[0], tokens[1])], loss, rate)
    with tempfile.TemporaryDirectory() as folder:
        files = [TrainingCheckpoint(Path(folder) / str(seed), {}, interval_s=math.inf) for seed in range(way.seeds)]
        precision = lambda: precision_of(device, way.precision)  # noqa: E731 - a context for each step
        fit(state, [phase], files, Worker(device, _silent), name=str(way), precision=precision)
    return (spent() - marks[1]) / steps / way.seeds


def _silent(line: str) -> None:
    """Takes a progress line."""


if __name__ == "__main__":
    main()
