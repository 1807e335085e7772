"""A study as one flat table: a row for every trial, whatever became of it, a column for every figure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nas.service.record import Record, read_study
from nas.service.report import study_report
from nas.store.store import Store

Row = dict[str, Any]


def study_table(store: Store, name: str) -> tuple[list[str], list[Row]]:
    """Columns and rows; a figure's columns are called `METRIC@WORKLOAD DEVICE/RUNTIME` with its unit.

    Raises:
        UnknownName: no such study.
    """
    record = read_study(store, name)
    placed = {row["trial"]: row for row in study_report(store, name)["ranking"]}
    references = {each.trial.number: reference for reference, each in record.references.items()}
    rows = [
        _trial(each, references.get(number)) | _place(placed.get(number)) | measured(each)
        for number, each in record.records.items()
    ]
    return list(dict.fromkeys(column for row in rows for column in row)), rows


def _trial(each: Record, reference: str | None) -> Row:
    status, params = each.trial.status, each.layout.params
    return {
        "trial": each.trial.number,
        "state": status.state.value,
        "rung": status.rung,
        "reason": status.reason,
        "origin": reference or each.trial.origin,
        "layout_id": each.layout.id,
        "layout": each.layout.format(),
        "params_total": params.total,
        "params_active": params.active,
        "params_non_embedding": params.non_embedding,
        "quality": each.quality.value if each.quality else None,
        "quality_sd": each.quality.sd if each.quality else None,
        "noisy": each.noisy,
    }


def _place(row: Row | None) -> Row:
    return {name: row[name] if row else None for name in ("rank", "hv_contribution", "p_front")}


def measured(each: Record) -> Row:
    """The columns of a trial's figures."""
    return dict(_columns(each))


def _columns(each: Record) -> Iterable[tuple[str, float | None]]:
    for place, measurement in each.measurements.items():
        for name, figure in measurement.figures.items():
            column = f"{name}@{place.workload} {place.device}/{place.runtime} [{figure.unit}]"
            yield column, figure.value
            yield f"{column} low", figure.low
            yield f"{column} high", figure.high
