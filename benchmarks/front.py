"""The front of an archived study against its references, with 95 % intervals.

    python -m benchmarks.front benchmarks/recorded/studies/lfm2.jsonl.gz [--page docs/measured/fronts.md]

Quality, latency and memory are ratios to the published reference. Intervals of times and memory are those of the
measurements of a candidate and its reference runs, intervals of quality those of seeds.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.page import markdown, write_part
from benchmarks.quality.studies import read, scratch_store
from nas.core.stats import Z95
from nas.search.analysis.snapshot import Snapshots
from nas.serve.views.study import KindView, kind_views


def front_row(row: Mapping[str, Any], name: str, logarithmic: Mapping[str, bool]) -> dict[str, str]:
    """Returns a layout's line: ratios with intervals, and how sure its place on the front is."""
    cells = {"": name}
    for objective, coordinate in row["coordinates"].items():
        half = Z95 * row["sd"][objective]
        if not logarithmic[objective]:
            cells[objective] = f"{-coordinate:.3f} ± {half:.3f}"
        else:
            low, ratio, high = (math.exp(coordinate + shift) for shift in (-half, 0.0, half))
            cells[objective] = f"{ratio:.2f} ({low:.2f} to {high:.2f})"
    sure = row["p_front"]
    total, active = (row["params"][name] / 1e6 for name in ("total", "active"))
    return cells | {
        "P(front)": "-" if sure is None else f"{sure:.2f}",
        "weights, active": f"{total:.0f}M" if total == active else f"{total:.0f}M, {active:.0f}M",
        "layout": f"`{row['layout'].partition(' ')[2].partition(' ')[2]}`",
    }


def kind_row(kind: KindView) -> dict[str, str]:
    """Returns the line of a kind of block: what became of the trials with it."""
    counts = {state: str(kind.states.get(state, 0)) for state in ("complete", "stopped", "infeasible")}
    shares = {
        name: "-" if share is None else f"{share:.0%}"
        for name, share in (("of the search's proposals", kind.chosen), ("of random layouts", kind.drawn))
    }
    return {"kind": f"`{kind.kind}`", "trials": f"{kind.trials}", "on the front": f"{kind.front}"} | counts | shares


def text(report: Mapping[str, Any], kinds: Sequence[KindView]) -> str:
    """Returns the study's sentence, its front, how far its qualities can be trusted, and its kinds, as Markdown."""
    logarithmic = {objective["name"]: objective["transform"] == "log" for objective in report["objectives"]}
    rows = [front_row(row, row["name"], logarithmic) for row in report["references"]]
    rows += [front_row(row, f"{row['trial']}", logarithmic) for row in report["front"]]
    trials, noise = report["trials"], report["noise"]["text"] if report["noise"] else ""
    sure = report["reliability"]["text"] if report["reliability"] else ""
    counts = ", ".join(f"{count} {state}" for state, count in trials.items() if count)
    tried_kinds = markdown([kind_row(kind) for kind in kinds])
    shares = (
        "Trials with each kind; the share that has it of what the search proposed, its fixed seeds not counted, and of "
        "random layouts of the space:"
    )
    return f"> {report['headline']['text']}\n\n{counts}. {sure}. {noise}\n\n{markdown(rows)}\n{shares}\n\n{tried_kinds}"


def of_archive(archive: Path) -> tuple[str, str]:
    """Returns the name of an archived study, and its part of the page."""
    with scratch_store() as store:
        report = read(archive, store)
        with Snapshots(store) as snapshots:
            return report["study"], text(report, kind_views(snapshots.get(report["study"])))


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path)
    parser.add_argument("--page", type=Path, help="with a place `<!-- NAME -->` of the archive; left out: printed")
    options = parser.parse_args()
    name, written = of_archive(options.archive)
    write_part(options.page, name, written)


if __name__ == "__main__":
    main()
