"""Calibrations: what the reference run takes on a device, by runtime and build."""

from __future__ import annotations

from sqlalchemy import ColumnElement, and_, delete, select

from nas.store.models import calibration
from nas.store.rows import Calibration, Json
from nas.store.store import Store, retried


@retried
def put(store: Store, device: str, runtime: str, build: str, reference_ms: float, samples: Json) -> Calibration:
    """Keeps a calibration in place of an older one of the same device, runtime and build."""
    new = Calibration(device, runtime, build, reference_ms, samples, store.now())
    with store.write() as connection:
        connection.execute(delete(calibration).where(_key(device, runtime, build)))
        connection.execute(
            calibration.insert().values(
                device=device,
                runtime=runtime,
                build=build,
                reference_ms=reference_ms,
                samples=samples,
                created=new.created,
            )
        )
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


def _key(device: str, runtime: str, build: str) -> ColumnElement[bool]:
    columns = calibration.c
    return and_(columns.device == device, columns.runtime == runtime, columns.build == build)
