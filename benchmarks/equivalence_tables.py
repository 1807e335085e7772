"""Shared parts of the benchmarks of equivalence gates: layouts, arguments, and the table of planted faults."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.page import table
from nas.core.published import LFM2
from nas.measure.runtimes.toolchain import host_target
from nas.testing.planted_faults import EVERY_KIND

Row = dict[str, Any]

ALONE = {
    "conv": "d256 v512 ffn=swiglu:512 [C3 C5*2]",
    "gqa": "d256 v512 ffn=swiglu:512 [A8/4 A4/1 A6/2:32]",
    "swa": "d256 v512 ffn=swiglu:512 [W4/2@32*3]",
    "swa with sinks": "d256 v512 ffn=swiglu:512 [W4/2@32(sink=1)*3]",
    "gqa with Canon": "d256 v512 ffn=swiglu:512 [A8/4(canon=4)*2]",
    "mla": "d256 v512 ffn=swiglu:512 [L4/64 L4/64(query=96)]",
    "mamba2": "d256 v512 ffn=swiglu:512 [M16*3]",
    "gdn": "d256 v512 ffn=swiglu:512 [D8/4*2]",
    "gla": "d256 v512 ffn=swiglu:512 [G8*2]",
    "mlstm": "d256 v512 ffn=swiglu:512 [X4*2]",
    "relu2": "d256 v512 ffn=relu2:512 [C3 A4/2]",
    "swiglu of several widths": "d256 v512 ffn=swiglu:512 [C3 A4/2+swiglu:768 C3+swiglu:352]",
    "moe of several widths": "d256 v512 ffn=moe:8x2:64 [A4/2*2 A4/2+moe:8x4:96]",
    "moe with shared experts": "d256 v512 ffn=moe:8x2:64(shared=2) [C3 A4/2]",
}
MIXED = {
    "conv + gqa": "d256 v512 ffn=swiglu:512 [C3 A4/2 C5 A8/2]",
    "conv + gqa + mamba2": "d256 v512 ffn=swiglu:512 [C3 A4/2 M16 C4 M16]",
    "conv + mamba2 + moe": "d256 v512 ffn=moe:8x2:64 [C3 M16+swiglu:512 C3 M32]",
    "swa + conv": "d256 v512 ffn=swiglu:512 [C3 W4/2@32(sink=1) C5 W8/2@32]",
    "parallel mixers": "d256 v512 ffn=swiglu:512 [C3&W4/2@32 A4/2 C3&A4/2]",
    "shared weights and caches": "d256 v512 ffn=swiglu:512 [A8/4 C3+none A8/4(kv=0) ^1 ^0]",
    "all kinds": EVERY_KIND.format(),
}
FULL = {"LFM2-350M": LFM2["LFM2-350M"]}


def arguments(doc: str | None) -> argparse.Namespace:
    """Returns `page`, `targets` and the `full` layouts of the command line of a gate's benchmark."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--page", type=Path, help="Markdown page that gets the tables")
    parser.add_argument("--small", action="store_const", dest="full", const={}, default=FULL, help="without LFM2-350M")
    parser.add_argument("--target", action="append", dest="targets", help="default: this machine and arm64")
    options = parser.parse_args()
    options.targets = options.targets or list(dict.fromkeys((host_target(), "aarch64-linux")))
    return options


def fault_table(rows: Sequence[Row]) -> str:
    """Returns a row for each planted fault, and a column of errors and limits for each machine and file type.

    A fault whose logits are within the limit was caught by the check of the chosen experts.
    """
    columns = list(dict.fromkeys((row["target"], row.get("quantisation", "")) for row in rows))
    cells: dict[tuple[str, str], dict[tuple[str, str], str]] = {}
    for row in rows:
        caught = row["error"] is not None and row["error"] > row["limit"]
        text = f"{row['error']} / {row['limit']}" if caught else "experts"
        cell = text if row["as_it_should"] else f"{text}, MISSED"
        cells.setdefault((row["fault"], row["layout"]), {})[row["target"], row.get("quantisation", "")] = cell
    head = ["fault", *(f"{target} {quantisation}".strip() for target, quantisation in columns)]
    return table(
        head, [[fault, *(by_column.get(column, "-") for column in columns)] for (fault, _), by_column in cells.items()]
    )


def passed(rows: Sequence[Row]) -> str:
    """Returns how many right graphs are within their limits."""
    return f"Right graphs within their limit: {sum(row['as_it_should'] for row in rows)} of {len(rows)}."
