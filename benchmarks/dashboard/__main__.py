"""Benchmarks the dashboard with many trials: `serve` measures its server, `browse` a browser; JSON on stdout.

Both make their studies first, which takes some minutes for 10,000 trials, and keep them under `--home`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.dashboard import browsing, made, serving

HOME = Path.home() / ".cache" / "hilnas" / "dashboard"


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True, dest="verb")
    verbs_help = {"make": "only make the studies", "serve": "measure the server", "browse": "measure a browser"}
    parsers = {verb: verbs.add_parser(verb, help=help) for verb, help in verbs_help.items()}
    for verb_parser in parsers.values():
        verb_parser.add_argument(
            "--home", type=Path, default=HOME, help=f"keeps the studies that were made (default: {HOME})"
        )
        verb_parser.add_argument("--trials", type=int, default=10_000)
        verb_parser.add_argument("--small", type=int, default=20, help="studies of 40 trials next to the large one")
    parsers["serve"].add_argument("--viewers", type=int, nargs="+", default=[1, 20])
    parsers["serve"].add_argument("--seconds", type=float, default=60.0, help="that each crowd of viewers stays")
    parsers["serve"].add_argument("--again", type=int, default=30, help="times that each single answer is asked for")
    parsers["browse"].add_argument("--again", type=int, default=10, help="times that each thing is done")
    args = parser.parse_args()
    if args.verb == "make":
        print(made.generated(args.home, args.trials, args.small))
    elif args.verb == "browse":
        print(json.dumps(browsing.measure(args.home, args.trials, args.small, args.again), indent=1))
    else:
        report = serving.measure(args.home, args.trials, args.small, args.viewers, args.seconds, args.again)
        print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
