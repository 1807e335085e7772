"""The coordinator's certificates, and what a client thinks of them."""

from __future__ import annotations

import ipaddress
import socket
import ssl
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import httpx
import pytest
from cryptography import x509
from farm_support import NAMES, Coordinator
from store_support import StillClock

from nas.core.clock import SystemClock
from nas.core.errors import InfrastructureFailed, InvalidInput
from nas.infra.web.server import listen_tcp
from nas.infra.web.tls import Certificates, Renewal, names_of, own_addresses, url_of

YEAR_S = 365 * 86400.0


def at(seconds: float) -> SystemClock:
    """A clock that stands `seconds` from now."""
    return StillClock(SystemClock().now() + seconds)  # type: ignore[return-value]


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def get(url: str, trust: ssl.SSLContext) -> httpx.Response:
    return httpx.get(f"{url}/v1/ca", verify=trust, timeout=60)


def test_the_authority_is_made_once(tmp_path: Path) -> None:
    authority, again = (Certificates(tmp_path, SystemClock()) for _ in range(2))
    assert authority.ca_pem == again.ca_pem
    assert authority.ca_sha256 == sha256(ssl.PEM_cert_to_DER_cert(authority.ca_pem)).hexdigest()
    assert "PRIVATE" not in authority.ca_pem
    authority.server(NAMES)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "tls").glob("*.pem")}
    assert modes == {"ca.pem": 0o600, "server.pem": 0o600}


@pytest.mark.parametrize("mode", [0o644, 0o640])
def test_an_authority_that_others_may_read_is_not_used(tmp_path: Path, mode: int) -> None:
    Certificates(tmp_path, SystemClock())
    (tmp_path / "tls" / "ca.pem").chmod(mode)
    with pytest.raises(InfrastructureFailed, match="open to others"):
        Certificates(tmp_path, SystemClock())


def test_a_damaged_authority_is_not_replaced(tmp_path: Path) -> None:
    Certificates(tmp_path, SystemClock())
    file = tmp_path / "tls" / "ca.pem"
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(InfrastructureFailed, match="every agent must then enrol again"):
        Certificates(tmp_path, SystemClock())


def test_the_server_certificate_is_kept_until_names_change_or_it_is_due(tmp_path: Path) -> None:
    def issued(names: tuple[str, ...], clock: SystemClock) -> int:
        return certificate(Certificates(tmp_path, clock).server(names)).serial_number

    first = issued(("box.example", "192.0.2.7"), at(0))
    assert issued(("192.0.2.7", "BOX.example"), at(0)) == first
    assert issued(("box.example",), at(0.5 * YEAR_S)) == first
    more = issued(("box.example", "other.example"), at(0))
    assert more != first
    assert issued(("box.example",), at(YEAR_S)) != more


def test_a_certificate_of_another_authority_is_replaced(tmp_path: Path) -> None:
    before = Certificates(tmp_path, SystemClock()).server(NAMES).read_bytes()
    (tmp_path / "tls" / "ca.pem").unlink()
    after = Certificates(tmp_path, SystemClock())
    assert after.server(NAMES).read_bytes() != before
    certificate(after.server(NAMES)).verify_directly_issued_by(x509.load_pem_x509_certificate(after.ca_pem.encode()))


@pytest.mark.parametrize("name", ["", "a b", "https://box", "box:7711", "*.example", "-", "a" * 64, "bücher.example"])
def test_what_is_no_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInput, match="neither a host name nor an IP address"):
        Certificates(tmp_path, SystemClock()).server([name])


def test_names_follow_from_what_a_server_listens_on() -> None:
    assert names_of("127.0.0.1", ["box"]) == ["box", "localhost", "127.0.0.1", "::1"]
    assert names_of("192.0.2.7") == ["192.0.2.7"]
    assert {socket.gethostname(), *own_addresses()} < set(names_of("0.0.0.0", ["box"]))
    assert "127.0.0.1" in own_addresses()
    assert not any(ipaddress.ip_address(address).is_link_local for address in own_addresses())


@pytest.mark.parametrize("name", ["Jörgs-PC", "a" * 64, ""])
def test_a_machine_s_name_that_no_certificate_holds_is_left_out(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: name)
    names = names_of("0.0.0.0")
    assert name not in names
    assert Certificates(tmp_path, SystemClock()).server(names).is_file()


