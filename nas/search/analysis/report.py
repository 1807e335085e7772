"""A study as one JSON object (`nas study show --json`), and its trials as tables and CSV (`nas study export`)."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from pydantic import BaseModel, Field

from nas.core.measurement import Measurement
from nas.core.metrics import METRICS
from nas.core.pareto import Ranked, TrialAxes, dominates, front_hypervolume, rank_trials
from nas.core.scoring import Axis, limit_of, measurement_keys, ratio_of_limit, ratio_sd
from nas.core.stats import Z95
from nas.core.units import show_share
from nas.infra.store import results, studies
from nas.infra.store.rows import StudyState
from nas.infra.store.store import Store
from nas.search.analysis.agreement import agreements
from nas.search.analysis.headline import headline
from nas.search.analysis.history import expected_gain, history, interval, interval_json
from nas.search.analysis.pipette import import_pyarrow
from nas.search.analysis.record import Record, StudyRecord, read_study
from nas.search.analysis.reliability import quality_reliability
from nas.search.analysis.snapshot import UNKNOWN, StudySnapshot, rounded
from nas.search.study.estimate import Estimate, estimate_left
from nas.search.study.events import Marked, ending

_COUNTED = ("complete", "infeasible", "stopped", "failed", "cancelled")
_WITH_MEASUREMENTS = ("front", "ranking", "references")
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
"""Prefixes that make a spreadsheet read a cell as a formula."""
_ROWS_PER_PART = 1000
_MUCH_MORE_CPU = 0.3
"""The busiest measurement is reported, too, if it exceeds the median one by more than this many cores."""
_NOISE_OF_LATEST = 400
"""Measurements from which the noise of a study is computed."""

_OF_FIGURE = ("unit", "value", "low", "high", "typical", "n", "reason")
"""Columns of the table of measurements that are fields of a figure."""

Json = dict[str, Any]
Cell = bool | int | float | str | None
Row = dict[str, Cell]


def study_report(store: Store, study: str | StudySnapshot) -> Json:
    """Returns the report of a study, by name or of a snapshot, which caches the slow parts.

    Raises:
        UnknownName: no such study.
    """
    snapshot = StudySnapshot(read_study(store, study)) if isinstance(study, str) else study
    report = snapshot.cached("report", lambda: _report(store, snapshot))
    rows = {row["trial"]: row for name in _WITH_MEASUREMENTS for row in report[name]}
    measurements = _measurements(store, [snapshot.records[trial] for trial in rows])
    whole = {trial: row | {"measurements": measurements[trial]} for trial, row in rows.items()}
    # Without an event, the process of a study may be gone since.
    condition = studies.condition(store, snapshot.record.study)
    remaining = time_left(store, snapshot, condition.state)
    now = asdict(condition) | {"left": remaining and remaining.model_dump(mode="json")}
    return report | now | {name: [row | whole[row["trial"]] for row in report[name]] for name in _WITH_MEASUREMENTS}


def ranking(study: StudySnapshot) -> list[Ranked]:
    """Returns the complete trials that count, best first; none without a reference point."""
    reference_point = study.reference_point
    if reference_point is None:
        return []
    return study.cached("ranking", lambda: rank_trials(study.counted, reference_point, chances=study.chances))


def time_left(store: Store, study: StudySnapshot, state: str) -> Estimate | None:
    """Returns what remains of a study whose process runs, estimated once for each of its revisions; else None."""
    if state not in (StudyState.RUNNING, StudyState.PAUSED):
        return None
    return study.cached("left", lambda: estimate_left(store, study.record.study))


class NoiseSummary(BaseModel):
    """Background load during measurement and width of confidence intervals: medians over measurements."""

    foreign_cpu: float | None = Field(description="CPU share of other processes, in cores")
    most_foreign_cpu: float | None = Field(None, description="the same of the measurement with the most")
    interval: float | None = Field(description="half width of the 95 % intervals of TTFT and decode p50, as a share")
    text: str = Field(description="both as a sentence")


def noise_summary(study: StudySnapshot) -> NoiseSummary | None:
    """Returns the noise of the latest measured trials; None before anything was measured."""
    measurements = [
        measurement for number in sorted(study.records) for measurement in study.records[number].measurements.values()
    ]
    measurements = measurements[-_NOISE_OF_LATEST:]
    figures = [measurement.figures[name] for measurement in measurements for name in ("ttft", "decode_p50")]
    widths = [math.expm1(Z95 * sd) for figure in figures if (sd := figure.whole_log_sd)]
    shares = [measurement.foreign_cpu for measurement in measurements if measurement.foreign_cpu is not None]
    if not widths and not shares:
        return None
    share, width = median(shares) if shares else None, median(widths) if widths else None
    parts = []
    if share is not None:
        # The median says nothing of what ran beside fewer than half of the measurements.
        most = f" (at most {max(shares):.1f})" if max(shares) >= share + _MUCH_MORE_CPU else ""
        parts.append(f"measured while other processes used {share:.1f} of a core{most}")
    parts += [f"intervals ±{show_share(width)} (median)"] if width is not None else []
    return NoiseSummary(
        foreign_cpu=share, most_foreign_cpu=max(shares, default=None), interval=width, text="; ".join(parts)
    )


def study_table(study: StudySnapshot) -> tuple[list[str], list[Row]]:
    """Returns the columns and rows of `nas study export`, with all figures that were measured.

    A figure's columns are called `METRIC@WORKLOAD DEVICE/RUNTIME` with its unit.
    """
    ranked = {row.trial: row for row in ranking(study)}
    references, written = study.reference_names, study.marks
    rows: list[Row] = []
    for number, record in study.records.items():
        place: Row = {name: getattr(ranked.get(number), name, None) for name in ("rank", "hv_contribution", "p_front")}
        rows.append(trial_row(record, references.get(number)) | place | _marked(written.get(number)) | measured(record))
    return [*dict.fromkeys(column for row in rows for column in row)], rows


def measurements_table(study: StudySnapshot) -> tuple[list[str], list[Row]]:
    """Returns the columns and rows of all measured figures, one row each."""
    rows: list[Row] = []
    for number, record in study.records.items():
        for key, measurement in record.measurements.items():
            where: Row = {"trial": number, "workload": key.workload, "device": key.device, "runtime": key.runtime}
            for name, figure in measurement.figures.items():
                rows.append(where | {"metric": name} | {column: getattr(figure, column) for column in _OF_FIGURE})
    return ["trial", "workload", "device", "runtime", "metric", *_OF_FIGURE], rows


def finite(rows: Iterable[Row]) -> list[Row]:
    """Returns the rows with null for numbers that JSON does not have."""
    return [
        {name: None if isinstance(cell, float) and not math.isfinite(cell) else cell for name, cell in row.items()}
        for row in rows
    ]


def parquet_bytes(columns: Sequence[str], rows: Iterable[Mapping[str, Cell]]) -> bytes:
    """Returns a table as the contents of a Parquet file.

    Raises:
        InvalidInput: pyarrow is not installed.
    """
    pyarrow, parquet = import_pyarrow()
    table = list(rows)
    arrays = {column: pyarrow.array([row.get(column) for row in table]) for column in columns}
    file = io.BytesIO()
    parquet.write_table(pyarrow.table(arrays), file)
    return file.getvalue()


def axes_table(study: StudySnapshot) -> tuple[list[str], Iterator[Row]]:
    """Returns the columns and rows of the study page's export, with the values on all its axes."""
    front = {row.trial: row for row in study.front}
    feasible = study.feasible().tolist()
    names = [f"{axis.key} [{axis.unit}]" if axis.unit else axis.key for axis in study.axes]
    values = [rounded(study.values(axis.key)).tolist() for axis in study.axes]
    fixed = "trial state origin rung feasible on_front p_front operator reason layout star tags note"
    written = study.marks

    def rows() -> Iterator[Row]:
        for i, record in study.records.items():
            status, placed = record.trial.status, front.get(i)
            yield {
                "trial": i,
                "state": status.state.value,
                "origin": record.trial.origin,
                "rung": status.rung,
                "feasible": None if feasible[i] == UNKNOWN else feasible[i],
                "on_front": int(placed is not None and placed.on),
                "p_front": None if placed is None else placed.p_front,
                "operator": record.trial.operator,
                "reason": status.reason,
                "layout": record.layout.format(),
                **_marked(written.get(i)),
            } | {name: column[i] for name, column in zip(names, values, strict=True)}

    return [*fixed.split(), *names], rows()


