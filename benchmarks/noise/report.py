"""How far figures of the protocol are off, and how often their intervals hold, by the runs in `recorded`.

    python -m benchmarks.noise.report [--folder FOLDER] [--page docs/measured/noise.md] [--draws 300]

The truth is the plain median, or percentile, of a run of the subject alone on the idle machine: that of the fastest
fifth of its runs, as an idle virtual machine has neighbours that nobody sees. A figure is made by
the protocol's own code of repetitions drawn from those of a condition, and of a calibration drawn from the reference's
runs alone: in the idle machine, as when a neighbour came after it, or under the same condition.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import page
from benchmarks.noise.record import FOLDER, SUBJECTS, sample_of
from nas.core.measurement import ClockName, Figure, ReferenceTimes, Sample
from nas.core.stats import Z95, floor
from nas.measure.protocol.estimator import (
    TIMES,
    TimeName,
    clock_of,
    log_ratios,
    reference_times,
    run_times,
    time_figures,
)

IDLE = ("idle", "idle2")
REPETITIONS = {"ttft": 4, "decode": 4, "decode_p95": 10}
"""Time -> repetitions of a figure; a p95 needs a thousand tokens."""
CALM_LOAD = 0.3
_HEAD = (
    "beside", "load", "ratio: bias", "sd", "one run", "held", "ms: bias", "held", "held, calibrated there", "±",
    "no figure", "plain",
)  # fmt: skip
FIGURES: Mapping[TimeName, str] = {"ttft": "ttft", "decode": "decode_p50", "decode_p95": "decode_p95"}


@dataclass(frozen=True)
class Recording:
    """The rows of one runtime, number of threads and condition."""

    runtime: str
    threads: int
    condition: str
    rows: Sequence[dict[str, Any]]

    def pairs(self, subject: str) -> list[tuple[Sample, Sample]]:
        """Returns candidate and reference of each process of both."""
        rows = [row for row in self.rows if row["subject"] == subject and row["kind"] == "pair"]
        return [(sample_of(row["sample"]), sample_of(row["beside"])) for row in rows]

    def alone(self, subject: str, kind: str) -> list[Sample]:
        """Returns the runs of the subject's model or reference alone."""
        return [sample_of(row["sample"]) for row in self.rows if row["subject"] == subject and row["kind"] == kind]


def read_recordings(folder: Path) -> list[Recording]:
    """Reads all files of a folder."""
    recordings = []
    for path in sorted(folder.glob("*.jsonl.gz")):
        runtime, threads, condition = path.name.removesuffix(".jsonl.gz").rsplit("-", 2)
        rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
        recordings.append(Recording(runtime, int(threads), condition, rows))
    return recordings


@dataclass(frozen=True)
class Cell:
    """Errors of one figure under one condition: shares, and 100 times natural logarithms.

    Args:
        bias: of the ratio candidate / reference against the idle machine's.
        sd: of it, over draws of so many repetitions.
        run_sd: of one repetition.
        ratio_held: share of draws whose interval, of the figure's own noise, holds the idle machine's.
        ms_bias: of milliseconds, calibrated on the idle machine.
        held: share of intervals of all noise that hold the truth, calibrated on the idle machine.
        held_busy: the same, calibrated under the condition itself.
        width: half a median interval.
        unknown: share of draws of which the protocol states no figure.
        plain: bias of the plain statistic of the same number of runs alone, as llama-bench would report it.
    """

    bias: float
    sd: float
    run_sd: float
    ratio_held: float
    ms_bias: float
    held: float
    held_busy: float
    width: float
    unknown: float
    plain: float


