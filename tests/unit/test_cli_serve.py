"""`nas serve`: parsing of --proxy-role, and the access it grants."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_runner import nas
from dashboard_lab import HTML, DashboardLab, Inputs

from nas.cli.serve import proxy_networks, proxy_roles
from nas.core.errors import InvalidInput
from nas.infra.store import studies
from nas.infra.store.rows import Role
from nas.serve.dashboard.access import AccessRules


def test_roles_are_given_by_name() -> None:
    assert proxy_roles([]) == {}
    roles = ["ann=admin", "bob=operate", "cn=carol,ou=lab=read"]
    assert proxy_roles(roles) == {"ann": Role.ADMIN, "bob": Role.OPERATE, "cn=carol,ou=lab": Role.READ}


@pytest.mark.parametrize(
    ("roles", "problem"),
    [
        (["ann"], "is not USER=ROLE"),
        (["=admin"], "is not USER=ROLE"),
        (["ann=admn"], "did you mean 'admin'"),
        (["ann=read", "ann=admin"], "already has role read"),
    ],
)
def test_malformed_roles_are_rejected(roles: list[str], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        proxy_roles(roles)


def test_roles_without_a_proxy_are_refused() -> None:
    done = nas("serve", "--proxy-role", "ann=admin")
    assert done.code == 3 and "--proxy-role" in done.err and "--proxy" in done.err


@pytest.mark.parametrize("text", ["localhost", "10.0.0.300", "10.0.0.1/24", "", "0.0.0.0/0", "::/0", "10.0.0.1:80"])
def test_a_proxy_that_never_matches_or_is_everybody_is_refused(text: str) -> None:
    done = nas("serve", "--proxy", text)
    assert done.code == 3 and done.err.startswith("nas: --proxy: ")


def test_proxies_are_addresses_and_networks() -> None:
    networks = proxy_networks(["10.0.0.5", "10.1.0.0/24", "fd00::/64", "::ffff:10.0.0.6"])
    assert [str(network) for network in networks] == ["10.0.0.5/32", "10.1.0.0/24", "fd00::/64", "10.0.0.6/32"]


def test_proxy_users_have_their_roles(tmp_path: Path) -> None:
    rules = AccessRules(proxies=proxy_networks(["10.0.0.1"]), proxy_roles=proxy_roles(["ann=operate"]))
    lab = DashboardLab(tmp_path, rules)
    study = lab.study()
    visitor = lab.stranger("10.0.0.1")
    for user, status in (("bob", 403), ("ann", 303)):
        named = {"X-Forwarded-User": user, "Origin": str(visitor.base_url)} | HTML
        token = Inputs(visitor.get("/studies", headers=named).text).fields.get("form_token", "")
        answer = visitor.post("/studies/study/pause", data={"form_token": token}, headers=named)
        assert answer.status_code == status, answer.text
    assert studies.get(lab.store, study).desired_state == "pause"
