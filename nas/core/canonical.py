"""Canonical JSON and the hashes built on it, layout ids and result keys; hashes of files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def canonical_json(value: Any) -> str:
    """Returns JSON with sorted keys, no spaces and no NaN, so that equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def content_hash(value: Any) -> str:
    """Returns the SHA-256 (64 hex digits) of the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def result_key(stage: str, **inputs: Any) -> str:
    """Returns the key of one stage's result: a hash over *all* inputs of that stage."""
    return content_hash({"stage": stage, **inputs})


def in_share(sha256: str, share: float) -> bool:
    """Returns whether a hash is among a share of all hashes: what is chosen so stays chosen as other items come."""
    return int(sha256[:8], 16) < share * 2**32


def sha256_of(path: Path) -> str:
    """Returns the SHA-256 of a file, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
