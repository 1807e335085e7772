"""How a host becomes an agent of a coordinator, and what it keeps of that.

A person carries one line from the coordinator to the host (`nas.core.enrolment.Invitation`). The CA certificate is
fetched from whoever answers, and believed only if it has the fingerprint in the line; from then on nothing else is
believed, and only then is the token sent.
"""

from __future__ import annotations

import hashlib
import hmac
import ssl
from pathlib import Path

import httpx
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from nas.core.durable import locked, write_durably
from nas.core.enrolment import Invitation
from nas.core.errors import InfrastructureFailed, InvalidInput, NasError
from nas.core.manifest import PublicKey
from nas.core.protocol import CA_PATH, AgentName, Authority, EnrolRequest
from nas.devices.client import JobClient, NotTheCoordinator

FILE = "enrolment.json"

_TIMEOUT_S = 10.0
_MAX_CERTIFICATE = 1 << 16


class Enrolment(BaseModel):
    """What a host keeps: where its coordinator is, how to know it, and how to prove who this is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    v: int = Field(1, ge=1, le=1)
    url: str
    ca: str = Field(description="the coordinator's CA certificate, PEM")
    name: AgentName
    secret: str = Field(repr=False)
    signing_key: PublicKey
    authority: Authority

    def client(self) -> JobClient:
        """Speaks to the coordinator as this agent."""
        return JobClient.open(self.url, auth=(self.name, self.secret), verify=trusting(self.ca))


def read_enrolment(folder: Path) -> Enrolment | None:
    """The enrolment kept in `folder`, if there is one.

    Raises:
        InfrastructureFailed: it cannot be read, or is damaged.
    """
    path = folder / FILE
    try:
        return Enrolment.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InfrastructureFailed(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        raise InfrastructureFailed(f"{path} is damaged; enrol this host again with 'nas agent enrol LINE'") from error


def enrol(invitation: Invitation, name: str, folder: Path, *, replace: bool = False) -> Enrolment:
    """Exchanges the invitation's token for a secret and keeps it, mode 0600.

    Args:
        invitation: the line that a person carried.
        name: of the agent, from now on.
        folder: where the enrolment is kept; made if missing.
        replace: whether an earlier enrolment of this host may be given up.

    Raises:
        InvalidInput: this host is enrolled, or whoever answers is not the coordinator of the line.
        InfrastructureFailed: nobody answers, or the disk failed.
        NasError: the coordinator refuses.
    """
    _check_name(name)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Also shows, before anything is spent, that something can be written here.
    with locked(folder / "enrolment.lock"):
        earlier = None if replace else read_enrolment(folder)
        if earlier is not None:
            raise InvalidInput(
                f"this host is enrolled as {earlier.name!r} with {earlier.url}; --replace gives that up "
                f"({folder / FILE})"
            )
        ca = _fetch_ca(invitation)
        enrolment = _exchange(invitation, name, ca)
        write_durably(folder / FILE, enrolment.model_dump_json(indent=2).encode() + b"\n")
    return enrolment


def trusting(ca: str) -> ssl.SSLContext:
    """TLS with servers of this one CA, under the names in their certificates; no other CA of the world counts."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=ca)
    return context


def _check_name(name: str) -> None:
    try:
        TypeAdapter(AgentName).validate_python(name)
    except ValidationError:
        raise InvalidInput(
            f"{name!r} is no agent name: up to 64 letters, digits, '.', '_' and '-'", where="--name"
        ) from None


def _fetch_ca(invitation: Invitation) -> str:
    """The certificate with the fingerprint of the line, PEM. What was fetched beside it is dropped."""
    told = _fetch_untrusted(invitation.url + CA_PATH)
    try:
        certificate = x509.load_pem_x509_certificate(told)
    except ValueError:
        raise InvalidInput(f"{invitation.url} is no hilnas coordinator: it shows no CA certificate") from None
    shown = hashlib.sha256(certificate.public_bytes(Encoding.DER)).hexdigest()
    if not hmac.compare_digest(shown, invitation.ca_sha256):
        raise InvalidInput(
            f"{invitation.url} shows the CA {shown[:16]}, but the line is for {invitation.ca_sha256[:16]}: somebody "
            "stands in between, or the coordinator was set up anew. Nothing was sent; get another line with "
            "'nas agent token' there"
        )
    return certificate.public_bytes(Encoding.PEM).decode()


def _fetch_untrusted(url: str) -> bytes:
    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    told = b""
    try:
        with (
            httpx.Client(verify=anybody, timeout=_TIMEOUT_S, trust_env=False) as http,
            http.stream("GET", url, headers={"Accept-Encoding": "identity"}) as response,
        ):
            for chunk in response.iter_raw():
                told += chunk
                if len(told) > _MAX_CERTIFICATE:
                    raise InvalidInput(f"{url}: says more than a certificate")
    except httpx.HTTPError as error:
        raise InfrastructureFailed(f"{url}: {error or type(error).__name__}") from error
    return told


def _exchange(invitation: Invitation, name: str, ca: str) -> Enrolment:
    client = JobClient.open(invitation.url, verify=trusting(ca))
    try:
        reply = client.enrol(EnrolRequest(token=invitation.token, agent=name))
    except NotTheCoordinator as error:
        raise InvalidInput(f"{error}. The token was not sent") from error
    except InfrastructureFailed as error:
        raise InfrastructureFailed(
            f"{error}. Try again; if the token is then told to be used, the reply was lost on its way: {_again(name)}"
        ) from error
    except NasError as error:
        raise InvalidInput(
            f"{error}. If an earlier try on this host broke off, it may have spent the token: {_again(name)}"
        ) from error
    finally:
        client.close()
    return Enrolment(
        url=invitation.url,
        ca=ca,
        name=name,
        secret=reply.secret,
        signing_key=reply.signing_key,
        authority=reply.authority,
    )


def _again(name: str) -> str:
    return f"get another line with 'nas agent token --name {name}' and enrol with it, which replaces what was lost"
