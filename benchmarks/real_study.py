"""Compares proposers on real studies of one space; JSON on stdout.

    python -m benchmarks.real_study --state FOLDER --page docs/measured/real-study.md

Runs `nas launch` for ours, NSGA-II, random and STAR's way with each seed. It prints first how long it will take,
without the fresh seeds of fronts. Killed and started again, it continues. The table of all layouts that were tried is
written to `--table`; a page and a plot are made of the table alone, also later: `--from TABLE --page PAGE`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks.page import fill
from benchmarks.runs import say
from benchmarks.search.recorded import Recorded, load, recorded, write
from benchmarks.study.campaign import Campaign
from benchmarks.study.figures import figures
from benchmarks.study.page import page
from benchmarks.study.plot import draw
from benchmarks.study.terms import ENGINES, Terms, campaign
from nas.cli.options import INTERRUPTED
from nas.core.errors import NasError
from nas.search.analysis.report import study_report

SPACE = "lfm2-study"
TABLE = Path("benchmarks/recorded/real-study.json.gz")


def collected(run: Campaign, planned: Iterable[Terms]) -> list[Recorded]:
    """Returns the studies of a campaign as tables."""
    with run.store() as store:
        return [recorded(study_report(store, terms.study), engine=terms.engine) for terms in planned]


def show(studies: list[Recorded], args: argparse.Namespace) -> None:
    """Prints the figures, and writes page and plot if asked to."""
    computed = figures(studies)
    if args.page is not None:
        picture = args.page.parent.parent / "img" / f"{args.page.stem}.png"
        draw(studies, computed["corner"], computed["union_hypervolume"], picture)
        fill(args.page, "real-study", page(computed))
        say(f"wrote {args.page} and {picture}")
    print(json.dumps(computed, indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, default=Path("real-study"), help="folder of the studies' database")
    parser.add_argument("--space", default=SPACE, help="name or file")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--trials", type=int, default=60, help="of each study, references not counted")
    parser.add_argument("--plan", action="store_true", help="say what would be run and how long it takes, and stop")
    parser.add_argument("--table", type=Path, default=TABLE, help="where all layouts that were tried are written")
    parser.add_argument("--from", dest="source", type=Path, help="run nothing; make figures and page of this table")
    parser.add_argument(
        "--page", type=Path, help="Markdown page whose part `real-study` is written, with its plot in ../img/"
    )
    args = parser.parse_args()
    try:
        if args.source is not None:
            show(load(args.source), args)
            return 0
        planned = campaign(args.engines, args.seeds, args.trials)
        run = Campaign(args.state.resolve(), args.space, say)
        if args.plan:
            run.tell(planned)
            return 0
        run.run(planned)
        studies = collected(run, planned)
        write(studies, args.table)
        say(f"wrote {args.table}")
        show(studies, args)
    except NasError as error:
        say(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        say("interrupted; the same command continues")
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
