"""The coordinator's certificates: a private authority, the server's certificate, its renewal and its names.

Agents pin the authority by its fingerprint, so no public authority is needed, and a new server certificate does not
affect them. Both are in `$NAS_HOME/tls`, each with its key in one file, which is replaced atomically. Browsers can be
given a certificate of the operator's own, on another port.
"""

from __future__ import annotations

import datetime
import ipaddress
import logging
import re
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from nas.core.clock import Clock
from nas.core.durable import locked, read_private, write_durably
from nas.core.errors import InfrastructureFailed, InvalidInput, NasError

log = logging.getLogger(__name__)
CA_FILE = "ca.pem"
SERVER_FILE = "server.pem"
_LABEL = r"\w([\w-]{0,61}\w)?"
_HOST_NAME = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*", re.ASCII)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_DAY = datetime.timedelta(days=1)
_CA_VALID = 20 * 365 * _DAY
_SERVER_VALID = 400 * _DAY
_RENEW = 100 * _DAY
"""Remaining validity at which a server certificate is renewed."""
_BACKDATED = 365 * _DAY
"""Certificates are valid from the past: the clock of an agent's host without a battery may be late."""


@dataclass(frozen=True)
class _Issued:
    """A certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def to_pem(self) -> bytes:
        private = self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return private + self.certificate.public_bytes(Encoding.PEM)


class Certificates:
    """The certificates of one home. Safe for several processes at once.

    Args:
        home: of the coordinator.
        clock: dates certificates.

    Raises:
        InfrastructureFailed: the authority's file cannot be read, is damaged, or others on this machine may read it.
            It is never replaced automatically, because every agent would have to enrol again.
    """

    def __init__(self, home: Path, clock: Clock) -> None:
        self._folder, self._clock = home / "tls", clock
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._locked():
            self._ca = self._open_ca()

    @property
    def ca_pem(self) -> str:
        """The authority's certificate, without its key."""
        return self._ca.certificate.public_bytes(Encoding.PEM).decode()

    @property
    def ca_sha256(self) -> str:
        """Its fingerprint: SHA-256 of the DER form, 64 hex digits."""
        return self._ca.certificate.fingerprint(hashes.SHA256()).hex()

    def server(self, names: Sequence[str]) -> Path:
        """Returns the server's certificate and key (PEM) for host names and addresses, renewed if one is missing."""
        required = {_general_name(name) for name in names}
        path = self._folder / SERVER_FILE
        with self._locked():
            issued = _read(path)
            if issued is None or not self._serves(issued.certificate, required):
                write_durably(path, self._issue(required).to_pem())
        return path

    def context(self, names: Sequence[str]) -> ssl.SSLContext:
        """Returns a server's TLS settings, with an up-to-date certificate."""
        context = _server_context()
        context.load_cert_chain(self.server(names))
        return context

    def _locked(self) -> AbstractContextManager[None]:
        return locked(self._folder / "lock")

    def _open_ca(self) -> _Issued:
        path = self._folder / CA_FILE
        ca = _read(path)
        if ca is None:
            ca = self._make_ca()
            write_durably(path, ca.to_pem())
        return ca

    def _make_ca(self) -> _Issued:
        key = ec.generate_private_key(ec.SECP256R1())
        name = _named("hilnas coordinator")
        usage = _usage(key_cert_sign=True, crl_sign=True)
        certificate = (
            self._builder(key, name, _CA_VALID)
            .issuer_name(name)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(key, hashes.SHA256())
        )
        return _Issued(certificate, key)

    def _issue(self, names: set[x509.GeneralName]) -> _Issued:
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._ca.key.public_key())
        certificate = (
            self._builder(key, _named("hilnas server"), _SERVER_VALID)
            .issuer_name(self._ca.certificate.subject)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(issuer, critical=False)
            .add_extension(x509.SubjectAlternativeName(sorted(names, key=repr)), critical=False)
            .sign(self._ca.key, hashes.SHA256())
        )
        return _Issued(certificate, key)

    def _builder(
        self, key: ec.EllipticCurvePrivateKey, subject: x509.Name, valid: datetime.timedelta
    ) -> x509.CertificateBuilder:
        now, public = self._now(), key.public_key()
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _BACKDATED)
            .not_valid_after(now + valid)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        )

    def _serves(self, certificate: x509.Certificate, required: set[x509.GeneralName]) -> bool:
        try:
            certificate.verify_directly_issued_by(self._ca.certificate)
        except (ValueError, InvalidSignature):
            return False
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return required <= set(names) and certificate.not_valid_after_utc - self._now() > _RENEW

    def _now(self) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(self._clock.now(), datetime.UTC)


