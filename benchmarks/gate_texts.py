"""How often the text alone makes llama.cpp's equivalence gate refuse a trained proxy; a JSON line per candidate.

    NAS_HOME=FOLDER python -m benchmarks.gate_texts STUDY [--texts 10]

The proxies of a study, as far as their weights are still in its home folder, are exported as Q4_0 for the patched build
of this machine, and checked with several texts of random tokens. `errors` are in units of the limit.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch

from nas.core import paths
from nas.core.canonical import sha256_of
from nas.core.layout import Layout
from nas.infra.store.store import Store
from nas.measure.runtimes import RUNTIMES
from nas.measure.runtimes.base import Checkpoint
from nas.measure.runtimes.llama_cpp.gate import run_gate
from nas.measure.runtimes.llama_cpp.oracle import Oracle
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.model.text.corpus import refer
from nas.search.analysis.record import read_study
from nas.search.proxy.job import exported_layout, weights_file
from nas.search.proxy.ladder import rung_jobs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study")
    parser.add_argument("--texts", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    store = Store.open(f"sqlite:///{paths.home() / 'hilnas.db'}", artifacts=paths.home() / "artifacts")
    study = read_study(store, args.study)
    quality, last = study.space.quality, len(study.space.quality.rungs) - 1
    for record in study.records.values():
        job = rung_jobs(quality, last, record.layout, refer(quality.corpus, Path()))[-1]
        weights = weights_file(paths.home() / "work/checkpoints", job.key)
        if weights.is_file():
            errors = _errors(exported_layout(job), weights, args.texts)
            print(json.dumps({"layout": record.layout.format(), "errors": errors}), flush=True)
    store.close()


def _errors(layout: Layout, weights: Path, texts: int) -> list[float]:
    """Returns the error with each text, as a share of the limit."""
    runtime, build = RUNTIMES["llama.cpp"], LLAMA_CPP.find_build(patched=True)
    checkpoint = Checkpoint(weights, sha256_of(weights))
    oracle = Oracle(layout, "q4_0", checkpoint, half_sums=build.spec.half_sums)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.gguf"
        runtime.export(layout, "q4_0", checkpoint, model)
        reports = [run_gate(layout, model, build, oracle.exact, oracle.rounded, seed=seed) for seed in range(texts)]
    return [round(report.error / report.limit, 3) for report in reports]


if __name__ == "__main__":
    main()
