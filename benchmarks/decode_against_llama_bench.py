"""Repeatability of `nas bench`, and its agreement with llama-bench on the same file, in interleaved pairs.

    python benchmarks/decode_against_llama_bench.py [--invocations 5] [--repetitions 3] > result.json

Needs a calm machine and `nas runtime build llama.cpp --tools`. Each pair is one fresh `nas bench` and one fresh
llama-bench. Ours is the plain mean over all decoded tokens, without drift correction, because llama-bench has none.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from nas.core.layout import Layout
from nas.core.published import LFM2
from nas.core.stats import coefficient_of_variation
from nas.runtimes import RUNTIMES
from nas.runtimes.base import RandomWeights
from nas.runtimes.llama_cpp.build import build

PROMPT, GEN = 1024, 100


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--invocations", type=int, default=5)
    arguments.add_argument("--repetitions", type=int, default=3)
    arguments.add_argument("--layout", default="LFM2-350M", choices=list(LFM2))
    options = arguments.parse_args()
    tools = build(log=_say, tools=True).folder
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model.gguf"
        layout = Layout.parse(LFM2[options.layout])
        RUNTIMES["llama.cpp"].export(layout, "q4_0", RandomWeights(), model)
        pairs = []
        for number in range(options.invocations):
            ours = _nas_bench(model, options.repetitions)
            theirs = _llama_bench(tools, model, options.repetitions)
            pairs.append({"ours": ours, "llama_bench_mean_ms": theirs, "ratio": ours["mean_ms"] / theirs})
            _say(f"pair {number + 1}: p50 {ours['p50_ms']:.3f} ms, mean ratio {pairs[-1]['ratio']:.4f}")
    json.dump(_summary(str(layout), options.repetitions, pairs), sys.stdout, indent=1)
    print()


def _summary(layout: str, repetitions: int, pairs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "layout": layout,
        "prompt": PROMPT,
        "gen": GEN,
        "repetitions": repetitions,
        "decode_p50_cv": coefficient_of_variation([pair["ours"]["p50_ms"] for pair in pairs]),
        "decode_p50_cv_uncorrected": coefficient_of_variation([pair["ours"]["raw_p50_ms"] for pair in pairs]),
        "mean_decode_ratio": statistics.median(pair["ratio"] for pair in pairs),
        "pairs": pairs,
    }


def _nas_bench(model: Path, repetitions: int) -> dict[str, float]:
    nas = str(Path(sys.executable).with_name("nas"))
    command = [nas, "bench", str(model), "--runtime", "llama.cpp", "--device", "local", "--prompt", str(PROMPT),
               "--gen", str(GEN), "--reps", str(repetitions), "--json"]  # fmt: skip
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    tokens = [ns / 1e6 for rep in report["reps"] if rep["valid"] for ns in rep["decode_ns"]]
    return {
        "p50_ms": report["decode_ms"]["p50"],
        "raw_p50_ms": statistics.median(tokens),
        "mean_ms": statistics.fmean(tokens),
        "ttft_ms": report["ttft_ms"]["median"],
        "refused_share": report["refused_share"],
        "drift": report["reference"]["drift"],
    }


def _llama_bench(tools: Path, model: Path, repetitions: int) -> float:
    command = [str(tools / "llama-bench"), "-m", str(model), "-p", "0", "-n", str(GEN), "-d", str(PROMPT), "-t", "1",
               "-lm", "none", "-fa", "1", "-r", str(repetitions), "-o", "json"]  # fmt: skip
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout
    (row,) = json.loads(output)
    return float(row["avg_ns"]) / GEN / 1e6


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
