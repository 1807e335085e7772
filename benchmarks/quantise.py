"""Files of one real model that `nas quantise` chooses, beside llama.cpp's mixtures of the same size.

    python -m benchmarks.quantise [--page docs/measured/quantising.md]

SmolLM2-135M-Instruct, published as Q4_1, is fetched into the cache. The source is its weights in F16, each moved by a
random share of its rounding, so that no type reproduces the published grid. For each of llama.cpp's mixtures, with
importance matrix, types are chosen under the budget of its size; both files are compared with the source on text that
chose nothing: Python's documentation, in windows of 256 tokens. Takes half an hour on two cores the first time;
divergences are kept in the cache. The results are in benchmarks/recorded/quantise.json.

    python -m benchmarks.quantise --times [--page docs/measured/quantising.md]

measures times by type and number of threads with llama-bench on this machine, into
benchmarks/recorded/quantise-times.json: up to ten rounds in four minutes, so leave the machine idle.

    python -m benchmarks.quantise --times --source FILE.gguf [--rounds 1]

prints those of another model, and records nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import pydoc_data.topics
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from scipy.stats import kendalltau  # type: ignore[import-untyped]

from benchmarks.page import fill, table
from nas.core.canonical import sha256_of
from nas.core.limit import Limit
from nas.core.workload import Workload
from nas.measure.runtimes.base import Checkpoint
from nas.measure.runtimes.llama_cpp.binding import MIXTURES
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.train.adapt.checkpoints import import_model
from nas.train.adapt.made_types import MadeTypes
from nas.train.adapt.quantise import SOURCE, TYPES, Quantiser, QuantiseRequest
from nas.train.release.found_tokenizer import found_tokenizer
from tests.support.smollm2 import fetch_smollm2

BLOCK, LEVELS = 32, 15
"""Of Q4_1: weights that share a step, and steps between the least and the greatest of them."""
TIMED = ("q8_0", "q6_k", "q5_0", "q4_k_m", "q4_0", "iq4_xs")
THREADS, PROMPT, GENERATED = (1, 2), 64, 32
LEAST_ROUNDS, MOST_ROUNDS, TIMES_S = 2, 10, 240.0
TIMES = Path(__file__).parent / "recorded/quantise-times.json"
RECORDED = Path(__file__).parent / "recorded/quantise.json"
TEXT = 240_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, help="Markdown page that gets the table")
    parser.add_argument("--times", action="store_true", help="Measure times by type and number of threads instead")
    parser.add_argument("--source", type=Path, help="GGUF file in F16 whose times are measured instead")
    parser.add_argument("--rounds", type=int, default=MOST_ROUNDS, help="Rounds of times at most")
    options = parser.parse_args()
    page = options.page
    if options.source:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(times(options.source, Path(folder), options.rounds)))
        return
    if options.times:
        write_times(page, options.rounds)
        return
    began = time.monotonic()
    rows = results()
    record = {"seconds": round(time.monotonic() - began), "rows": rows}
    RECORDED.write_text(json.dumps(record, indent=1) + "\n")
    if page:
        write_page(page, record)
    print(json.dumps(record, indent=1))


def results() -> list[dict[str, Any]]:
    """Returns a row for each mixture, smallest first."""
    build, rows = LLAMA_CPP.build(log=print, tools=True), []
    with tempfile.TemporaryDirectory() as folder:
        scratch, source = Path(folder) / "scratch", Path(folder) / "source.gguf"
        scratch.mkdir()
        write_source(source)
        request = request_of(source)
        quantiser = Quantiser(request, build, scratch, log)
        mixtures = sorted(((quantiser.mixture(name), name) for name in MIXTURES), key=lambda pair: pair[0].size)
        for mixture, name in mixtures:
            plain = quantiser.mixture(name, importance=False)
            limited = replace(request, limits=[Limit("file_size", mixture.size / 1e6)])
            chosen = Quantiser(limited, build, scratch, log).choose(Path(folder) / "chosen.gguf")
            rows.append(
                {
                    "mixture": mixture.to_json(),
                    "without_matrix": plain.to_json(),
                    "chosen": chosen.score.to_json(),
                    "expected_kl": chosen.expected["kl"],
                    "types": {str(slot): kind for slot, kind in chosen.types.items()},
                }
            )
    return rows


def write_times(page: Path | None, most_rounds: int) -> None:
    """Measures the times of the model and writes record and table."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source.gguf"
        write_source(source)
        record = times(source, Path(folder), most_rounds)
    TIMES.write_text(json.dumps(record, indent=1) + "\n")
    if page:
        fill(page, "times", table_of_times(record))


