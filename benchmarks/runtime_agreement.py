"""Compares how llama.cpp and ExecuTorch rank the same layouts, interleaved, at one thread.

    python benchmarks/runtime_agreement.py [--space lfm2-mixed] [--layouts 20] [--repetitions 6] [--markdown PAGE]

Layouts are drawn from the space, those that both runtimes carry, with its references in front. A round measures every
layout on both runtimes, one right after the other, in new processes and in random order; so disturbances
of the machine affect all layouts alike. A first round, which warms the file cache, is thrown away; figures
are medians over rounds. `repeatability` is each runtime's agreement with itself, odd rounds against even ones: what
noise leaves for any agreement between the two. The result is JSON on stdout.

Ranks show where they disagree. To explain it, there is the rank correlation of the ratio of the two
with how many layers of each kind a layout has, and with its share of weights. This is a correlation, not a
cause. The disk holds two files of every layout: together about 450 MB at 350M weights.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nas.core.layout import Layout
from nas.core.measurement import Sample
from nas.core.space import SearchSpace
from nas.core.workload import Workload
from nas.measure.runtimes.base import Build, RandomWeights, Runtime
from nas.measure.runtimes.executorch.runtime import EXECUTORCH
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.search.analysis.agreement import Coefficient, RankCorrelation, rank_correlation
from nas.search.proposers import Sampler
from nas.search.spaces import load_space
from nas.search.study.check import support_filter
from nas.testing.run_plan import run_plan

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.page import markdown
from benchmarks.runs import DEADLINE_S, print_json, say

METRICS = ("ttft_ms", "decode_p50_ms", "latency_ms", "peak_rss_mb", "file_mb")
RUNTIMES: tuple[Runtime, ...] = (LLAMA_CPP, EXECUTORCH)
FIRST, SECOND = (runtime.name for runtime in RUNTIMES)

Figures = dict[str, float]


@dataclass(frozen=True)
class Place:
    """One layout's file on one runtime."""

    runtime: Runtime
    file: Path
    layout: Layout
    workload: Workload
    folder: Path
    plan: Any
    file_mb: float

    def run(self) -> Figures:
        """Runs one new process."""
        sample = self.runtime.parse(run_plan(self.plan, self.folder, {"model": self.file}))
        return _figures(sample, self.workload, self.file_mb)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--space", default="lfm2-mixed", help="packaged name or file")
    parser.add_argument("--layouts", type=int, default=20, help="references among them")
    parser.add_argument("--repetitions", type=int, default=6)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--gen", type=int, default=100)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--markdown", type=Path, help="also write a page of tables here")
    options = parser.parse_args()
    if options.repetitions < 2:
        parser.error("repeatability needs two repetitions")
    workload = Workload(prompt=options.prompt, gen=options.gen, context=options.context, threads=1)
    space = load_space(options.space)
    layouts = _layouts(space, options.layouts, options.seed)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hilnas-benchmark-")))
        places = _export(layouts, workload, folder)
        figures = _measure(places, options.repetitions, options.seed)
    result = {
        "space": space.name,
        "seed": options.seed,
        "workload": workload.key(),
        "repetitions": options.repetitions,
        "builds": {runtime: place.plan.runner.build for (_, runtime), place in places.items()},
    } | _compared(layouts, figures)
    if options.markdown:
        options.markdown.write_text(_page(result))
    print_json(result)


def _layouts(space: SearchSpace, count: int, seed: int) -> list[Layout]:
    """Returns the references, then random layouts; no layout twice."""
    carried = support_filter(space)
    sampler = Sampler(space, lambda layout: carried(layout) and bool(EXECUTORCH.supports(layout)))
    rng = np.random.default_rng(seed)
    layouts = {layout.id: layout for layout in space.references.layouts().values()}
    while len(layouts) < count:
        layout = sampler.draw(rng)
        layouts[layout.id] = layout
    return list(layouts.values())[:count]


def _export(layouts: Sequence[Layout], workload: Workload, folder: Path) -> dict[tuple[int, str], Place]:
    patched = any(LLAMA_CPP.supports(layout).verdict == "patched" for layout in layouts)
    builds: dict[str, Build] = {FIRST: LLAMA_CPP.build(log=say, patched=patched), SECOND: EXECUTORCH.build(log=say)}
    places = {}
    for index, layout in enumerate(layouts):
        say(f"exporting {index + 1} of {len(layouts)}: {layout}")
        for runtime in RUNTIMES:
            file, runtime_build = folder / f"{index}-{runtime.name}", builds[runtime.name]
            artifact = runtime.export(layout, runtime.quantisations[0], RandomWeights(), file)
            plan = runtime.plan(artifact, runtime_build.runner, workload, DEADLINE_S)
            places[index, runtime.name] = Place(
                runtime, file, layout, workload, runtime_build.folder, plan, artifact.size / 1e6
            )
    return places


def _measure(
    places: Mapping[tuple[int, str], Place], repetitions: int, seed: int
) -> dict[tuple[int, str], list[Figures]]:
    order, rng = sorted({index for index, _ in places}), random.Random(seed)
    runs: dict[tuple[int, str], list[Figures]] = {key: [] for key in places}
    for number in range(repetitions + 1):
        say(f"round {number} of {repetitions}" + " (thrown away)" * (number == 0))
        rng.shuffle(order)
        for index in order:
            for runtime in rng.sample((FIRST, SECOND), 2):
                figures = places[index, runtime].run()
                if number:
                    runs[index, runtime].append(figures)
    return runs


