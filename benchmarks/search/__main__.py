"""Compares proposers on synthetic problems and on recorded studies; JSON on stdout.

`run --out FOLDER` takes hours of CPU and continues after an interruption; `report FOLDER` prints results so far, and
`pack` makes one file of them. `time` measures CPU seconds per proposal after 100, 500 and 2,000 layouts; `replay
STUDY.json` compares engines on the table of recorded studies, as `nas study export STUDY -f json` and `python -m
benchmarks.real_study` write it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.runs import say
from benchmarks.search import fidelity, models
from benchmarks.search.problems import FAMILY
from benchmarks.search.recorded import load, table
from benchmarks.search.replay import replay
from benchmarks.search.report import report
from benchmarks.search.results import REFERENCE, Key, fill, pack, read
from benchmarks.search.runs import ENGINES
from benchmarks.search.table import tables
from benchmarks.search.timing import seconds
from nas.search.spaces import load_space

MARKS = (50, 100, 200)
EHVI = "ehvi"
_ASKED_FOR = ("gp", "oracle")
"""Engines that run only where they are named."""


def run(args: argparse.Namespace) -> int:
    keys = [
        Key(problem, engine, workers, seed)
        for seed in range(args.first, args.first + args.seeds)
        for problem in args.problems
        for workers in args.workers
        for engine in ([REFERENCE] if workers == 1 and args.reference else []) + args.engines
    ]
    done = fill(args.out, keys, args.evaluations, args.reference, args.cpu_minutes * 60, say)
    return 0 if done else 1


def packed(args: argparse.Namespace) -> int:
    names = dict(pair.split("=", 1) for pair in args.rename)
    say(f"{pack(args.folder, args.file, names)} runs in {args.file}")
    return 0


def reported(args: argparse.Namespace) -> int:
    results = {key: data for path in args.results for key, data in read(path).items()}
    figures = report(results, MARKS, EHVI)
    print(tables(figures, EHVI) if args.markdown else json.dumps(figures, indent=1))
    return 0


def clocked(args: argparse.Namespace) -> int:
    rows = [seconds(problem, args.proposer, observed) for problem in args.problems for observed in args.told]
    print(json.dumps(rows, indent=1))
    return 0


def replayed(args: argparse.Namespace) -> int:
    recorded_table = table(load(args.recorded))
    engines = {name: ENGINES[name][0] for name in args.engines}
    print(
        json.dumps(
            replay(
                recorded_table, load_space(args.space or recorded_table.space), engines, args.seeds, args.evaluations
            )
        )
    )
    return 0


def climbed(args: argparse.Namespace) -> int:
    seeds = range(args.first, args.first + args.seeds)
    comparison = fidelity.compare(
        args.problems, seeds, args.engine, pool=args.pool, whole=args.whole, longer=args.longer, out=args.out, say=say
    )
    print(fidelity.table(comparison) if args.markdown else json.dumps(comparison, indent=1))
    return 0


def checked(args: argparse.Namespace) -> int:
    seeds = range(args.first, args.first + args.seeds)
    rows = models.check(args.out, args.problems, seeds, args.engines, args.told, say)
    print(models.table(rows) if args.markdown else json.dumps(rows, indent=1))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True, dest="verb")
    campaign = verbs.add_parser("run", help="fill a folder with results")
    campaign.add_argument("--out", type=Path, required=True)
    campaign.add_argument("--problems", nargs="+", default=list(FAMILY), choices=list(FAMILY))
    campaign.add_argument(
        "--engines", nargs="+", default=[e for e in ENGINES if e not in _ASKED_FOR], choices=list(ENGINES)
    )
    campaign.add_argument("--first", type=int, default=1000, help="least seed; engines are developed below 1000")
    campaign.add_argument("--seeds", type=int, default=10)
    campaign.add_argument("--workers", type=int, nargs="+", default=[1])
    campaign.add_argument("--evaluations", type=int, default=200)
    campaign.add_argument("--reference", type=int, default=8000, help="evaluations of the long search; 0: none")
    campaign.add_argument("--cpu-minutes", type=float, default=1e9, help="after which no further run is begun")
    campaign.set_defaults(call=run)
    packing = verbs.add_parser("pack", help="one file of a folder's results, to be recorded")
    packing.add_argument("folder", type=Path)
    packing.add_argument("file", type=Path, help="to write: NAME.jsonl.gz")
    packing.add_argument("--rename", nargs="+", default=[], metavar="ENGINE=NAME", help="names of engines in the file")
    packing.set_defaults(call=packed)
    reporting = verbs.add_parser("report", help="figures of results")
    reporting.add_argument("results", type=Path, nargs="+", help="folders, or files that `pack` wrote")
    reporting.add_argument("--markdown", action="store_true", help="tables of docs/measured/search-engine.md, not JSON")
    reporting.set_defaults(call=reported)
    clock = verbs.add_parser("time", help="CPU seconds a proposal")
    clock.add_argument("--problems", nargs="+", default=["hybrid", "five"], choices=list(FAMILY))
    clock.add_argument("--proposer", default=EHVI)
    clock.add_argument("--told", type=int, nargs="+", default=[100, 500, 2000])
    clock.set_defaults(call=clocked)
    model = verbs.add_parser("models", help="errors and calibration of surrogates")
    model.add_argument("--out", type=Path, required=True, help="folder of histories and results, to continue from")
    model.add_argument("--problems", nargs="+", default=list(FAMILY), choices=list(FAMILY))
    model.add_argument("--engines", nargs="+", default=[EHVI])
    model.add_argument("--first", type=int, default=0, help="least seed")
    model.add_argument("--seeds", type=int, default=1)
    model.add_argument("--told", type=int, default=100, help="observations in each history")
    model.add_argument("--markdown", action="store_true", help="a table instead of JSON")
    model.set_defaults(call=checked)
    again = verbs.add_parser("replay", help="engines on the table of recorded studies")
    again.add_argument("recorded", type=Path, help="a report of `nas study export -f json`, or a table of reports")
    again.add_argument("--space", help="name or file; the study's own name of it if left out")
    again.add_argument("--evaluations", type=int, default=100, help="layouts that each engine is asked for")
    again.add_argument("--engines", nargs="+", default=["random", "evolution", "nsga2", "tpe", EHVI])
    again.add_argument("--seeds", type=int, default=10)
    again.set_defaults(call=replayed)
    climb = verbs.add_parser("fidelity", help="policies of the ladder against training everybody to the top")
    climb.add_argument("--problems", nargs="+", default=list(fidelity.PROBLEMS), choices=list(FAMILY))
    climb.add_argument("--engine", default=EHVI, choices=["ehvi", "evolution", "random"])
    climb.add_argument("--first", type=int, default=1000, help="least seed; policies are developed below 1000")
    climb.add_argument("--seeds", type=int, default=10)
    climb.add_argument("--pool", type=int, default=128, help="candidates scored per proposal")
    climb.add_argument("--whole", type=int, default=50, help="budget: the cost of so many layouts trained to the top")
    climb.add_argument("--longer", type=float, default=1.0, help="times which the top rung takes longer")
    climb.add_argument("--out", type=Path, help="file of finished runs, to continue from")
    climb.add_argument("--markdown", action="store_true", help="a table instead of JSON")
    climb.set_defaults(call=climbed)
    args = parser.parse_args()
    return int(args.call(args))


if __name__ == "__main__":
    sys.exit(main())
