"""The database option, and the database that it names. Hosts without database packages can import this, too."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from nas.core.logs import without_passwords

if TYPE_CHECKING:
    from nas.store.store import Store

_VARIABLE = "NAS_DB"

DatabaseOption = Annotated[
    str | None,
    typer.Option("--db", envvar=_VARIABLE, help="Database URL; default: SQLite below $NAS_HOME.", show_default=False),
]


def same_database(url: str | None) -> str:
    """What a command that is shown to people needs to name the database at `url`: nothing where they need not."""
    if url is None or url == os.environ.get(_VARIABLE):
        return ""
    return f" --db {shlex.quote(without_passwords(url))}"


@contextmanager
def open_store(url: str | None, *, create: bool = False) -> Iterator[Store]:
    """The database at `url`, or the default one, for as long as the context lasts."""
    from nas.store.store import Store

    store = Store.open(url, create=create)
    try:
        yield store
    finally:
        store.close()
