"""Errors of hardware models on layouts that they were not fitted to, on the table of hardware_layouts.py; JSON.

    python benchmarks/hardware_model.py [--folder FOLDER] [--splits 20] [--markdown]
        [--page docs/measured/hardware-model.md]

Each split draws half of the layouts to learn from; errors are of the other half. `own`: a model of the measured half.
`moved`: the same with one thread, moved to two threads by the two-thread figures of five of its layouts; `few`: a model
of these five alone; `shift`: the one-thread model times the median ratio of the five. MAPE is the mean of |forecast /
measured - 1|, Spearman's rho the rank correlation with what was measured; mean and standard deviation over splits.
`noise` is what remains for a perfect model, whose error is the noise of the medians that it is judged by. A figure is
the median over rounds of time / reference run's time x the median of all reference runs; memory is taken as it is.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nas.core.layout import Layout
from nas.search.analysis.agreement import rank_correlation
from nas.search.proposers.hardware import Costs, HardwareModel, Measured
from nas.search.spaces import load_space

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.hardware_layouts import FOLDER, SPACE, WORKLOAD, Row, read_layouts, read_rows
from benchmarks.page import fill, markdown
from benchmarks.runs import print_json

FIGURES = {"ttft_ms": "ms", "decode_p50_ms": "ms", "decode_p95_ms": "ms", "peak_rss_mb": "MB"}
FEW = 5
_MEDIAN_OF_3 = 0.6698
"""Standard deviation of the median of three normal values, in those of one."""
Array = NDArray[np.float64]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--markdown", action="store_true", help="a table instead of JSON")
    parser.add_argument("--page", type=Path, help="also write the table there, between the marks of its results")
    options = parser.parse_args()
    rows = read_rows(options.folder)
    layouts = read_layouts(options.folder)
    measured = sorted({row.layout for row in rows})
    results = [
        {"runtime": runtime, "figure": figure} | _judge(layouts, measured, rows, runtime, figure, options.splits)
        for runtime in sorted({row.runtime for row in rows})
        for figure in FIGURES
    ]
    table = markdown([_cells(result) for result in results])
    if options.page:
        fill(options.page, "results", table)
    if options.markdown:
        print(table)
    else:
        foreign = statistics.median(row.foreign_cpu for row in rows)
        conditions = {"layouts": len(measured), "splits": options.splits, "foreign_cpu_median": foreign}
        print_json({"space": SPACE, "workload": WORKLOAD.key(), **conditions, "models": results})


def _judge(
    layouts: Sequence[Layout], measured: Sequence[int], rows: Sequence[Row], runtime: str, figure: str, splits: int
) -> dict[str, Any]:
    """Returns errors of all sorts of models, by number of threads."""
    samples = {
        threads: _figures([row for row in rows if (row.runtime, row.threads) == (runtime, threads)], figure)
        for threads in sorted({row.threads for row in rows})
    }
    one, two = sorted(samples)
    space = load_space(SPACE)
    costs = Costs(WORKLOAD, [block.kind for block in space.mixers + space.ffn], FIGURES[figure])

    def sample(threads: int, which: Sequence[int]) -> Measured:
        rounds = np.array([samples[threads][index] for index in which])
        logs = np.log(np.median(rounds, axis=1))
        return Measured([layouts[index] for index in which], logs, np.full(len(rounds), noise_of(rounds)))

    ways: dict[str, list[tuple[float, float]]] = {}
    for split in range(splits):
        drawn = [measured[at] for at in np.random.default_rng(split).permutation(len(measured))]
        training_half, test_half = drawn[: len(drawn) // 2], drawn[len(drawn) // 2 :]
        few = training_half[:FEW]
        base = HardwareModel(costs, sample(one, training_half))
        models: dict[str, tuple[int, Callable[[Sequence[Layout]], Array]]] = {
            "own one": (one, _forecast(base)),
            "own two": (two, _forecast(HardwareModel(costs, sample(two, training_half)))),
            "moved": (two, _forecast(base.moved(sample(two, few)))),
            "few": (two, _forecast(HardwareModel(costs, sample(two, few)))),
            "shift": (two, _shifted(base, sample(two, few))),
        }
        for name, (threads, forecast) in models.items():
            truth = sample(threads, test_half)
            ways.setdefault(name, []).append(_errors(forecast(truth.layouts), truth.logs))
    noise = {
        str(threads): math.sqrt(2 / math.pi) * noise_of(np.array([*by_layout.values()]))
        for threads, by_layout in samples.items()
    }
    return {"noise": noise} | {name: _summary(errors) for name, errors in ways.items()}


def _forecast(model: HardwareModel) -> Callable[[Sequence[Layout]], Array]:
    return lambda layouts: model.predict(layouts).mean


def _shifted(base: HardwareModel, few: Measured) -> Callable[[Sequence[Layout]], Array]:
    shift = float(np.median(few.logs - base.predict(few.layouts).mean))
    return lambda layouts: base.predict(layouts).mean + shift


def _errors(forecast: Array, logs: Array) -> tuple[float, float]:
    spearman = rank_correlation(forecast.tolist(), logs.tolist()).spearman
    return float(np.abs(np.expm1(forecast - logs)).mean()), spearman.value if spearman else float("nan")


def _summary(errors: Sequence[tuple[float, float]]) -> dict[str, Any]:
    mape, rho = np.array(errors).T
    return {
        "mape": {"mean": float(mape.mean()), "sd": float(mape.std(ddof=1))},
        "spearman": {"mean": float(rho.mean()), "sd": float(rho.std(ddof=1))},
    }


def _figures(rows: Sequence[Row], figure: str) -> dict[int, list[float]]:
    """Returns layout -> one value per round; times are relative to the reference run, times its median."""
    calm = statistics.median(row.reference_ms for row in rows)
    values: dict[int, list[float]] = {}
    for row in rows:
        scale = calm / row.reference_ms if FIGURES[figure] == "ms" else 1.0
        values.setdefault(row.layout, []).append(getattr(row, figure) * scale)
    return values


def noise_of(rounds: Array) -> float:
    """Returns the standard deviation of the logarithm of the median of [L, 3] rounds, equal for all L layouts.

    The deviation of one round is sqrt(pi) / 2 of the mean difference of two, which an outlier moves less than it moves
    squares: it hardly moves medians. Noise is taken to be normal.
    """
    logs = np.log(rounds)
    apart = np.abs(logs - np.roll(logs, 1, axis=1))  # the three pairs of rounds
    return float(math.sqrt(math.pi) / 2 * apart.mean() * _MEDIAN_OF_3)


def _cells(result: Mapping[str, Any]) -> dict[str, str]:
    heads = {
        "own one": "one thread",
        "own two": "two threads",
        "moved": f"two, moved by {FEW}",
        "few": f"two, these {FEW} alone",
        "shift": f"two, shifted by {FEW}",
    }
    cells = {
        head: "{:.1%} ± {:.1%}, {:.2f}".format(
            result[name]["mape"]["mean"], result[name]["mape"]["sd"], result[name]["spearman"]["mean"]
        )
        for name, head in heads.items()
    }
    noise = " / ".join(f"{share:.1%}" for share in result["noise"].values())
    return {"runtime": result["runtime"], "figure": result["figure"], "noise, one / two": noise, **cells}


if __name__ == "__main__":
    main()
