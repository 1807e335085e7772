"""Protocols of recall: what is learned from cold in a few seconds, by small stacks.

    python -m benchmarks.quality.protocols run [--minutes M]      trains what is missing
    python -m benchmarks.quality.protocols report [--page docs/measured/truth.md]

A row is a protocol and a layout, named beforehand; a cell has the score of each seed, in nats above chance. One
training is one line of `RECORDED`, under its result key.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.page import markdown, write_part
from benchmarks.quality.truth import recorded, train_missing
from nas.core.layout import Layout
from nas.core.quality_config import QualityConfig, Rung, TaskStage
from nas.model.text.corpus import CorpusRef
from nas.search.proxy.job import TrainJob
from nas.search.proxy.ladder import rung_jobs

RECORDED = Path(__file__).parents[1] / "recorded" / "protocols.jsonl"
SEEDS = (0, 1)

_MQAR = {"fewer": False, "beside": False}
PROTOCOLS: dict[str, tuple[TaskStage, dict[str, Any]]] = {
    "mqar, batch 16": (TaskStage(steps=100, batch=16, settings=_MQAR), {}),
    "fewer pairs, too; value behind its key": (TaskStage(steps=100, batch=16, settings={"beside": False}), {}),
    "value beside its key; all pairs": (TaskStage(steps=100, batch=16, settings={"fewer": False}), {}),
    "recall": (TaskStage(steps=100, batch=16), {}),
    "recall, batch 8": (TaskStage(steps=100, batch=8), {}),
    "recall, rate 0.01": (TaskStage(steps=100, batch=16), {"task_lr": 1e-2}),
    "recall, Muon": (TaskStage(steps=100, batch=16), {"optimiser": "muon"}),
    "recall, 300 steps": (TaskStage(steps=300, batch=16), {}),
}
"""Name -> the task's training, and settings of the ladder that are not its defaults."""
_ATTENTION, _HYBRID, _CONVOLUTION, _STATE = "A8/2+none", "C3+none A8/2+none", "C3+none*2", "M512+none"
ROWS = (
    *((name, layout) for name in list(PROTOCOLS)[:4] for layout in (_ATTENTION, _HYBRID)),
    ("recall", _CONVOLUTION),
    ("recall", _STATE),
    *((name, _HYBRID) for name in list(PROTOCOLS)[4:7]),
    ("recall, 300 steps", _STATE),
)


def jobs(protocol: str, layout: str) -> list[TrainJob]:
    """Returns the trainings of a row, one for each seed."""
    stage, settings = PROTOCOLS[protocol]
    config = QualityConfig(rungs=(Rung(name="recall", tasks={"recall": stage}, seeds=SEEDS),), **settings)
    text = f"d512 v8192 ffn=swiglu:1536 [{layout}]"
    return rung_jobs(config, 0, Layout.parse(text), CorpusRef(source="default", hash="0" * 64))


def table() -> str:
    """Returns the rows that are trained, in Markdown."""
    trained, cells = recorded(RECORDED), []
    for protocol, layout in ROWS:
        if not all(job.key in trained for job in jobs(protocol, layout)):
            continue
        rows = [trained[job.key] for job in jobs(protocol, layout)]
        cells.append(
            {
                "protocol": protocol,
                "layout": f"`{layout}`",
                "score of each seed": ", ".join(f"{row['scores']['task/recall']:.2f}" for row in rows),
                "CPU s a seed": f"{sum(row['cpu_seconds'] for row in rows) / len(rows):.1f}",
            }
        )
    return f"{markdown(cells)}\n{len(cells)} of {len(ROWS)} rows, {len(SEEDS)} seeds.\n"


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    commands.add_parser("run").add_argument("--minutes", type=float, default=600.0, help="begin no training after")
    commands.add_parser("report").add_argument("--page", type=Path)
    options = parser.parse_args()
    if options.command == "run":
        todo = {job.key: (layout, job) for name, layout in ROWS for job in jobs(name, layout)}
        train_missing(todo, RECORDED, options.minutes)
    else:
        write_part(options.page, "protocols", table())


if __name__ == "__main__":
    main()
