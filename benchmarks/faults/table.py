"""The results of campaigns as a Markdown table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.page import table

_NAMES = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}


def campaign_table(results: Sequence[dict[str, Any]]) -> str:
    """Returns a table of what `fault_campaign.py` printed.

    A column adds up the campaigns with the same database and kinds of devices.
    """
    campaigns: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for result in results:
        kinds = ", ".join(result.get("machine_kinds", ("sshd", "adbd")))
        campaigns.setdefault((kinds, result["database"]), []).append(result)
    columns = {f"{_NAMES[database]}; {kinds}": _column(group) for (kinds, database), group in campaigns.items()}
    names = dict.fromkeys(name for column in columns.values() for name in column)
    rows = [[name, *(column.get(name, "0") for column in columns.values())] for name in names]
    return table(["", *columns], rows)


def _column(campaigns: Sequence[dict[str, Any]]) -> dict[str, str]:
    jobs, tries, restarts, kinds = (_added(campaigns, name) for name in ("jobs", "tries", "restarts", "kinds"))
    spreads = [campaign["recovery_s"]["all"] for campaign in campaigns]
    return {
        "faults": str(sum(campaign["faults"] for campaign in campaigns)),
        "seeds": ", ".join(str(campaign["seed"]) for campaign in campaigns),
        "violations of the invariants": str(sum(len(campaign["violations"]) for campaign in campaigns)),
        "jobs: done, failed as infrastructure, failed as the candidate's": ", ".join(
            str(jobs[name]) for name in ("done", "failed infrastructure", "failed candidate")
        ),
        "attempts per job: 1, 2, 3, ...": ", ".join(str(tries[str(n)]) for n in range(1, max(map(int, tries)) + 1)),
        "seconds until the job had ended: median, 90 %, longest": "; ".join(
            f"{spread['median']}, {spread['p90']}, {spread['max']}" for spread in spreads
        ),
        "the agent, the coordinator was started again": f"{restarts['agent']}, {restarts['coordinator']}",
        "503 of the coordinator while a fault explains it": str(sum(campaign["answers_503"] for campaign in campaigns)),
        "faults that came too late to matter": str(sum(campaign["late"] for campaign in campaigns)),
        "minutes": f"{sum(campaign['seconds'] for campaign in campaigns) / 60:.0f}",
        "devices": str(campaigns[0]["machines"]),
        "faults of a kind: least, most": f"{min(kinds.values())}, {max(kinds.values())}",
    }


def _added(campaigns: Sequence[dict[str, Any]], field: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for campaign in campaigns:
        total.update({str(name): count for name, count in campaign[field].items()})
    return total
