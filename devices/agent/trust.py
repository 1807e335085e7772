"""Trust between agent and coordinator: enrolment, and the pinned manifest of runners.

A person carries one line from the coordinator to the host (`nas.core.trust.Invitation`). The CA certificate is
fetched from whatever answers, and accepted only if it has the fingerprint in the line; from then on only that CA is
trusted, and only then is the token sent. Enrolment also pins the key whose signature every runner manifest must carry.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import ssl
from collections.abc import Callable
from pathlib import Path

import httpx
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from nas.core.clock import Clock, SystemClock
from nas.core.durable import locked, write_durably
from nas.core.errors import InfrastructureFailed, InvalidInput, NasError, Unsupported
from nas.core.plan import Runner
from nas.core.trust import (
    Invitation,
    PublicKey,
    RunnerManifest,
    SignedManifest,
    fetch_certificate,
    fingerprint,
    signed_bytes,
    unverified,
)
from nas.core.wire import CA_PATH, AgentName, Authority, EnrolRequest
from nas.measure.devices.agent.client import JobClient, NotTheCoordinator

FILE = "enrolment.json"

_TIMEOUT_S = 10.0


class Enrolment(BaseModel):
    """A host's record of its coordinator: address, how to authenticate it, and this agent's secret."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    v: int = Field(1, ge=1, le=1)
    url: str
    ca: str = Field(description="the coordinator's CA certificate, PEM")
    name: AgentName
    secret: str = Field(repr=False)
    signing_key: PublicKey
    authority: Authority

    def client(self) -> JobClient:
        """Returns a client that authenticates as this agent."""
        return JobClient.open(self.url, auth=(self.name, self.secret), verify=trusting(self.ca))


def read_enrolment(folder: Path) -> Enrolment | None:
    """Loads the enrolment from `folder`, if there is one.

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
        raise InfrastructureFailed(
            f"{path} is damaged; enrol this host again with 'nas agent enrol LINE --replace'"
        ) from error


def enrol(invitation: Invitation, name: str, folder: Path, *, replace: bool = False) -> Enrolment:
    """Exchanges the invitation's token for a secret and stores it in `folder`, mode 0600.

    Raises:
        InvalidInput: this host is enrolled and `replace` is false, or another server than the coordinator answers.
        InfrastructureFailed: nothing answers, or the disk failed.
        NasError: the coordinator refuses.
    """
    _check_name(name)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Also proves, before the token is spent, that the folder is writable.
    with locked(folder / "enrolment.lock"):
        earlier = None if replace else read_enrolment(folder)
        if earlier is not None:
            raise InvalidInput(
                f"this host is enrolled as {earlier.name!r} with {earlier.url}; --replace overwrites that "
                f"({folder / FILE})"
            )
        ca = _fetch_ca(invitation)
        enrolment = _exchange(invitation, name, ca)
        write_durably(folder / FILE, enrolment.model_dump_json(indent=2).encode() + b"\n")
    return enrolment


def trusting(ca: str) -> ssl.SSLContext:
    """Returns a TLS context that accepts servers of this one CA, under the names in their certificates."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=ca)
    return context


def _check_name(name: str) -> None:
    try:
        TypeAdapter(AgentName).validate_python(name)
    except ValidationError:
        raise InvalidInput(
            f"{name!r} is not an agent name: up to 64 letters, digits, '.', '_' and '-'", where="--name"
        ) from None


def _fetch_ca(invitation: Invitation) -> str:
    """Returns the certificate with the fingerprint of the invitation, PEM."""
    with httpx.Client(verify=unverified(), timeout=_TIMEOUT_S, trust_env=False) as http:
        _, fetched = fetch_certificate(http, invitation.url + CA_PATH)
    try:
        certificate = x509.load_pem_x509_certificate(fetched)
    except ValueError:
        raise InvalidInput(f"{invitation.url} is not a hilnas coordinator: it presents no CA certificate") from None
    digest = hashlib.sha256(certificate.public_bytes(Encoding.DER)).hexdigest()
    if not hmac.compare_digest(digest, invitation.ca_sha256):
        raise InvalidInput(
            f"{invitation.url} presents the CA {digest[:16]}, but the line is for {invitation.ca_sha256[:16]}: "
            "somebody intercepts the connection, or the coordinator was set up again. Nothing was sent; get another "
            "line with 'nas agent token' there"
        )
    return certificate.public_bytes(Encoding.PEM).decode()


def _exchange(invitation: Invitation, name: str, ca: str) -> Enrolment:
    client = JobClient.open(invitation.url, verify=trusting(ca))
    try:
        reply = client.enrol(EnrolRequest(token=invitation.token, agent=name))
    except NotTheCoordinator as error:
        raise InvalidInput(f"{error}. The token was not sent") from error
    except InfrastructureFailed as error:
        raise InfrastructureFailed(
            f"{error}. Try again; if the token then counts as used, the reply was lost: get another line with "
            f"'nas agent token --name {name}' and enrol with it, which replaces the lost one"
        ) from error
    except NasError as error:
        raise InvalidInput(str(error)) from error
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


