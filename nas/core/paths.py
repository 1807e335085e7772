"""Where hilnas keeps things: state under `$NAS_HOME`, what can be rebuilt under the user's cache folder."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def home() -> Path:
    """State that cannot be rebuilt: database, artifacts of the front, checkpoints. `$NAS_HOME` overrides."""
    return Path(os.environ.get("NAS_HOME") or platformdirs.user_data_dir("hilnas")).expanduser().resolve()


def cache() -> Path:
    """Runtime builds, downloads, corpora: rebuilt on demand. `$NAS_CACHE` overrides."""
    return Path(os.environ.get("NAS_CACHE") or platformdirs.user_cache_dir("hilnas")).expanduser().resolve()
