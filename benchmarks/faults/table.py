"""The results of campaigns as a table of a Markdown page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- measured: fault_campaign -->", "<!-- end -->"
_NAMES = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}


def write_table(page: Path, results: Sequence[dict[str, Any]]) -> None:
    """Writes the table between the page's marks.

    Args:
        page: a Markdown file with `BEGIN` and `END`.
        results: what `fault_campaign.py` printed; several of a database are added up.
    """
    before, _, rest = page.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n\n{table(results)}\n{END}{after}")


def table(results: Sequence[dict[str, Any]]) -> str:
    """Returns the Markdown table: a column for each database."""
    of = {kind: [each for each in results if each["database"] == kind] for kind in _NAMES}
    columns = {kind: _column(found) for kind, found in of.items() if found}
    rows = [["", *(_NAMES[kind] for kind in columns)], ["---"] * (1 + len(columns))]
    for name in dict.fromkeys(name for column in columns.values() for name in column):
        rows.append([name, *(column.get(name, "0") for column in columns.values())])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _column(found: Sequence[dict[str, Any]]) -> dict[str, str]:
    jobs, tries, restarts, kinds = (_added(found, name) for name in ("jobs", "tries", "restarts", "kinds"))
    spreads = [each["recovery_s"]["all"] for each in found]
    return {
        "faults": str(sum(each["faults"] for each in found)),
        "seeds": ", ".join(str(each["seed"]) for each in found),
        "violations of the invariants below": str(sum(len(each["violations"]) for each in found)),
        "jobs: done, failed as infrastructure, failed as the candidate's": ", ".join(
            str(jobs[name]) for name in ("done", "failed infrastructure", "failed candidate")
        ),
        "attempts per job: 1, 2, 3, ...": ", ".join(str(tries[str(n)]) for n in range(1, max(map(int, tries)) + 1)),
        "seconds until the job had ended: median, 90 %, longest": "; ".join(
            f"{each['median']}, {each['p90']}, {each['max']}" for each in spreads
        ),
        "the agent, the coordinator was started again": f"{restarts['agent']}, {restarts['coordinator']}",
        "503 of the coordinator while a fault explains it": str(sum(each["answers_503"] for each in found)),
        "faults that came too late to matter": str(sum(each["late"] for each in found)),
        "minutes, devices": f"{sum(each['seconds'] for each in found) / 60:.0f}, {found[0]['machines']}",
    } | {f"fault: {name}": str(count) for name, count in sorted(kinds.items())}


def _added(found: Sequence[dict[str, Any]], field: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for each in found:
        total.update({str(name): count for name, count in each[field].items()})
    return total
