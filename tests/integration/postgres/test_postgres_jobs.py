"""`test_store_jobs.py` over again; and a claim while others hold jobs."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import select
from store_support import add_device, open_store, put, take
from test_store_jobs import *  # noqa: F403

from nas.infra.store.models import job as job_table


def test_a_claim_takes_the_next_job_where_others_hold_those_of_the_highest_priority(tmp_path: Path) -> None:
    """As they do while they cancel them."""
    store, other = open_store(tmp_path), open_store(tmp_path)
    add_device(store)
    urgent, next_one = put(store, "urgent", priority=5), put(store, "next")
    with other.write() as connection:
        connection.execute(select(job_table).where(job_table.c.id == urgent.id).with_for_update())
        assert take(store).id == next_one.id
