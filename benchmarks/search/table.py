"""Formats the report of a campaign as Markdown tables for docs/measured/search-engine.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.search.report import ALL


def tables(report: Mapping[str, Any], ours: str) -> str:
    """Returns fractions of ours with the lead over the best baseline, then of all engines at 100 evaluations.

    The row of all problems is about the loss by parallel workers only; its seeds are pairs of runs.
    """
    rows = {(row["problem"], row["engine"], row["workers"]): row for row in report["fractions"]}
    problems = list(dict.fromkeys(problem for problem, engine, workers in rows if engine == ours and workers == 1))
    leads = {lead["problem"]: lead for lead in report["leads"] if lead["evaluations"] == 100}
    losses = {loss["problem"]: loss for loss in report["parallel"] if loss["evaluations"] == 100}
    lines = _head(
        "problem", "seeds", "@50", "@100", "@200", "lead @100 (95 %)", "over", "loss by 8 workers @100 (95 %)"
    )
    for problem in problems:
        row, lead, loss = rows[problem, ours, 1], leads.get(problem), losses.get(problem)
        marks = [_share(row.get(f"@{mark}")) for mark in (50, 100, 200)]
        over = lead["over"] if lead else ""
        seeds = max(cell["n"] for name, cell in row.items() if name.startswith("@"))
        lines.append(_line(f"`{problem}`", seeds, *marks, _interval(lead), over, _interval(loss)))
    if ALL in losses:
        lines.append(_line(ALL, losses[ALL]["n"], "", "", "", "", "", _interval(losses[ALL])))
    engines = sorted({engine for _, engine, workers in rows if workers == 1})
    lines += ["", *_head("@100", *engines)]
    for problem in problems:
        cells = (rows.get((problem, engine, 1), {}).get("@100") for engine in engines)
        lines.append(_line(f"`{problem}`", *(f"{cell['mean']:.3f}" if cell else "" for cell in cells)))
    for other in dict.fromkeys(gain["over"] for gain in report["former"]):
        lines += ["", *_against(report, rows, problems, ours, other)]
    if report["of_oracle"]:
        lines += ["", *_head("share of the oracle", "engine", "@50", "@100", "@200")]
        for row in report["of_oracle"]:
            marks = [_share(row.get(f"@{mark}")) for mark in (50, 100, 200)]
            lines.append(_line(f"`{row['problem']}`", row["engine"], *marks))
    return "\n".join(lines)


def _against(
    report: Mapping[str, Any], rows: Mapping[Any, Any], problems: Sequence[str], ours: str, other: str
) -> Iterator[str]:
    """Yields the table of ours and another form of it, and the mean gain over all pairs of runs."""
    gains = {gain["evaluations"]: gain for gain in report["former"] if gain["over"] == other}
    yield from _head("problem", *(f"@{mark}: {engine}" for mark in gains for engine in (other, ours)))
    for problem in problems:
        cells = [
            _share(rows.get((problem, engine, 1), {}).get(f"@{mark}")) for mark in gains for engine in (other, ours)
        ]
        if all(cells):
            yield _line(f"`{problem}`", *cells)
    pairs = (f"{gain['better']} of {gain['n']} better" for gain in gains.values())
    cells = [cell for gain, pair in zip(gains.values(), pairs, strict=True) for cell in (pair, _interval(gain))]
    yield _line("gain (95 %)", *cells)


def _head(*names: object) -> list[str]:
    return [_line(*names), _line(*("---" for _ in names))]


def _line(*cells: object) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _share(summary: Mapping[str, float] | None) -> str:
    if summary is None:
        return ""
    return f"{summary['mean']:.3f}" + (f" ± {summary['sd']:.3f}" if summary["n"] > 1 else "")


def _interval(summary: Mapping[str, Any] | None) -> str:
    if summary is None:
        return ""
    between = f" ({summary['low']:.3f} to {summary['high']:.3f})" if "low" in summary else ""
    return f"{summary['mean']:.3f}{between}"
