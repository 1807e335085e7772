"""Calibrations: what the reference run takes on a device, by runtime and build, and how it drifts from that."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from sqlalchemy import ColumnElement, Row, and_, delete, select

from nas.core.measurement import DRIFT_LIMIT
from nas.store.models import calibration, reference_run
from nas.store.rows import Calibration, Json
from nas.store.store import Store
from nas.store.upsert import insert_if_absent

KEPT_S = 90 * 86_400.0
"""How long reference runs are kept."""

KEPT_ROUNDS = 2000
"""Rounds whose reference runs are kept, of one device, runtime and build."""

LATEST_RUNS = 9
"""Calm runs that tell how far a device is off its calibration now: those of three screens."""

Place = tuple[str, str, str]
"""Device, runtime and build."""


@dataclass(frozen=True, slots=True)
class ReferenceRun:
    """One run of the reference model beside a measurement, or in a health check.

    Args:
        ratio: its time / the calibration.
        temperature_c: of the device right after it; None where it does not tell.
        calm: whether nothing disturbed the device meanwhile, so that `ratio` says something about the device.
    """

    ratio: float
    temperature_c: float | None
    calm: bool


@dataclass(frozen=True, slots=True)
class DriftPoint:
    """A reference run and when its round ended. `calibration_ms` is what its ratio is to."""

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
        calibration: as it is now; None where only noisy studies ran.
        points: oldest first.
        off: how far the latest calm runs since the calibration are off it, as a share; None: too few.
        recalibrate: whether that is beyond the limit.
    """

    device: str
    runtime: str
    build: str
    calibration: Calibration | None
    points: tuple[DriftPoint, ...]
    off: float | None
    recalibrate: bool


def put(store: Store, device: str, runtime: str, build: str, reference_ms: float, samples: Json) -> Calibration:
    """Keeps a calibration in place of an older one of the same device, runtime and build."""
    new = Calibration(device, runtime, build, reference_ms, samples, store.now())
    with store.write() as connection:
        connection.execute(delete(calibration).where(_key(device, runtime, build)))
        connection.execute(calibration.insert().values(**asdict(new)))
    return new


def get(store: Store, device: str, runtime: str, build: str) -> Calibration | None:
    """The calibration of a device for one runtime's build."""
    with store.read() as connection:
        row = connection.execute(select(calibration).where(_key(device, runtime, build))).first()
        return Calibration(**row._mapping) if row else None


def of_device(store: Store, device: str) -> list[Calibration]:
    """All calibrations of a device, oldest first."""
    query = select(calibration).where(calibration.c.device == device).order_by(calibration.c.created)
    with store.read() as connection:
        return [Calibration(**row._mapping) for row in connection.execute(query)]


def off_by(ratios: Sequence[float], limit: float) -> tuple[float, bool]:
    """How far runs are off the calibration that they are ratios to, as a share; and whether to calibrate anew.

    The one rule: the median decides. A device that passes it keeps its calibration, so that studies compare.
    """
    off = statistics.median(ratios) - 1
    return off, abs(off) > limit


def note_runs(
    store: Store, place: Place, job: str, runs: Sequence[ReferenceRun], calibration_ms: float
) -> None:  # fmt: skip
    """Keeps the reference runs of one job; a second time changes nothing. Old ones go.

    Args:
        store: the database.
        place: device, runtime and build.
        job: id of the round.
        runs: in order.
        calibration_ms: what the ratios are to.
    """
    if not runs:
        return
    now, (device, runtime, build) = store.now(), place
    values = {"device": device, "runtime": runtime, "build": build, "at": now, "calibration_ms": calibration_ms}
    packed = [[round(run.ratio, 5), run.temperature_c, run.calm] for run in runs]
    columns, here = reference_run.c, _runs_of(*place)
    newest = select(columns.at).where(here).order_by(columns.at.desc()).offset(KEPT_ROUNDS - 1).limit(1)
    with store.write() as connection:
        if insert_if_absent(connection, reference_run, job=job, runs=packed, **values):
            connection.execute(delete(reference_run).where(here, columns.at < now - KEPT_S))
            connection.execute(delete(reference_run).where(here, columns.at < newest.scalar_subquery()))


def drift(
    store: Store,
    device: str,
    *,
    runtime: str | None = None,
    since: float = 0.0,
    limit: float = DRIFT_LIMIT,
) -> list[Drift]:
    """The reference runs of a device, by runtime and build: those calibrated last come first.

    Args:
        store: the database.
        device: id.
        runtime: only of this one.
        since: only points from then on, in seconds since the epoch.
        limit: share off its calibration from which a device must be calibrated anew.
    """
    columns = reference_run.c
    query = select(reference_run).where(columns.device == device, columns.at >= since).order_by(columns.at, columns.job)
    if runtime is not None:
        query = query.where(columns.runtime == runtime)
    with store.read() as connection:
        rows = connection.execute(query).all()
    known = {(each.runtime, each.build): each for each in of_device(store, device)}
    shown = [key for key in known if runtime in (None, key[0])]
    keys = dict.fromkeys([*reversed(shown), *((row.runtime, row.build) for row in reversed(rows))])
    return [
        _drift((device, *key), known.get(key), [row for row in rows if (row.runtime, row.build) == key], limit)
        for key in keys
    ]


def _drift(place: Place, known: Calibration | None, rows: Iterable[Row[tuple[object, ...]]], limit: float) -> Drift:
    points = tuple(
        DriftPoint(row.at, row.job, row.calibration_ms, ReferenceRun(*run)) for row in rows for run in row.runs
    )
    calm = [point.run.ratio for point in points if known and point.at >= known.created and point.run.calm]
    off, recalibrate = off_by(calm[-LATEST_RUNS:], limit) if len(calm) >= LATEST_RUNS else (None, False)
    return Drift(*place, known, points, off, recalibrate)


def _key(device: str, runtime: str, build: str) -> ColumnElement[bool]:
    columns = calibration.c
    return and_(columns.device == device, columns.runtime == runtime, columns.build == build)


def _runs_of(device: str, runtime: str, build: str) -> ColumnElement[bool]:
    columns = reference_run.c
    return and_(columns.device == device, columns.runtime == runtime, columns.build == build)
