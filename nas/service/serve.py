"""`nas serve`: the coordinator as a network service, beside the database and `$NAS_HOME`."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, FastAPI
from pydantic import BaseModel, ConfigDict, ValidationError

from nas.core.durable import write_durably
from nas.core.errors import InfrastructureFailed
from nas.service import enrolling, jobs_api, users_api
from nas.service.addresses import names_of, url_of
from nas.service.agent_access import SecretAccess
from nas.service.coordinator import Server, listen_tcp
from nas.service.farm import Farm, open_farm
from nas.service.health import AnyDevice, HealthKeeper
from nas.service.renewal import Renewal
from nas.service.request_log import RequestLog
from nas.service.submission_process import LaunchProcess
from nas.service.submitted import SubmittedStudies
from nas.service.tls import Certificates
from nas.service.web import web_app
from nas.store.store import Store

PORT = 7711
ADDRESS_FILE = "serve.json"

_MAX_FILES = 65536
_OBJECTS_PER_COLLECTION = 20_000


@dataclass(frozen=True)
class ServeOptions:
    """What `nas serve` was asked for.

    Args:
        host: name or address of this machine to listen on; a wildcard listens on all.
        port: TCP port; 0 takes any that is free.
        names: more names and addresses under which agents and people reach this server.
        studies: submitted studies that run side by side.
    """

    host: str = "127.0.0.1"
    port: int = PORT
    names: tuple[str, ...] = ()
    studies: int = 2


class Address(BaseModel):
    """Where the last `nas serve` of a home listened."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    ca_sha256: str


@dataclass(frozen=True)
class Service:
    """A coordinator that serves."""

    store: Store
    farm: Farm
    home: Path
    certificates: Certificates
    url: str
    studies: SubmittedStudies


@contextlib.contextmanager
def serving(
    store: Store, options: ServeOptions, more: Callable[[Service], APIRouter] | None = None
) -> Iterator[Service]:  # fmt: skip
    """The coordinator, while the context is open; at its end requests are answered first, long polls at once.

    Args:
        store: where everything is.
        options: how to serve.
        more: routes of what stands above the services, such as pages for people.

    Raises:
        InvalidInput: a name is neither a host name nor an address.
        InfrastructureFailed: the port is taken, or another `nas serve` runs on this home.
    """
    home = store.artifacts.parent
    home.mkdir(parents=True, exist_ok=True)
    with _only_one(home), contextlib.closing(listen_tcp(options.host, options.port)) as listening:
        _allow_many_connections()
        certificates = Certificates(home, store.clock)
        url = url_of(options.host, listening.getsockname()[1], options.names)
        renewal = Renewal(certificates, lambda: names_of(options.host, options.names))
        # Opening the farm gives every lease its full time again, before the first agent can speak.
        with open_farm(store, serves_others=True) as farm:
            studies = SubmittedStudies(store, home, LaunchProcess(store, home), at_once=options.studies)
            service = Service(store, farm, home, certificates, url, studies)
            health = HealthKeeper(store, farm.doorbell.ring, AnyDevice(store, farm.runners, home / "work").plan)
            server = Server(make_service_app(service, more), listening, renewal.context)
            with studies, server, renewal, health, _few_pauses():
                address = Address(url=url, ca_sha256=certificates.ca_sha256)
                write_durably(home / ADDRESS_FILE, address.model_dump_json().encode())
                try:
                    yield service
                finally:
                    farm.doorbell.close()


def make_service_app(service: Service, more: Callable[[Service], APIRouter] | None = None) -> FastAPI:
    """Everything that `nas serve` answers. A new API is a router, and a line here."""
    store, farm = service.store, service.farm
    access, suspect = SecretAccess(store), farm.own_files.suspect
    app = web_app()
    app.add_middleware(RequestLog)
    app.include_router(enrolling.router(store, service.home, service.certificates, access.forget))
    app.include_router(jobs_api.router(store, farm.find_file, farm.watch, farm.runners.signed, access, suspect))
    app.include_router(users_api.router(store, service.studies, access.forget, lambda: farm.doorbell.closed))
    if more is not None:
        app.include_router(more(service))
    return app


def last_address(home: Path) -> Address | None:
    """Where `nas serve` listens, or listened last."""
    try:
        return Address.model_validate_json((home / ADDRESS_FILE).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


@contextlib.contextmanager
def _few_pauses() -> Iterator[None]:
    """A full garbage collection stops everything for 0.1 s where there are thousands of connections: make them rare."""
    usual = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS_PER_COLLECTION, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()


@contextlib.contextmanager
def _only_one(home: Path) -> Iterator[None]:
    with (home / "serve.lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            known = last_address(home)
            raise InfrastructureFailed(f"'nas serve' runs already{f' at {known.url}' if known else ''}") from None
        yield


def _allow_many_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(_MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
