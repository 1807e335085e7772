"""Trust between a coordinator and its clients: invitations, certificates, and the signed list of runners.

An invitation is one line of text that a person copies from the coordinator to a new agent, valid for one enrolment. It
holds the coordinator's URL, the fingerprint of its certificate authority, and a one-time secret. So the agent verifies
the coordinator before it sends anything, without any public certificate authority.

The manifest lists the runners that agents may run. The coordinator signs its text, so that an agent checks it against
the key it pinned before it parses anything: `nas.measure.farm.trust` signs, `nas.measure.devices.agent.trust` checks.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import re
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ConfigDict, Field

from nas.core.canonical import canonical_json
from nas.core.errors import InfrastructureFailed, InvalidInput
from nas.core.plan import Runner

PublicKey = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""An Ed25519 public key (RFC 8032), its 32 bytes as hex digits."""

_CONTEXT = b"hilnas runner manifest\n"
"""Prefix of the signed bytes, so that a signature for another purpose is not valid for a manifest."""
_PREFIX = "hilnas-enrol."
_SHA256 = re.compile(r"[0-9a-f]{64}")
_TIMEOUT_S = 10.0
_MOST_BYTES = 1 << 16
"""Of a certificate."""
_OTHER_NAME = frozenset({62, 64})
_OTHER_TIME = frozenset({9, 10})
"""OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and _IP_ADDRESS_MISMATCH; _CERT_NOT_YET_VALID and _CERT_HAS_EXPIRED."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """A parsed enrolment line.

    Args:
        url: `https://host:port` of the coordinator.
        ca_sha256: fingerprint of its CA certificate: SHA-256 of the DER form, 64 hex digits.
        token: the one-time secret.
    """

    url: str
    ca_sha256: str
    token: str

    def format(self) -> str:
        """Returns the line: three fields, base64url of UTF-8, without padding."""
        packed = "\n".join((self.url, self.ca_sha256, self.token)).encode()
        return _PREFIX + base64.urlsafe_b64encode(packed).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> Invitation:
        """Reads what `format` wrote; surrounding white space is ignored.

        Raises:
            InvalidInput: it is damaged, or something else.
        """
        packed = text.strip().removeprefix(_PREFIX)
        try:
            url, ca_sha256, token = (
                base64.b64decode(packed + "=" * (-len(packed) % 4), altchars=b"-_", validate=True).decode().split("\n")
            )
            scheme = urlsplit(url).scheme
        except (binascii.Error, ValueError):
            raise InvalidInput(f"incomplete enrolment line: it begins with {_PREFIX} and has no spaces") from None
        if scheme != "https" or not _SHA256.fullmatch(ca_sha256) or not token:
            raise InvalidInput("the enrolment line is damaged; get another one with 'nas agent token'")
        return cls(url, ca_sha256, token)


@dataclass(frozen=True, slots=True)
class CertificateFault:
    """Why a certificate was refused.

    Args:
        why: the reason and its remedy.
        lasting: a retry cannot help.
    """

    why: str
    lasting: bool

    def __str__(self) -> str:
        return self.why


class RunnerManifest(BaseModel):
    """Every runner that agents may run, as whole records: another file, name or main is another runner.

    `serial` increases with every issue. An agent refuses manifests older than the newest that it has seen.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    v: Literal[1] = 1
    serial: int = Field(ge=1)
    issued_at: float = Field(description="seconds since the epoch, by the coordinator's clock")
    runners: tuple[Runner, ...]

    def to_text(self) -> str:
        """Returns the canonical JSON, which is signed."""
        return canonical_json(self.model_dump(mode="json"))


class SignedManifest(BaseModel):
    """A manifest's text with its signature, which must be verified before the text is used."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    text: str = Field(description="canonical JSON of a `RunnerManifest`")
    key: PublicKey
    signature: str = Field(pattern=r"^[0-9a-f]{128}$", description="Ed25519, of `signed_bytes(text)`")


def signed_bytes(text: str) -> bytes:
    """Returns the bytes that the signature of a manifest with this text covers."""
    return _CONTEXT + text.encode()


def fingerprint(key: str) -> str:
    """Returns the SHA-256 of the public key's 32 bytes, 64 hex digits, which people compare."""
    return hashlib.sha256(bytes.fromhex(key)).hexdigest()


_Client = TypeVar("_Client", httpx.Client, httpx.AsyncClient)


