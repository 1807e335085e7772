"""Simulated device agents for `farm_load.py`: they send agents' requests to a coordinator, over TLS, without devices.

Run by it as a process of its own, so that what the agents cost is not counted as the coordinator's: reads a `Crowd`
as JSON from stdin, prints its statistics as JSON to stdout.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import resource
import ssl
import sys
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from nas.core import wire as p
from nas.core.device import Device
from nas.core.plan import Pair, RawRun, RoundResult

STDOUT = json.dumps({"decode_ns": [12_345_678 + n for n in range(256)]})
"""What a runner prints for 256 tokens."""


@dataclass(frozen=True)
class Crowd:
    """Agents of one process.

    Args:
        url: of the coordinator.
        ca_pem: its certificate authority.
        agents: (name, secret); each serves one device, of the same name in small letters.
        job_s: seconds that a job takes; from half to one and a half times as long.
        poll_s: longest wait of a lease request.
        begin: Unix time when the first agent starts.
        ramp_s: seconds until the last agent starts.
        measured_s: seconds after the ramp over which requests are counted; then agents finish what they hold.
        seed: of everything random.
    """

    url: str
    ca_pem: str
    agents: list[tuple[str, str]]
    job_s: float
    poll_s: float
    begin: float
    ramp_s: float
    measured_s: float
    seed: int

    @property
    def counted_from(self) -> float:
        """Unix time of the end of the ramp."""
        return self.begin + self.ramp_s

    @property
    def counted_to(self) -> float:
        """Unix time after which no job is leased."""
        return self.counted_from + self.measured_s


@dataclass
class Statistics:
    """Statistics of agents: milliseconds by kind of request, accepted jobs, and unexpected responses."""

    milliseconds: dict[str, list[float]] = field(default_factory=dict)
    accepted: list[str] = field(default_factory=list)
    cancelled: int = 0
    refused: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    connections: int = 0
    cpu_s: float = 0.0


class Agent:
    """One agent: leases jobs, sends heartbeats while it "runs" them, submits results, all on one connection."""

    def __init__(
        self, crowd: Crowd, name: str, secret: str, number: int, tls: ssl.SSLContext, stats: Statistics
    ) -> None:
        self._crowd, self._name, self._device, self._tls, self._stats = crowd, name, name.lower(), tls, stats
        self._rng = random.Random(f"{crowd.seed}/{number}")
        self._basic = base64.b64encode(f"{name}:{secret}".encode()).decode()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._beat_s = 5.0
        self._arrives = crowd.begin + self._rng.random() * crowd.ramp_s

    async def live(self) -> None:
        """From its arrival until the end of its last job."""
        await asyncio.sleep(self._arrives - time.time())
        device = Device(
            id=self._device, model="Simulated", cpu="none", target="simulated", cores=8, memory_mb=8192, os="Linux"
        )
        registration = p.RegisterRequest(agent=self._name, devices=(device,), boot_id="simulated")
        reply = await self._ask("register", p.REGISTER_PATH, registration)
        self._beat_s = float(reply["heartbeat_s"])
        while (now := time.time()) < self._crowd.counted_to:
            wait_s = min(self._crowd.poll_s, self._crowd.counted_to - now)
            request = p.LeaseRequest(agent=self._name, device=self._device, wait_s=wait_s)
            job = (await self._ask("lease", p.LEASE_PATH, request))["job"]
            if job:
                await self._work(job)
        if self._streams:
            self._streams[1].close()

    async def _work(self, job: dict[str, Any]) -> None:
        beat = p.HeartbeatRequest(agent=self._name, device=self._device, job=job["id"], epoch=job["epoch"])
        remaining = self._crowd.job_s * (0.5 + self._rng.random())
        while remaining > self._beat_s:
            await asyncio.sleep(self._beat_s)
            remaining -= self._beat_s
            if (await self._ask("heartbeat", p.HEARTBEAT_PATH, beat))["cancel"]:
                self._stats.cancelled += 1
                return
        await asyncio.sleep(remaining)
        result = p.ResultRequest(agent=self._name, device=self._device, epoch=job["epoch"], result=_result(job))
        verdict = await self._ask("result", p.RESULT_PATH.format(job=job["id"]), result)
        if verdict["accepted"]:
            self._stats.accepted.append(job["id"])
        else:
            self._stats.refused.append(verdict["reason"])

    async def _ask(self, kind: str, path: str, message: Any) -> dict[str, Any]:
        """Sends a request until it is answered, as agents do."""
        body = message.model_dump_json().encode()
        while True:
            start = time.time()
            try:
                status, answer = await asyncio.wait_for(self._exchange(path, body), self._crowd.poll_s + 30)
            except (OSError, asyncio.IncompleteReadError, TimeoutError, ssl.SSLError) as error:
                self._stats.errors.append(f"{kind}: {type(error).__name__} {error}")
                self._streams = None
            else:
                if status == 200:
                    self._note(kind, start, answer)
                    return answer
                self._stats.errors.append(f"{kind}: {status} {answer}")
            await asyncio.sleep(self._rng.random())

    def _note(self, kind: str, start: float, answer: dict[str, Any]) -> None:
        if kind == "lease" and not answer["job"]:
            kind = "lease, nothing to do"
        if kind == "register" or self._crowd.counted_from <= start < self._crowd.counted_to:
            self._stats.milliseconds.setdefault(kind, []).append(1e3 * (time.time() - start))

    async def _exchange(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        target = urlsplit(self._crowd.url)
        if self._streams is None:
            self._stats.connections += 1
            self._streams = await asyncio.open_connection(target.hostname, target.port, ssl=self._tls)
        reader, writer = self._streams
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {target.netloc}\r\nAuthorization: Basic {self._basic}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        answer = json.loads(await reader.readexactly(int(headers["content-length"])))
        if headers.get("connection", "").lower() == "close":
            writer.close()
            self._streams = None
        return int(status.split()[1]), answer


def _result(job: dict[str, Any]) -> RoundResult:
    run = RawRun(exit_code=0, stdout=STDOUT, wall_s=1.0, cpu_s=1.0, started_at=time.time())
    reference = run if job["round"]["reference"] else None
    pairs = [Pair(reference=reference, candidate=run, foreign_cpu=0.0)] * job["round"]["repetitions"]
    return RoundResult(pairs=pairs, wall_s=float(job["epoch"]))


async def live(crowd: Crowd) -> Statistics:
    """All agents of this process, to their end."""
    stats, tls = Statistics(), ssl.create_default_context(cadata=crowd.ca_pem)
    agents = [Agent(crowd, *who, number, tls, stats) for number, who in enumerate(crowd.agents)]
    await asyncio.gather(*(agent.live() for agent in agents))
    usage = resource.getrusage(resource.RUSAGE_SELF)
    stats.cpu_s = usage.ru_utime + usage.ru_stime
    return stats


def main() -> None:
    """Runs the crowd given on stdin."""
    stats = asyncio.run(live(Crowd(**json.load(sys.stdin))))
    json.dump(vars(stats), sys.stdout)


if __name__ == "__main__":
    main()
