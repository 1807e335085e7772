"""Formats the report of a campaign as Markdown tables for docs/measured/search-engine.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.page import table
from benchmarks.search.report import ALL


def tables(report: Mapping[str, Any], candidate: str) -> str:
    """Returns fractions of the candidate with its lead over the best baseline, then of all engines at 100 evaluations.

    The row of all problems is about the loss by parallel workers only; its seeds are pairs of runs.
    """
    rows = {(row["problem"], row["engine"], row["workers"]): row for row in report["fractions"]}
    problems = list(dict.fromkeys(problem for problem, engine, workers in rows if engine == candidate and workers == 1))
    leads = {lead["problem"]: lead for lead in report["leads"] if lead["evaluations"] == 100}
    losses = {loss["problem"]: loss for loss in report["parallel"] if loss["evaluations"] == 100}
    lines = list[list[object]]()
    for problem in problems:
        row, lead, loss = rows[problem, candidate, 1], leads.get(problem), losses.get(problem)
        marks = [_share(row.get(f"@{mark}")) for mark in (50, 100, 200)]
        over = lead["over"] if lead else ""
        seeds = max(cell["n"] for name, cell in row.items() if name.startswith("@"))
        lines.append([f"`{problem}`", seeds, *marks, _interval(lead), over, _interval(loss)])
    if ALL in losses:
        lines.append([ALL, losses[ALL]["n"], "", "", "", "", "", _interval(losses[ALL])])
    loss_head = "loss by 8 workers @100 (95 %)"
    parts = [table(["problem", "seeds", "@50", "@100", "@200", "lead @100 (95 %)", "over", loss_head], lines)]
    engines = sorted({engine for _, engine, workers in rows if workers == 1})
    lines = []
    for problem in problems:
        cells = (rows.get((problem, engine, 1), {}).get("@100") for engine in engines)
        lines.append([f"`{problem}`", *(f"{cell['mean']:.3f}" if cell else "" for cell in cells)])
    parts.append(table(["@100", *engines], lines))
    for other in dict.fromkeys(gain["over"] for gain in report["former"]):
        parts.append(_against(report, rows, problems, candidate, other))
    if report["of_oracle"]:
        lines = [
            [f"`{row['problem']}`", row["engine"], *(_share(row.get(f"@{mark}")) for mark in (50, 100, 200))]
            for row in report["of_oracle"]
        ]
        parts.append(table(["share of the oracle", "engine", "@50", "@100", "@200"], lines))
    return "\n".join(parts)


def _against(
    report: Mapping[str, Any], rows: Mapping[Any, Any], problems: Sequence[str], candidate: str, other: str
) -> str:
    """Returns the table of the candidate and another form of it, and the mean gain over all pairs of runs."""
    gains = {gain["evaluations"]: gain for gain in report["former"] if gain["over"] == other}
    lines = list[list[str]]()
    for problem in problems:
        cells = [
            _share(rows.get((problem, engine, 1), {}).get(f"@{mark}"))
            for mark in gains
            for engine in (other, candidate)
        ]
        if all(cells):
            lines.append([f"`{problem}`", *cells])
    pairs = (f"{gain['better']} of {gain['n']} better" for gain in gains.values())
    cells = [cell for gain, pair in zip(gains.values(), pairs, strict=True) for cell in (pair, _interval(gain))]
    head = ["problem", *(f"@{mark}: {engine}" for mark in gains for engine in (other, candidate))]
    return table(head, [*lines, ["gain (95 %)", *cells]])


def _share(summary: Mapping[str, float] | None) -> str:
    if summary is None:
        return ""
    return f"{summary['mean']:.3f}" + (f" ± {summary['sd']:.3f}" if summary["n"] > 1 else "")


def _interval(summary: Mapping[str, Any] | None) -> str:
    if summary is None:
        return ""
    between = f" ({summary['low']:.3f} to {summary['high']:.3f})" if "low" in summary else ""
    return f"{summary['mean']:.3f}{between}"