@dataclass(frozen=True)
class OwnCertificate:
    """A certificate of the operator's own, for people who connect with a browser.

    Args:
        chain: PEM file of the certificate, then those that issued it.
        key: PEM file of its key, without a password.
    """

    chain: Path
    key: Path

    def context(self) -> ssl.SSLContext:
        """Returns a server's TLS settings, read from the files again.

        Raises:
            InvalidInput: a file cannot be read, has no certificate or key, or the key is not the certificate's.
        """
        context = _server_context()
        try:
            # Without `password` OpenSSL would ask on the terminal.
            context.load_cert_chain(self.chain, self.key, password=lambda: "")
        except ssl.SSLError as error:
            why = f"{self.chain}, {self.key}: no certificate with its key in PEM without a password ({error.reason})"
            raise InvalidInput(why, where="--cert, --key") from error
        except OSError as error:
            # The error names no file: OpenSSL opens both.
            why = f"{self.chain} or {self.key}: {error.strerror}"
            raise InvalidInput(why, where="--cert, --key") from error
        return context

    def host(self) -> str | None:
        """Returns the first host name in the certificate; None if it has only addresses and wildcards."""
        certificate = x509.load_pem_x509_certificate(self.chain.read_bytes())
        try:
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except x509.ExtensionNotFound:
            return None
        return next((name for name in names.get_values_for_type(x509.DNSName) if _HOST_NAME.fullmatch(name)), None)


class Renewal:
    """TLS settings with a thread that renews the certificate while the context is open.

    Args:
        issue: returns the settings with a valid certificate; called at each check, because certificates expire and a
            machine's addresses change.
        every_s: seconds between checks.
    """

    def __init__(self, issue: Callable[[], ssl.SSLContext], *, every_s: float = 3600.0) -> None:
        self._issue, self._every_s = issue, every_s
        self._newest = issue()
        self.context = self._newest
        """For the server. New connections get the newest certificate; open ones keep theirs."""
        self.context.sni_callback = self._switch
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="certificate", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _switch(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._newest

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                self._newest = self._issue()
            except (NasError, OSError) as error:
                log.warning("the server's certificate cannot be renewed: %s", error)


def names_of(host: str, more: Sequence[str] = ()) -> list[str]:
    """Returns the names in the certificate of a server that listens on `host`: `more`, and those of its host."""
    if is_wildcard(host):
        # A machine may have any name, also one that no certificate can hold.
        host_name = socket.gethostname()
        return [*more, *([host_name] if _HOST_NAME.fullmatch(host_name) else []), *_LOOPBACK, *own_addresses()]
    return [*more, *(_LOOPBACK if host in _LOOPBACK else (host,))]


def url_of(listening: socket.socket, host: str, more: Sequence[str] = ()) -> str:
    """Returns the URL to announce: with the first of `more`, else with an address that other machines can reach.

    Args:
        listening: the server's socket.
        host: that it was asked to listen on, a name or an address.
        more: names given by the operator.
    """
    bound, port = listening.getsockname()[:2]
    if more:
        name = more[0]
    elif is_wildcard(bound):
        only_6 = listening.family == socket.AF_INET6 and listening.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
        version = 4 if listening.family == socket.AF_INET else 6 if only_6 else None
        usable = [address for address in own_addresses(version) if address not in _LOOPBACK]
        name = next(iter(usable), "localhost")
    else:
        name = host
    return f"https://[{name}]:{port}" if ":" in name else f"https://{name}:{port}"


def is_wildcard(host: str) -> bool:
    """Returns whether who listens on a host listens on all interfaces."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def own_addresses(version: int | None = None) -> list[str]:
    """Returns the addresses of this machine's interfaces, IPv4 first, without link-local ones.

    Args:
        version: 4 or 6; None for both.
    """
    every = {card.address for cards in psutil.net_if_addrs().values() for card in cards if card.family in _FAMILIES}
    parsed = [ipaddress.ip_address(address) for address in every if "%" not in address]
    addresses = [ip for ip in parsed if not ip.is_link_local and version in (None, ip.version)]
    return [str(ip) for ip in sorted(addresses, key=lambda ip: (ip.version, int(ip)))]


def _server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _read(path: Path) -> _Issued | None:
    pem = read_private(path)
    if pem is None:
        return None
    try:
        key, certificate = load_pem_private_key(pem, password=None), x509.load_pem_x509_certificate(pem)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InfrastructureFailed(
            f"{path} is damaged: restore it, or remove it for a new one"
            + ("; every agent must then enrol again" if path.name == CA_FILE else "")
        )
    return _Issued(certificate, key)


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    if not _HOST_NAME.fullmatch(name):
        raise InvalidInput(f"{name!r} is neither a host name nor an IP address", where="--name")
    return x509.DNSName(name.lower())


def _named(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _usage(**uses: bool) -> x509.KeyUsage:
    every = (
        "digital_signature content_commitment key_encipherment data_encipherment key_agreement key_cert_sign crl_sign"
        " encipher_only decipher_only"
    )
    return x509.KeyUsage(**{use: uses.get(use, False) for use in every.split()})
