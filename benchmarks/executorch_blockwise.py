"""Compares blocks with one whole graph in ExecuTorch: costs of export, loading, prompt and tokens; JSON.

    python benchmarks/executorch_blockwise.py [--layout LFM2-350M] [--prompts 512,1024,4096] [--markdown] > result.json

Needs a calm machine for the times of runs. Exports are processes of `nas export` with random weights, the same in every
form, with CPU seconds and greatest resident memory of the whole process, Python's start included: the whole graph;
blocks with an empty cache of programs; the same again, when every block has been lowered before. Then both files are
run in turn by our runner, blocks with the float16 cache that is measured in searches and with the float32 cache that a
whole graph has. `same_logits` says whether whole graph and blocks agree to the bit (a prompt in chunks, 32 tokens).
`ratio` is blocks with the same cache / whole graph, below 1 where blocks are better.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nas.core.canonical import sha256_of
from nas.core.layout import Layout
from nas.core.measurement import Sample
from nas.core.workload import Workload
from nas.measure.runtimes.base import Artifact
from nas.measure.runtimes.executorch.gate import BATCH, EXACT_CACHE, PROMPT, STEPS
from nas.measure.runtimes.executorch.runtime import EXECUTORCH
from nas.measure.runtimes.executorch.variants import Build
from nas.measure.runtimes.runner import Feed, local_machine, runner_logits
from nas.testing.run_plan import run_plan

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.page import markdown
from benchmarks.runs import DEADLINE_S, counts, decode_ms, layout_called, print_json, say

GEN = 100
FIGURES = ("load_ms", "ttft_ms", "decode_p50_ms", "peak_rss_mb")


@dataclass(frozen=True)
class Form:
    """A file, and the number format of the cache to run it with."""

    file: Path
    kv: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="LFM2-350M", help="published name or one-line layout")
    parser.add_argument("--prompts", type=counts, default=[512, 1024, 4096])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--markdown", action="store_true", help="tables instead of JSON")
    options = parser.parse_args()
    layout, runtime_build = layout_called(options.layout), EXECUTORCH.build(log=say)
    with tempfile.TemporaryDirectory(prefix="hilnas-benchmark-") as folder:
        files = {name: Path(folder) / name for name in ("whole", "blocks")}
        exports = _exports(layout, files, Path(folder) / "cache", max(options.prompts) + GEN)
        whole, blocks = (_logits(file, runtime_build, layout.vocab, Path(folder)) for file in files.values())
        same = np.array_equal(whole, blocks)
        forms = {
            "whole": Form(files["whole"], "f32"),
            "blocks f32": Form(files["blocks"], "f32"),
            "blocks": Form(files["blocks"], "f16"),
        }
        rows = [_prompt(layout, runtime_build, forms, prompt, options) for prompt in options.prompts]
    result = {
        "layout": layout.format(),
        "build": runtime_build.runner.build,
        "threads": options.threads,
        "repetitions": options.repetitions,
        "gen": GEN,
        "export": exports,
        "same_logits": bool(same),
        "prompts": rows,
    }
    if options.markdown:
        print(_tables(result))
    else:
        print_json(result)


def _exports(layout: Layout, files: dict[str, Path], cache: Path, context: int) -> dict[str, dict[str, float]]:
    whole = ("--whole", str(-(-context // 256) * 256))
    return {
        "whole": _export(layout, files["whole"], cache, *whole),
        "blocks, all new": _export(layout, files["blocks"], cache),
        "blocks, all known": _export(layout, files["blocks"], cache),
    }


def _export(layout: Layout, file: Path, cache: Path, *more: str) -> dict[str, float]:
    """Runs one process of `nas export`; returns its resource usage."""
    command = [str(Path(sys.executable).with_name("nas")), "export", layout.format(), "--runtime", "executorch"]
    environment = os.environ | {"NAS_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    process = subprocess.Popen([*command, *more, "-o", str(file)], env=environment, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"nas export failed with exit code {process.returncode}")
    row = {
        "cpu_s": used.ru_utime + used.ru_stime,
        "wall_s": time.perf_counter() - start,
        "peak_rss_mb": used.ru_maxrss * 1024 / 1e6,
        "file_mb": file.stat().st_size / 1e6,
    }
    say(f"export {' '.join((file.name, *more))}: " + ", ".join(f"{name} {value:.1f}" for name, value in row.items()))
    return row


def _logits(file: Path, runtime_build: Build, vocab: int, scratch: Path) -> NDArray[np.float32]:
    machine = local_machine(runtime_build.executable, runtime_build.runner.target)
    return runner_logits(machine, file, vocab, Feed(PROMPT, STEPS, BATCH), scratch, EXACT_CACHE)


def _prompt(
    layout: Layout, runtime_build: Build, forms: dict[str, Form], prompt: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Runs every form in turn, backwards every second time."""
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in forms}
    for number in range(options.repetitions):
        for name in sorted(forms, reverse=bool(number % 2)):
            samples[name].append(_figures(_run(layout, runtime_build, forms[name], prompt, options.threads)))
        times = {name: f"{runs[-1]['ttft_ms']:.1f}/{runs[-1]['decode_p50_ms']:.2f}" for name, runs in samples.items()}
        say(f"prompt {prompt}, {number + 1} of {options.repetitions}, TTFT/decode p50 in ms: {times}")
    ratios = {
        figure: statistics.median(
            blocks[figure] / whole[figure]
            for blocks, whole in zip(samples["blocks f32"], samples["whole"], strict=True)
        )
        for figure in FIGURES
    }
    medians = {
        name: {figure: statistics.median(one[figure] for one in runs) for figure in FIGURES}
        for name, runs in samples.items()
    }
    return {"prompt": prompt, "median": medians, "ratio": ratios, "runs": samples}


