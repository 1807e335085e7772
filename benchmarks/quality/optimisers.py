"""Steps and processor time that protocols of proxy training need for the loss of the constant-rate AdamW protocol.

    python -m benchmarks.quality.optimisers [--protocols constant,wsd,...] [--state FOLDER]
    python -m benchmarks.quality.optimisers --report [--page docs/measured/proxies.md]

Each protocol trains each layout with two seeds, in one pass, to several lengths; a longer training resumes from the
shorter one where the protocol allows it. One unit of work is a protocol with a layout; finished ones are in
`benchmarks/recorded/optimisers.json` and are not repeated, and a killed one resumes from its checkpoints in `--state`.
`steps` are those at which a protocol's loss, interpolated between lengths, reaches that of the constant rate at its
last length, or "more" than that length; `fewer` is the geometric mean, over layouts and seeds, of the constant
protocol's steps over these, and `less CPU` the same of processor seconds, evaluations included.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.quality.page import fill
from benchmarks.quality.start_values import GRID, started
from nas.core.durable import write_durably
from nas.core.layout import Layout
from nas.model.text.corpus import refer
from nas.search.proxy.job import LmRun, TrainJob, TrainResult
from nas.search.proxy.train import train_seeds

RESULTS = Path(__file__).parents[1] / "recorded/optimisers.json"
LAYOUTS = {
    "hybrid": "d64 v256 ffn=swiglu:256 [C3*2 A4/2 C3]",
    "attention": "d64 v256 ffn=swiglu:256 [A4/2*4]",
    "experts": "d64 v256 ffn=moe:8x2:128 [C3 M A4/2 C3]",
}
LENGTHS = (100, 150, 200, 300, 400)
SEEDS = (0, 1)
BASE = "constant"
FORMER = "constant, start values of 0.1.0"
WSD: dict[str, Any] = {"decay": 0.2, "ema": 0.0}
PROTOCOLS: dict[str, dict[str, Any]] = {
    BASE: {},
    FORMER: {},
    "wsd": WSD,
    "wsd, muon": {**WSD, "optimiser": "muon"},
    "wsd, muon, lr 0.006": {**WSD, "optimiser": "muon", "lr": 6e-3},
    "wsd, muon, lr 0.012": {**WSD, "optimiser": "muon", "lr": 12e-3},
    "wsd, lr 0.006": {**WSD, "lr": 6e-3},
    "wsd, ema": {**WSD, "ema": 0.99},
    "wsd, betas 0.9 0.99": {**WSD, "betas": (0.9, 0.99)},
    "wsd, decay 0.4": {**WSD, "decay": 0.4},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--protocols", default=",".join(name.replace(", ", "+") for name in PROTOCOLS))
    parser.add_argument("--state", type=Path, default=Path("/tmp/hilnas-optimisers"))
    parser.add_argument("--report", action="store_true", help="only the table of what was measured")
    parser.add_argument("--page", type=Path, help="also write the table there")
    options = parser.parse_args()
    if not options.report:
        for name in options.protocols.split(","):
            for layout in LAYOUTS:
                measure(name.replace("+", ", "), layout, options.state)
    text = report(recorded())
    print(text)
    if options.page:
        fill(options.page, "optimisers", f"{text}\n")


def recorded() -> dict[str, Any]:
    """Returns 'protocol / layout' -> its measurement."""
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    return found


def measure(protocol: str, layout: str, state: Path) -> None:
    """Trains one layout under one protocol to all lengths and records seed -> bits per byte at each."""
    name = f"{protocol} / {layout}"
    if name in recorded():
        return
    started_as: AbstractContextManager[object] = nullcontext()
    if protocol == FORMER:  # its jobs have the keys of `BASE`
        started_as, state = (
            mock.patch("nas.search.proxy.train.Model", partial(started, setting=GRID[0])),
            state / "former",
        )
    losses: dict[str, list[float]] = {str(seed): [] for seed in SEEDS}
    before: list[TrainJob] = []
    done = cpu = 0.0
    for length in LENGTHS:
        jobs = [_job(protocol, layout, length, seed) for seed in SEEDS]
        done += len(SEEDS) * length
        if before:
            done -= len(SEEDS) * (before[0].steps - before[0].decay_steps)
            jobs = [job.model_copy(update={"resume_from": old.key}) for job, old in zip(jobs, before, strict=True)]
        with started_as:
            outcomes = train_seeds(jobs, yield_hook=lambda: None, checkpoint_dir=state, device="cpu", log=print)
        before = jobs
        for seed, outcome in zip(SEEDS, outcomes, strict=True):
            assert isinstance(outcome, TrainResult), outcome
            losses[str(seed)].append(statistics.mean(outcome.losses.values()))
            cpu += outcome.cpu_seconds
    found = recorded() | {name: {"lengths": LENGTHS, "bits_per_byte": losses, "cpu_seconds_a_step": cpu / done}}
    write_durably(RESULTS, (json.dumps(found, indent=1) + "\n").encode())


def _job(protocol: str, layout: str, length: int, seed: int) -> TrainJob:
    fields: dict[str, Any] = {
        "layout": Layout.parse(LAYOUTS[layout]).to_json(),
        "run": LmRun(corpus=refer("default", Path()), length=128, eval_bytes=4096),
        "steps": length, "batch": 4, "lr": 3e-3, "warmup": 20, "weight_decay": 0.05, "clip": 1.0, "ema": 0.99,
        "seed": seed,
    }  # fmt: skip
    return TrainJob(**(fields | PROTOCOLS[protocol]))


def report(found: dict[str, Any]) -> str:
    """Returns a Markdown table of the protocols that were measured on all layouts."""
    lines = [
        "| protocol | bits per byte at 100, 200, 400 steps | steps | fewer | CPU ms a step | less CPU |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    complete = [name for name in PROTOCOLS if all(f"{name} / {layout}" in found for layout in LAYOUTS)]
    for name in complete:
        rows = [(found[f"{BASE} / {layout}"], found[f"{name} / {layout}"]) for layout in LAYOUTS]
        at = [
            statistics.mean(row["bits_per_byte"][str(seed)][LENGTHS.index(n)] for _, row in rows for seed in SEEDS)
            for n in (100, 200, 400)
        ]
        steps = [
            _steps(row["bits_per_byte"][str(seed)], base["bits_per_byte"][str(seed)][-1])
            for base, row in rows
            for seed in SEEDS
        ]
        cost = [row["cpu_seconds_a_step"] / base["cpu_seconds_a_step"] for base, row in rows for _ in SEEDS]
        less = [LENGTHS[-1] / (count * ratio) for count, ratio in zip(steps, cost, strict=True)]
        ms = 1e3 * statistics.mean(row["cpu_seconds_a_step"] for _, row in rows)
        fewer = [LENGTHS[-1] / count for count in steps]
        cells = [name, ", ".join(f"{value:.3f}" for value in at)]
        reached = all(map(math.isfinite, steps))
        cells += [f"{statistics.mean(steps):.0f}", f"{statistics.geometric_mean(fewer):.2f}"] if reached else _NEVER
        cells += [f"{ms:.0f}", f"{statistics.geometric_mean(less):.2f}" if reached else _NEVER[1]]
        lines.append(f"| {' | '.join(cells)} |")
    if FORMER in complete:
        lines += ["", _against_former(found)]
    return "\n".join(lines)


_NEVER = ["more", "-"]


def _against_former(found: dict[str, Any]) -> str:
    """Returns a sentence on the steps that `BASE` needs for the losses of `FORMER` at the last length."""
    needed = []
    for layout in LAYOUTS:
        base, former = (
            [statistics.mean(at) for at in zip(*found[f"{name} / {layout}"]["bits_per_byte"].values(), strict=True)]
            for name in (BASE, FORMER)
        )
        needed.append(f"{layout} {_steps(base, former[-1]):.0f}")
    return (
        f"Steps that the constant rate needs for the mean losses of the former start values at {LENGTHS[-1]} steps"
        f" ({LENGTHS[0]} is the least that was measured): {', '.join(needed)}."
    )


def _steps(losses: list[float], wanted: float) -> float:
    """Returns the steps at which `losses` first reach `wanted`, on a line between two lengths; infinity if never."""
    if losses[0] <= wanted:
        return float(LENGTHS[0])
    for (early, late), (high, low) in zip(pairwise(LENGTHS), pairwise(losses), strict=True):
        if low <= wanted:
            return early + (late - early) * (high - wanted) / (high - low)
    return math.inf


if __name__ == "__main__":
    main()