def _marked(mark: Marked | None) -> Row:
    """Returns the columns of what people wrote about a trial."""
    if mark is None:
        return {"star": 0, "tags": None, "note": None}
    return {"star": int(mark.star), "tags": " ".join(mark.tags) or None, "note": mark.text or None}


def measured(record: Record) -> Row:
    """Returns the columns of a trial's figures."""
    row: Row = {}
    for key, measurement in record.measurements.items():
        for name, figure in measurement.figures.items():
            column = f"{name}@{key.workload} {key.device}/{key.runtime} [{figure.unit}]"
            row |= {column: figure.value, f"{column} low": figure.low, f"{column} high": figure.high}
    return row


def csv_parts(columns: Sequence[str], rows: Iterable[Mapping[str, Cell]]) -> Iterator[str]:
    """Yields a table as CSV, many lines at a time.

    Spreadsheets do not read any text as a formula; an unknown value is an empty cell.
    """
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([_written(column) for column in columns])
    for number, row in enumerate(rows, 1):
        writer.writerow([_written(row.get(column)) for column in columns])
        if number % _ROWS_PER_PART == 0:
            yield file.getvalue()
            file.seek(0)
            file.truncate()
    yield file.getvalue()


def harmless(text: str) -> str:
    """Returns a text that a spreadsheet shows and does not calculate."""
    return f"'{text}" if text.startswith(_FORMULA) else text


