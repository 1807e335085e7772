"""The coordinator behind nginx, with the configuration of docs/how-to/coordinator.md."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from ipaddress import ip_network
from pathlib import Path

import httpx
import pytest

sys.path.append(str(Path(__file__).parents[1] / "unit"))

from dashboard_lab import Inputs
from farm_support import Coordinator
from store_support import new_study
from study_lab import LIMIT_S

from nas.infra.store import agents, studies
from nas.infra.store.rows import Role
from nas.infra.web.server import listen_tcp
from nas.serve.api.serve import make_service_app
from nas.serve.dashboard.access import AccessRules
from nas.serve.dashboard.app import dashboard_router
from tests.support.waiting import until

pytestmark = pytest.mark.needs("nginx")
PAGE = Path(__file__).parents[2] / "docs/how-to/coordinator.md"
HTML = {"Accept": "text/html"}
NGINX = """
daemon off; pid {folder}/pid; error_log {folder}/error.log; worker_processes 1;
events {{ worker_connections 64; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    {server}
}}
"""


class Farm(Coordinator):
    """A coordinator with pages for users of the proxy."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        rules = AccessRules(proxies=(ip_network("127.0.0.1"),), proxy_roles={"ann": Role.OPERATE, "boss": Role.ADMIN})
        pages = dashboard_router(self.store, rules, self.service.studies, self.service.snapshots)
        self.app = make_service_app(self.service, lambda service: pages)
        self.study = new_study(self.store, "phones").id


@pytest.fixture
def farm(tmp_path: Path) -> Farm:
    return Farm(tmp_path)


@pytest.fixture
def url(farm: Farm, tmp_path: Path) -> Iterator[str]:
    """That of nginx, with the documented configuration but for names, ports and folders."""
    folder = tmp_path / "nginx"
    folder.mkdir(mode=0o755)
    certificate = farm.certificates.server(["localhost", "127.0.0.1"])
    (folder / "users").write_text("ann:{PLAIN}secret\nbob:{PLAIN}secret\n")
    with listen_tcp("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    [server] = re.findall(r"```nginx\n(.*?)```", PAGE.read_text(), re.S)
    with ExitStack() as stack:
        coordinator = stack.enter_context(farm.listening())
        for old, new in (
            ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
            ("/etc/letsencrypt/live/farm.example/fullchain.pem", str(certificate)),
            ("/etc/letsencrypt/live/farm.example/privkey.pem", str(certificate)),
            ("/etc/nginx/hilnas.users", str(folder / "users")),
            ("https://127.0.0.1:7711", coordinator.replace("localhost", "127.0.0.1")),
        ):
            assert old in server
            server = server.replace(old, new)
        user = "user root; " if shutil.which("id") and subprocess.check_output(["id", "-u"]) == b"0\n" else ""
        (folder / "nginx.conf").write_text(user + NGINX.format(folder=folder, server=server))
        with subprocess.Popen(["nginx", "-c", str(folder / "nginx.conf"), "-p", str(folder)]) as process:
            stack.callback(process.terminate)
            until(lambda: (folder / "pid").exists() and (folder / "pid").read_text().strip() != "", LIMIT_S)
            yield f"https://localhost:{port}"
            process.terminate()


def visitor(farm: Farm, url: str, name: str | None = None) -> httpx.Client:
    return httpx.Client(base_url=url, verify=farm.trusting(), auth=(name, "secret") if name else None, timeout=20)


def test_people_with_a_password_see_the_pages_under_their_name(farm: Farm, url: str) -> None:
    with visitor(farm, url) as stranger:
        assert stranger.get("/studies").status_code == 401
        assert stranger.get("/studies", headers={"X-Forwarded-User": "boss"}).status_code == 401
    with visitor(farm, url, "bob") as bob:
        page = bob.get("/studies", headers={"X-Forwarded-User": "boss"} | HTML)
        assert "bob (read)" in page.text and "boss" not in page.text
        assert bob.get("/assets/dashboard.css").status_code == 200
        form = Inputs(page.text).fields | {"next": "/studies"}
        assert bob.post("/studies/phones/pause", data=form, headers={"Origin": url}).status_code == 403


def test_an_action_of_a_page_passes_the_proxy(farm: Farm, url: str) -> None:
    with visitor(farm, url, "ann") as ann:
        form = Inputs(ann.get("/studies", headers=HTML).text).fields | {"next": "/studies"}
        answer = ann.post("/studies/phones/pause", data=form, headers={"Origin": url} | HTML)
        assert (answer.status_code, answer.headers["Location"]) == (303, "/studies")
    assert studies.get(farm.store, "phones").desired_state == "pause"


def test_scripts_use_tokens_and_get_events_as_they_happen(farm: Farm, url: str) -> None:
    token = agents.create_api_token(farm.store, "script", Role.READ)
    with visitor(farm, url) as script:
        script.headers["Authorization"] = f"Bearer {token}"
        assert script.get("/v1/server").json()["token"] == "script"
        headers = {"Accept": "text/event-stream"}
        with script.stream("GET", "/v1/studies/phones/events", headers=headers) as events:
            assert next(events.iter_lines()).startswith("retry:")