_DIGITS = 16
"""Digits of a fingerprint in messages."""


FRESH_S = 3600.0
"""Age after which the manifest is fetched again."""


class PinnedManifest:
    """A `KnownRunner`: the runners of the newest signed manifest.

    It is fetched for the first plan after the start, when an unknown runner appears, and after `FRESH_S`, so that a
    runner which the coordinator withdrew is refused. The newest manifest seen is stored with its signature, and an
    older one is not accepted in its place, even after a restart.

    Args:
        fetch: requests the coordinator's manifest.
        key: the coordinator's public key, pinned at enrolment.
        state: folder that outlives the agent; created if missing.
        clock: measures the manifest's age.
    """

    def __init__(
        self, fetch: Callable[[], SignedManifest], key: PublicKey, state: Path, clock: Clock | None = None
    ) -> None:
        if not re.fullmatch(r"[0-9a-f]{64}", key):
            raise InvalidInput(f"public key {key!r}: give 64 hex digits")
        self._fetch, self._key = fetch, key
        state.mkdir(parents=True, exist_ok=True)
        self._memory = state / f"manifest-{fingerprint(key)}.json"
        self._clock = clock or SystemClock()
        self._fetched_at: float | None = None

    def __call__(self, runner: Runner) -> bool:
        """Returns whether the whole record of `runner` is in the newest manifest.

        Raises:
            Unsupported: the coordinator's manifest is not trusted, or it has the build with other files.
            InfrastructureFailed: the coordinator did not answer, or the stored manifest is damaged.
        """
        fresh = self._fetched_at is not None and self._clock.monotonic() - self._fetched_at < FRESH_S
        manifest = self._stored_manifest()
        in_kept = manifest is not None and runner in manifest[1].runners
        if in_kept and fresh:
            return True
        try:
            newest = self._renewed()
        except Unsupported:
            if in_kept:
                return True  # an older manifest withdraws nothing; the coordinator's home may have been restored
            raise
        if runner in newest.runners:
            return True
        for listed in newest.runners:
            if (listed.runtime, listed.build, listed.target) == (runner.runtime, runner.build, runner.target):
                raise Unsupported(_difference(runner, listed, newest.serial))
        return False

    def _renewed(self) -> RunnerManifest:
        signed = self._fetch()
        manifest = verified(signed, self._key)
        self._fetched_at = self._clock.monotonic()
        with locked(self._memory.with_suffix(".lock")):
            last = self._stored_manifest()
            if last is not None and last[0].text == signed.text:
                return manifest
            if last is not None and manifest.serial <= last[1].serial:
                raise Unsupported(
                    f"runner manifest: the coordinator sent number {manifest.serial}, but this agent saw another one, "
                    f"number {last[1].serial}, before: an old manifest was replayed, or the coordinator's home restored"
                )
            write_durably(self._memory, signed.model_dump_json().encode())
        return manifest

    def _stored_manifest(self) -> tuple[SignedManifest, RunnerManifest] | None:
        try:
            signed = SignedManifest.model_validate_json(self._memory.read_bytes())
            return signed, verified(signed, self._key)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise InfrastructureFailed(f"{self._memory}: {error.strerror}") from error
        except (ValidationError, Unsupported) as error:
            raise InfrastructureFailed(
                f"{self._memory}: the last manifest that this agent saw is damaged; remove the file if you know why"
            ) from error


def verified(signed: SignedManifest, key: PublicKey) -> RunnerManifest:
    """Returns the manifest after verifying its signature.

    Raises:
        Unsupported: it was signed with another key, was altered, or is in a form that this agent cannot read.
    """
    if signed.key != key:
        raise Unsupported(
            f"runner manifest: signed with key {fingerprint(signed.key)[:_DIGITS]}, but this agent trusts only "
            f"{fingerprint(key)[:_DIGITS]}"
        )
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(
            bytes.fromhex(signed.signature), signed_bytes(signed.text)
        )
    except InvalidSignature:
        raise Unsupported(
            f"runner manifest: its signature is not by key {fingerprint(key)[:_DIGITS]}: it was altered after signing"
        ) from None
    try:
        return RunnerManifest.model_validate_json(signed.text)
    except ValidationError as error:
        raise Unsupported(f"runner manifest: not in the form that this agent reads: {error}") from error


def _difference(runner: Runner, listed: Runner, serial: int) -> str:
    names = sorted(runner.files.keys() | listed.files.keys())
    files = [name for name in names if runner.files.get(name) != listed.files.get(name)]
    where = ", ".join(files) or "its description"
    return (
        f"runner {runner.runtime} {runner.build[:12]}: not the one in the coordinator's runner manifest "
        f"(number {serial}): it differs in {where}"
    )
