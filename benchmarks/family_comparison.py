"""Writes results of `nas family compare` into docs/measured/family-comparison.md.

    python benchmarks/family_comparison.py [--add] COMPARISON.json [COMPARISON.json ...]

They take the place of what is there, or with `--add` follow it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from nas.core.errors import InvalidInput
from nas.core.family import Comparison, read_record
from nas.train.compare.tables import as_markdown

PAGE = Path(__file__).resolve().parent.parent / "docs" / "measured/family-comparison.md"
BEGIN, END = "<!-- results -->", "<!-- /results -->"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", nargs="+", type=Path, help="what `nas family compare` wrote")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--add", action="store_true", help="keep earlier results")
    arguments = parser.parse_args()
    fill(arguments.page, [_read(path) for path in arguments.comparison], add=arguments.add)


def fill(page: Path, comparisons: list[Comparison], *, add: bool = False) -> None:
    """Replaces the text between the page's markers, or adds to it."""
    before, begun, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    earlier, ended, after = rest.partition(END)
    if not (begun and ended):
        raise InvalidInput(f"no {BEGIN} ... {END}", where=str(page))
    parts = [f"## {each.family or 'Reference models'} on {each.device}\n\n{as_markdown(each)}" for each in comparisons]
    written = "\n\n".join(([earlier.strip()] if add else []) + parts)
    page.write_text(f"{before}{BEGIN}\n\n{written}\n\n{END}{after}", "utf-8")


def _read(path: Path) -> Comparison:
    found = read_record(path, Comparison)
    if found is None:
        raise InvalidInput("no such file", where=str(path))
    return found


if __name__ == "__main__":
    main()
