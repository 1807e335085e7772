"""What the benchmarks of single models share: a layout's model file, and fresh processes of the runner on it.

No device, no reference run, no verdict: these scripts want a calm machine and say what they saw.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nas.core.layout import Layout
from nas.core.measurement import Sample
from nas.core.published import LFM2
from nas.core.workload import Workload
from nas.runtimes.base import Artifact, RandomWeights
from nas.runtimes.llama_cpp.build import build
from nas.runtimes.llama_cpp.builds import Build
from nas.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.testing.run_plan import run_plan

DEADLINE_S = 3600.0

MIXED_350M = (
    "d1024 v65536 ffn=swiglu:4096 "
    "[C3*2 M64 A16/8 C3*2 M64 W16/4@512 C3+moe:8x2:512 C3 M64 A16/8 C3+moe:8x2:512 C3 M64 A16/8]"
)
"""Every kind of mixer and feed-forward in 16 layers; 340M weights."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model file and the build that runs it."""

    layout: Layout
    artifact: Artifact
    file: Path
    build: Build

    def run(self, workload: Workload) -> Sample:
        """One fresh process.

        Raises:
            NasError: the runner failed, or did not take the workload.
        """
        plan = LLAMA_CPP.plan(self.artifact, self.build.runner, workload, DEADLINE_S)
        return LLAMA_CPP.parse(run_plan(plan, self.build.folder, {"model": self.file}))


@contextmanager
def exported(layout: Layout, *, tools: bool = False) -> Iterator[Model]:
    """`layout` as Q4_0 with random weights, for the stock build where that carries it, while the context is open.

    Args:
        layout: what to export.
        tools: whether the build must have llama-bench.
    """
    patched = LLAMA_CPP.supports(layout).verdict == "patched"
    made = build(log=say, patched=patched, tools=tools)
    with tempfile.TemporaryDirectory(prefix="hilnas-benchmark-") as folder:
        file = Path(folder) / "model.gguf"
        yield Model(layout, LLAMA_CPP.export(layout, "q4_0", RandomWeights(), file), file, made)


def layout_called(text: str) -> Layout:
    """A published name, or a one-line string."""
    return Layout.parse(LFM2.get(text, text))


def counts(text: str) -> list[int]:
    """Numbers with commas between: the type of an option."""
    return [int(part) for part in text.split(",")]


def decode_ms(sample: Sample) -> list[float]:
    """Milliseconds per decoded token."""
    return [ns / 1e6 for ns in sample.decode_ns]


def say(line: str) -> None:
    """Progress, on stderr."""
    print(line, file=sys.stderr, flush=True)


def print_json(result: dict[str, Any]) -> None:
    """The result, on stdout."""
    json.dump(result, sys.stdout, indent=1)
    print()


def markdown(rows: list[dict[str, str]]) -> str:
    """`rows` as a Markdown table whose head is the keys of the first."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