def _report(store: Store, study: StudySnapshot) -> Json:
    """Returns the report without repetitions."""
    record, point, log = study.record, study.reference_point, study.record.log
    axes: TrialAxes = {trial: study.counted[trial] for trial in sorted(study.counted)}
    rows = [_row(record, study.records[row.trial], row) for row in ranking(study)]
    moments, spent = history(log.completions, axes, point), results.stage_seconds(store, record.study.id)
    names = [objective.name for objective in record.space.objectives]
    return {
        "study": study.name,
        "space": {"name": record.space.name, "hash": record.study.space_hash},
        "state": study.state.value,
        "headline": None if (result := headline(study)) is None else result.model_dump(),
        "trials": _counts(study),
        "hypervolume": front_hypervolume(axes, point) if point is not None else None,
        "hypervolume_ci95": interval_json(interval(axes, point), axes, point) if moments and point else None,
        "history": moments,
        "expected_gain": None if (gain := expected_gain(log)) is None else gain.model_dump(),
        "ended": ending(log.notes),
        "reference_point": None if point is None else dict(zip(names, point, strict=True)),
        "objectives": [_objective(study, index) for index in range(len(names))],
        "budgets": _budgets(record),
        "front": [row for row in rows if row["rank"] == 0],
        "ranking": rows,
        "references": [
            {"name": reference, **_row(record, trial, None)} for reference, trial in record.references.items()
        ],
        "reliability": None if (sure := quality_reliability(study)) is None else sure.model_dump(),
        "noise": None if (noise := noise_summary(study)) is None else noise.model_dump(),
        "told": _observations(record),
        "warm_start": record.warm_start,
        "agreement": [agreement.model_dump(mode="json") for agreement in agreements(record)],
        "elapsed_s": log.elapsed_s,
        "stage_seconds": {stage: spent.get(stage, 0.0) for stage in ("export", "measure", "train", "gate")}
        | {"propose": record.propose_seconds},
        "seed": record.study.seed,
        "version": record.study.version,
    }


def _row(record: StudyRecord, trial: Record, ranked: Ranked | None) -> Json:
    names = [objective.name for objective in record.space.objectives]
    axes, params = trial.axes, trial.layout.params
    return {
        "trial": trial.trial.number,
        "layout_id": trial.layout.id,
        "layout": trial.layout.format(),
        "objectives": {name: axis.value if axis else None for name, axis in zip(names, axes, strict=True)},
        "coordinates": {name: axis.coordinate if axis else None for name, axis in zip(names, axes, strict=True)},
        "sd": {name: axis.sd if axis else None for name, axis in zip(names, axes, strict=True)},
        "value_sd": {name: axis.value_sd if axis else None for name, axis in zip(names, axes, strict=True)},
        "rank": ranked.rank if ranked else None,
        "hv_contribution": ranked.hv_contribution if ranked else None,
        "p_front": ranked.p_front if ranked else None,
        "ties": list(ranked.ties) if ranked else [],
        "proxy_id": record.proxy_id(trial),
        "dominated_by": _dominated_by(record, axes),
        "params": {"total": params.total, "active": params.active, "non_embedding": params.non_embedding},
        "measurements": [],
        "quality": trial.quality.model_dump(mode="json") if trial.quality else None,
        "rescored": trial.rescored is not None,
        "budgets": [check.model_dump(mode="json") for check in record.checks(trial)],
        "origin": trial.trial.origin,
        "operator": trial.trial.operator,
        "parents": list(trial.trial.parents),
    }


