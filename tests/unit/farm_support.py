"""What the tests of the coordinator as a network service share: its application, and clients that trust it."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from fastapi import FastAPI
from store_support import device, open_store

from nas.core.clock import Clock, SystemClock
from nas.infra.store import agents
from nas.infra.store.store import Store
from nas.infra.web.server import Server, listen_tcp
from nas.infra.web.tls import Certificates
from nas.measure.farm.farm import Farm, LocalAgent
from nas.measure.farm.queue import JobNotifier, LeaseMonitor
from nas.measure.farm.trust import Admissions, open_key
from nas.search.analysis.snapshot import Snapshots
from nas.serve.api.serve import Service, make_service_app
from nas.serve.api.submissions import LaunchProcess, SubmittedStudies

NAMES = ("localhost", "127.0.0.1")


class Coordinator:
    """`nas serve` without its own agent: the store, the application, and who may use it."""

    def __init__(self, home: Path, clock: Clock | None = None) -> None:
        self.home = home
        self.store: Store = open_store(home, clock or SystemClock())  # type: ignore[arg-type]
        self.certificates = Certificates(home, self.store.clock)
        self.monitor = LeaseMonitor(self.store, JobNotifier(), agent=None)
        admissions = Admissions(home, open_key(home), self.store.clock)
        farm = Farm(self.store, cast(LocalAgent, None), self.monitor, admissions)
        studies = SubmittedStudies(self.store, home, LaunchProcess(self.store, home))
        url = "https://localhost:7711"
        self.service = Service(self.store, farm, home, self.certificates, url, url, studies, Snapshots(self.store))

    @cached_property
    def app(self) -> FastAPI:
        """The application."""
        return make_service_app(self.service)

    def enrol(self, name: str = "host") -> tuple[str, str]:
        """A new agent's name and secret."""
        return name, agents.enrol(self.store, agents.issue_token(self.store, name=name), name)

    def trusting(self) -> ssl.SSLContext:
        """What a client needs that trusts this coordinator's CA, and no other."""
        return ssl.create_default_context(cadata=self.certificates.ca_pem)

    @contextmanager
    def listening(self, context: ssl.SSLContext | None = None) -> Iterator[str]:
        """Serves over TLS on a port of its own; gives the URL."""
        context = context or self.certificates.context(NAMES)
        with Server(self.app, listen_tcp("127.0.0.1", 0), context) as server, self.monitor:
            yield f"https://localhost:{server.port}"


def registration(agent: str, *names: str) -> dict[str, Any]:
    """What an agent says of itself."""
    return {"agent": agent, "devices": [device(name).model_dump(mode="json") for name in names], "boot_id": "boot"}
