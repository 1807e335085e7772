"""Decode time by the number of chosen experts, on both runtimes, compared with dense layers of equal active weights.

    python benchmarks/experts.py [--experts 8,32] [--top-k 1,2,4,8] [--repetitions 5] [--threads 1] > result.json

Layouts differ in their feed-forward only: `moe:EXPERTSxTOPK:WIDTH` against `swiglu:TOPK*WIDTH`. Each round runs every
layout on every runtime in fresh processes, in random order; a first round, which warms the file cache, is
thrown away. `over_dense` is the decode time over that of the dense layout with as many active weights: what routing
costs. `over_llama_cpp` is the median over rounds of the ratio within one round. Files are about 260 MB with 32 experts.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from runs import Model, counts, decode_ms, exported, layout_called, markdown, print_json, say

from nas.core.workload import Workload

RUNTIMES = ("llama.cpp", "executorch")
HEADER = "d1024 v16384 ffn={} [C3*2 A16/8 C3*2 A16/8 C3 C3]"
DENSE = "dense"

Place = tuple[str, str, int]
"""Runtime, number of experts or "dense", how many are chosen."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=counts, default=[8, 32])
    parser.add_argument("--top-k", type=counts, default=[1, 2, 4, 8])
    parser.add_argument("--width", type=int, default=512, help="of an expert")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--gen", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--markdown", action="store_true", help="a table instead of JSON")
    options = parser.parse_args()
    layouts = _layouts(options.experts, options.top_k, options.width)
    workload = Workload(prompt=options.prompt, gen=options.gen, threads=options.threads)
    with ExitStack() as stack:
        models = {
            (runtime, *key): stack.enter_context(exported(layout_called(layout), runtime))
            for key, layout in layouts.items()
            for runtime in RUNTIMES
        }
        taken = _measure(models, workload, options.repetitions)
    rows = [_row(key, layout, taken) for key, layout in layouts.items()]
    if options.markdown:
        print(markdown([_shown(row) for row in rows]))
    else:
        builds = {runtime: models[runtime, *key].build.runner.build for key in layouts for runtime in RUNTIMES}
        print_json({"workload": workload.key(), "repetitions": options.repetitions, "builds": builds, "rows": rows})


def _layouts(experts: Sequence[int], chosen: Sequence[int], width: int) -> dict[tuple[str, int], str]:
    dense = {(DENSE, k): HEADER.format(f"swiglu:{k * width}") for k in chosen}
    routed = {(str(n), k): HEADER.format(f"moe:{n}x{k}:{width}") for n in experts for k in chosen if k <= n}
    return dense | routed


def _measure(models: Mapping[Place, Model], workload: Workload, repetitions: int) -> dict[Place, list[float]]:
    """Returns median milliseconds per decoded token of each round."""
    order, rng = list(models), random.Random(0)
    taken: dict[Place, list[float]] = {place: [] for place in models}
    for number in range(repetitions + 1):
        say(f"round {number} of {repetitions}" + " (thrown away)" * (number == 0))
        rng.shuffle(order)
        for place in order:
            taken[place].append(statistics.median(decode_ms(models[place].run(workload))))
    return {place: times[1:] for place, times in taken.items()}


def _row(key: tuple[str, int], layout: str, taken: Mapping[Place, Sequence[float]]) -> dict[str, Any]:
    experts, chosen = key
    row: dict[str, Any] = {"experts": experts, "top_k": chosen, "layout": layout}
    for runtime in RUNTIMES:
        row[runtime] = {
            "decode_ms": statistics.median(taken[runtime, experts, chosen]),
            "over_dense": _ratio(taken[runtime, experts, chosen], taken[runtime, DENSE, chosen]),
        }
    row["over_llama_cpp"] = _ratio(taken["executorch", *key], taken["llama.cpp", *key])
    return row


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


def _shown(row: dict[str, Any]) -> dict[str, str]:
    ratio = row["over_llama_cpp"]
    shown = {"experts": row["experts"], "chosen": str(row["top_k"])}
    for runtime in RUNTIMES:
        shown[f"{runtime}, ms a token"] = f"{row[runtime]['decode_ms']:.2f}"
        shown[f"{runtime}, over dense"] = f"{row[runtime]['over_dense']['median']:.2f}"
    return shown | {"executorch / llama.cpp": f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"}


if __name__ == "__main__":
    main()
