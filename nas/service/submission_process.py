"""The process of a submitted study: `nas launch` over the coordinator's database, in a session of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from nas.service.submission import Submission, SubmissionFolder
from nas.store.store import Store

_NOT_THEIRS = ("NAS_SERVER", "NAS_TOKEN")
"""A process that inherited these would submit its study instead of running it."""


class LaunchProcess:
    """Starts the processes.

    Args:
        store: the database that they use.
        home: their `$NAS_HOME`.
        more: further arguments of `nas launch`, such as a Ray cluster's address.
    """

    def __init__(self, store: Store, home: Path, more: Sequence[str] = ()) -> None:
        # Not as an argument: the URL may hold a password, and everybody may read arguments.
        own = {"NAS_HOME": str(home), "NAS_DB": store.engine.url.render_as_string(hide_password=False)}
        self._environment = {name: value for name, value in os.environ.items() if name not in _NOT_THEIRS} | own
        self._more = tuple(more)

    def start(
        self, folder: SubmissionFolder, submission: Submission, lock: IO[bytes], *, resume: bool
    ) -> subprocess.Popen[bytes]:
        """A process that keeps `lock` for as long as it lives, whatever becomes of this one."""
        argv = [sys.executable, "-m", "nas.cli", "launch", "--space", str(folder.space), "--study", submission.study]
        argv += ["--yes", "--json", *self._more]
        argv += ["--trials", str(submission.trials)] if submission.trials is not None else []
        argv += ["--accept-noise"] * submission.accept_noise + ["--resume"] * resume
        argv += [part for name in submission.warm_start for part in ("--warm-start", name)]
        with folder.open_log() as out, folder.open_result() as result:
            return subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=result, stderr=out, env=self._environment,
                start_new_session=True, pass_fds=(lock.fileno(),),
            )  # fmt: skip
