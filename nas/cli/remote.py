"""`--server`: the devices and agents of a coordinator or of a database."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from getpass import getuser
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from pydantic import BaseModel, ValidationError

from nas.cli.options import open_store
from nas.core.errors import InvalidInput
from nas.serve.client import Json, UsersClient, known_client, part

if TYPE_CHECKING:
    from nas.infra.store.store import Store
    from nas.serve.api.devices import DeviceOrder

_ALL = 1 << 20
Request = TypeVar("Request", bound=BaseModel)

ServerOption = Annotated[
    str | None,
    typer.Option(
        "--server",
        envvar="NAS_SERVER",
        metavar="URL",
        show_default=False,
        help="Use this coordinator instead of a database; add it with 'nas server add'.",
    ),
]


def open_server(server: str, db: str | None = None) -> UsersClient:
    """Returns a client for a known coordinator; `$NAS_TOKEN` overrides the stored token."""
    if db is not None:
        raise InvalidInput("give either --server (or $NAS_SERVER) or --db (or $NAS_DB): a server has its own database")
    return known_client(server)


@contextmanager
def open_fleet(server: str | None, db: str | None) -> Iterator[Fleet]:
    """Opens the devices and agents of a coordinator, or of a database if `server` is None."""
    if server is not None:
        with open_server(server, db) as client:
            yield _Remote(client)
        return
    with open_store(db) as store:
        yield _Local(store)


class _Remote:
    def __init__(self, client: UsersClient) -> None:
        self._client = client

    def devices(self) -> Json:
        return self._client.get_all("/v1/devices", "devices")

    def device(self, id: str) -> Json:
        return self._client.get(f"/v1/devices/{part(id)}")

    def order(self, id: str, what: DeviceOrder, reason: str) -> Json:
        return self._client.post(f"/v1/devices/{part(id)}/{what}", {"reason": reason})

    def label(self, id: str, labels: Json) -> Json:
        return self._client.post(f"/v1/devices/{part(id)}/label", labels)

    def reserve(self, id: str, request: Json) -> Json:
        return self._client.post(f"/v1/devices/{part(id)}/reserve", request)

    def retire(self, id: str) -> Json:
        return self._client.post(f"/v1/devices/{part(id)}/remove")

    def agents(self) -> Json:
        return self._client.get_all("/v1/agents", "agents")

    def revoke(self, agent: str) -> Json:
        return self._client.post(f"/v1/agents/{part(agent)}/revoke")


class _Local:
    def __init__(self, store: Store) -> None:
        from nas.serve.api import devices

        self._store, self._fleet = store, devices

    def devices(self) -> Json:
        return {"devices": self._fleet.page_of_devices(self._store, limit=_ALL).model_dump(mode="json")["devices"]}

    def device(self, id: str) -> Json:
        return self._fleet.device_detail(self._store, id).model_dump(mode="json")

    def order(self, id: str, what: DeviceOrder, reason: str) -> Json:
        return self._fleet.steer_device(self._store, id, what, reason).model_dump(mode="json")

    def label(self, id: str, labels: Json) -> Json:
        request = _checked(id, self._fleet.LabelRequest, labels)
        return self._fleet.label_device(self._store, id, request).model_dump(mode="json")

    def reserve(self, id: str, request: Json) -> Json:
        checked = _checked(id, self._fleet.ReserveRequest, request)
        try:
            user = getuser()
        except (KeyError, OSError):  # a container's user without an entry in /etc/passwd
            user = f"uid {os.getuid()}"
        return self._fleet.reserve_device(self._store, id, checked, user).model_dump(mode="json")

    def retire(self, id: str) -> Json:
        return self._fleet.retire_device(self._store, id).model_dump(mode="json")

    def agents(self) -> Json:
        return {"agents": self._fleet.page_of_agents(self._store, limit=_ALL).model_dump(mode="json")["agents"]}

    def revoke(self, agent: str) -> Json:
        return self._fleet.revoke_secret(self._store, agent).model_dump(mode="json")


Fleet = _Remote | _Local
"""Devices and agents of a coordinator or a database; what is returned has the forms of `nas.serve.api.devices`."""


def _checked(id: str, model: type[Request], fields: Json) -> Request:
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise InvalidInput(f"{id}: {error.errors()[0]['msg']}") from None
