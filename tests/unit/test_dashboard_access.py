"""Who may see the pages, what browsers are sent about them, and which actions are refused."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from live_lab import LiveLab

from nas.infra.store import agents
from nas.infra.store.rows import Role
from nas.infra.web.server import RequestLog, web_app
from nas.serve.dashboard.access import LOOPBACK_HOSTS, SESSION_S, SESSIONS_OF_ONE, AccessRules, Sessions
from nas.serve.dashboard.app import dashboard_router
from nas.serve.dashboard.local_server import dashboard_here
from nas.serve.dashboard.pages import CONTENT_SECURITY_POLICY

HOST = "https://lab.example:7711"
PAGES = ("/studies", "/studies.json", "/studies/study/points")
OPEN = AccessRules(open_hosts=LOOPBACK_HOSTS, secure=False)
HTML = {"Accept": "text/html"}


class Form(HTMLParser):
    """The hidden fields of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.fields: dict[str, str] = {}
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag == "input" and named.get("type") == "hidden":
            self.fields[str(named["name"])] = str(named["value"])


@pytest.fixture
def lab(tmp_path: Path) -> LiveLab:
    lab = LiveLab(tmp_path)
    lab.study()
    return lab


def client(
    lab: LiveLab, rules: AccessRules | None = None, base: str = HOST, peer: str = "10.0.0.9"
) -> TestClient:  # fmt: skip
    app = web_app()
    app.add_middleware(RequestLog)
    app.router.routes += dashboard_router(lab.store, rules or AccessRules()).routes
    return TestClient(app, base_url=base, raise_server_exceptions=False, follow_redirects=False, client=(peer, 50_000))


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    """Somebody on this machine, for requests that change nothing."""
    lab = LiveLab(tmp_path_factory.mktemp("local"))
    lab.study()
    return client(lab, OPEN, "http://127.0.0.1:8000")


def log_in(visitor: TestClient, token: str, **form: str) -> httpx.Response:
    return visitor.post("/login", data={"token": token, **form}, headers={"Origin": HOST} | HTML)


@pytest.fixture
def visitor(lab: LiveLab) -> Iterator[TestClient]:
    """Somebody with a session."""
    with client(lab) as visitor:
        assert log_in(visitor, agents.create_api_token(lab.store, "ann", Role.OPERATE)).status_code == 303
        yield visitor


@pytest.mark.parametrize("path", PAGES)
def test_strangers_see_nothing(lab: LiveLab, path: str) -> None:
    stranger = client(lab)
    assert stranger.get(path).status_code == 401
    answer = stranger.get(path, headers=HTML)
    assert answer.status_code == (401 if path.endswith(".json") else 303)
    assert "tiny" not in answer.text


def test_a_stranger_is_sent_to_log_in_and_back(lab: LiveLab) -> None:
    stranger = client(lab)
    goal = stranger.get("/studies?before=7", headers=HTML).headers["Location"]
    fields = Form(stranger.get(goal).text).fields
    assert fields == {"next": "/studies?before=7"}
    answer = log_in(stranger, agents.create_api_token(lab.store, "ann", Role.READ), **fields)
    assert (answer.status_code, answer.headers["Location"]) == (303, "/studies?before=7")
    assert stranger.get("/studies").status_code == 200


@pytest.mark.parametrize(
    "goal", ["//evil.example/", "https://evil.example", "/\\evil.example", "javascript:1", "/a\nb"]
)
def test_logging_in_leads_to_no_other_host(lab: LiveLab, goal: str) -> None:
    token = agents.create_api_token(lab.store, "ann", Role.READ)
    assert log_in(client(lab), token, next=goal).headers["Location"] == "/studies"


def test_the_cookie_is_out_of_reach_of_scripts_and_other_sites(lab: LiveLab) -> None:
    answer = log_in(client(lab), token := agents.create_api_token(lab.store, "ann", Role.READ))
    cookie = answer.headers["Set-Cookie"]
    assert cookie.startswith("__Host-hilnas=")
    attributes = {part.strip().lower() for part in cookie.split(";")[1:]}
    assert {"httponly", "secure", "samesite=strict", "path=/"} <= attributes
    assert not any(part.startswith("domain") for part in attributes)
    assert token not in cookie


def test_a_wrong_token_opens_no_session(lab: LiveLab) -> None:
    stranger = client(lab)
    answer = log_in(stranger, "hilnas.ann.wrong")
    assert answer.status_code == 403 and "Set-Cookie" not in answer.headers
    assert stranger.get("/studies").status_code == 401