def times(source: Path, folder: Path, most_rounds: int) -> dict[str, Any]:
    """Returns the times of all types with each number of threads, in rounds of random order."""
    build, load = LLAMA_CPP.build(log=log, tools=True), [os.getloadavg()]
    with MadeTypes(source, TIMED, "", "", 2, folder, log) as files:
        failed = files.make()
        kinds = {path: name for path, name in files.files.items() if path not in failed}
        cells = [(path, threads) for path in kinds for threads in THREADS]
        rows: dict[str, dict[str, Any]] = {
            f"{name} {threads}": {"size": path.stat().st_size, "decode_ms": [], "prompt_tps": []}
            for path, name in kinds.items()
            for threads in THREADS
        }
        order, began, rounds = random.Random(0), time.monotonic(), 0
        while rounds < min(LEAST_ROUNDS, most_rounds) or (rounds < most_rounds and time.monotonic() - began < TIMES_S):
            order.shuffle(cells)
            for path, threads in cells:
                argv = [str(build.folder / "llama-bench"), "-m", str(path), "-t", str(threads), "-o", "json"]
                argv += ["-p", str(PROMPT), "-n", str(GENERATED), "-r", "1"]
                prompt, decode = json.loads(subprocess.check_output(argv, stderr=subprocess.DEVNULL))
                row = rows[f"{kinds[path]} {threads}"]
                row["prompt_tps"].append(PROMPT * 1e9 / prompt["avg_ns"])
                row["decode_ms"].append(decode["avg_ns"] / GENERATED / 1e6)
            rounds += 1
            load.append(os.getloadavg())
            log(f"round {rounds}")
    return {"load": load, "cores": len(os.sched_getaffinity(0)), "rounds": rounds, "rows": rows}


def table_of_times(record: dict[str, Any]) -> str:
    """Returns the best of all rounds, with the medians."""
    columns = ["type", "MB", *(f"ms a token, {count} thread(s)" for count in THREADS)]
    columns += [f"prompt tokens/s, {count} thread(s)" for count in THREADS]
    lines = []
    for name in dict.fromkeys(cell.partition(" ")[0] for cell in record["rows"]):
        rows = [record["rows"][f"{name} {threads}"] for threads in THREADS]
        times = [f"{min(row['decode_ms']):.1f} ({statistics.median(row['decode_ms']):.1f})" for row in rows]
        rates = [f"{max(row['prompt_tps']):.0f} ({statistics.median(row['prompt_tps']):.0f})" for row in rows]
        lines.append(["F16" if name == SOURCE else name.upper(), f"{rows[0]['size'] / 1e6:.1f}", *times, *rates])
    return table(columns, lines)


def log(line: str) -> None:
    print(line, file=sys.stderr)


