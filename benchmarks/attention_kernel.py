"""Compares our attention kernel with llama.cpp's flash attention, on the same numbers, shapes and threads; JSON.

    python benchmarks/attention_kernel.py [--tokens 4096] [--threads 1,2] [--pairs 5] > result.json

Needs a calm machine. Two small programs (benchmarks/attention_programs/) are compiled against what the runners use: one
our header with ExecuTorch's thread pool, flags as the runner's; one ggml's CPU backend of our llama.cpp build. Each
reads a text of 4,096 tokens from an empty float16 cache, in the chunks that its runner takes (128 here, 512 there),
then repeats one query over all 4,096. Defaults are a layer of LFM2-350M: 16 heads, 8 of keys and
values, of 64 numbers. Processes of both sides alternate, and so does their order. `ratio` is ours / theirs, below 1
where ours is faster; `difference` is the relative L2 distance of the results, which rounding to float16 explains.

Timed are writing keys and values into the cache and attention. Not timed: the rest of a layer. In a model weights push
the cache out of the processor's between two calls.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nas.measure.runtimes.executorch.compile import installed_sdk
from nas.measure.runtimes.executorch.programs import CHUNK
from nas.measure.runtimes.executorch.runtime import EXECUTORCH
from nas.measure.runtimes.llama_cpp import source
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.measure.runtimes.toolchain import find_compiler

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.runs import counts, print_json, say

CHUNKS = {"ours": CHUNK, "llama_cpp": 512}
FOLDER = Path(__file__).with_name("attention_programs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--threads", type=counts, default=[1, 2])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50, help="decode steps a process")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hilnas-benchmark-") as folder:
        programs = {"ours": _compile_ours(Path(folder)), "llama_cpp": _compile_theirs(Path(folder))}
        rows = [_compared(programs, threads, options) for threads in options.threads]
    shape = {name: getattr(options, name) for name in ("tokens", "heads", "kv_heads", "head_dim")}
    print_json({**shape, "cache": "f16", "chunks": CHUNKS, "threads": rows})


def _compile_ours(folder: Path) -> Path:
    executorch, sdk = EXECUTORCH.build(log=say), installed_sdk()
    include = [*sdk.include_flags, f"-I{EXECUTORCH.runner_sources[0].parent}"]
    libraries = ["-lexecutorch_threadpool", "-lexecutorch", "-Wl,--allow-shlib-undefined"]
    return _compile(folder / "ours", [*executorch.spec.flags, *include], executorch.folder, libraries)


def _compile_theirs(folder: Path) -> Path:
    llama = LLAMA_CPP.build(log=say)
    headers = source.unpack(source.fetch(say), folder) / "ggml" / "include"
    return _compile(
        folder / "theirs", ["-std=c++17", "-O2", f"-I{headers}"], llama.folder, ["-lggml-cpu", "-lggml-base"]
    )


def _compile(program: Path, flags: Sequence[str], library: Path, libraries: Sequence[str]) -> Path:
    found_at = [f"-L{library}", f"-Wl,-rpath,{library}", f"-Wl,-rpath-link,{library}"]
    text = str(FOLDER / f"{program.name}.cpp")
    subprocess.run([find_compiler().cxx, *flags, text, "-o", str(program), *found_at, *libraries], check=True)
    return program


def _compared(programs: dict[str, Path], threads: int, options: argparse.Namespace) -> dict[str, Any]:
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in programs}
    results = {}
    for number in range(options.pairs):
        for name in sorted(programs, reverse=bool(number % 2)):
            times, results[name] = _run(programs[name], CHUNKS[name], threads, options)
            runs[name].append(times)
        text = ", ".join(f"{name} {runs['ours'][-1][name] / runs['llama_cpp'][-1][name]:.3f}" for name in times)
        say(f"{threads} threads, pair {number + 1} of {options.pairs}: ours / llama.cpp: {text}")
    ratios = {
        name: [
            candidate[name] / reference[name]
            for candidate, reference in zip(runs["ours"], runs["llama_cpp"], strict=True)
        ]
        for name in ("prefill_ms", "decode_ms")
    }
    output, reference = results["ours"].astype(np.float64), results["llama_cpp"]
    return {
        "threads": threads,
        "difference": float(np.linalg.norm(output - reference) / np.linalg.norm(reference)),
        "ratio": {
            name: {"median": statistics.median(all_), "min": min(all_), "max": max(all_)}
            for name, all_ in ratios.items()
        },
        "median": {
            side: {name: statistics.median(one[name] for one in run) for name in run[0]} for side, run in runs.items()
        },
        "runs": runs,
    }


def _run(program: Path, chunk: int, threads: int, options: argparse.Namespace) -> tuple[dict[str, float], Any]:
    """Runs one process: returns median milliseconds of the prompt and of a step, and the result of both."""
    sizes = (options.heads, options.kv_heads, options.head_dim, options.tokens, chunk, threads, 1, options.steps)
    out = program.with_suffix(".out")
    done = subprocess.run([str(program), *map(str, sizes), str(out)], check=True, capture_output=True)
    times = json.loads(done.stdout)
    medians = {f"{name}_ms": statistics.median(times[f"{name}_ns"]) / 1e6 for name in ("prefill", "decode")}
    return medians, np.fromfile(out, np.float32)


if __name__ == "__main__":
    main()
