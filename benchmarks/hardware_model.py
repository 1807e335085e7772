"""Errors of hardware models on layouts that they were not fitted to, on the table of hardware_layouts.py; JSON.

    python benchmarks/hardware_model.py [--folder FOLDER] [--splits 20] [--markdown]
        [--page docs/measured/hardware-model.md]

Each split draws half of the layouts to learn from; errors are of the other half. `own`: a model of the measured half.
`moved`: the same with one thread, moved to two threads by the two-thread figures of five of its layouts; `few`: a model
of these five alone; `shift`: the one-thread model times the median ratio of the five. MAPE is the mean of |forecast /
measured - 1|, Spearman's rho the rank correlation with what was measured; mean and standard deviation over splits.
`noise` is what remains for a perfect model: the MAPE of one round against the median of the others. A figure is the
median over rounds of time / reference run's time x the median of all reference runs; memory is taken as it is.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hardware_layouts import FOLDER, SPACE, WORKLOAD, Row, read_layouts, read_rows
from numpy.typing import NDArray
from page import fill, markdown
from runs import print_json

from nas.core.layout import Layout
from nas.search.analysis.agreement import rank_correlation
from nas.search.proposers.hardware import Costs, HardwareModel, Measured
from nas.search.spaces import load_space

FIGURES = {"ttft_ms": "ms", "decode_p50_ms": "ms", "decode_p95_ms": "ms", "peak_rss_mb": "MB"}
FEW = 5
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
    table = markdown([_shown(result) for result in results])
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
        logs = np.array([samples[threads][index] for index in which])
        return Measured([layouts[index] for index in which], np.log(np.median(logs, axis=1)), _noise(logs))

    ways: dict[str, list[tuple[float, float]]] = {}
    for split in range(splits):
        drawn = [measured[at] for at in np.random.default_rng(split).permutation(len(measured))]
        seen, unseen = drawn[: len(drawn) // 2], drawn[len(drawn) // 2 :]
        few = seen[:FEW]
        base = HardwareModel(costs, sample(one, seen))
        models: dict[str, tuple[int, Callable[[Sequence[Layout]], Array]]] = {
            "own one": (one, _forecast(base)),
            "own two": (two, _forecast(HardwareModel(costs, sample(two, seen)))),
            "moved": (two, _forecast(base.moved(sample(two, few)))),
            "few": (two, _forecast(HardwareModel(costs, sample(two, few)))),
            "shift": (two, _shifted(base, sample(two, few))),
        }
        for name, (threads, forecast) in models.items():
            truth = sample(threads, unseen)
            ways.setdefault(name, []).append(_errors(forecast(truth.layouts), truth.logs))
    noise = {str(threads): _noise_mape(list(samples[threads].values())) for threads in samples}
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
    errors: dict[int, list[float]] = {}
    for row in rows:
        scale = calm / row.reference_ms if FIGURES[figure] == "ms" else 1.0
        errors.setdefault(row.layout, []).append(getattr(row, figure) * scale)
    return errors


def _noise(rounds: Array) -> Array:
    """Returns [L] standard deviations of the logarithm of the median over [L, R] rounds, equal for all layouts."""
    spread = float(np.sqrt(np.log(rounds).var(axis=1, ddof=1).mean()))
    return np.full(len(rounds), spread / np.sqrt(rounds.shape[1]))


def _noise_mape(rounds: Sequence[Sequence[float]]) -> float:
    off = [
        abs(value / statistics.median([*other[:index], *other[index + 1 :]]) - 1)
        for other in rounds
        for index, value in enumerate(other)
    ]
    return statistics.fmean(off)


def _shown(result: Mapping[str, Any]) -> dict[str, str]:
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