def open_http(url: str, **settings: Any) -> httpx.Client:
    """Returns a client for requests to `url` through the proxy that the environment names, if any.

    Addresses of this machine itself are asked directly: no proxy reaches them.

    Raises:
        InvalidInput: the environment names a proxy that is none, or a file of certificates that cannot be read.
    """
    return _opened(httpx.Client, url, settings)


def open_async_http(url: str, **settings: Any) -> httpx.AsyncClient:
    """Returns the same as `open_http` for coroutines, whose requests can have a deadline as a whole."""
    return _opened(httpx.AsyncClient, url, settings)


def _opened(client: Callable[..., _Client], url: str, settings: Mapping[str, Any]) -> _Client:
    host = (urlsplit(url).hostname or "").removeprefix("[").removesuffix("]")
    try:
        local = host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        local = False
    try:
        return client(trust_env=not local, **settings)
    except (ValueError, ImportError, httpx.InvalidURL) as error:
        names = "$HTTPS_PROXY, $ALL_PROXY, $HTTP_PROXY or $NO_PROXY"
        raise InvalidInput(f"this is no proxy, or no list of hosts: {error}", where=names) from error
    except OSError as error:
        raise InvalidInput(f"cannot read certificates: {error.strerror}", where="$SSL_CERT_FILE") from error


def unverified() -> ssl.SSLContext:
    """Returns a TLS context that accepts every server: what it sends has to be verified otherwise."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def fetch_certificate(http: httpx.Client, url: str) -> tuple[int, bytes]:
    """Returns status and content of an answer, which is read no further than a certificate is long.

    Raises:
        InvalidInput: it is longer.
        InfrastructureFailed: it does not come, or does not end in time.
    """
    content, deadline = b"", time.monotonic() + 2 * _TIMEOUT_S
    try:
        with http.stream("GET", url, headers={"Accept-Encoding": "identity"}) as answer:
            for chunk in answer.iter_raw():
                content += chunk
                if len(content) > _MOST_BYTES:
                    raise InvalidInput(f"{url}: sent more than a certificate")
                if time.monotonic() > deadline:
                    raise InfrastructureFailed(f"{url}: no certificate within {2 * _TIMEOUT_S:g} s")
            return answer.status_code, content
    except httpx.HTTPError as error:
        raise InfrastructureFailed(f"{url}: {error or type(error).__name__}") from error


def is_certificate_error(error: BaseException) -> bool:
    """Returns whether a connection failed because the server's certificate could not be verified."""
    return _certificate_error(error) is not None


def certificate_fault(error: BaseException, url: str, context: ssl.SSLContext | None) -> CertificateFault | None:
    """Returns why a connection failed, where the coordinator's certificate was the cause; else None."""
    fault = _certificate_error(error)
    if fault is None or context is None:
        return None
    if fault.verify_code in _OTHER_NAME:
        return CertificateFault(_other_name(url, context), lasting=True)
    if fault.verify_code in _OTHER_TIME:
        why = f"{url}: {fault.verify_message}: compare the clocks of both machines; 'nas serve' renews its certificate"
        return CertificateFault(why, lasting=False)
    why = (
        f"{url}: {fault.verify_message}: whoever answers there has no certificate of the authority that was pinned. "
        "Somebody intercepts the connection, or the coordinator was set up again: then enrol again with 'nas agent "
        "token' ('nas server add' for people)"
    )
    return CertificateFault(why, lasting=True)


def _other_name(url: str, context: ssl.SSLContext) -> str:
    host = urlsplit(url).hostname
    names = _names(url, context)
    names_it = f"is for {', '.join(names)}, not for {host}" if names else f"is not for {host}"
    other = ", or use one of these names (an agent: with a line of 'nas agent token --url')" if names else ""
    return f"{url}: the coordinator's certificate {names_it}. Start it with 'nas serve --name {host}'{other}"


def _names(url: str, context: ssl.SSLContext) -> list[str]:
    """Returns the names in the certificate if an authority that `context` trusts issued it; else none."""
    any_name = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    any_name.check_hostname = False
    for authority in context.get_ca_certs(binary_form=True):
        any_name.load_verify_locations(cadata=authority)
    parts = urlsplit(url)
    with (
        contextlib.suppress(OSError),
        socket.create_connection((parts.hostname or "", parts.port or 443), _TIMEOUT_S) as plain,
        any_name.wrap_socket(plain) as tls,
    ):
        names: Any = (tls.getpeercert() or {}).get("subjectAltName", ())
        return [str(name) for kind, name in names if kind in ("DNS", "IP Address")]
    return []


def _certificate_error(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error
