"""Attacks a coordinator as strangers on its network can, and says who is served meanwhile.

    python benchmarks/server_attacks.py                      every attack for 20 s
    python benchmarks/server_attacks.py "idle tls" --seconds 300
    python benchmarks/server_attacks.py --page docs/measured/robustness.md RESULT.json

One `nas serve` on this machine with TLS, SQLite, and a shell's usual soft limit of 1,024 open files; a second process
attacks it from one address, that of the people here. Meanwhile three people ask: one on a connection that they keep,
with an API token; one who logs in on a new connection; one with a session, on a new connection. Prints JSON: for each
attack how many were answered and how fast, and the coordinator's open files and memory. Exit code 1 if one was not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import httpx
import psutil

from nas.infra.store import agents
from nas.infra.store.rows import Role
from nas.infra.store.store import Store
from nas.infra.web.tls import Certificates
from nas.serve.api.serve import last_address

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.page import fill, table

NAS = (sys.executable, "-c", "from nas.cli.main import main; main()")
SOFT_FILES = 1024
HOLDERS = 2000
"""Connections that an attack tries to hold."""
FLOODERS = 64
"""Connections on which an attack asks as fast as it is answered."""
_START_S = 60.0
_TIMEOUT_S = 10.0
_OPENING = 64
_FORM = "Content-Type: application/x-www-form-urlencoded\r\n"
_END = "\r\n\r\n"


@dataclass
class Person:
    """Somebody who asks again and again; `seconds`: of those that were answered as they should be."""

    ask: Callable[[], bool]
    every_s: float
    requests: int = 0
    seconds: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def run(self, stop: threading.Event) -> None:
        """Asks until `stop` is set."""
        while not stop.wait(self.every_s):
            start = time.monotonic()
            self.requests += 1
            try:
                if self.ask():
                    self.seconds.append(time.monotonic() - start)
                else:
                    self.problems.append("refused")
            except httpx.HTTPError as error:
                self.problems.append(type(error).__name__)

    def report(self) -> dict[str, Any]:
        """Returns what became of the requests."""
        ms = [round(second * 1000, 1) for second in self.seconds]
        return {
            "asked": self.requests,
            "answered": len(ms),
            "median_ms": round(statistics.median(ms), 1) if ms else None,
            "longest_ms": max(ms, default=None),
            "problems": sorted(set(self.problems)),
        }


@dataclass(frozen=True)
class Target:
    """What is attacked: host and port, and a token of role read."""

    port: int
    reader: str

    @property
    def head(self) -> str:
        """The headers of a request by a browser's form."""
        return f"Host: 127.0.0.1:{self.port}\r\nOrigin: https://127.0.0.1:{self.port}\r\n"

    def post(self, path: str, body: str, length: int | None = None) -> bytes:
        """Returns a posted form."""
        size = len(body) if length is None else length
        return f"POST {path} HTTP/1.1\r\n{self.head}{_FORM}Content-Length: {size}{_END}{body}".encode()


async def hold(
    target: Target, first: bytes = b"", drip: bytes = b"", every_s: float = 1.0, *, tls: bool = True, reads: bool = True
) -> None:
    """Holds connections, each with a beginning that is sent at once and more at intervals; opens closed ones again."""
    opening = asyncio.Semaphore(_OPENING)

    async def one() -> None:
        while True:
            with contextlib.suppress(OSError, TimeoutError):
                async with opening:
                    reader, writer = await _connect(target, tls, 1 << 16 if reads else 1 << 10)
                try:
                    writer.write(first)
                    while not reader.at_eof():
                        if drip:
                            writer.write(drip)
                            await writer.drain()
                        if reads:
                            with contextlib.suppress(TimeoutError):
                                await asyncio.wait_for(reader.read(1 << 16), every_s)
                        else:
                            await asyncio.sleep(every_s)
                finally:
                    writer.close()
            await asyncio.sleep(0.05)

    await asyncio.gather(*(one() for _ in range(HOLDERS)))


async def flood(target: Target, request: bytes) -> None:
    """Sends a request on many connections, on each again as soon as it is answered."""

    async def one() -> None:
        while True:
            with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, ValueError):
                reader, writer = await _connect(target, True, 1 << 16)
                try:
                    while True:
                        writer.write(request)
                        head = await reader.readuntil(_END.encode())
                        lines = head.lower().split(b"\r\n")
                        length = next(line for line in lines if line.startswith(b"content-length"))
                        await reader.readexactly(int(length.partition(b":")[2]))
                        if b"connection: close" in head.lower():
                            break
                finally:
                    writer.close()
            await asyncio.sleep(0.01)

    await asyncio.gather(*(one() for _ in range(FLOODERS)))


