"""`nas token`, on a real database."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runner import nas

from nas.infra.store import agents
from nas.infra.store.rows import Role
from nas.infra.store.store import Store
from nas.serve.api.serve import ADDRESS_FILE, Address

pytestmark = pytest.mark.usefixtures("home")


def test_a_token_is_shown_once_listed_without_its_secret_and_revoked() -> None:
    token = nas("token", "create", "laptop", "--role", "operate").out.strip()
    store = Store.open()
    api_token = agents.authenticate_api_token(store, token)
    assert api_token is not None
    assert (api_token.name, api_token.role) == ("laptop", Role.OPERATE)
    listed = nas("token", "list", "--json").out
    (row,) = json.loads(listed)["tokens"]
    assert (row["name"], row["role"]) == ("laptop", "operate")
    database = (store.artifacts.parent / "hilnas.db").read_bytes().decode("latin-1")
    assert token.rpartition(".")[2] not in listed + nas("token", "list").out + database
    assert nas("token", "revoke", "laptop").code == 0
    assert agents.authenticate_api_token(store, token) is None
    store.close()


def test_the_users_command_names_the_coordinator_that_ran_here(home: Path) -> None:
    assert "nas server add https://HOST:7711 --token -" in nas("token", "create", "ann").err
    ran = Address(url="https://farm.example:7811", ca_sha256="0" * 64)
    for address, url in (
        (ran, ran.url),
        (ran.model_copy(update={"web_url": "https://farm.example"}), "https://farm.example"),
    ):
        (home / ADDRESS_FILE).write_text(address.model_dump_json())
        assert f"nas server add {url} --token -" in nas("token", "create", f"user-{len(url)}").err


def test_the_default_role_can_look_only_and_names_are_unique() -> None:
    assert nas("token", "create", "laptop").code == 0
    assert json.loads(nas("token", "list", "--json").out)["tokens"][0]["role"] == "read"
    done = nas("token", "create", "laptop")
    assert (done.code, done.out) == (3, "")
    assert nas("token", "create", "../x").code == 3
    assert "'laptop'" in nas("token", "revoke", "latpop").err
