"""Where the agents of this user and machine keep things."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from nas.core import paths
from nas.core.errors import InfrastructureFailed


def agent_home() -> Path:
    """What an agent host must not lose: its enrolment, its list of devices, results not yet handed in."""
    return paths.home() / "agent"


def agent_cache() -> Path:
    """Files and runners, fetched again where they are missing."""
    return paths.cache() / "agent"


def host_lock_folder() -> Path:
    """One per user and machine, whatever database or temporary folder a launch uses. `$NAS_LOCK` overrides.

    Raises:
        InfrastructureFailed: somebody else has taken the folder's name.
    """
    session = Path(f"/run/user/{os.getuid()}")
    usual = session / "hilnas" if session.is_dir() else Path(f"/tmp/hilnas-{os.getuid()}")
    folder = Path(os.environ.get("NAS_LOCK") or usual).expanduser()
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise InfrastructureFailed(f"{folder} belongs to somebody else; remove it, or have it removed")
    return folder
