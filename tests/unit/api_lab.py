"""What the tests of the users' API share: an application over a real store, and callers of every role."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import httpx
import yaml
from fastapi.testclient import TestClient
from store_support import StillClock, add_device, open_store

from nas.infra.store import agents
from nas.infra.store.rows import Role
from nas.infra.store.store import Store
from nas.infra.web.server import RequestLog, web_app
from nas.search.analysis.snapshot import Snapshots
from nas.serve.api.serve import users_router
from nas.serve.api.submissions import Submission, SubmissionFolder, SubmittedStudies

SPACE: dict[str, Any] = {
    "v": 1,
    "name": "tiny",
    "model": {"d_model": 128, "depth": {"min": 2, "max": 4}, "vocab": 256},
    "mixers": {"conv": {"kernel": [3]}, "gqa": {"heads": 2, "kv_heads": [1]}},
    "ffn": {"swiglu": {"width": [256, 320, 352]}},
    "devices": ["local"],
    "runtimes": [{"name": "llama.cpp", "quantisation": "q4_0"}],
    "workloads": {"chat": {"prompt": 64, "gen": 16}},
    "objectives": [
        {"name": "quality", "metric": "quality"},
        {"name": "latency", "metric": "latency", "workload": "chat"},
    ],
    "references": {
        "published": "d128 v256 ffn=swiglu:320 [C3 A2/1 C3]",
        "attention": "d128 v256 ffn=swiglu:352 [A2/1*3]",
    },
}


def space_text(**changes: Any) -> str:
    """A space that llama.cpp carries, some of whose first-level keys are other ones."""
    return yaml.safe_dump(SPACE | changes, sort_keys=False)


@dataclass
class ScriptedProcess:
    """Runs a script in place of `nas launch`; keeps what it was started with."""

    script: str = "import sys; sys.stdin.read()"
    started: list[tuple[str, bool]] = field(default_factory=list)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(
        self, folder: SubmissionFolder, submission: Submission, lock: IO[bytes], *, resume: bool
    ) -> subprocess.Popen[bytes]:
        self.started.append((submission.study, resume))
        with folder.open_log() as log:
            process = subprocess.Popen(
                [sys.executable, "-c", self.script],
                stdin=subprocess.PIPE, stderr=log, pass_fds=(lock.fileno(),), start_new_session=True,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def end(self) -> None:
        """Ends what still runs."""
        for process in self.processes:
            process.communicate()


class Lab:
    """A store with one device, the API over it, and a token for each role."""

    def __init__(self, folder: Path) -> None:
        self.clock = StillClock()
        self.store: Store = open_store(folder, self.clock)
        add_device(self.store)
        self.process = ScriptedProcess()
        self.home = folder / "home"
        self.submitted = SubmittedStudies(self.store, self.home, self.process)
        self.revoked: list[None] = []
        self.app = web_app()
        self.app.add_middleware(RequestLog)
        self.closing = False
        self.app.include_router(
            users_router(
                self.store,
                self.submitted,
                lambda: self.revoked.append(None),
                lambda: self.closing,
                Snapshots(self.store),
            )
        )
        self.tokens = {role: agents.create_api_token(self.store, role.value, role) for role in Role}

    def client(self, role: Role | None = Role.ADMIN) -> TestClient:
        """Somebody of that role, or a stranger."""
        headers = {"Authorization": f"Bearer {self.tokens[role]}"} if role else {}
        return TestClient(self.app, headers=headers, raise_server_exceptions=False)

    def get(self, path: str, **params: object) -> Any:
        """The JSON of a GET that must be answered."""
        answer = self.client(Role.READ).get(path, params=params)  # type: ignore[arg-type]
        assert answer.status_code == 200, answer.text
        return answer.json()


def refusal(answer: httpx.Response, status: int, kind: str) -> str:
    """The message of an answer that must be an error of that kind, in the one form of all errors."""
    body = answer.json()
    assert (answer.status_code, body["kind"]) == (status, kind), answer.text
    assert set(body) == {"error", "kind", "request_id"}
    assert body["request_id"] == answer.headers["X-Request-Id"]
    return str(body["error"])
