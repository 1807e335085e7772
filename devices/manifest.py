"""What an agent will run: the runners of the newest manifest that the coordinator signed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import ValidationError

from nas.core.durable import locked, write_durably
from nas.core.errors import InfrastructureFailed, InvalidInput, Unsupported
from nas.core.manifest import PublicKey, RunnerManifest, SignedManifest, fingerprint, signed_bytes
from nas.core.plan import Runner

_SHOWN = 16
"""Digits of a fingerprint in messages."""


class PinnedManifest:
    """A `KnownRunner`: knows the runners of the newest manifest, which it fetches anew when it meets another one.

    The newest manifest that was seen is kept, with its signature: it answers for the runners it lists, and an older one
    is not taken in its place, not even after a restart.

    Args:
        fetch: asks the coordinator for its manifest.
        key: the coordinator's public key, pinned at enrolment.
        state: folder that outlives the agent; made if missing.
    """

    def __init__(self, fetch: Callable[[], SignedManifest], key: PublicKey, state: Path) -> None:
        if not re.fullmatch(r"[0-9a-f]{64}", key):
            raise InvalidInput(f"public key {key!r}: give 64 hex digits")
        self._fetch, self._key = fetch, key
        state.mkdir(parents=True, exist_ok=True)
        self._memory = state / f"manifest-{fingerprint(key)}.json"

    def __call__(self, runner: Runner) -> bool:
        """Whether the whole record of `runner` is in the newest manifest.

        Raises:
            Unsupported: the coordinator's manifest is not to be trusted, or it has the build with other files.
            InfrastructureFailed: the coordinator did not answer, or what was kept is damaged.
        """
        kept = self._kept()
        if kept is not None and runner in kept[1].runners:
            return True
        newest = self._renewed()
        if runner in newest.runners:
            return True
        for listed in newest.runners:
            if (listed.runtime, listed.build, listed.target) == (runner.runtime, runner.build, runner.target):
                raise Unsupported(_difference(runner, listed, newest.serial))
        return False

    def _renewed(self) -> RunnerManifest:
        signed = self._fetch()
        manifest = verified(signed, self._key)
        with locked(self._memory.with_suffix(".lock")):
            kept = self._kept()
            if kept is not None and kept[0].text == signed.text:
                return manifest
            if kept is not None and manifest.serial <= kept[1].serial:
                raise Unsupported(
                    f"runner manifest: the coordinator sent number {manifest.serial}, but this agent saw another one, "
                    f"number {kept[1].serial}, before: an old manifest was replayed, or the coordinator's home restored"
                )
            write_durably(self._memory, signed.model_dump_json().encode())
        return manifest

    def _kept(self) -> tuple[SignedManifest, RunnerManifest] | None:
        try:
            signed = SignedManifest.model_validate_json(self._memory.read_bytes())
            return signed, verified(signed, self._key)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise InfrastructureFailed(f"{self._memory}: {error.strerror}") from error
        except (ValidationError, Unsupported) as error:
            raise InfrastructureFailed(
                f"{self._memory}: the manifest that this agent saw last is damaged; remove the file if you know why"
            ) from error


def verified(signed: SignedManifest, key: PublicKey) -> RunnerManifest:
    """The manifest, after its signature was found to be one of `key`.

    Raises:
        Unsupported: it is of another key, was altered, or is in a form that this agent does not read.
    """
    if signed.key != key:
        raise Unsupported(
            f"runner manifest: signed with key {fingerprint(signed.key)[:_SHOWN]}, but this agent trusts only "
            f"{fingerprint(key)[:_SHOWN]}"
        )
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(
            bytes.fromhex(signed.signature), signed_bytes(signed.text)
        )
    except InvalidSignature:
        raise Unsupported(
            f"runner manifest: its signature is none of key {fingerprint(key)[:_SHOWN]}: it was altered after signing"
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
