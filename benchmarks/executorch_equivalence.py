"""Checks that ExecuTorch computes what layouts define, on this machine and on arm64; prints JSON.

    python benchmarks/executorch_equivalence.py [--page docs/measured/equivalence-executorch.md] [--small]
        [--target TARGET]

Error and limit of the equivalence gate in 8da4w, for each block kind alone, for layouts that mix them and for
LFM2-350M, and of planted faults, each of which must be detected. Missing builds are made; another machine's runs
by emulation (qemu-user), so the full-size layout takes a while there. `--page` writes the tables into a Markdown page,
`--small` leaves LFM2-350M out.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from nas.core.layout import Layout
from nas.measure.runtimes.executorch.runtime import EXECUTORCH
from nas.measure.runtimes.executorch.variants import Build
from nas.testing.executorch_gate import gate
from nas.testing.planted_faults import PLANTS

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.equivalence_tables import ALONE, MIXED, Row, arguments, fault_table, passed
from benchmarks.page import fill
from benchmarks.runs import digits, say


def main() -> None:
    options = arguments(__doc__)
    torch.set_num_threads(1)
    layouts = ALONE | MIXED | options.full
    builds = {target: EXECUTORCH.build(target, log=say) for target in options.targets}
    report: dict[str, Any] = {
        "command": "python benchmarks/executorch_equivalence.py",
        "layouts": [row for build in builds.values() for row in _layouts(build, layouts)],
        "faults": [row for build in builds.values() for row in _faults(build)],
    }
    report["passed"] = all(row["as_it_should"] for part in ("layouts", "faults") for row in report[part])
    print(json.dumps(report, indent=1))
    if options.page:
        tables = f"{passed(report['layouts'])}\n\n### Planted faults\n\n{fault_table(report['faults'])}\n"
        fill(options.page, "measured", f"\n{tables}")
    sys.exit(not report["passed"])


def _layouts(used: Build, layouts: dict[str, str]) -> Iterator[Row]:
    for name, text in layouts.items():
        say(f"{used.runner.target}: {name}")
        layout = Layout.parse(text)
        with tempfile.TemporaryDirectory() as folder:
            report = gate(Path(folder), layout, used)
        yield {
            "target": used.runner.target,
            "name": name,
            "layout": layout.format(),
            "build": used.runner.build[:12],
            "error": digits(report.error),
            "limit": digits(report.limit),
            "as_it_should": bool(report.passed),
        }


def _faults(used: Build) -> Iterator[Row]:
    for right, faults in PLANTS:
        for fault in faults:
            say(f"{used.runner.target}: {fault.name}")
            with tempfile.TemporaryDirectory() as folder:
                report = gate(Path(folder), right, used, fault)
            yield {
                "target": used.runner.target,
                "fault": fault.name,
                "layout": right.format(),
                "error": digits(report.error),
                "limit": digits(report.limit),
                "as_it_should": not report.passed,
            }


if __name__ == "__main__":
    main()
