"""Does llama.cpp compute what layouts mean? Prints error and limit of the equivalence gate as JSON.

Each block kind alone and layouts that mix them, as Q4_0, F16 and F32, on this machine's builds (made where missing).
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from nas.core.layout import Layout
from nas.nn.model import Model
from nas.nn.weights import save_weights
from nas.runtimes.base import Checkpoint
from nas.runtimes.llama_cpp.build import build
from nas.runtimes.llama_cpp.runtime import LLAMA_CPP

LAYOUTS = {
    "lfm2": "d256 v512 ffn=swiglu:512 [C3*2 A4/2 C3 A4/1]",
    "lfm2moe": "d256 v512 ffn=moe:8x2:64 [C3+swiglu:512 A4/2 C3 A4/2]",
    "lfm2, windows": "d256 v512 ffn=swiglu:512 [C3 W4/2@32 C3 W4/2@32]",
    "qwen3": "d256 v512 ffn=swiglu:512 [A8/4*3]",
    "llama": "d256 v512 ffn=swiglu:512 [A8/4(qk_norm=0)*3]",
    "conv": "d256 v512 ffn=swiglu:512 [C3 C5*2]",
    "gqa": "d256 v512 ffn=swiglu:512 [A8/4 A4/1 A6/2:32]",
    "swa": "d256 v512 ffn=swiglu:512 [W4/2@32*3]",
    "swa, sinks": "d256 v512 ffn=swiglu:512 [W4/2@32(sink=1)*3]",
    "mamba2": "d256 v512 ffn=swiglu:512 [M16*3]",
    "swiglu widths": "d256 v512 ffn=swiglu:512 [C3 A4/2+swiglu:768 C3+swiglu:352]",
    "moe widths": "d256 v512 ffn=moe:8x2:64 [C3 A4/2 C3+moe:8x4:96]",
    "conv + gqa": "d256 v512 ffn=swiglu:512 [C3 A4/2 C5 A8/2]",
    "conv + gqa + mamba2": "d256 v512 ffn=swiglu:512 [C3 A4/2 M16 C4 M16]",
    "conv + mamba2 + moe": "d256 v512 ffn=moe:8x2:64 [C3 M16+swiglu:512 C3 M32]",
    "swa + conv": "d256 v512 ffn=swiglu:512 [C3 W4/2@32(sink=1) C5 W8/2@32]",
    "all": "d256 v512 ffn=moe:8x2:64 [M16 A4/2 C3+swiglu:512 W4/2@32(sink=1)+moe:8x4:96 C5 A8/8(qk_norm=0)]",
}


def main() -> None:
    torch.set_num_threads(1)
    builds = {patched: build(log=_say, patched=patched) for patched in (False, True)}
    rows = [row for name, text in LAYOUTS.items() for row in _rows(name, Layout.parse(text))]
    ids = {"stock": builds[False].runner.build, "patched": builds[True].runner.build}
    print(json.dumps({"builds": ids, "passed": all(row["passed"] for row in rows), "layouts": rows}, indent=1))


def _rows(name: str, layout: Layout) -> list[dict[str, Any]]:
    verdict = LLAMA_CPP.supports(layout).verdict
    runner = build(log=_say, patched=verdict == "patched").runner
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        trained, model = _weights(layout, Path(folder) / "weights"), Path(folder) / "m.gguf"
        for quantisation in LLAMA_CPP.quantisations:
            LLAMA_CPP.export(layout, quantisation, trained, model)
            report = LLAMA_CPP.gate(layout, quantisation, trained, model, runner)
            rows.append(
                {
                    "name": name,
                    "layout": layout.format(),
                    "build": verdict,
                    "quantisation": quantisation,
                    "error": float(f"{report.error:.3g}"),
                    "limit": float(f"{report.limit:.3g}"),
                    "passed": bool(report.passed),
                }
            )
    return rows


def _weights(layout: Layout, path: Path) -> Checkpoint:
    """Fresh weights, with norms apart from one."""
    model, generator = Model(layout, seed=1), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter, weight in model.named_parameters():
            if "norm" in parameter:
                weight.copy_(0.5 + torch.rand(weight.shape, generator=generator))
    save_weights(model, path)
    return Checkpoint(path, hashlib.sha256(path.read_bytes()).hexdigest())


def _say(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    main()
