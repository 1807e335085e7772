"""Starts a PostgreSQL server for tests and benchmarks, with data in a temporary folder, reached by a Unix socket.

It is independent of servers on this host. PostgreSQL refuses to run as root, so then it runs as `nobody`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psycopg
from psycopg import sql

from nas.infra.store.models import metadata
from nas.infra.store.store import Store

_TEMPLATE = "hilnas_template"
_START_S = 30.0

CARELESS = {"fsync": "off", "full_page_writes": "off"}
"""Settings for tests, whose data need not survive a power failure."""


class Server:
    """A PostgreSQL server.

    Args:
        programs: folder of initdb and postgres.
        folder: for data and socket; the server's user may enter it.
        settings: as in postgresql.conf.
    """

    def __init__(self, programs: Path, folder: Path, settings: Mapping[str, str]) -> None:
        self.folder = folder
        self._programs = programs
        self._settings = settings
        self._databases: set[str] = set()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the server."""
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the server runs."""
        return self._process is not None and self._process.poll() is None

    def url(self, database: str) -> str:
        """Returns the URL of a database on this server."""
        return f"postgresql://hilnas@/{database}?host={self.folder}"

    def initialise(self) -> None:
        """Makes the folder of its data."""
        options = ["--username=hilnas", "--auth=trust", "--no-sync", "--encoding=UTF8", "--locale=C"]
        init = _as_server(self._programs / "initdb", "-D", self.folder / "data", *options)
        done = subprocess.run(init, cwd=self.folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def start(self) -> None:
        """Starts the server, and returns when it takes connections."""
        options = [f"--{name}={value}" for name, value in {"listen_addresses": "", **self._settings}.items()]
        argv = [self._programs / "postgres", "-D", self.folder / "data", "-k", self.folder, *options]
        with (self.folder / "log").open("ab") as log:
            # Ends with the process that started it.
            self._process = subprocess.Popen(_as_server(*argv, death="INT"), cwd=self.folder, stdout=log, stderr=log)
        deadline = time.monotonic() + _START_S
        while True:
            try:
                return self.connect().close()
            except psycopg.OperationalError as error:
                assert time.monotonic() < deadline and self._process.poll() is None, (error, self.log())
                time.sleep(0.02)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Ends every connection, then the server: SIGINT shuts down in order, SIGQUIT as in a crash."""
        assert self._process is not None
        self._process.send_signal(how)
        self._process.wait(_START_S)
        self._process = None

    def create(self, name: str) -> str:
        """Creates a database without tables; returns its URL."""
        self._execute("CREATE DATABASE {}", name)
        self._databases.add(name)
        return self.url(name)

    def create_empty(self, name: str) -> str:
        """Creates a database with our tables, copied from a template; returns its URL."""
        if _TEMPLATE not in self._databases:
            Store.open(self.create(_TEMPLATE)).close()
        self._execute("CREATE DATABASE {} TEMPLATE {}", name, _TEMPLATE)
        self._databases.add(name)
        return self.url(name)

    def empty(self, url: str) -> None:
        """Removes all rows of a database with our tables and restarts their ids; faster than creating a database."""
        tables = sql.SQL(", ").join(sql.Identifier(table.name) for table in metadata.sorted_tables)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(sql.SQL("TRUNCATE {} RESTART IDENTITY").format(tables))

    @contextlib.contextmanager
    def dropping(self) -> Iterator[None]:
        """Removes at the end the databases created in the context, even if clients are connected."""
        before = set(self._databases)
        try:
            yield
        finally:
            for name in self._databases - before - {_TEMPLATE}:
                self._execute("DROP DATABASE {} WITH (FORCE)", name)
                self._databases.remove(name)

    def log(self) -> str:
        """Returns the server's log."""
        return (self.folder / "log").read_text(errors="replace")

    def _execute(self, statement: str, *names: str) -> None:
        with self.connect() as connection:
            connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))

    def connect(self) -> psycopg.Connection[tuple[object, ...]]:
        """Returns a connection of its superuser."""
        return psycopg.connect(host=str(self.folder), user="hilnas", dbname="postgres", autocommit=True)


@contextlib.contextmanager
def server(settings: Mapping[str, str], data_folder: Path | None = None) -> Iterator[Server]:
    """Runs a server.

    Args:
        settings: as in postgresql.conf.
        data_folder: for its data, which stay for the next server there; None: a new one, removed at the end.
    """
    programs = _programs()
    folder = data_folder or Path(tempfile.mkdtemp(prefix="hilnas-postgres-"))
    folder.mkdir(exist_ok=True)
    try:
        if os.geteuid() == 0:
            shutil.chown(folder, "nobody", "nogroup")
        # A server whose processes all were killed leaves it, and its number may now be that of another process.
        (folder / "data" / "postmaster.pid").unlink(missing_ok=True)
        server = Server(programs, folder, settings)
        if not (folder / "data").exists():
            server.initialise()
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        if data_folder is None:
            shutil.rmtree(folder)


def _programs() -> Path:
    paths = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    on_path = shutil.which("initdb")
    assert paths or on_path, "no PostgreSQL server is installed here: apt install postgresql"
    return paths[-1].parent if paths else Path(str(on_path)).resolve().parent


def _as_server(*argv: object, death: str = "KILL") -> list[str]:
    user = ["--reuid=nobody", "--regid=nogroup", "--clear-groups"] if os.geteuid() == 0 else []
    return ["setpriv", *user, f"--pdeathsig={death}", *map(str, argv)]