def write_source(path: Path) -> None:
    """Writes the model in F16 with weights that were never rounded to the published types."""
    published, weights = fetch_smollm2(), path.with_suffix(".safetensors")
    layout, tokenizer = import_model(published, weights).layout, found_tokenizer(published)
    state = load_file(weights)
    generator = torch.Generator().manual_seed(0)
    for name, value in state.items():
        if value.ndim == 2:
            blocks = value.reshape(-1, BLOCK)
            step = (blocks.amax(1, keepdim=True) - blocks.amin(1, keepdim=True)) / LEVELS
            state[name] = (blocks + step * (torch.rand(blocks.shape, generator=generator) - 0.5)).reshape(value.shape)
    with safe_open(weights, "pt") as file:
        metadata = file.metadata() or {}
    save_file(state, weights, metadata=metadata)
    vocabulary = tokenizer.tokenizer.vocabulary(layout.vocab)
    checkpoint = Checkpoint(weights, sha256_of(weights))
    LLAMA_CPP.export_trained(layout, "f16", checkpoint, path, "SmolLM2-135M-Instruct", vocabulary, tokenizer.context)
    weights.unlink()


def request_of(source: Path) -> QuantiseRequest:
    """Returns the request; half of the text is for the importance matrix, a quarter for each of the others."""
    whole = "\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))[:TEXT]
    quarter = len(whole) // 4
    return QuantiseRequest(
        source=source,
        chosen_on=whole[2 * quarter : 3 * quarter],
        reported_on=whole[3 * quarter :],
        importance_from=whole[: 2 * quarter],
        limits=(),
        kl=None,
        minimise="kl",
        types=TYPES,
        parts=3,
        windows=8,
        device="local",
        workload=Workload(prompt=512, gen=128),
        repetitions=5,
        threads=len(os.sched_getaffinity(0)),
    )


def says(rows: list[dict[str, Any]]) -> str:
    """Returns what the table says, as sentences."""
    lossy = [row for row in rows if row["mixture"]["name"] != "q8_0"]
    better = [row["mixture"]["kl"] > row["chosen"]["kl_ci95"][1] for row in lossy]
    worse = [row["mixture"]["kl"] < row["chosen"]["kl_ci95"][0] for row in lossy]
    less = []
    for row in lossy:
        files = [other["chosen"] for other in rows if other["chosen"]["kl"] <= row["mixture"]["kl"]]
        less.append(1 - min((file["size"] for file in files), default=row["mixture"]["size"]) / row["mixture"]["size"])
    expected, measured = [row["expected_kl"] for row in lossy], [row["chosen"]["kl"] for row in lossy]
    errors = [1 - a / b for a, b in zip(expected, measured, strict=True)]
    tau, equal = kendalltau(expected, measured).statistic, len(lossy) - sum(better) - sum(worse)
    sentences = (
        f"Of {len(lossy)} sizes with less than 8 bits, the chosen file has the lower divergence in {sum(better)}, an",
        f"equal one (within the interval) in {equal} and a higher one in {sum(worse)}. The smallest of these files",
        f"with no more divergence than a mixture is up to {max(less):.0%} smaller than that (median",
        f"{statistics.median(less):.0%} of so few sizes). The sums order the chosen files as their measured",
        f"divergences do (Kendall's tau {tau:.2f}), and are {min(errors):.0%} to {max(errors):.0%} below them.",
    )
    return " ".join(sentences) + "\n"


def write_page(page: Path, record: dict[str, Any]) -> None:
    """Writes the table, and what it says."""
    columns = (
        "size of",
        "MB",
        "KL",
        "KL with matrix",
        "KL chosen (95 %)",
        "expected",
        "bits/byte, with matrix",
        "chosen",
    )
    rows = []
    for row in record["rows"]:
        mixture, chosen = row["mixture"], row["chosen"]
        low, high = chosen["kl_ci95"]
        rows.append(
            (
                mixture["name"].upper(),
                f"{mixture['size'] / 1e6:.1f}",
                f"{row['without_matrix']['kl']:.4f}",
                f"{mixture['kl']:.4f}",
                f"{chosen['kl']:.4f} ({low:.4f} to {high:.4f})",
                f"{row['expected_kl']:.4f}",
                f"{mixture['bits_per_byte']:.4f}",
                f"{chosen['bits_per_byte']:.4f}",
            )
        )
    fill(page, "quantise", table(columns, rows))
    fill(page, "quantise-says", says(record["rows"]))


if __name__ == "__main__":
    main()