def _observations(record: StudyRecord) -> list[Json]:
    """Returns the observation that was reported to the proposer of each trial, and the seconds it took."""
    rows, counted = [], set[str]()
    for trial in record.records.values():
        seconds: dict[str, float] = {}
        for result in trial.results:
            if result.key not in counted:  # a shared result counts for its first trial
                counted.add(result.key)
                seconds[result.stage] = seconds.get(result.stage, 0.0) + result.seconds
        if (observation := trial.observation) is not None:
            rows.append(
                {
                    **observation.to_json(),
                    "trial": trial.trial.number,
                    "layout": trial.layout.format(),
                    "origin": trial.trial.origin,
                    "operator": trial.trial.operator,
                    "proxy_id": record.proxy_id(trial),
                    "after_s": trial.observed_after_s,
                    "stage_seconds": seconds,
                }
            )
    return rows


def _measurements(store: Store, records: Sequence[Record]) -> dict[int, list[Json]]:
    """Returns trial -> its measurements with all repetitions."""
    keys = {summary.key for record in records for summary in record.measurements.values()}
    stored = results.get_many(store, sorted(keys))
    dumped = {
        key: Measurement.model_validate(result.payload["value"]).model_dump(mode="json")
        for key, result in stored.items()
    }
    return {
        record.trial.number: [
            {"place": key._asdict(), **dumped[summary.key]} for key, summary in record.measurements.items()
        ]
        for record in records
    }


def _dominated_by(record: StudyRecord, axes: Sequence[Axis | None]) -> list[str]:
    """Returns the references that are nowhere worse and somewhere better."""
    coordinates = [axis.coordinate for axis in axes if axis is not None]
    beaten = []
    for name, reference in record.references.items():
        point = [axis.coordinate for axis in reference.axes if axis is not None]
        if len(coordinates) == len(point) == len(axes) and dominates([point], [coordinates])[0, 0]:
            beaten.append(name)
    return beaten


def _counts(study: StudySnapshot) -> Json:
    states = study.states()
    counts = {state: states.get(state, 0) for state in _COUNTED}
    proposed = sum(states.values())
    return {"proposed": proposed, **counts, "running": proposed - sum(counts.values())}


def _objective(study: StudySnapshot, index: int) -> Json:
    objective, axis = study.space.objectives[index], study.axes[index]
    return {
        "name": objective.name,
        "metric": objective.metric,
        "aggregate": objective.aggregate if len(measurement_keys(study.space, objective)) > 1 else None,
        "device": objective.device,
        "runtime": objective.runtime,
        "workload": objective.workload,
        "direction": axis.direction,
        "unit": axis.unit,
        "transform": axis.transform,
    }


def _budgets(record: StudyRecord) -> list[Json]:
    rows = []
    for budget in record.space.budgets:
        for where in measurement_keys(record.space, budget):
            rows.append(
                {
                    "name": budget.name,
                    "metric": budget.metric,
                    **where._asdict(),
                    "limit": limit_of(budget, record.published or {}, where),
                    "unit": METRICS[budget.metric].unit,
                    "ratio": ratio_of_limit(budget, record.published or {}, where),
                    "written": budget.max if budget.max is not None else budget.min,
                }
            )
    return rows


def trial_row(record: Record, reference: str | None = None) -> Row:
    """Returns the columns of a trial without its figures; `reference`: name of the reference layout that it is."""
    status, params = record.trial.status, record.layout.params
    return {
        "trial": record.trial.number,
        "state": status.state.value,
        "rung": status.rung,
        "reason": status.reason,
        "origin": reference or record.trial.origin,
        "layout_id": record.layout.id,
        "layout": record.layout.format(),
        "params_total": params.total,
        "params_active": params.active,
        "params_non_embedding": params.non_embedding,
        **_quality_cells(record),
    }


def _quality_cells(record: Record) -> Row:
    """Returns the columns of a trial's quality; re-scored: on seeds that chose nothing."""
    names = ["quality", *(f"quality_{name}" for name in ("low", "high", "sd", "seeds", "rung", "rescored"))]
    quality = record.quality
    if quality is None:
        return dict.fromkeys(names)
    half = Z95 * ratio_sd(quality.value, quality.sd)
    return {
        "quality": quality.value,
        "quality_low": quality.value - half,
        "quality_high": quality.value + half,
        "quality_sd": quality.sd,
        "quality_seeds": quality.n_seeds,
        "quality_rung": quality.rung,
        "quality_rescored": int(record.rescored is not None),
    }


def _written(cell: Cell) -> Cell:
    if isinstance(cell, float) and cell != cell:
        return None
    return harmless(cell) if isinstance(cell, str) else cell
