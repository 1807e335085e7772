"""Where `nas device` and `nas agent` read and steer: a coordinator's API, or a database. Both speak the same JSON."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from nas.cli.database import open_store
from nas.cli.remote import open_server
from nas.cli.users_client import Json, UsersClient, part

if TYPE_CHECKING:
    from nas.service.fleet import DeviceOrder
    from nas.store.store import Store

_ALL = 1 << 20


class Fleet(Protocol):
    """Devices and agents."""

    def devices(self) -> Json:
        """All of them, as `nas.service.api_models.DevicePage`."""

    def device(self, id: str) -> Json:
        """One, as `DeviceDetail`."""

    def order(self, id: str, what: DeviceOrder, reason: str) -> Json:
        """Steers one; how it stands then, as `DeviceView`."""

    def retire(self, id: str) -> Json:
        """Takes one out of use; how it stands then, as `DeviceView`."""

    def agents(self) -> Json:
        """All of them, as `AgentPage`."""

    def revoke(self, agent: str) -> Json:
        """Takes its secret away; how it stands then, as `AgentView`."""


@contextmanager
def open_fleet(server: str | None, db: str | None) -> Iterator[Fleet]:
    """The fleet of a coordinator, or else that of a database."""
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
        return self._client.whole("/v1/devices", "devices")

    def device(self, id: str) -> Json:
        return self._client.get(f"/v1/devices/{part(id)}")

    def order(self, id: str, what: DeviceOrder, reason: str) -> Json:
        return self._client.post(f"/v1/devices/{part(id)}/{what}", {"reason": reason})

    def retire(self, id: str) -> Json:
        return self._client.post(f"/v1/devices/{part(id)}/remove")

    def agents(self) -> Json:
        return self._client.whole("/v1/agents", "agents")

    def revoke(self, agent: str) -> Json:
        return self._client.post(f"/v1/agents/{part(agent)}/revoke")


class _Local:
    def __init__(self, store: Store) -> None:
        from nas.service import fleet

        self._store, self._fleet = store, fleet

    def devices(self) -> Json:
        return {"devices": self._fleet.list_devices(self._store, limit=_ALL).model_dump(mode="json")["devices"]}

    def device(self, id: str) -> Json:
        return self._fleet.show_device(self._store, id).model_dump(mode="json")

    def order(self, id: str, what: DeviceOrder, reason: str) -> Json:
        return self._fleet.order(self._store, id, what, reason).model_dump(mode="json")

    def retire(self, id: str) -> Json:
        return self._fleet.remove_device(self._store, id).model_dump(mode="json")

    def agents(self) -> Json:
        return {"agents": self._fleet.list_agents(self._store, limit=_ALL).model_dump(mode="json")["agents"]}

    def revoke(self, agent: str) -> Json:
        return self._fleet.revoke_agent(self._store, agent).model_dump(mode="json")
