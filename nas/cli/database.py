"""The database option, and the database that it names. Hosts without database packages can import this, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from nas.store.store import Store

DatabaseOption = Annotated[
    str | None,
    typer.Option("--db", envvar="NAS_DB", help="Database URL; default: SQLite below $NAS_HOME.", show_default=False),
]


@contextmanager
def open_store(url: str | None, *, create: bool = False) -> Iterator[Store]:
    """The database at `url`, or the default one, for as long as the context lasts."""
    from nas.store.store import Store

    store = Store.open(url, create=create)
    try:
        yield store
    finally:
        store.close()
