"""How often what hilnas states of a study is so, over simulated studies of known truth.

    python -m benchmarks.claims [--studies 400] [--json] [--page docs/measured/claims.md] [--only null]

The figures and scores are made up, with noise of known size; everything after them is the product's own code.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from benchmarks.claims.experiments import EXPERIMENTS, rows_of
from benchmarks.claims.registry import BEFORE
from benchmarks.claims.rows import Row
from benchmarks.page import fill, markdown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=400, help="simulated studies of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=sorted(EXPERIMENTS), help="one group of statistics")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--page", type=Path, help="also write the table there, between its marks")
    options = parser.parse_args()
    rows = [*_timed(options.only, options.studies, options.seed)]
    table = markdown([row.cells() for row in rows])
    print(json.dumps([asdict(row) | {"right": row.right} for row in rows], indent=1) if options.json else table)
    if options.page:
        fill(options.page, "claims", table)
        fill(options.page, "before", markdown(BEFORE))
    sys.exit(not all(row.right for row in rows))


def _timed(only: str | None, studies: int, seed: int) -> Iterator[Row]:
    for name in EXPERIMENTS:
        if only in (None, name):
            start = time.monotonic()
            yield from rows_of(name, studies, seed)
            print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
