"""Single rows of the job table, inside a transaction that may change them."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, bindparam, select, update

from nas.core.plan import Round, RoundResult
from nas.store.models import job as job_table
from nas.store.rows import Blame, JobKind, JobRow, JobState

# Made once: to make them costs more than to run them.
_HELD = select(job_table).where(job_table.c.id == bindparam("of_job")).with_for_update(key_share=True)
_CHANGE = update(job_table).where(job_table.c.id == bindparam("of_job"))
_CHANGE_IF = _CHANGE.where(job_table.c.state == bindparam("if_state"))


def find(connection: Connection, id: str) -> JobRow | None:
    """The job `id`, if there is one, held until the transaction ends."""
    row = connection.execute(_HELD, {"of_job": id}).first()
    return job_of(row) if row else None


def change(connection: Connection, id: str, if_state: JobState | None = None, **values: Any) -> bool:
    """Sets columns of a job that is there, and in `if_state`, if one is given; whether it was."""
    if if_state is None:
        changed = connection.execute(_CHANGE, {"of_job": id, **values})
    else:
        changed = connection.execute(_CHANGE_IF, {"of_job": id, "if_state": if_state, **values})
    return changed.rowcount == 1


def job_of(row: Row[Any]) -> JobRow:
    """A whole row of the table as the store hands it out."""
    return JobRow(
        row.id,
        row.result_key,
        row.round,
        JobKind(row.kind),
        row.study,
        row.trial,
        row.device,
        row.priority,
        Round.model_validate(row.payload),
        JobState(row.state),
        row.attempts,
        row.epoch,
        row.lease_until,
        row.not_before,
        row.created,
        row.updated,
        RoundResult.model_validate(row.result) if row.result else None,
        Blame(row.blame) if row.blame else None,
        row.reason,
        row.message,
        row.phase,
        row.phase_until,
    )
