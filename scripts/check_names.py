"""Counts names that are pronouns or participles; fails where a package has more than it may have.

`python scripts/check_names.py` checks; `--write` lowers the limits in `names.json` to the counts, and never raises one.
"""

from __future__ import annotations

import ast
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMITS = Path(__file__).with_name("names.json")
FOLDERS = ("nas", "devices", "runtimes", "search_spaces", "dashboard", "benchmarks", "scripts", "tests")
NAMES = frozenset(
    [
        "each",
        "found",
        "own",
        "known",
        "taken",
        "wanted",
        "asked",
        "some",
        "here",
        "left",
        "given",
        "made",
        "kept",
        "told",
        "seen",
        "said",
        "ours",
        "theirs",
        "there",
        "gone",
        "begun",
        "shown",
        "ended",
        "tried",
    ]
)


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields line and name of every assigned variable or attribute, field, argument, function and class in `NAMES`.

    Names are compared in lower case and without leading and trailing underscores.
    """
    for node in ast.walk(tree):
        match node:
            case (
                ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(attr=name, ctx=ast.Store())
                | ast.arg(arg=name)
                | ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ) if name.lower().strip("_") in NAMES:
                yield node.lineno, name


def occurrences() -> dict[str, list[str]]:
    """Returns package -> `FILE:LINE: NAME`; a package is a folder of the repository with modules of its own."""
    places: dict[str, list[str]] = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):  # links are not followed
            package = str(path.parent.relative_to(ROOT))
            for line, name in names(ast.parse(path.read_text(encoding="utf-8"))):
                places.setdefault(package, []).append(f"{path.relative_to(ROOT)}:{line}: {name}")
    return places


def main() -> int:
    """Returns the exit code: 1 where a package exceeds its limit."""
    places = occurrences()
    counts = Counter({package: len(lines) for package, lines in places.items()})
    limits: dict[str, int] = json.loads(LIMITS.read_text(encoding="utf-8"))
    if "--write" in sys.argv[1:]:
        lowered = {package: min(limit, counts[package]) for package, limit in limits.items() if counts[package]}
        LIMITS.write_text(json.dumps(lowered, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        limits = lowered
    exceeded = [package for package in counts if counts[package] > limits.get(package, 0)]
    for package in exceeded:
        print("\n".join(places[package]))
        print(f"{package}: {counts[package]} of these names, limit {limits.get(package, 0)}: name what the value is")
    print(f"{counts.total()} names that are pronouns or participles; limits allow {sum(limits.values())}")
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