@cache  # reading the system's authorities for each connection would take most of the attacker's time
def _anybody() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def _connect(target: Target, tls: bool, limit: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    context = _anybody() if tls else None
    return await asyncio.wait_for(asyncio.open_connection("127.0.0.1", target.port, ssl=context, limit=limit), 30)


def attacks(target: Target) -> dict[str, Callable[[], Awaitable[None]]]:
    """Returns name -> attack."""
    head = f"GET /login HTTP/1.1\r\n{target.head}X-More: ".encode()
    asset = f"GET /assets/uplot.esm.js HTTP/1.1\r\n{target.head}\r\n".encode()
    whole = f"GET /login HTTP/1.1\r\n{target.head}\r\n".encode()
    bearer = f"GET /v1/studies HTTP/1.1\r\n{target.head}Authorization: Bearer hilnas.boss.wrong\r\n\r\n".encode()
    return {
        "idle tcp": partial(hold, target, tls=False),
        "idle tls": partial(hold, target),
        "slow heads": partial(hold, target, head, b"x"),
        "slow second heads": partial(hold, target, whole, b"\r\n"),
        "slow bodies": partial(hold, target, target.post("/login", "t", 1000), b"x"),
        "endless bodies": partial(hold, target, target.post("/login", "", 1 << 40), b"x" * 4096, 0.02),
        "answers not taken": partial(hold, target, asset * 20, asset, reads=False),
        "nonsense": partial(hold, target, b"\x16\x03\x01\x02\x00\x01", b"\x00", tls=False),
        "wrong logins": partial(flood, target, target.post("/login", "token=hilnas.boss.wrong")),
        "wrong tokens": partial(flood, target, bearer),
        "sessions of a reader": partial(flood, target, target.post("/login", f"token={target.reader}")),
    }


def run(name: str, seconds: float) -> dict[str, Any]:
    """Attacks a coordinator of its own; returns the report."""
    with tempfile.TemporaryDirectory(prefix="hilnas-attacks-") as folder, contextlib.ExitStack() as stack:
        home = Path(folder)
        store = Store.open(f"sqlite:///{home / 'hilnas.db'}", artifacts=home / "artifacts")
        boss = agents.create_api_token(store, "boss", Role.ADMIN)
        reader = agents.create_api_token(store, "guest", Role.READ)
        process = stack.enter_context(_coordinator(home))
        address = last_address(home)
        assert address is not None
        url = address.url
        trust = ssl.create_default_context(cadata=Certificates(home, store.clock).ca_pem)
        client = partial(httpx.Client, base_url=url, verify=trust, timeout=_TIMEOUT_S)
        connection = stack.enter_context(client(headers={"Authorization": f"Bearer {boss}"}))

        def log_in() -> httpx.Response:
            with client() as browser:
                return browser.post("/login", data={"token": boss}, headers={"Origin": url})

        cookies = dict(log_in().cookies)

        def look() -> bool:
            with client(cookies=cookies) as browser:
                return browser.get("/studies.json").status_code == 200

        people = {
            "kept connection": Person(lambda: connection.get("/v1/server").status_code == 200, 0.2),
            "new login": Person(lambda: log_in().status_code == 303, 0.5),
            "new connection with a session": Person(look, 0.5),
        }
        assert all(person.ask() for person in people.values()), "it does not serve before the attack"
        target = json.dumps({"port": httpx.URL(url).port, "reader": reader})
        files = process.num_fds()
        attacker = subprocess.Popen([sys.executable, __file__, name, "--target", target], start_new_session=True)
        stack.callback(attacker.wait)
        stack.callback(attacker.kill)
        deadline = time.monotonic() + _START_S
        while process.num_fds() < files + FLOODERS // 4:
            assert time.monotonic() < deadline, "the attack did not begin"
            time.sleep(0.05)
        stop = threading.Event()
        threads = [threading.Thread(target=person.run, args=(stop,)) for person in people.values()]
        for thread in threads:
            thread.start()
        files = memory = 0
        until = time.monotonic() + seconds
        while time.monotonic() < until and process.is_running():
            time.sleep(0.5)
            files = max(files, process.num_fds())
            memory = max(memory, process.memory_info().rss >> 20)
        stop.set()
        for thread in threads:
            thread.join()
        assert attacker.poll() is None, "the attack ended early"
        store.close()
        return {
            "attack": name,
            "people": {who: person.report() for who, person in people.items()},
            "open_files": files,
            "memory_mb": memory,
        }


@contextlib.contextmanager
def _coordinator(home: Path) -> Iterator[psutil.Process]:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    with (home / "serve.log").open("wb") as log:
        process = subprocess.Popen(
            [*NAS, "serve", "--port", "0"],
            env=os.environ | {"NAS_HOME": str(home)},
            stdout=log,
            stderr=log,
            preexec_fn=limit,
        )
        try:
            deadline = time.monotonic() + _START_S
            while last_address(home) is None:
                assert process.poll() is None and time.monotonic() < deadline, (home / "serve.log").read_text()
                time.sleep(0.1)
            yield psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait()


def summary(reports: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table of attacks: who was answered, and how fast."""
    rows = []
    for report in reports:
        people = [
            f"{person['answered']} of {person['asked']}; {person['median_ms']}, {person['longest_ms']}"
            for person in report["people"].values()
        ]
        rows.append([report["attack"], *people, report["open_files"], report["memory_mb"]])
    return table(["attack", *reports[0]["people"], "open files", "memory [MB]"], rows)


def main() -> None:
    """Runs the benchmark, or, as a child, one attack until it is killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(attacks(Target(0, "")))
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=f"by default all: {', '.join(names)}")
    parser.add_argument("--seconds", type=float, default=20.0, help="that an attack lasts")
    parser.add_argument("--page", type=Path, help="write the table of these results into this page")
    parser.add_argument("--target", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.page:
        results = [report for name in arguments.attacks for report in json.loads(Path(name).read_text())]
        fill(arguments.page, "measured: server_attacks", summary(results))
        return
    if unknown := set(arguments.attacks) - set(names):
        parser.error(f"no attack {', '.join(sorted(unknown))}")
    if arguments.target:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        asyncio.run(attacks(Target(**json.loads(arguments.target)))[arguments.attacks[0]]())  # type: ignore[arg-type]
        return
    reports = [run(name, arguments.seconds) for name in arguments.attacks or names]
    print(json.dumps(reports, indent=1))
    if any(row["answered"] < row["asked"] for report in reports for row in report["people"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
