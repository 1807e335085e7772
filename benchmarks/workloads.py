"""Measures how one layout's figures depend on the request and on the runtime's settings; JSON.

    python benchmarks/workloads.py [--runtime llama.cpp] [--layout LFM2-350M] [--prompts 512,4096] > result.json

Every prompt with every number of threads at the defaults, then every prompt with one setting changed at a time, at the
first number of threads: with llama.cpp an 8-bit cache, no flash attention, smaller and larger batches; with ExecuTorch,
which takes at most 128 tokens a call, smaller batches. All settings are part of each row. p95 needs 1,000 tokens, ten
repetitions; with fewer it is null, with the reason.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nas.core.measurement import Figure
from nas.core.stats import quantile, repetition_figure
from nas.core.workload import Workload

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.page import markdown
from benchmarks.runs import Model, counts, decode_ms, exported, layout_called, print_json, runtime_option, say

GEN = 100
CHANGES: dict[str, tuple[dict[str, Any], ...]] = {
    "llama.cpp": ({"kv_type": "q8_0"}, {"flash_attn": False}, {"n_ubatch": 128}, {"n_ubatch": 2048}),
    "executorch": ({"n_ubatch": 32}, {"n_ubatch": 64}),
}
"""By runtime."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runtime_option(parser)
    parser.add_argument("--layout", default="LFM2-350M", help="published name or one-line layout")
    parser.add_argument("--prompts", type=counts, default=[128, 512, 1024, 4096], help="32768 takes minutes a run")
    parser.add_argument("--threads", type=counts, default=list(range(1, (os.cpu_count() or 1) + 1)))
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--markdown", action="store_true", help="a table instead of JSON")
    options = parser.parse_args()
    workloads = list(_workloads(options.prompts, options.threads, CHANGES[options.runtime]))
    with exported(layout_called(options.layout), options.runtime) as model:
        rows = []
        for number, workload in enumerate(workloads, 1):
            rows.append(_row(model, workload, options.repetitions))
            text = ", ".join(f"{name} {value}" for name, value in _cells(rows[-1]).items())
            say(f"{number} of {len(workloads)}: {text}")
        result = {
            "runtime": options.runtime,
            "layout": model.layout.format(),
            "build": model.build.runner.build,
            "patched": model.build.runner.patched,
            "repetitions": options.repetitions,
            "workloads": rows,
        }
    if options.markdown:
        print(markdown([_cells(row) for row in rows]))
    else:
        print_json(result)


def _workloads(prompts: Sequence[int], threads: Sequence[int], changes: Sequence[dict[str, Any]]) -> Iterator[Workload]:
    for prompt in prompts:
        yield from (Workload(prompt=prompt, gen=GEN, threads=count) for count in threads)
    for change in changes:
        yield from (Workload(prompt=prompt, gen=GEN, threads=threads[0], **change) for prompt in prompts)


def _row(model: Model, workload: Workload, repetitions: int) -> dict[str, Any]:
    samples = [model.run(workload) for _ in range(repetitions)]
    tokens = [decode_ms(sample) for sample in samples]
    figures = {
        "ttft_ms": repetition_figure([sample.ttft_ms for sample in samples], "ms"),
        "prefill_tps": repetition_figure([1e3 * workload.prompt / sample.ttft_ms for sample in samples], "tok/s"),
        "decode_p50_ms": repetition_figure([statistics.median(times) for times in tokens], "ms"),
        "decode_p95_ms": repetition_figure([tail for run in tokens if (tail := quantile(run, 0.95))], "ms"),
        "peak_rss_mb": repetition_figure([sample.peak_rss_mb for sample in samples if sample.peak_rss_mb], "MB"),
    }
    return {"workload": workload.key(), **{name: figure.model_dump() for name, figure in figures.items()}}


def _cells(row: dict[str, Any]) -> dict[str, str]:
    workload = row["workload"]
    return {
        "prompt": f"{workload['prompt']:,}",
        "threads": str(workload["threads"]),
        "cache": workload["kv_type"],
        "flash attention": "on" if workload["flash_attn"] else "off",
        "ubatch": str(workload["n_ubatch"]),
        "TTFT (ms)": _number(row["ttft_ms"]),
        "prefill (tok/s)": _number(row["prefill_tps"]),
        "decode p50 (ms)": _number(row["decode_p50_ms"]),
        "decode p95 (ms)": _number(row["decode_p95_ms"]),
        "peak RSS (MB)": _number(row["peak_rss_mb"]),
    }


def _number(figure: dict[str, Any]) -> str:
    value = Figure.model_validate(figure).value
    return "-" if value is None else f"{value:.4g}" if value < 1000 else f"{value:,.0f}"


if __name__ == "__main__":
    main()
