"""Files of one real model that `nas quantise` chooses, beside llama.cpp's mixtures of the same size.

    python -m benchmarks.quantise [--page docs/measured/quantising.md]

SmolLM2-135M-Instruct, published as Q4_1, is fetched into the cache. The source is its weights in F16, each moved by a
random share of its rounding, so that no type reproduces the published grid. For each of llama.cpp's mixtures, with
importance matrix, types are chosen under the budget of its size; both files are compared with the source on text that
chose nothing: Python's documentation, in windows of 256 tokens. Takes half an hour on two cores the first time;
divergences are kept in the cache. The results are in benchmarks/recorded/quantise.json.
"""

from __future__ import annotations

import argparse
import json
import os
import pydoc_data.topics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from nas.core.canonical import sha256_of
from nas.core.limit import Limit
from nas.core.workload import Workload
from nas.measure.runtimes.base import Checkpoint
from nas.measure.runtimes.llama_cpp.binding import MIXTURES
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.train.adapt.checkpoints import import_model
from nas.train.adapt.quantise import TYPES, Quantiser, QuantiseRequest
from nas.train.release.found_tokenizer import found_tokenizer

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.page import fill, table
from tests.support.smollm2 import fetch_smollm2

BLOCK, LEVELS = 32, 15
"""Of Q4_1: weights that share a step, and steps between the least and the greatest of them."""
RECORDED = Path(__file__).parent / "recorded/quantise.json"
TEXT = 240_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, help="Markdown page that gets the table")
    page = parser.parse_args().page
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
    save_file(state, weights, metadata=metadata_of(weights))
    vocabulary = tokenizer.tokenizer.vocabulary(layout.vocab)
    checkpoint = Checkpoint(weights, sha256_of(weights))
    LLAMA_CPP.export_trained(layout, "f16", checkpoint, path, "SmolLM2-135M-Instruct", vocabulary, tokenizer.context)
    weights.unlink()


def metadata_of(weights: Path) -> dict[str, str]:
    with safe_open(weights, "pt") as file:
        return dict(file.metadata() or {})


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


def write_page(page: Path, record: dict[str, Any]) -> None:
    """Writes the table."""
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
        theirs, chosen = row["mixture"], row["chosen"]
        low, high = chosen["kl_ci95"]
        rows.append(
            (
                theirs["name"].upper(),
                f"{theirs['size'] / 1e6:.1f}",
                f"{row['without_matrix']['kl']:.4f}",
                f"{theirs['kl']:.4f}",
                f"{chosen['kl']:.4f} ({low:.4f} to {high:.4f})",
                f"{row['expected_kl']:.4f}",
                f"{theirs['bits_per_byte']:.4f}",
                f"{chosen['bits_per_byte']:.4f}",
            )
        )
    fill(page, "quantise", table(columns, rows))


if __name__ == "__main__":
    main()