@pytest.mark.parametrize("headers", [{}, {"Origin": "https://evil.example"}, {"Origin": "null"},
                                     {"Sec-Fetch-Site": "cross-site"}])  # fmt: skip
def test_other_sites_cannot_log_anybody_in(lab: LiveLab, headers: dict[str, str]) -> None:
    token = agents.create_api_token(lab.store, "ann", Role.READ)
    answer = client(lab).post("/login", data={"token": token}, headers=headers)
    assert answer.status_code == 403 and "Set-Cookie" not in answer.headers


def test_a_revoked_token_ends_its_sessions(lab: LiveLab, visitor: TestClient) -> None:
    assert visitor.get("/studies").status_code == 200
    agents.revoke_api_token(lab.store, "ann")
    assert visitor.get("/studies").status_code == 401


def test_a_session_ends_in_time(lab: LiveLab, visitor: TestClient) -> None:
    lab.clock.time += SESSION_S + 1
    assert visitor.get("/studies").status_code == 401


def test_logging_out_ends_the_session_itself(visitor: TestClient) -> None:
    cookies = dict(visitor.cookies)
    fields = Form(visitor.get("/studies").text).fields
    assert visitor.post("/logout", data=fields, headers={"Origin": HOST}).status_code == 303
    visitor.cookies.update(cookies)
    assert visitor.get("/studies").status_code == 401


@pytest.mark.parametrize(
    ("token", "headers"),
    [("", {"Origin": HOST}), ("0" * 64, {"Origin": HOST}), (None, {"Origin": "https://evil.example"}), (None, {})],
)
def test_an_action_needs_our_page_and_its_form(visitor: TestClient, token: str | None, headers: dict[str, str]) -> None:
    fields = Form(visitor.get("/studies").text).fields
    sent = fields if token is None else {"form_token": token}
    assert visitor.post("/logout", data=sent, headers=headers).status_code == 403
    assert visitor.get("/studies").status_code == 200


@pytest.mark.parametrize(
    ("origin", "host", "status"),
    [
        ("https://lab.example", "lab.example:443", 303),
        ("https://lab.example:8443", "lab.example:8443", 303),
        ("https://lab.example:8443", "lab.example", 403),
        ("https://lab.example", "127.0.0.1:7711", 403),
        ("https://lab.example:443", "lab.example", 403),
        ("https://", ":443", 403),
    ],
)
def test_a_proxy_that_changes_the_host_is_told_of(lab: LiveLab, origin: str, host: str, status: int) -> None:
    form = {"token": agents.create_api_token(lab.store, "ann", Role.READ)}
    answer = client(lab).post("/login", data=form, headers={"Origin": origin, "Host": host})
    assert answer.status_code == status
    if status == 403:
        assert f"addressed as {host}" in answer.text and "must keep the header Host" in answer.text


def test_a_form_token_is_of_one_session(lab: LiveLab, visitor: TestClient) -> None:
    mine = Form(visitor.get("/studies").text).fields
    assert log_in(visitor, agents.create_api_token(lab.store, "bob", Role.ADMIN)).status_code == 303
    assert visitor.post("/logout", data=mine, headers={"Origin": HOST}).status_code == 403


@pytest.mark.parametrize(
    "sent", [{"content": b"\xff=1"}, {"content": b"a" * (2 << 20)}, {"json": {}}, {"content": b"x"}]
)
def test_what_is_no_form_is_refused(lab: LiveLab, sent: dict[str, Any]) -> None:
    headers = {"Origin": HOST} | ({} if "json" in sent else {"Content-Type": "application/x-www-form-urlencoded"})
    assert client(lab).post("/login", headers=headers, **sent).status_code in (403, 413, 415, 422)


def test_strangers_send_small_forms_only(lab: LiveLab) -> None:
    token, stranger = agents.create_api_token(lab.store, "ann", Role.READ), client(lab)
    for path in ("/login", "/logout"):
        answer = stranger.post(path, data={"token": token, "next": "/" + "x" * 5000}, headers={"Origin": HOST})
        assert answer.status_code == 413, path
    assert log_in(stranger, token, next="/studies?x=" + "x" * 900).status_code == 303


def test_a_long_address_is_not_returned_to_after_the_login(lab: LiveLab) -> None:
    stranger = client(lab)
    assert "next=" in stranger.get("/studies?x=" + "x" * 500, headers=HTML).headers["Location"]
    assert stranger.get("/studies?x=" + "x" * 2000, headers=HTML).headers["Location"] == "/login"


