"""Calibrations: the time of the reference run on a device, by runtime and build, and its drift."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from sqlalchemy import ColumnElement, Row, and_, delete, func, select

from nas.core.stats import floor
from nas.infra.store import devices
from nas.infra.store.engine import insert_if_absent
from nas.infra.store.models import calibration, reference_run
from nas.infra.store.rows import Calibration, Json
from nas.infra.store.store import Store, retried

KEPT_S = 90 * 86_400.0
"""Age at which reference runs are deleted."""

KEPT_ROUNDS = 2000
"""Rounds of one device, runtime and build whose reference runs are kept."""

LATEST_RUNS = 9
"""Latest runs from which the present drift is computed: those of three screening measurements."""

FASTER_LIMIT = 0.05
"""Share by which the reference model may run faster than at its calibration; beyond, that was taken while busy."""
SLOWER_LIMIT = 0.2
"""Share by which it may run slower. Figures are corrected for a busy device; beyond, something has changed."""

CalibrationKey = tuple[str, str, str]
"""Device, runtime and build."""


@dataclass(frozen=True, slots=True)
class ReferenceRun:
    """One run of the reference model, next to a measurement or in a health check.

    Args:
        ratio: its time / the calibration.
        temperature_c: of the device right after it; None: it has no sensor.
        calm: whether nothing disturbed the device meanwhile.
        battery_percent: its charge right after it; None: it has no battery.
    """

    ratio: float
    temperature_c: float | None
    calm: bool
    battery_percent: float | None = None


@dataclass(frozen=True, slots=True)
class DriftPoint:
    """A reference run and when its round ended; its ratio refers to `calibration_ms`."""

    at: float
    job: str
    calibration_ms: float
    run: ReferenceRun


@dataclass(frozen=True, slots=True)
class Drift:
    """The reference runs of one device, runtime and build over time.

    Args:
        device: id.
        runtime: name.
        build: of the calibration (`Calibration.build`).
        calibration: the present one, if there is one.
        points: oldest first.
        off: drift of the latest runs since the calibration, as a share; None: too few runs.
        recalibrate: whether the drift exceeds the limits.
    """

    device: str
    runtime: str
    build: str
    calibration: Calibration | None
    points: tuple[DriftPoint, ...]
    off: float | None
    recalibrate: bool


@retried
def put(store: Store, device: str, runtime: str, build: str, reference_ms: float, samples: Json) -> Calibration:
    """Stores a calibration, which replaces an older one of the same device, runtime and build."""
    new = Calibration(device, runtime, build, reference_ms, samples, store.now())
    with store.write() as connection:
        devices.read(connection, device)
        connection.execute(delete(calibration).where(_key(device, runtime, build)))
        connection.execute(calibration.insert().values(**asdict(new)))
    return new


def get(store: Store, device: str, runtime: str, build: str) -> Calibration | None:
    """Returns the calibration of a device for one runtime's build; None where there is none."""
    with store.read() as connection:
        row = connection.execute(select(calibration).where(_key(device, runtime, build))).first()
        return Calibration(**row._mapping) if row else None


def of_device(store: Store, device: str) -> list[Calibration]:
    """Returns all calibrations of a device, oldest first."""
    query = select(calibration).where(calibration.c.device == device).order_by(calibration.c.created)
    return [Calibration(**row._mapping) for row in store.rows(query)]


def off_by(ratios: Sequence[float]) -> tuple[float, bool]:
    """Returns the drift of runs by their floor, as a share, and whether to calibrate the device again."""
    off = floor(ratios) - 1
    return off, not -FASTER_LIMIT <= off <= SLOWER_LIMIT


@retried
def note_runs(store: Store, key: CalibrationKey, job: str, runs: Sequence[ReferenceRun], calibration_ms: float) -> None:
    """Stores the reference runs of one job, in order, and deletes old ones; idempotent."""
    if not runs:
        return
    now, (device, runtime, build) = store.now(), key
    values = {"device": device, "runtime": runtime, "build": build, "at": now, "calibration_ms": calibration_ms}
    packed = [[round(run.ratio, 5), run.temperature_c, run.calm, run.battery_percent] for run in runs]
    columns = reference_run.c
    of_key = and_(columns.device == device, columns.runtime == runtime, columns.build == build)
    newest = select(columns.at).where(of_key).order_by(columns.at.desc()).offset(KEPT_ROUNDS - 1).limit(1)
    with store.write() as connection:
        devices.read(connection, device)
        if insert_if_absent(connection, reference_run, job=job, runs=packed, **values):
            connection.execute(delete(reference_run).where(of_key, columns.at < now - KEPT_S))
            connection.execute(delete(reference_run).where(of_key, columns.at < newest.scalar_subquery()))


def drift(store: Store, device: str, *, since: float = 0.0) -> list[Drift]:
    """Returns a device's reference runs from `since` on, by runtime and build; the latest calibrated comes first."""
    columns = reference_run.c
    query = select(reference_run).where(columns.device == device, columns.at >= since).order_by(columns.at, columns.job)
    rows = store.rows(query)
    calibrations = {(stored.runtime, stored.build): stored for stored in of_device(store, device)}
    keys = dict.fromkeys([*reversed(calibrations), *((row.runtime, row.build) for row in reversed(rows))])
    return [
        _drift((device, *key), calibrations.get(key), [row for row in rows if (row.runtime, row.build) == key])
        for key in keys
    ]


def latest_runs(store: Store) -> dict[str, tuple[float, ReferenceRun]]:
    """Returns device -> when its latest round with reference runs ended, and the last of these."""
    columns = reference_run.c
    newest = select(columns.device, func.max(columns.at).label("at")).group_by(columns.device).subquery()
    query = select(columns.device, columns.at, columns.runs).join(
        newest, and_(columns.device == newest.c.device, columns.at == newest.c.at)
    )
    return {row.device: (row.at, ReferenceRun(*row.runs[-1])) for row in store.rows(query)}


def disturbed(store: Store, *, since: float) -> dict[str, float]:
    """Returns device -> the share of its reference runs since then that something disturbed; none without runs."""
    calm: dict[str, list[bool]] = {}
    columns = reference_run.c
    for row in store.rows(select(columns.device, columns.runs).where(columns.at >= since)):
        calm.setdefault(row.device, []).extend(ReferenceRun(*run).calm for run in row.runs)
    return {device: 1 - sum(runs) / len(runs) for device, runs in calm.items() if runs}


def _drift(key: CalibrationKey, stored: Calibration | None, rows: Iterable[Row[tuple[object, ...]]]) -> Drift:
    points = tuple(
        DriftPoint(row.at, row.job, row.calibration_ms, ReferenceRun(*run)) for row in rows for run in row.runs
    )
    ratios = [point.run.ratio for point in points if stored and point.at >= stored.created]
    off, recalibrate = off_by(ratios[-LATEST_RUNS:]) if len(ratios) >= LATEST_RUNS else (None, False)
    return Drift(*key, stored, points, off, recalibrate)


def _key(device: str, runtime: str, build: str) -> ColumnElement[bool]:
    columns = calibration.c
    return and_(columns.device == device, columns.runtime == runtime, columns.build == build)
