"""Compares our measurements with llama-bench's: same file, libraries and settings, in interleaved pairs; JSON.

    python benchmarks/against_llama_bench.py [--contexts 1024,4096] [--pairs 5] [--threads 1] > result.json

Needs a calm machine. A pair is three fresh processes: our runner (prompt of C tokens, then 100 decoded), llama-bench's
prompt test of C tokens, and its generation test of 100 tokens at depth C. The order alternates. Every process
measures once, so no side profits from a longer life. Differences of llama-bench (of the pinned source):

- its prompt test is warmed up by the whole prompt, ours by 16 tokens: the first touch of cache and buffers is in our
  TTFT, as it is in a user's;
- its generation test stops the clock once, for all tokens; we do for each and include the argmax over the vocabulary;
- it keeps one thread pool. With more than one thread that matters, so compare one thread first.

Alike: no memory mapping, repacked weights, flash attention, f16 cache, batches of 2048 and 512, a context no longer
than the request, logits of the last position only, random tokens.

In addition, `--repeatability` times `nas bench` as a whole: how much its decode p50 spreads over invocations, as it is
reported and as the median of all tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nas.core.workload import Workload

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.runs import Model, counts, decode_ms, exported, layout_called, print_json, say

GEN = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="LFM2-350M", help="published name or one-line layout")
    parser.add_argument("--contexts", type=counts, default=[1024, 4096])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeatability", type=int, default=5, metavar="N", help="invocations of nas bench; 0: none")
    parser.add_argument("--repetitions", type=int, default=3, help="of each invocation of nas bench")
    options = parser.parse_args()
    with exported(layout_called(options.layout), tools=True) as model:
        result = {
            "layout": model.layout.format(),
            "build": model.build.runner.build,
            "patched": model.build.runner.patched,
            "threads": options.threads,
            "gen": GEN,
            "contexts": [_compared(model, context, options.pairs, options.threads) for context in options.contexts],
        }
        if options.repeatability:
            result["repeatability"] = _repeatability(model.file, options)
    print_json(result)


def _compared(model: Model, context: int, pairs: int, threads: int) -> dict[str, Any]:
    """Returns pairs at one context, and the ratios ours / theirs."""
    rows = []
    for number in range(pairs):
        sides = [lambda: _our_figures(model, context, threads), lambda: _llama_bench_figures(model, context, threads)]
        if number % 2:
            llama_figures, our_figures = sides[1](), sides[0]()
        else:
            our_figures, llama_figures = sides[0](), sides[1]()
        rows.append({"ours": our_figures, "llama_bench": llama_figures})
        ratios = ", ".join(f"{name} {our_figures[name] / llama_figures[name]:.4f}" for name in our_figures)
        say(f"context {context}, pair {number + 1} of {pairs}: {ratios}")
    return {
        "context": context,
        **{
            f"{name}_ratio": _spread([row["ours"][name] / row["llama_bench"][name] for row in rows])
            for name in our_figures
        },
        "pairs": rows,
    }


def _our_figures(model: Model, context: int, threads: int) -> dict[str, float]:
    sample = model.run(Workload(prompt=context, gen=GEN, context=context + GEN, threads=threads))
    return {"decode_ms": statistics.fmean(decode_ms(sample)), "prefill_tps": 1e3 * context / sample.ttft_ms}


def _llama_bench_figures(model: Model, context: int, threads: int) -> dict[str, float]:
    decode = _llama_bench(model, threads, "-p", "0", "-n", str(GEN), "-d", str(context))
    prefill = _llama_bench(model, threads, "-p", str(context), "-n", "0")
    return {"decode_ms": decode / 1e6 / GEN, "prefill_tps": 1e9 * context / prefill}


def _llama_bench(model: Model, threads: int, *test: str) -> float:
    """Returns nanoseconds of one test, run once."""
    alike = ("-lm", "none", "--repack", "1", "-fa", "on", "-ctk", "f16", "-ctv", "f16", "-b", "2048", "-ub", "512")
    command = [str(model.build.folder / "llama-bench"), "-m", str(model.file), *test, *alike]
    command += ["-t", str(threads), "-r", "1", "-o", "json"]
    (row,) = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return float(row["avg_ns"])


def _repeatability(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the coefficient of variation of decode p50 over whole invocations of `nas bench`."""
    runs = []
    for number in range(options.repeatability):
        runs.append(_nas_bench(model, options))
        say(f"nas bench {number + 1} of {options.repeatability}: p50 {runs[-1]['p50_ms']:.3f} ms")
    return {
        "repetitions": options.repetitions,
        "decode_p50_cv": _cv([run["p50_ms"] for run in runs]),
        "decode_p50_cv_uncorrected": _cv([run["raw_p50_ms"] for run in runs]),
        "invocations": runs,
    }


def _nas_bench(model: Path, options: argparse.Namespace) -> dict[str, float]:
    numbers = {
        "--prompt": options.contexts[0],
        "--gen": GEN,
        "--reps": options.repetitions,
        "--threads": options.threads,
    }
    command = [str(Path(sys.executable).with_name("nas")), "bench", str(model), "--json"]
    command += [str(part) for pair in numbers.items() for part in pair]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    tokens = [ns / 1e6 for rep in report["reps"] if rep["valid"] for ns in rep["decode_ns"]]
    return {
        "p50_ms": report["decode_ms"]["p50"],
        "raw_p50_ms": statistics.median(tokens),
        "ttft_ms": report["ttft_ms"]["value"],
        "refused_share": report["refused_share"],
        "drift": report["reference"]["drift"],
    }


def _cv(values: Sequence[float]) -> float | None:
    """Returns the standard deviation over the mean; None for fewer than two values."""
    return statistics.stdev(values) / statistics.fmean(values) if len(values) > 1 else None


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


if __name__ == "__main__":
    main()
