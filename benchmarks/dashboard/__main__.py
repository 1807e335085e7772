"""The dashboard with many trials: `serve` measures its server; JSON on stdout."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.dashboard import made, serving

HOME = Path.home() / ".cache" / "hilnas" / "dashboard"


def main() -> None:
    """One run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True, dest="verb")
    for verb, told in (("make", "only make the studies"), ("serve", "measure the server")):
        each = verbs.add_parser(verb, help=told)
        each.add_argument("--home", type=Path, default=HOME, help=f"keeps the studies that were made (default: {HOME})")
        each.add_argument("--trials", type=int, default=100_000)
        each.add_argument("--small", type=int, default=100, help="studies of 40 trials beside the large one")
    each.add_argument("--viewers", type=int, nargs="+", default=[1, 20])
    each.add_argument("--seconds", type=float, default=60.0, help="that each crowd of viewers stays")
    each.add_argument("--again", type=int, default=30, help="times that each single answer is asked for")
    args = parser.parse_args()
    if args.verb == "make":
        print(made.made(args.home, args.trials, args.small))
    else:
        found = serving.measure(args.home, args.trials, args.small, args.viewers, args.seconds, args.again)
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
