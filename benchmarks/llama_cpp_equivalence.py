"""Checks that llama.cpp computes what layouts define, on this machine and on arm64; prints JSON.

    python benchmarks/llama_cpp_equivalence.py [--page docs/measured/equivalence-llama-cpp.md] [--small]
        [--target TARGET]

Error and limit of the equivalence gate for each block kind alone, for layouts that mix them and for LFM2-350M, as Q4_0,
F16 and F32; of planted faults, each of which must be caught; and whether greedy tokens of stock files are the same with
and without our patch. Builds are made where missing; another machine's runs by emulation (qemu-user), and LFM2-350M as
Q4_0 only there, because emulated floating point is slow. `--page` writes the tables into a Markdown page, `--small`
leaves LFM2-350M out.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nas.core.layout import Layout
from nas.measure.runtimes.base import Checkpoint
from nas.measure.runtimes.llama_cpp.binding import decoded_tokens
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.measure.runtimes.llama_cpp.variants import Build
from nas.measure.runtimes.toolchain import host_target
from nas.testing.llama_cpp_gate import gate
from nas.testing.planted_faults import PLANTED_CHOICE, PLANTS, checkpoint

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.equivalence_tables import ALONE, FULL, MIXED, Row, arguments, fault_table, passed
from benchmarks.page import fill, table
from benchmarks.runs import digits, say
from tests.support.short_training import STOCK as BYTE_LEVEL
from tests.support.short_training import learned_checkpoint

STOCK = {
    "lfm2": "d256 v512 ffn=swiglu:512 [C3*2 A4/2 C3 A4/1]",
    "lfm2moe": "d256 v512 ffn=moe:8x2:64 [C3+swiglu:512 A4/2 C3 A4/2]",
    "qwen3": "d256 v512 ffn=swiglu:512 [A8/4*3]",
    "llama": "d256 v512 ffn=swiglu:512 [A8/4(qk_norm=0)*3]",
}
TOKENS = 64


def main() -> None:
    options = arguments(__doc__)
    targets, full = options.targets, options.full
    torch.set_num_threads(1)
    report: dict[str, Any] = {
        "command": "python benchmarks/llama_cpp_equivalence.py",
        "layouts": [row for target in targets for row in _layouts(target, ALONE | MIXED | STOCK | full)],
        "faults": [row for target in targets for row in _faults(target)],
        "greedy": list(_greedy(full)) if host_target() in targets else [],
    }
    report["passed"] = all(row["as_it_should"] for part in ("layouts", "faults", "greedy") for row in report[part])
    print(json.dumps(report, indent=1))
    if options.page:
        fill(options.page, "measured", _tables(report))
    sys.exit(not report["passed"])


@cache
def _build(target: str, patched: bool) -> Build:
    """Returns a build; a patched one runs stock files too, so another machine's needs only that."""
    host = target == host_target()
    return LLAMA_CPP.build("host" if host else target, log=say, patched=patched or not host)


def _layouts(target: str, layouts: dict[str, str]) -> Iterator[Row]:
    for name, text in layouts.items():
        layout = Layout.parse(text)
        used = _build(target, LLAMA_CPP.supports(layout).verdict == "patched")
        slow = name in FULL and used.spec.static
        for quantisation in LLAMA_CPP.quantisations[:1] if slow else LLAMA_CPP.quantisations:
            say(f"{target}: {name} {quantisation}")
            with tempfile.TemporaryDirectory() as folder:
                report = gate(Path(folder), quantisation, layout, used)
            yield {
                "target": target,
                "name": name,
                "layout": text,
                "arch": LLAMA_CPP.supports(layout).arch,
                "build": used.runner.build[:12],
                "quantisation": quantisation,
                "error": digits(report.error),
                "limit": digits(report.limit),
                "note": report.note,
                "as_it_should": bool(report.passed),
            }


def _faults(target: str) -> Iterator[Row]:
    used = _build(target, True)
    for planted, faults in PLANTS:
        for fault in faults if LLAMA_CPP.supports(planted) else ():
            # Through a runner, a fault in choices shows where they need not be settled.
            hidden = fault.choice_only and used.spec.static
            right = PLANTED_CHOICE if hidden else planted
            for quantisation in ("f32",) if hidden else ("q4_0", "f32"):
                say(f"{target}: {fault.name} {quantisation}")
                with tempfile.TemporaryDirectory() as folder:
                    report = gate(Path(folder), quantisation, right, used, fault)
                yield {
                    "target": target,
                    "fault": fault.name,
                    "layout": right.format(),
                    "quantisation": quantisation,
                    "error": digits(report.error),
                    "limit": digits(report.limit),
                    "note": report.note,
                    "as_it_should": not report.passed,
                }


def _greedy(full: dict[str, str]) -> Iterator[Row]:
    """Compares greedy tokens of small models after a short training, and of the full-size one with fresh weights."""
    text = (Path(__file__).resolve().parent.parent / "LICENSE").read_bytes()
    for name, byte_level in BYTE_LEVEL.items():
        layout = Layout.parse(byte_level)
        with tempfile.TemporaryDirectory() as folder:
            trained = learned_checkpoint(layout, text, Path(folder) / "weights")
            yield _greedy_row(name, layout, trained, list(text[:40]), Path(folder))
    for name, published in full.items():
        layout = Layout.parse(published)
        with tempfile.TemporaryDirectory() as folder:
            fresh = checkpoint(layout, Path(folder) / "weights")
            prompt = np.random.default_rng(0).integers(0, layout.vocab, 32).tolist()
            yield _greedy_row(name, layout, fresh, prompt, Path(folder))


def _greedy_row(name: str, layout: Layout, weights: Checkpoint, prompt: list[int], folder: Path) -> Row:
    say(f"greedy tokens: {name}")
    model = folder / "m.gguf"
    LLAMA_CPP.export(layout, "q4_0", weights, model)
    builds = [_build(host_target(), patched) for patched in (False, True)]
    stock, patched = (decoded_tokens(build, model, prompt, TOKENS) for build in builds)
    return {
        "name": name,
        "layout": layout.format(),
        "tokens": TOKENS,
        "distinct": len(set(stock)),
        "same": sum(a == b for a, b in zip(stock, patched, strict=True)),
        "as_it_should": stock == patched,
    }


def _tables(report: dict[str, Any]) -> str:
    greedy = [(row["name"], row["tokens"], row["distinct"], row["same"]) for row in report["greedy"]]
    return (
        "\n"
        + "\n".join(
            [
                f"{passed(report['layouts'])}\n",
                "### Planted faults\n",
                fault_table(report["faults"]),
                "### Greedy tokens, stock and patched build\n",
                table(("layout", "tokens", "distinct ones", "the same on both"), greedy),
            ]
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
