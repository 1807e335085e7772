"""What quantisation costs proxies of each kind of block: in PyTorch with rounded weights, and of the exported file.

    python -m benchmarks.quality.rounding [--steps 200] [--seeds 1] [--page docs/measured/quantising.md]
    python -m benchmarks.quality.rounding --only KIND [--steps 200]       prints that kind's, and records nothing

Proxies of one kind of mixer or feed-forward are trained on the default corpus and scored on its held-out part: as
trained, with the weights that the file stores (`RoundingRuntime.rounded`), and by llama.cpp from the exported file.
A minute a proxy on one core. The results are in benchmarks/recorded/rounding.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.page import fill, table
from nas.core.layout import Layout
from nas.core.quality_config import QualityConfig, Rung
from nas.measure.runtimes.base import Checkpoint
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.model.text.corpus import refer
from nas.search.proxy.data import open_data, score_groups
from nas.search.proxy.job import TrainJob, exported_layout, weights_file
from nas.search.proxy.ladder import rung_jobs
from nas.search.proxy.train import train

LAYOUTS = {
    "attention": "ffn=swiglu:192 [A4/2*8]",
    "sliding window": "ffn=swiglu:192 [W4/2@32*7 A4/2]",
    "latent attention": "ffn=swiglu:192 [L4/32*8]",
    "short convolution": "ffn=swiglu:192 [C3*7 A4/2]",
    "Mamba-2": "ffn=swiglu:192 [M16*8]",
    "gated delta net": "ffn=swiglu:192 [D4*8]",
    "gated linear attention": "ffn=swiglu:192 [G4*8]",
    "mLSTM": "ffn=swiglu:192 [X4*8]",
    "ReLU squared": "ffn=relu2:288 [A4/2*8]",
    "mixture of experts": "ffn=moe:8x2:96 [A4/2*8]",
}
TYPES = ("q4_0", "q8_0", "f16")
RECORDED = Path(__file__).parents[1] / "recorded/rounding.json"


class FileModel(nn.Module):
    """A GGUF file whose logits llama.cpp computes in this process."""

    def __init__(self, file: Path, length: int) -> None:
        from nas.measure.runtimes.llama_cpp.binding import Session

        super().__init__()
        self._session = Session(str(file), length, length)

    def forward(self, ids: Tensor) -> Tensor:
        """Computes logits [B, T, V] of ids [B, T]."""
        rows = []
        for row in ids.tolist():
            self._session.reset()
            rows.append(torch.from_numpy(self._session.feed(row).copy()))
        return torch.stack(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", choices=LAYOUTS, help="The only kind, which is not recorded")
    parser.add_argument("--page", type=Path, help="Markdown page that gets the table")
    options = parser.parse_args()
    build = LLAMA_CPP.build(log=lambda line: print(line, file=sys.stderr), patched=True)
    os.environ["LLAMA_CPP_LIB_PATH"] = str(build.folder)
    rows = []
    for name, text in LAYOUTS.items():
        if options.only not in (None, name):
            continue
        for seed in range(options.seeds):
            row = {"kind": name, "seed": seed, **losses(Layout.parse(f"d64 v256 {text}"), options.steps, seed)}
            rows.append(row)
            print(json.dumps(row), flush=True)
    if options.only is not None:
        return
    record = {"steps": options.steps, "rows": rows}
    RECORDED.write_text(json.dumps(record, indent=1) + "\n")
    if options.page:
        fill(options.page, "rounding", as_table(record))


def losses(layout: Layout, steps: int, seed: int) -> dict[str, float]:
    """Returns bits per byte of a proxy: as trained, and of each type in PyTorch and of the file."""
    config = QualityConfig(rungs=(Rung(name="text", lm_steps=steps, seeds=(seed,)),))
    (job,) = rung_jobs(config, 0, layout, refer(config.corpus, Path.cwd()))
    with tempfile.TemporaryDirectory() as folder:
        result = train(job, yield_hook=lambda: None, checkpoint_dir=Path(folder), device="cpu", log=lambda line: None)
        checkpoint = Checkpoint(weights_file(Path(folder), job.key), result.weights_sha256)
        losses = {"trained": fmean(loss for group, loss in result.losses.items() if "." not in group)}
        for kind in TYPES:
            file = Path(folder) / f"{kind}.gguf"
            LLAMA_CPP.export(exported_layout(job), kind, checkpoint, file)
            losses[kind] = loss(LLAMA_CPP.rounded(exported_layout(job), kind, checkpoint), job)
            losses[f"{kind} file"] = loss(FileModel(file, config.length), job)
    return losses


def loss(model: nn.Module, job: TrainJob) -> float:
    """Returns bits per byte, the mean over the domains of the corpus."""
    scores = score_groups(model, open_data(job).groups(), torch.device("cpu"))
    return fmean(score.loss for group, (score, _) in scores.items() if "." not in group)


def as_table(record: dict[str, Any]) -> str:
    """Returns the means over seeds, as Markdown."""
    columns = ["proxies of", "bits/byte as trained"]
    columns += [f"{kind.upper()}{where}" for kind in TYPES for where in ("", " file")]
    lines = []
    for name in dict.fromkeys(row["kind"] for row in record["rows"]):
        rows = [row for row in record["rows"] if row["kind"] == name]
        more = [
            f"{fmean(row[key] / row['trained'] - 1 for row in rows):+.2%}"
            for kind in TYPES
            for key in (kind, f"{kind} file")
        ]
        lines.append([name, f"{fmean(row['trained'] for row in rows):.3f}", *more])
    return table(columns, lines)


if __name__ == "__main__":
    main()
