"""Folders of hilnas: state in `$NAS_HOME`, rebuildable files in the user's cache folder."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def home() -> Path:
    """Returns the folder of the database, artifacts and checkpoints. `$NAS_HOME` overrides."""
    return Path(os.environ.get("NAS_HOME") or platformdirs.user_data_dir("hilnas")).expanduser().resolve()


def cache() -> Path:
    """Returns the folder of runtime builds, downloads and corpora. `$NAS_CACHE` overrides."""
    return Path(os.environ.get("NAS_CACHE") or platformdirs.user_cache_dir("hilnas")).expanduser().resolve()
