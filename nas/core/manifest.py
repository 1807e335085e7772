"""Which runners agents may run: a list that the coordinator signs and that agents check against the key they pinned.

What is signed is the text of the document, so that an agent checks it before it parses anything. Signing is
`nas.service.signing`, checking is `nas.devices.manifest`.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from nas.core.canonical import canonical_json
from nas.core.plan import Runner

PublicKey = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""An Ed25519 public key (RFC 8032), its 32 bytes as hex digits."""

_CONTEXT = b"hilnas runner manifest\n"
"""Stands before what is signed, so that a signature made for another purpose is none for a manifest."""


class RunnerManifest(BaseModel):
    """Every runner that agents may run, as whole records: another file, another name or another main is another runner.

    `serial` grows with every issue. An agent that saw one refuses all that came before it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    v: Literal[1] = 1
    serial: int = Field(ge=1)
    issued_at: float = Field(description="seconds since the epoch, by the coordinator's clock")
    runners: tuple[Runner, ...]

    def to_text(self) -> str:
        """Canonical JSON, which is what gets signed."""
        return canonical_json(self.model_dump(mode="json"))


class SignedManifest(BaseModel):
    """A manifest's text with its signature. Nothing in it is to be believed before the signature was checked."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    text: str = Field(description="canonical JSON of a `RunnerManifest`")
    key: PublicKey
    signature: str = Field(pattern=r"^[0-9a-f]{128}$", description="Ed25519, of `signed_bytes(text)`")


def signed_bytes(text: str) -> bytes:
    """What the signature of a manifest with this text covers."""
    return _CONTEXT + text.encode()


def fingerprint(key: str) -> str:
    """What people compare: SHA-256 of the public key's 32 bytes, as 64 hex digits."""
    return hashlib.sha256(bytes.fromhex(key)).hexdigest()
