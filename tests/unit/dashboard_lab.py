"""What the tests of actions and of devices' pages share: a coordinator's dashboard, and visitors of every role."""

from __future__ import annotations

import tempfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
from api_lab import ScriptedProcess
from fastapi import FastAPI
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient
from live_lab import LiveLab
from store_support import add_device

from nas.infra.store import agents
from nas.infra.store.rows import Role
from nas.infra.web.server import RequestLog, web_app
from nas.serve.api.submissions import SubmittedStudies
from nas.serve.dashboard.access import AccessRules
from nas.serve.dashboard.app import dashboard_router

HOST = "https://lab.example:7711"
HTML = {"Accept": "text/html"}
FORM_HEADERS = {"Origin": HOST} | HTML


class Inputs(HTMLParser):
    """The fields of a page's forms, the paths that its buttons post to, and the contents of its text fields."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.fields: dict[str, str] = {}
        self.actions: list[str] = []
        self.areas: dict[str, str] = {}
        self._area: str | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag == "input" and "name" in named:
            self.fields[str(named["name"])] = named.get("value") or ""
        if tag == "button" and "formaction" in named:
            self.actions.append(str(named["formaction"]))
        if tag == "textarea":
            self._area = str(named["name"])
            self.areas[self._area] = ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "textarea" and self._area is not None:
            self.areas[self._area] = self.areas[self._area].removeprefix("\n")
            self._area = None

    def handle_data(self, data: str) -> None:
        if self._area is not None:
            self.areas[self._area] += data


class DashboardLab(LiveLab):
    """A store with one device, the pages over it, and a token for each role."""

    def __init__(self, folder: Path, rules: AccessRules | None = None) -> None:
        super().__init__(folder)
        add_device(self.store)
        self.process = ScriptedProcess()
        self.home = folder / "home"
        self.submitted = SubmittedStudies(self.store, self.home, self.process)
        self.app = web_app()
        self.app.add_middleware(RequestLog)
        self.app.router.routes += dashboard_router(self.store, rules or AccessRules(), self.submitted).routes
        self.tokens = {role: agents.create_api_token(self.store, role.value, role) for role in Role}

    def stranger(self, peer: str = "10.0.0.9") -> TestClient:
        """Somebody who has not logged in."""
        return TestClient(self.app, base_url=HOST, raise_server_exceptions=False, follow_redirects=False,
                          client=(peer, 50_000))  # fmt: skip

    def visitor(self, role: Role) -> Visitor:
        """Somebody with a session."""
        client = self.stranger()
        assert client.post("/login", data={"token": self.tokens[role]}, headers=FORM_HEADERS).status_code == 303
        return Visitor(client)


class Visitor:
    """Somebody with a session, and the form token of it."""

    def __init__(self, client: TestClient) -> None:
        self.client = client
        self.form_token = Inputs(self.page("/studies").text).fields["form_token"]

    def page(self, path: str) -> httpx.Response:
        """The page of a path, as a browser asks for it."""
        return self.client.get(path, headers=HTML)

    def post(self, path: str, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        """Posts a form as our pages do; with other `headers` than theirs if given."""
        sent = {"form_token": self.form_token} | fields
        return self.client.post(path, data=sent, headers=FORM_HEADERS if headers is None else headers)


def page_routes(app: FastAPI) -> list[APIRoute]:
    """Every route of the pages."""
    return [route for route in app.routes if isinstance(route, APIRoute)]


def all_routes() -> list[APIRoute]:
    """Every route of a coordinator's pages."""
    with tempfile.TemporaryDirectory() as folder:
        routes = page_routes(DashboardLab(Path(folder)).app)
    assert {"/studies", "/login", "/devices/{id}", "/launch"} <= {route.path for route in routes}
    return routes