def _run(layout: Layout, runtime_build: Build, form: Form, prompt: int, threads: int) -> Sample:
    artifact = Artifact(
        sha256=sha256_of(form.file),
        size=form.file.stat().st_size,
        runtime=EXECUTORCH.name,
        quantisation=EXECUTORCH.quantisations[0],
        layout_id=layout.id,
        arch="any",
        weights="random:0",
    )
    workload = Workload(prompt=prompt, gen=GEN, threads=threads)
    plan = EXECUTORCH.plan(artifact, runtime_build.runner, workload, DEADLINE_S)
    args = list(plan.args)
    args[args.index("--kv") + 1] = form.kv
    plan = plan.model_copy(update={"args": tuple(args)})
    return EXECUTORCH.parse(run_plan(plan, runtime_build.folder, {"model": form.file}))


def _figures(sample: Sample) -> dict[str, float]:
    return {
        "load_ms": sample.load_ms,
        "ttft_ms": sample.ttft_ms,
        "decode_p50_ms": statistics.median(decode_ms(sample)),
        "peak_rss_mb": sample.peak_rss_mb or float("nan"),
    }


def _tables(result: dict[str, Any]) -> str:
    exports = [
        {"export": name, "CPU (s)": f"{row['cpu_s']:.1f}", "peak RSS (MB)": f"{row['peak_rss_mb']:.0f}"}
        | {"file (MB)": f"{row['file_mb']:.1f}"}
        for name, row in result["export"].items()
    ]
    runs = [
        {"prompt": f"{row['prompt']:,}", "file": name, "load (ms)": f"{one['load_ms']:.0f}"}
        | {"prefill (ms)": f"{one['ttft_ms']:.1f}", "decode p50 (ms)": f"{one['decode_p50_ms']:.2f}"}
        | {"peak RSS (MB)": f"{one['peak_rss_mb']:.0f}"}
        for row in result["prompts"]
        for name, one in row["median"].items()
    ]
    same = "the same to the bit" if result["same_logits"] else "not the same"
    return f"{markdown(exports)}\nLogits of blocks and whole graph: {same}.\n\n{markdown(runs)}"


if __name__ == "__main__":
    main()
