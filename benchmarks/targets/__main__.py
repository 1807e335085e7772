"""Command line of the study of targets: see the package."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

import benchmarks.targets as package
from benchmarks.targets import layouts, measuring, page, quality, table
from nas.core.errors import NasError
from nas.core.layout import Layout
from nas.measure.farm.farm import this_machine


def main() -> int:
    parser = argparse.ArgumentParser(description=package.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "train"):
        command = commands.add_parser(name)
        command.add_argument("folder", type=Path)
        command.add_argument("--layouts", type=int, default=64, help="of the study, LFM2's pattern among them")
        command.add_argument("--minutes", type=float, default=35.0, help="after which nothing new is begun")
        command.add_argument("--recorded", type=Path, default=table.RECORDED, help="where the table is written")
    commands.choices["run"].add_argument("--rounds", type=int, default=3, help="measurements of a layout on a target")
    show = commands.add_parser("page")
    show.add_argument("--recorded", type=Path, default=table.RECORDED)
    show.add_argument("--page", type=Path, default=page.PAGE)
    show.add_argument("--report-only", action="store_true", help="only what needs no study: the published tables")
    options = parser.parse_args()
    if options.command == "page":
        if options.report_only:
            page.write_report(options.page)
        else:
            page.write(table.load(options.recorded), options.page)
        return 0
    drawn = layouts.draw(options.layouts)
    try:
        if options.command == "run":
            measuring.run(options.folder, drawn, options.rounds, options.minutes)
        else:
            quality.train(_by_speed(drawn, options.folder), options.folder / "trained.jsonl", options.minutes)
    except NasError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    machine = this_machine()
    about = {"cpu": machine.cpu, "cores": machine.cores, "memory_mb": machine.memory_mb, "libc": machine.libc}
    study = table.collect(options.folder, drawn, about, options.recorded)
    print(json.dumps({"measurements": len(study.rows), "table": str(options.recorded)}))
    return 0


def _by_speed(drawn: list[Layout], folder: Path) -> list[Layout]:
    """Returns layouts in the order in which their quality is wanted: LFM2's, then the fastest ones of any target.

    So the fastest of those that are good enough is known for certain as soon as all faster ones are trained.
    """
    targets = json.loads((folder / "targets.json").read_text())
    study = table.Table({}, drawn, [measuring.Target(**row) for row in targets], measuring.read_rows(folder), [])
    times = study.times("latency")
    ranks = times.means.argsort(axis=0).argsort(axis=0).min(axis=1)
    return [drawn[0], *(times.layouts[at] for at in np.argsort(ranks, kind="stable") if times.places[at] != 0)]


if __name__ == "__main__":
    sys.exit(main())
