"""The dashboard on a loopback address: without TLS and login, read-only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from nas.infra.store.store import Store
from nas.infra.web.server import RequestLog, Server, listen_tcp, web_app
from nas.search.analysis.snapshot import Snapshots
from nas.serve.dashboard.access import LOOPBACK_HOSTS, AccessRules
from nas.serve.dashboard.app import dashboard_router

_LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def dashboard_here(store: Store) -> Iterator[str]:
    """Serves the pages on a free port of the loopback address while the context is open; yields their URL.

    Raises:
        InfrastructureFailed: the server does not start.
    """
    app, rules = web_app(), AccessRules(open_hosts=LOOPBACK_HOSTS, secure=False)
    app.add_middleware(RequestLog)
    with Snapshots(store) as snapshots, contextlib.closing(listen_tcp(_LOOPBACK, 0)) as listening:
        app.router.routes += dashboard_router(store, rules, snapshots=snapshots).routes
        with Server(app, listening) as server:
            yield f"http://{_LOOPBACK}:{server.port}/studies"
