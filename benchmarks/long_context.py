"""Decodes far into a context: time, speed of the prompt, and memory compared with arithmetic; JSON.

    python benchmarks/long_context.py [--runtime llama.cpp] [--contexts 4096,8192,16384,32768] [--kv f16] > result.json

For each layout, cache type and context, fresh processes read a prompt of that length and decode 64 tokens after it.
Memory is compared with the layout's own arithmetic, `cache_mb`: key-value cache at that context plus recurrent state.
What both grow by is compared by least squares: `measured_kb_per_token`, `arithmetic_kb_per_token`, and their ratio
`rss_slope`, which is null where the arithmetic does not grow. What exceeds the arithmetic with every layout is
the runtime's own: with llama.cpp 1.5 KB or so, the mask of attention (an f16 number for each of `n_ubatch` tokens, 512,
and each of the context) and its list of cells; with ExecuTorch the table of RoPE, 256 bytes at head size 64, and the
token's id. A window keeps its length and one batch (ExecuTorch: 128 tokens), which the arithmetic leaves out; that does
not grow. At one thread of a server core llama.cpp's whole grid takes about two hours.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

from runs import Model, counts, decode_ms, exported, layout_called, markdown, print_json, runtime_option, say

from nas.core.published import LFM2
from nas.core.workload import Workload

GEN = 64
LAYOUTS = {
    "attention": LFM2["LFM2-350M"],
    # Two of six attention layers still see everything.
    "windows": "d1024 v65536 ffn=swiglu:4608 "
    "[C3*2 W16/8@1024 C3*2 W16/8@1024 C3*2 A16/8 C3 W16/8@1024 C3 W16/8@1024 C3 A16/8 C3]",
    "mamba2": "d1024 v65536 ffn=swiglu:4352 [C3*2 M C3*2 M C3*2 A16/8 C3 M C3 M C3 A16/8 C3]",
}
"""350M-class layouts that differ in what they do with a long context."""

KV_TYPES = {"llama.cpp": ["f16", "q8_0"], "executorch": ["f16"]}
"""What each runtime can keep."""
ELEMENT_BYTES = {"f16": 2.0, "q8_0": 34 / 32}
"""Bytes of a number in the cache; a block of q8_0 is 32 numbers and one f16 scale."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runtime_option(parser)
    parser.add_argument("--contexts", type=counts, default=[4096, 8192, 16384, 32768])
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), help="names above, or one-line layouts")
    parser.add_argument("--kv", type=lambda text: text.split(","), help="default: all that the runtime has")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--markdown", action="store_true", help="a table instead of JSON")
    options = parser.parse_args()
    results = [_layout(name, kv, options) for name in options.layouts for kv in options.kv or KV_TYPES[options.runtime]]
    if options.markdown:
        print(markdown([_shown(result, row) for result in results for row in result["contexts"]]))
    else:
        print_json({"runtime": options.runtime, "gen": GEN, "threads": options.threads, "results": results})


def _layout(name: str, kv: str, options: argparse.Namespace) -> dict[str, Any]:
    with exported(layout_called(LAYOUTS.get(name, name)), options.runtime) as model:
        rows = [_row(model, kv, context, options.threads, options.repetitions) for context in options.contexts]
        return {
            "name": name,
            "layout": model.layout.format(),
            "patched": model.build.runner.patched,
            "kv_type": kv,
            "file_mb": model.artifact.size / 1e6,
            **_growth(rows),
            "contexts": rows,
        }


def _row(model: Model, kv: str, context: int, threads: int, repetitions: int) -> dict[str, Any]:
    workload = Workload(prompt=context, gen=GEN, kv_type=kv, threads=threads)
    samples = [model.run(workload) for _ in range(repetitions)]
    tokens = [decode_ms(sample) for sample in samples]
    cached = model.layout.kv_bytes(workload.window, ELEMENT_BYTES[kv])
    row = {
        "context": context,
        "window": workload.window,
        "decode_p50_ms": statistics.median(map(statistics.median, tokens)),
        "prefill_tps": statistics.median(1e3 * context / sample.ttft_ms for sample in samples),
        "peak_rss_mb": statistics.median(sample.peak_rss_mb or float("nan") for sample in samples),
        "kv_mb": cached / 1e6,
        "state_mb": model.layout.state_bytes() / 1e6,
        "cache_mb": (cached + model.layout.state_bytes()) / 1e6,
    }
    say(f"{kv} {context}: {row['decode_p50_ms']:.1f} ms a token, {row['peak_rss_mb']:.0f} MB  {model.layout}")
    return row


def _growth(rows: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Returns memory per token of context, measured and by arithmetic; null for a single context."""
    windows = [row["window"] for row in rows]
    if len(set(windows)) == 1:
        return dict.fromkeys(("measured_kb_per_token", "arithmetic_kb_per_token", "rss_slope"))
    measured, arithmetic = (
        1e3 * statistics.linear_regression(windows, [row[name] for row in rows]).slope
        for name in ("peak_rss_mb", "cache_mb")
    )
    ratio = measured / arithmetic if arithmetic else None
    return {"measured_kb_per_token": measured, "arithmetic_kb_per_token": arithmetic, "rss_slope": ratio}


def _shown(result: dict[str, Any], row: dict[str, Any]) -> dict[str, str]:
    return {
        "layout": result["name"],
        "cache": result["kv_type"],
        "context": f"{row['context']:,}",
        "decode p50 (ms)": f"{row['decode_p50_ms']:.1f}",
        "prefill (tok/s)": f"{row['prefill_tps']:.0f}",
        "peak RSS (MB)": f"{row['peak_rss_mb']:.0f}",
        "cache and state by arithmetic (MB)": f"{row['cache_mb']:.1f}",
        "RSS growth (KB/token)": _number(result["measured_kb_per_token"]),
        "by arithmetic (KB/token)": _number(result["arithmetic_kb_per_token"]),
    }


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    main()
