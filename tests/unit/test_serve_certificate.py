"""A certificate of the operator's own for people: `nas serve --cert --key`, and `nas server add` with it."""

from __future__ import annotations

import json
import ssl
from pathlib import Path

import httpx
import pytest
from api_lab import Lab
from cli_runner import nas
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from farm_support import Coordinator
from server_lab import Certificates, serve

from nas.core.clock import SystemClock
from nas.core.errors import InvalidInput
from nas.infra.store.rows import Role
from nas.infra.web.tls import Certificates as Authority
from nas.infra.web.tls import OwnCertificate, Renewal
from nas.serve.client import known_servers


def certificate(folder: Path) -> OwnCertificate:
    folder.mkdir(exist_ok=True)
    certificates = Certificates(folder)
    return OwnCertificate(certificates.certificate, certificates.key)


def test_both_files_are_needed() -> None:
    for option in ("--cert", "--key"):
        done = nas("serve", option, "file.pem")
        assert done.code == 3 and "give both the certificate and its key" in done.err


@pytest.mark.parametrize("fault", ["missing", "other key", "no certificate", "password"])
def test_files_that_cannot_be_used_are_named(tmp_path: Path, fault: str) -> None:
    good = certificate(tmp_path)
    other = certificate(tmp_path / "other")
    locked, text = tmp_path / "locked.key", tmp_path / "text.pem"
    text.write_text("no certificate")
    private = load_pem_private_key(good.key.read_bytes(), password=None)
    locked.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))
    bad = {
        "missing": OwnCertificate(tmp_path / "missing.pem", good.key),
        "other key": OwnCertificate(good.chain, other.key),
        "no certificate": OwnCertificate(text, good.key),
        "password": OwnCertificate(good.chain, locked),
    }[fault]
    with pytest.raises(InvalidInput) as caught:
        bad.context()
    assert str(bad.chain) in str(caught.value) and str(bad.key) in str(caught.value)
    good.context()


def test_the_name_for_people_is_the_first_host_name_of_the_certificate(tmp_path: Path) -> None:
    def host(*names: str) -> str | None:
        file = Authority(tmp_path / names[-1], SystemClock()).server(names)
        return OwnCertificate(file, file).host()

    assert host("192.0.2.7", "farm.example") == "farm.example"
    assert host("192.0.2.7") is None


def test_a_renewed_certificate_is_read_while_serving(tmp_path: Path) -> None:
    lab = Coordinator(tmp_path)
    first = Authority(tmp_path / "a", SystemClock())
    second = Authority(tmp_path / "b", SystemClock())
    file = tmp_path / "own.pem"
    file.write_bytes(first.server(["localhost"]).read_bytes())
    trust = ssl.create_default_context(cadata=second.ca_pem)
    with (
        Renewal(OwnCertificate(file, file).context, every_s=0.01) as renewal,
        lab.listening(renewal.context) as url,
    ):
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            httpx.get(f"{url}/v1/ca", verify=trust, timeout=60)
        file.write_text("half written")
        new = tmp_path / "new.pem"
        new.write_bytes(second.server(["localhost"]).read_bytes())
        new.replace(file)
        while True:
            try:
                assert httpx.get(f"{url}/v1/ca", verify=trust, timeout=60).status_code == 200
            except httpx.ConnectError:
                continue  # not read yet
            break


def test_a_server_that_the_system_trusts_is_added_without_a_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NAS_CONFIG", str(tmp_path / "config"))
    (tmp_path / "tls").mkdir()
    certificates, lab = Certificates(tmp_path / "tls"), Lab(tmp_path)
    trusted = tmp_path / "trusted.pem"
    trusted.write_text(certificates.ca_pem)
    token = f"{lab.tokens[Role.READ]}\n"
    try:
        with serve(lab, certificates) as url:
            done = nas("server", "add", url, stdin=token)
            assert (done.code, "give the CA fingerprint" in done.err) == (3, True)
            monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
            done = nas("server", "add", url, stdin=token)
            assert done.code == 0, done.err
            assert known_servers()[url].ca_pem is None
            (row,) = json.loads(nas("server", "list", "--json").out)["servers"]
            assert row == {"url": url, "fingerprint": None}
            assert "trusted by the system" in nas("server", "list").out
            assert nas("study", "list", "--server", url).code == 0
            monkeypatch.delenv("SSL_CERT_FILE")
            done = nas("study", "list", "--server", url)
            assert (done.code, "certificate verify failed" in done.err) == (4, True)
    finally:
        lab.process.end()