def cell(
    name: TimeName, recording: Recording, idle: Sequence[Recording], subject: str, draws: int, rng: random.Random
) -> Cell | None:
    """Returns the errors of one figure; None where there are too few runs, or none has a figure."""
    gen, threads, count = SUBJECTS[subject].workload.gen, recording.threads, REPETITIONS[name]
    pairs = recording.pairs(subject)
    if not pairs:
        return None
    calm_pairs = [pair for rest in idle for pair in rest.pairs(subject)]
    calm_models = [sample for rest in idle for sample in rest.alone(subject, "model")]
    calm_references = [sample for rest in idle for sample in rest.alone(subject, "reference")]
    clock = clock_of([*calm_models, *calm_references], threads)
    if name == "decode_p95" and gen * count < 1000:
        return None
    truth = floor(_plains(name, calm_models, clock))
    ratio = statistics.fmean(log_ratios(run_times(c, clock), run_times(r, clock))[name] for c, r in calm_pairs)
    calm = reference_times(calm_references, threads)
    beside = recording.condition not in IDLE
    busy = reference_times(recording.alone(subject, "reference"), threads, disturbed=beside)
    per_run = [log_ratios(run_times(c, clock), run_times(r, clock))[name] for c, r in pairs]
    errors: list[float] = []
    ratio_held = held = held_busy = 0
    widths, in_ms = [], []
    for _ in range(draws):
        drawn = rng.choices(pairs, k=count)
        for calibration in (calm, busy):
            figure = _figure(name, drawn, calibration, threads, gen)
            value, sd, low, high = figure.value, figure.log_sd, figure.low, figure.high
            if value is None or sd is None or low is None or high is None:
                continue
            if calibration is busy:
                held_busy += low <= truth <= high
                continue
            error = math.log(value / getattr(calm, f"{name}_ms")) - ratio
            errors.append(error)
            ratio_held += abs(error) <= Z95 * sd
            held += low <= truth <= high
            in_ms.append(math.log(value / truth))
            widths.append(math.log(high / low) / 2)
    if len(errors) < 2:
        return None
    alone = statistics.median(_plains(name, recording.alone(subject, "model"), "wall"))
    plain = alone / floor(_plains(name, calm_models, "wall"))
    return Cell(
        bias=100 * statistics.fmean(errors),
        sd=100 * statistics.stdev(errors),
        run_sd=100 * statistics.stdev(per_run),
        ratio_held=ratio_held / len(errors),
        ms_bias=100 * statistics.fmean(in_ms),
        held=held / len(errors),
        held_busy=held_busy / len(errors),
        width=100 * statistics.median(widths),
        unknown=1 - len(errors) / draws,
        plain=100 * math.log(plain),
    )


def _figure(
    name: TimeName, pairs: Sequence[tuple[Sample, Sample]], calibration: ReferenceTimes, threads: int, gen: int
) -> Figure:
    candidates, references = zip(*pairs, strict=True)
    return time_figures(candidates, references, calibration, threads, gen)[FIGURES[name]]


def _plains(name: TimeName, samples: Sequence[Sample], clock: ClockName) -> list[float]:
    return [value for sample in samples if (value := run_times(sample, clock).of(name)) is not None]


def table(recordings: Sequence[Recording], draws: int) -> str:
    """Returns the page's tables."""
    rng = random.Random(0)
    lines: list[str] = []
    for runtime, threads in sorted({(recording.runtime, recording.threads) for recording in recordings}):
        group = [recording for recording in recordings if (recording.runtime, recording.threads) == (runtime, threads)]
        idle = [recording for recording in group if recording.condition in IDLE]
        for subject, name in ((subject, name) for subject in SUBJECTS for name in TIMES if name in FIGURES):
            rows = [(recording, cell(name, recording, idle, subject, draws, rng)) for recording in group]
            if not any(errors for _, errors in rows):
                continue
            heading = f"### {FIGURES[name]} of {subject}, {runtime}, {threads} thread{'s' * (threads > 1)}"
            cells = [_cells(recording, errors) for recording, errors in rows if errors]
            lines += [heading, "", page.table(_HEAD, cells)]
    started = [
        (recording.condition, statistics.fmean(row["load"] < CALM_LOAD for row in recording.rows))
        for recording in recordings
    ]
    waits = ", ".join(
        f"{condition} {statistics.fmean(1 - share for other, share in started if other == condition):.0%}"
        for condition in sorted(dict(started))
    )
    return "\n".join(
        [*lines, f'Share of runs that a rule "wait until the load is below {CALM_LOAD}" would not start: {waits}.']
    ).replace("%", " %")


def _cells(recording: Recording, errors: Cell) -> list[str]:
    load = statistics.median(row["load"] for row in recording.rows)
    of_ratio = (f"{errors.bias:+.1f}", f"{errors.sd:.1f}", f"{errors.run_sd:.1f}", f"{errors.ratio_held:.0%}")
    of_ms = (f"{errors.ms_bias:+.1f}", f"{errors.held:.0%}", f"{errors.held_busy:.0%}", f"{errors.width:.1f}")
    return [recording.condition, f"{load:.0f}", *of_ratio, *of_ms, f"{errors.unknown:.0%}", f"{errors.plain:+.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--draws", type=int, default=300)
    options = parser.parse_args()
    page.write_part(options.page, "noise", table(read_recordings(options.folder), options.draws))


if __name__ == "__main__":
    main()
