"""The name of this database, drawn when it is first asked for: the authority that counts the epochs of leases."""

from __future__ import annotations

import secrets

from sqlalchemy import select

from nas.store.models import identity
from nas.store.store import Store, retried
from nas.store.upsert import insert_if_absent

_ONLY = 1


@retried
def authority(store: Store) -> str:
    """A random name of 32 hex digits; the same for whoever opens this database, and another for its replacement."""
    query = select(identity.c.name).where(identity.c.id == _ONLY)
    with store.read() as connection:
        name = connection.scalar(query)
    if name is not None:
        return str(name)
    with store.write() as connection:
        insert_if_absent(connection, identity, id=_ONLY, name=secrets.token_hex(16))
        return str(connection.scalar(query))
