"""Compares start values of proxies by their loss after 400 steps; prints a table; resumes.

    python -m benchmarks.quality.start_values [--page docs/measured/proxies.md]

Stacks of four layers at width 64, byte-level, the default corpus. `GRID` says what is trained; a training that has a
result is not repeated. The first two rows are the start values of version 0.1.0.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from benchmarks.quality.fairness import CONFIG, STEPS
from benchmarks.quality.page import fill, markdown
from nas.core.layout import Layout
from nas.model.nn.attention import Attention
from nas.model.nn.model import Model
from nas.model.nn.primitives import Embedding, ExpertLinear, Linear
from nas.model.text.corpus import refer
from nas.search.proxy.job import LmRun, TrainJob
from nas.search.proxy.train import train

RESULTS = Path(__file__).parent / "start_values"
STACKS = {"AB": "{A} C3*3", "BT": "C3*2 {A} C3", "AA": "{A}*4", "MM": "M4(heads=8)*4", "CC": "C3*4"}
HEADS = {8: "A8/4", 16: "A4/2"}


@dataclass(frozen=True)
class Setting:
    """One training.

    Args:
        stack: of `STACKS`.
        head: size of attention heads.
        embedding: deviation of the embedding's start values.
        residual: deviation of projections into the residual stream, in 1 / sqrt(2 depth inputs).
        gain: start value of QK-norm's weights.
        lr: learning rate.
        theta: RoPE's base.
    """

    stack: str
    head: int
    embedding: float
    residual: float
    gain: float
    lr: float = 3e-3
    theta: int = 3160

    @property
    def path(self) -> Path:
        """Where its result is written."""
        values = "-".join(f"{name[0]}{value:g}" for name, value in asdict(self).items() if name != "stack")
        return RESULTS / f"{self.stack}-{values}.json"

    def layout(self) -> Layout:
        """Returns the stack."""
        attention = HEADS[self.head] + ("" if self.theta == 1_000_000 else f"(rope_theta={self.theta})")
        return Layout.parse(f"d64 v256 ffn=swiglu:288 [{STACKS[self.stack].format(A=attention)}]")


GRID = (
    Setting("AB", 16, 0.02, 1, 1, theta=1_000_000),
    Setting("BT", 16, 0.02, 1, 1, theta=1_000_000),
    *(Setting(stack, 16, 0.125, 0.125, 1) for stack in ("AB", "BT", "AA")),
    *(Setting("AA", 16, 0.125, 0.125, gain) for gain in (1.41, 2.0)),
    *(Setting("AA", 8, 0.125, 0.125, gain) for gain in (1.0, 1.68, 2.4)),
    *(Setting("AA", 8, 0.125, residual, 1.68) for residual in (0.4, 1.0)),
    *(Setting(stack, 8, 0.125, 0.125, gain) for gain in (1.68, 2.4) for stack in ("AB", "BT")),
    Setting("AB", 8, 0.125, 0.125, 1.0),
    *(Setting(stack, 8, 0.125, 0.4, 1.68) for stack in ("AB", "BT")),
    *(Setting(stack, 16, 0.125, residual, 1) for stack in ("MM", "CC") for residual in (0.125, 0.4)),
    Setting("BT", 16, 0.125, 0.125, 1, lr=6e-3),
    *(Setting("AA", 8, 0.125, 0.125, gain, lr=6e-3) for gain in (1.0, 1.68)),
)


@torch.no_grad()
def started(layout: Layout, seed: int, setting: Setting) -> Model:
    """Returns a model with the start values of `setting`."""
    model = Model(layout, seed)
    for module in model.modules():
        if isinstance(module, Embedding):
            module.weight.mul_(setting.embedding * layout.d_model**0.5)
        if isinstance(module, Linear | ExpertLinear) and module.residual:
            module.weight.mul_(setting.residual * layout.d_model**0.5)
        if isinstance(module, Attention) and module.q_norm is not None:
            module.q_norm.weight.fill_(setting.gain)
            module.k_norm.weight.fill_(setting.gain)
    return model


def run_one(setting: Setting) -> None:
    """Trains one setting as a study does and writes its loss, the mean over domains in bits per byte."""
    job = TrainJob(
        layout=setting.layout().to_json(),
        run=LmRun(corpus=refer(CONFIG.corpus, Path()), length=CONFIG.length, eval_bytes=CONFIG.eval_bytes),
        steps=STEPS,
        lr=setting.lr,
        seed=0,
        **CONFIG.model_dump(include={"batch", "warmup", "weight_decay", "clip", "ema"}),
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch("nas.search.proxy.train.Model", partial(started, setting=setting)),
    ):
        result = train(job, yield_hook=lambda: None, checkpoint_dir=Path(folder), device="cpu", log=lambda line: None)
    loss = round(statistics.mean(result.losses.values()), 5)
    written = asdict(setting) | {"layout": setting.layout().format(), "loss": loss}
    RESULTS.mkdir(exist_ok=True)
    setting.path.write_text(json.dumps(written | {"cpu_s": round(result.cpu_seconds, 1)}, indent=1) + "\n")


def table() -> str:
    """Returns what is on file as Markdown."""
    done = [json.loads(setting.path.read_text()) for setting in GRID if setting.path.exists()]
    names = {"embedding": "embedding", "residual": "residual", "gain": "QK gain", "lr": "learning rate"}
    return markdown(
        [
            {"stack": f"`{each['layout'].partition('[')[2][:-1]}`"}
            | {shown: f"{each[name]:g}" for name, shown in names.items()}
            | {"bits per byte": f"{each['loss']:.3f}"}
            for each in done
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, help="also write the table there")
    parser.add_argument("--report", action="store_true", help="train nothing")
    options = parser.parse_args()
    for setting in GRID:
        if not (options.report or setting.path.exists()):
            run_one(setting)
            print(setting.path.stem, file=sys.stderr, flush=True)
    text = table()
    print(text, end="")
    if options.page:
        fill(options.page, "start values", text)


if __name__ == "__main__":
    main()