def _figures(sample: Sample, workload: Workload, file_mb: float) -> Figures:
    assert sample.peak_rss_mb is not None
    token = statistics.median(sample.decode_ns) / 1e6
    latency = sample.ttft_ms + workload.gen * token
    return dict(zip(METRICS, (sample.ttft_ms, token, latency, sample.peak_rss_mb, file_mb), strict=True))


def _compared(layouts: Sequence[Layout], runs: Mapping[tuple[int, str], list[Figures]]) -> dict[str, Any]:
    medians = {
        metric: {
            name: [statistics.median(run[metric] for run in runs[index, name]) for index in range(len(layouts))]
            for name in (FIRST, SECOND)
        }
        for metric in METRICS
    }
    blocks = _composition(layouts)
    rows = [
        {
            "layout": layout.format(),
            "blocks": {kind: counts[index] for kind, counts in blocks.items()},
            **{
                metric: {name: values[index] for name, values in medians[metric].items()}
                | {"ratio": medians[metric][SECOND][index] / medians[metric][FIRST][index]}
                | {"ranks": [_rank(medians[metric][name], index) for name in (FIRST, SECOND)]}
                for metric in METRICS
            },
            "spread": {
                name: {metric: _spread([run[metric] for run in runs[index, name]]) for metric in METRICS}
                for name in (FIRST, SECOND)
            },
        }
        for index, layout in enumerate(layouts)
    ]
    agreement = {
        metric: _agreement(rows, metric, blocks)
        | {"repeatability": {name: _repeatability(runs, len(layouts), name, metric) for name in (FIRST, SECOND)}}
        for metric in METRICS
    }
    return {"agreement": agreement, "layouts": rows}


def _agreement(rows: Sequence[Mapping[str, Any]], metric: str, blocks: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    ratios = [row[metric]["ratio"] for row in rows]
    off = sorted(rows, key=lambda row: -abs(row[metric]["ranks"][0] - row[metric]["ranks"][1]))
    correlations = rank_correlation(*([row[metric][name] for row in rows] for name in (FIRST, SECOND)))
    return {
        **correlations.model_dump(),
        "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        "ratio_goes_along_with": {kind: _spearman(rank_correlation(ratios, counts)) for kind, counts in blocks.items()},
        "furthest_apart": [{"layout": row["layout"], "ranks": row[metric]["ranks"]} for row in off[:3]],
    }


def _repeatability(runs: Mapping[tuple[int, str], list[Figures]], layouts: int, name: str, metric: str) -> float | None:
    """Returns Spearman's rho of odd rounds against even ones."""
    odd, even = (
        [statistics.median(run[metric] for run in runs[index, name][start::2]) for index in range(layouts)]
        for start in (0, 1)
    )
    return _spearman(rank_correlation(odd, even))


def _composition(layouts: Sequence[Layout]) -> dict[str, list[float]]:
    """Returns by block kind the number of layers of each layout with it, and the weights in millions."""
    counts = [Counter(block.kind for layer in layout.layers for block in layer.blocks) for layout in layouts]
    kinds = sorted(set().union(*counts))
    shares = {kind: [float(count[kind]) for count in counts] for kind in kinds}
    return shares | {"weights_m": [layout.params.total / 1e6 for layout in layouts]}


def _rank(values: Sequence[float], index: int) -> int:
    """Returns ranks, 1 for the least."""
    return 1 + sum(value < values[index] for value in values)


def _spread(values: Sequence[float]) -> float:
    """Returns (greatest - least) / median."""
    return (max(values) - min(values)) / statistics.median(values)


def _spearman(correlation: RankCorrelation) -> float | None:
    return correlation.spearman.value if correlation.spearman else None


def _page(result: Mapping[str, Any]) -> str:
    agreement = [
        {
            "metric": metric,
            "Spearman": _correlation_text(agreement["spearman"]),
            "Kendall": _correlation_text(agreement["kendall"]),
            "each with itself": ", ".join(
                f"{name} {value:.2f}" for name, value in agreement["repeatability"].items() if value is not None
            ),
            f"{SECOND} / {FIRST}": "{median:.2f} ({min:.2f} to {max:.2f})".format(**agreement["ratio"]),
            "the ratio goes along with": ", ".join(
                f"{kind} {value:+.2f}"
                for kind, value in agreement["ratio_goes_along_with"].items()
                if value is not None
            ),
        }
        for metric, agreement in result["agreement"].items()
    ]
    layouts = [
        {"layout": f"`{row['layout']}`"}
        | {
            f"{metric} {FIRST}, {SECOND} (ranks)": "{:.4g}, {:.4g} ({}, {})".format(
                row[metric][FIRST], row[metric][SECOND], *row[metric]["ranks"]
            )
            for metric in METRICS
        }
        for row in result["layouts"]
    ]
    head = (
        f"# {FIRST} and {SECOND} on the same layouts\n\n"
        f"Made by `benchmarks/runtime_agreement.py`: {len(layouts)} layouts of {result['space']}, one thread, "
        f"{result['repetitions']} rounds.\n\n"
    )
    return head + markdown(agreement) + "\n" + markdown(layouts)


def _correlation_text(correlation: Mapping[str, float] | None) -> str:
    if correlation is None:
        return "-"
    coefficient = Coefficient.model_validate(correlation)
    return f"{coefficient.value:.2f} [{coefficient.low:.2f}, {coefficient.high:.2f}]"


if __name__ == "__main__":
    main()
