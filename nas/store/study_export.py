"""Writing a study to a file that another hilnas can read. Artifacts and jobs stay behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TextIO

from sqlalchemy import Connection, Select, select

from nas.core.canonical import canonical_json
from nas.store import studies
from nas.store.models import attempt, event, result, result_use, trial
from nas.store.rows import Study
from nas.store.store import Store
from nas.store.study_file import FORMAT, VERSION


def export_study(store: Store, study_id: int, out: TextIO) -> int:
    """Writes a study as JSON lines (`nas.store.study_file`), as it is at one moment; gives the number of lines.

    Raises:
        UnknownName: no such study.
    """
    with store.read() as connection:
        lines = 0
        for line in _lines(connection, studies.get(store, study_id)):
            out.write(canonical_json(line) + "\n")
            lines += 1
        out.write(canonical_json({"end": lines}) + "\n")
    return lines + 1


def _lines(connection: Connection, study: Study) -> Iterator[dict[str, Any]]:
    header = ("name", "space", "seed", "version", "created", "state", "scales", "reference_point", "proposer")
    yield {"format": FORMAT, "v": VERSION} | {field: getattr(study, field) for field in header}
    for name, query in _tables(study.id).items():
        for row in connection.execute(query):
            yield {name: dict(row._mapping)}


def _tables(study: int) -> dict[str, Select[Any]]:
    """What to write under which name, in the order in which it can be read again."""
    t, e, r, u, a = trial.c, event.c, result.c, result_use.c, attempt.c
    served = select(u.result_key).where(u.study == study)
    return {
        "trial": select(t.number, t.layout_id, t.layout, t.origin, t.parents, t.operator, t.record, t.created)
        .where(t.study == study)
        .order_by(t.number),
        "event": select(e.trial, e.kind, e.payload, e.at).where(e.study == study).order_by(e.id),
        "result": select(result).where(r.result_key.in_(served)).order_by(r.created, r.result_key),
        "use": select(u.trial, u.result_key, u.first).where(u.study == study).order_by(u.trial, u.result_key),
        "attempt": select(a.kind, a.message, a.at, a.result_key, a.stage, a.trial, a.job, a.device, a.payload)
        .where(a.study == study)
        .order_by(a.id),
    }