@pytest.mark.parametrize(
    ("host", "more", "url_host"),
    [
        ("0.0.0.0", ["box", "other"], "box"),
        ("127.0.0.1", [], "127.0.0.1"),
        ("::1", [], "[::1]"),
        ("localhost", [], "localhost"),
    ],
)
def test_the_url_has_the_first_name_or_the_host(host: str, more: list[str], url_host: str) -> None:
    with listen_tcp(host, 0) as listening:
        assert url_of(listening, host, more) == f"https://{url_host}:{listening.getsockname()[1]}"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0", "::0"])
def test_the_url_of_all_interfaces_has_an_address_that_answers(host: str) -> None:
    with listen_tcp(host, 0) as listening:
        parts = urlsplit(url_of(listening, host))
        socket.create_connection((parts.hostname or "", parts.port or 0), timeout=10).close()
        if listening.family == socket.AF_INET6:
            for address in ("127.0.0.1", "::1"):
                socket.create_connection((address, parts.port or 0), timeout=10).close()


def test_a_server_of_ipv6_alone_is_announced_by_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = {"eth0": [SimpleNamespace(family=family, address=address) for family, address in
                      ((socket.AF_INET, "192.0.2.2"), (socket.AF_INET6, "fd00::2"))]}  # fmt: skip
    monkeypatch.setattr("psutil.net_if_addrs", lambda: cards)
    for both, url_host in ((True, "192.0.2.2"), (False, "[fd00::2]")):
        with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=both) as listening:
            assert url_of(listening, "::") == f"https://{url_host}:{listening.getsockname()[1]}"


def test_a_client_that_trusts_the_authority_is_served(tmp_path: Path) -> None:
    lab = Coordinator(tmp_path)
    with lab.listening() as url, httpx.Client(verify=lab.trusting(), timeout=60) as client:
        assert client.get(f"{url}/v1/ca").text == lab.certificates.ca_pem
        assert client.get(f"{url.replace('localhost', '127.0.0.1')}/v1/runners").status_code == 401


def test_a_client_turns_away_from_what_it_does_not_trust(tmp_path: Path) -> None:
    lab, other = Coordinator(tmp_path), Certificates(tmp_path / "other", SystemClock())
    with lab.listening() as url:
        for verify, refusal in (
            (ssl.create_default_context(cadata=other.ca_pem), "certificate verify failed"),
            (ssl.create_default_context(), "certificate verify failed"),
        ):
            with pytest.raises(httpx.ConnectError, match=refusal):
                get(url, verify)
        old = lab.trusting()
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(httpx.ConnectError, match="SSL"):
            get(url, old)


@pytest.mark.parametrize(("clock", "names", "refusal"), [
    (at(-2 * YEAR_S), NAMES, "has expired"),
    (at(2 * YEAR_S), NAMES, "not yet valid"),
    (at(0), ("box.example",), "Hostname mismatch"),
], ids=["expired", "early", "another name"])  # fmt: skip
def test_a_certificate_that_is_not_good_now_and_here_is_refused(
    tmp_path: Path, clock: SystemClock, names: tuple[str, ...], refusal: str
) -> None:
    lab = Coordinator(tmp_path)
    wrong = Certificates(tmp_path, clock).context(names)
    with lab.listening(wrong) as url, pytest.raises(httpx.ConnectError, match=refusal):
        get(url, lab.trusting())


def test_a_server_that_runs_on_gets_its_new_certificate(tmp_path: Path) -> None:
    lab = Coordinator(tmp_path)
    names = ["box.example"]
    with (
        Renewal(lambda: lab.certificates.context(names), every_s=0.01) as renewal,
        lab.listening(renewal.context) as url,
    ):
        with pytest.raises(httpx.ConnectError, match="Hostname mismatch"):
            get(url, lab.trusting())
        names.append("localhost")
        while "localhost" not in str(certificate(tmp_path / "tls" / "server.pem").extensions):
            pass
        while True:
            try:
                assert get(url, lab.trusting()).status_code == 200
            except httpx.ConnectError:
                continue  # not switched to yet
            break
