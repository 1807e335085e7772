"""Does ExecuTorch compute what layouts mean? Prints error and limit of the equivalence gate as JSON.

Each block kind alone and layouts that mix them, in 8da4w, by this machine's build of the runner (made where missing).
What lowering and writing cost is printed beside, in CPU seconds: the first layout with a block pays for the block.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from llama_cpp_equivalence import LAYOUTS, _say, _weights

from nas.core.layout import Layout
from nas.runtimes.executorch.build import build
from nas.runtimes.executorch.runtime import EXECUTORCH

MORE = {
    "parallel mixers": "d256 v512 ffn=swiglu:512 [C3&W4/2@32 A4/2 C3&A4/2]",
    "shared weights and caches": "d256 v512 ffn=swiglu:512 [A8/4 C3+none A8/4(kv=0) ^1 ^0]",
}


def main() -> None:
    torch.set_num_threads(1)
    runner = build(log=_say).runner
    rows = [_row(name, Layout.parse(text)) for name, text in (LAYOUTS | MORE).items()]
    print(json.dumps({"build": runner.build, "passed": all(row["passed"] for row in rows), "layouts": rows}, indent=1))


def _row(name: str, layout: Layout) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        trained, model = _weights(layout, Path(folder) / "weights"), Path(folder) / "model"
        begun = time.process_time()
        EXECUTORCH.export(layout, "8da4w", trained, model)
        export_s = time.process_time() - begun
        report = EXECUTORCH.gate(layout, "8da4w", trained, model, build(log=_say).runner)
    return {
        "name": name,
        "layout": layout.format(),
        "error": float(f"{report.error:.3g}"),
        "limit": float(f"{report.limit:.3g}"),
        "passed": bool(report.passed),
        "export_cpu_s": round(export_s, 2),
    }


if __name__ == "__main__":
    main()
