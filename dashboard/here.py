"""The dashboard on this machine only: without TLS and login, to look at."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from nas.dashboard.access import LOOPBACK_HOSTS, AccessRules
from nas.dashboard.app import dashboard_router
from nas.service.coordinator import Server, listen_tcp
from nas.service.live_studies import LiveStudies
from nas.service.request_log import RequestLog
from nas.service.web import web_app
from nas.store.store import Store

_LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def dashboard_here(store: Store) -> Iterator[str]:
    """The URL of the pages, on any free port of the loopback address, while the context is open.

    Raises:
        InfrastructureFailed: the server does not start.
    """
    app, rules = web_app(), AccessRules(open_hosts=LOOPBACK_HOSTS, secure=False)
    app.add_middleware(RequestLog)
    with LiveStudies(store) as live, contextlib.closing(listen_tcp(_LOOPBACK, 0)) as listening:
        app.include_router(dashboard_router(store, rules, live=live))
        with Server(app, listening) as server:
            yield f"http://{_LOOPBACK}:{server.port}/studies"