PROXIES = AccessRules(proxies=(ip_network("10.0.0.1"), ip_network("10.1.0.0/24")), proxy_roles={"boss": Role.ADMIN})


def test_only_configured_proxies_name_users(lab: LiveLab) -> None:
    named = {"X-Forwarded-User": "carol"} | HTML
    for peer in ("10.0.0.1", "::ffff:10.0.0.1", "10.1.0.77"):
        assert "carol (read)" in client(lab, PROXIES, peer=peer).get("/studies", headers=named).text, peer
    for peer in ("10.0.0.2", "10.1.1.1", "::1"):
        assert client(lab, PROXIES, peer=peer).get("/studies", headers=named).status_code == 303, peer
    assert client(lab, PROXIES, peer="10.0.0.1").get("/studies", headers=HTML).status_code == 303
    assert client(lab, peer="10.0.0.1").get("/studies", headers=named).status_code == 303


def test_a_proxy_names_users_in_utf_8(lab: LiveLab) -> None:
    rules = AccessRules(proxies=PROXIES.proxies, proxy_roles={"müller": Role.OPERATE})
    sent = [(b"X-Forwarded-User", "müller".encode()), (b"Accept", b"text/html")]
    assert "müller (operate)" in client(lab, rules, peer="10.0.0.1").get("/studies", headers=sent).text


@pytest.mark.parametrize("names", [("boss", "guest"), ("guest", "boss"), ("boss", "boss"), ("", "boss")])
def test_a_request_in_which_a_proxy_names_two_users_is_refused(lab: LiveLab, names: tuple[str, str]) -> None:
    sent = [("X-Forwarded-User", name) for name in names]
    answer = client(lab, PROXIES, peer="10.0.0.1").get("/studies", headers=sent)
    assert answer.status_code == 400 and "more than once" in answer.json()["error"]
    # Of others the header means nothing.
    assert client(lab, PROXIES, peer="10.0.0.2").get("/studies", headers=sent).status_code == 401


def test_a_reader_ends_nobodys_session_but_its_own(lab: LiveLab) -> None:
    admin = agents.create_api_token(lab.store, "boss", Role.ADMIN)
    reader = agents.create_api_token(lab.store, "guest", Role.READ)
    sessions = Sessions(lab.store)
    of_admin, of_reader = sessions.open(admin), sessions.open(reader)
    assert of_admin and of_reader
    newer = [sessions.open(reader) for _ in range(SESSIONS_OF_ONE)]
    assert sessions.token(of_admin) and sessions.token(of_reader) is None
    assert all(id and sessions.token(id) for id in newer)


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost:1", "localhost", "[::1]:8000", "LOCALHOST:8000"])
def test_on_loopback_everybody_may_look(local: TestClient, host: str) -> None:
    assert local.get("/studies", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil:80", ""]
)
@pytest.mark.parametrize("path", [*PAGES, "/login", "/assets/dashboard.js", "/"])
def test_another_name_for_loopback_is_refused(local: TestClient, path: str, host: str) -> None:
    answer = local.get(path, headers={"Host": host})
    assert answer.status_code == 421 and "tiny" not in answer.text


@pytest.mark.parametrize(
    "path",
    ["/studies", "/studies.json", "/login", "/assets/dashboard.css", "/studies/none/points", "/studies?before=x", "/"],
)
def test_every_answer_has_the_security_headers(local: TestClient, path: str) -> None:
    for accept in ("text/html", "*/*"):
        answer = local.get(path, headers={"Accept": accept})
        assert answer.headers["Content-Security-Policy"] == CONTENT_SECURITY_POLICY
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Referrer-Policy"] == "same-origin"
        assert answer.headers["Cache-Control"] in ("no-store", "no-cache")


def test_the_policy_allows_nothing_inline_and_no_other_host() -> None:
    rules = dict(part.strip().split(" ", 1) for part in CONTENT_SECURITY_POLICY.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == rules["form-action"] == "'self'"
    assert rules["frame-ancestors"] == rules["base-uri"] == "'none'"
    assert "unsafe" not in CONTENT_SECURITY_POLICY and "http" not in CONTENT_SECURITY_POLICY


def test_it_is_served_on_this_machine(lab: LiveLab) -> None:
    with dashboard_here(lab.store) as url, httpx.Client() as browser:
        assert "tiny" in browser.get(url, headers=HTML).text
        assert browser.get(url, headers={"Host": "evil.example"}).status_code == 421
        assert browser.post(url).status_code == 405
