"""Why a server's certificate was not believed, and what mends that."""

from __future__ import annotations

import contextlib
import socket
import ssl
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

_TIMEOUT_S = 10.0
_OTHER_NAME = frozenset({62, 64})
_OTHER_TIME = frozenset({9, 10})
"""OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and _IP_ADDRESS_MISMATCH; _CERT_NOT_YET_VALID and _CERT_HAS_EXPIRED."""


@dataclass(frozen=True, slots=True)
class CertificateFault:
    """What is wrong.

    Args:
        why: with the remedy.
        lasting: another try cannot help.
    """

    why: str
    lasting: bool

    def __str__(self) -> str:
        return self.why


def certificate_fault(error: BaseException, url: str, context: ssl.SSLContext | None) -> CertificateFault | None:
    """What kept a connection from being made, where that was the certificate of a coordinator.

    Args:
        error: of the connection.
        url: that was wanted.
        context: whom the client believes; None: nobody was asked for a certificate.
    """
    found = _certificate_error(error)
    if found is None or context is None:
        return None
    if found.verify_code in _OTHER_NAME:
        return CertificateFault(_other_name(url, context), lasting=True)
    if found.verify_code in _OTHER_TIME:
        why = f"{url}: {found.verify_message}: compare the clocks of both machines; 'nas serve' renews its certificate"
        return CertificateFault(why, lasting=False)
    why = (
        f"{url}: {found.verify_message}: whoever answers there has no certificate of the authority that was pinned. "
        "Somebody stands in between, or the coordinator was set up anew: then enrol again with a line of 'nas agent "
        "token' ('nas server add' for people)"
    )
    return CertificateFault(why, lasting=True)


def _other_name(url: str, context: ssl.SSLContext) -> str:
    host = urlsplit(url).hostname
    names = _names(url, context)
    told = f"is for {', '.join(names)}, not for {host}" if names else f"is not for {host}"
    other = ", or use one of these names (an agent: with a line of 'nas agent token --url')" if names else ""
    return f"{url}: the coordinator's certificate {told}. Start it with 'nas serve --name {host}'{other}"


def _names(url: str, context: ssl.SSLContext) -> list[str]:
    """The names in the certificate, which must be of an authority that `context` believes; none where it is not."""
    whoever = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    whoever.check_hostname = False
    for authority in context.get_ca_certs(binary_form=True):
        whoever.load_verify_locations(cadata=authority)
    parts = urlsplit(url)
    with (
        contextlib.suppress(OSError),
        socket.create_connection((parts.hostname or "", parts.port or 443), _TIMEOUT_S) as plain,
        whoever.wrap_socket(plain) as tls,
    ):
        shown: Any = (tls.getpeercert() or {}).get("subjectAltName", ())
        return [str(name) for kind, name in shown if kind in ("DNS", "IP Address")]
    return []


def _certificate_error(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error
