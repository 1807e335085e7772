"""Puts a coordinator under the load of many agents: requests a second, latencies, CPU, and that no job is lost.

    python benchmarks/farm_load.py                                       1,000 agents, jobs of 60 s, SQLite
    python benchmarks/farm_load.py --postgres                            the same on a PostgreSQL of its own
    python benchmarks/farm_load.py --job-seconds 0 --agents 200          as many jobs a second as it can take

One `nas serve` on this machine, over TLS. Agents are simulated by other processes (`farm_agents.py`), each agent with
one device, one connection that it keeps, and always a job to do: so every one of them beats every 5 s. They come in
the course of the ramp; then requests and CPU are counted for `--seconds`; then agents finish what they hold. At the
end the database is asked: every job that was leased is done, once, with the result that was accepted.

The cost of the simulation is reported separately. Where it, the coordinator and the database share too few cores,
the rates are the machine's, not the coordinator's. Prints JSON; exit code 1 if a check failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import func, select

from nas.core.canonical import content_hash
from nas.core.device import Device
from nas.core.plan import InputFile, Plan, PlanFile, Round, RoundResult, Runner
from nas.infra.store import agents, devices
from nas.infra.store.models import job as job_table
from nas.infra.store.rows import JobKind, JobState
from nas.infra.store.store import Store
from nas.infra.web.tls import Certificates
from nas.serve.api.serve import last_address

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.farm_agents import Crowd
from tests.support.postgres import server

NAS = (sys.executable, "-c", "from nas.cli.main import main; main()")
AGENTS = Path(__file__).with_name("farm_agents.py")
_START_S = 60.0
_LEAD_S = 4.0
"""Between the start of the simulating processes and the first agent."""


@dataclass(frozen=True)
class Setting:
    """A run.

    Args:
        agents: how many.
        processes: that simulate them.
        job_s: seconds a job takes, about.
        jobs: queued for each device.
        ramp_s: seconds in which agents arrive.
        measured_s: seconds that are counted.
        poll_s: longest wait of a lease request.
        repetitions: pairs of runs in a result.
        seed: of everything random.
    """

    agents: int
    processes: int
    job_s: float
    jobs: int
    ramp_s: float
    measured_s: float
    poll_s: float
    repetitions: int
    seed: int


@dataclass
class Watched:
    """A process, optionally with its children, whose CPU time is read."""

    process: psutil.Process
    with_children: bool

    def cpu_s(self) -> float:
        """Returns CPU seconds so far."""
        family = [self.process, *(self.process.children(recursive=True) if self.with_children else [])]
        total = 0.0
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total


def main() -> None:
    """Runs the benchmark."""
    setting, postgres, keep = _arguments()
    with tempfile.TemporaryDirectory(prefix="hilnas-load-") as folder, contextlib.ExitStack() as stack:
        home = Path(folder)
        if postgres:
            running = stack.enter_context(server({"max_connections": "100"}))
            url, database = running.create("load"), Watched(psutil.Process(running.pid), with_children=True)
        else:
            url, database = f"sqlite:///{home / 'load.db'}", None
        report = run(setting, home, url, database)
        if keep:
            print((home / "serve.log").read_text(), file=sys.stderr)
    print(json.dumps(report, indent=2))
    if report["problems"]:
        sys.exit(1)


def run(setting: Setting, home: Path, url: str, database: Watched | None) -> dict[str, Any]:
    """Runs once on an empty database; returns the report."""
    os.environ["NAS_HOME"] = str(home)
    store = Store.open(url)
    crowds = _prepare(setting, store)
    with _coordinator(home, url) as serving:
        address = last_address(home)
        assert address is not None
        ca_pem, begin = Certificates(home, store.clock).ca_pem, time.time() + _LEAD_S
        common: dict[str, Any] = {"url": address.url, "ca_pem": ca_pem, "begin": begin, "job_s": setting.job_s}
        common |= {"ramp_s": setting.ramp_s, "measured_s": setting.measured_s, "poll_s": setting.poll_s}
        started = [
            _start(Crowd(agents=crowd, seed=setting.seed + number, **common)) for number, crowd in enumerate(crowds)
        ]
        cpu = _cpu_between(begin + setting.ramp_s, setting.measured_s, serving, database, started)
        reports = [json.loads(process.communicate()[0]) for process in started]
        assert serving.poll() is None, (home / "serve.log").read_text()
    report = _report(setting, reports, cpu)
    report["database"] = store.engine.dialect.name
    report["jobs"], problems = _audit(store, reports)
    report["problems"] = problems + [f"{n} x {error}" for error, n in Counter(_all(reports, "errors")).most_common(5)]
    store.close()
    return report


def _prepare(setting: Setting, store: Store) -> list[list[tuple[str, str]]]:
    """Creates agents with secrets, their devices and jobs; returns the agents of each process."""
    agents.authority(store)
    who = []
    for number in range(setting.agents):
        name = f"agent-{number:05}"
        who.append((name, agents.enrol(store, agents.issue_token(store), name)))
        device = Device(id=name, model="Simulated", cpu="none", target="simulated", cores=8, memory_mb=8192, os="Linux")
        devices.register(store, name, [device], boot_id="simulated")
    payload = _round(setting.repetitions).model_dump(mode="json")
    rows = []
    for name, _ in who:
        for number in range(setting.jobs):
            key = content_hash([name, number])
            rows.append(
                {
                    "id": f"{key}.0",
                    "result_key": key,
                    "round": 0,
                    "kind": JobKind.MEASURE,
                    "device": name,
                    "priority": 0,
                    "payload": payload,
                    "state": JobState.QUEUED,
                    "attempts": 0,
                    "not_before": 0.0,
                    "created": store.now(),
                    "updated": store.now(),
                }
            )
    with store.write() as connection:
        connection.execute(job_table.insert(), rows)
    return [who[number :: setting.processes] for number in range(setting.processes)]


def _round(repetitions: int) -> Round:
    """Returns a round of usual size: two models by recipe, a runner of a few files."""

    def plan(name: str) -> Plan:
        files = {
            file: PlanFile(sha256=content_hash(file), size=1 << 20) for file in ("runner", "libllama.so", "libggml.so")
        }
        runner = Runner(runtime="llama.cpp", build="b1", target="x86_64-linux", files=files, main="runner")
        recipe = PlanFile(sha256=content_hash([name, "recipe"]), size=12_000)
        model = InputFile(sha256=content_hash(name), size=200 << 20, recipe=recipe)
        args = ("--model", "{model}", "--prompt", "512", "--gen", "256", "--context", "1024", "--threads", "4")
        return Plan(runner=runner, inputs={"model": model}, args=args, threads=4, deadline_s=60)

    return Round(candidate=plan("candidate"), reference=plan("reference"), repetitions=repetitions)


@contextlib.contextmanager
def _coordinator(home: Path, url: str) -> Iterator[subprocess.Popen[bytes]]:
    argv = [*NAS, "serve", "--port", "0", "--db", url]
    with (home / "serve.log").open("ab") as log, subprocess.Popen(argv, stdout=log, stderr=log) as process:
        try:
            deadline = time.monotonic() + _START_S
            while last_address(home) is None:
                assert time.monotonic() < deadline and process.poll() is None, (home / "serve.log").read_text()
                time.sleep(0.05)
            yield process
        finally:
            process.terminate()


def _start(crowd: Crowd) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, AGENTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    json.dump(asdict(crowd), process.stdin)
    process.stdin.close()
    process.stdin = None
    return process


def _cpu_between(
    begin: float,
    seconds: float,
    serving: subprocess.Popen[bytes],
    database: Watched | None,
    agents: list[subprocess.Popen[str]],
) -> dict[str, float]:
    """Returns the share of a core that each part used in that time."""
    parts = {"coordinator": [Watched(psutil.Process(serving.pid), with_children=False)]}
    parts["database"] = [database] if database else []
    parts["simulation"] = [Watched(psutil.Process(process.pid), with_children=False) for process in agents]

    def read() -> dict[str, float]:
        return {name: sum(process.cpu_s() for process in many) for name, many in parts.items()}

    time.sleep(max(0.0, begin - time.time()))
    at, before = time.monotonic(), read()
    time.sleep(seconds)
    after, took = read(), time.monotonic() - at
    return {name: round((after[name] - before[name]) / took, 3) for name in parts}


def _report(setting: Setting, reports: list[dict[str, Any]], cpu: dict[str, float]) -> dict[str, Any]:
    kinds = sorted({kind for report in reports for kind in report["milliseconds"]})
    requests = {kind: [ms for report in reports for ms in report["milliseconds"].get(kind, [])] for kind in kinds}
    counted = sum(len(times) for kind, times in requests.items() if kind != "register")
    return {
        "setting": asdict(setting),
        "requests_per_s": round(counted / setting.measured_s, 1),
        "jobs_per_s": round(len(requests.get("result", [])) / setting.measured_s, 2),
        "latency_ms": {kind: _latency(times) for kind, times in requests.items()},
        "cores": cpu,
        "coordinator_ms_per_request": round(1e3 * cpu["coordinator"] * setting.measured_s / max(counted, 1), 3),
        "connections": sum(report["connections"] for report in reports),
    }


def _latency(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    p99 = ordered[math.ceil(0.99 * len(ordered)) - 1]
    figures = {"p50": statistics.median(ordered), "p99": p99, "max": ordered[-1]}
    return {"n": len(ordered)} | {name: round(value, 2) for name, value in figures.items()}


def _audit(store: Store, reports: list[dict[str, Any]]) -> tuple[dict[str, int], list[str]]:
    """Returns the final states of the jobs, and problems."""
    accepted = Counter(_all(reports, "accepted"))
    # This machine is a device, too, whose health the coordinator checks.
    simulated = job_table.c.kind == JobKind.MEASURE
    with store.read() as connection:
        counts = select(job_table.c.state, func.count()).where(simulated).group_by(job_table.c.state)
        states: dict[str, int] = dict(connection.execute(counts).tuples().all())
        query = select(job_table.c.id, job_table.c.attempts, job_table.c.epoch, job_table.c.result)
        done = list(connection.execute(query.where(simulated, job_table.c.state == JobState.DONE)))
    problems = [f"{n} jobs are {state}" for state, n in states.items() if state not in (JobState.DONE, JobState.QUEUED)]
    if lost := accepted.keys() - {row.id for row in done}:
        problems.append(f"{len(lost)} jobs whose result was accepted are not done")
    if unknown := {row.id for row in done} - accepted.keys():
        problems.append(f"{len(unknown)} jobs are done of which no agent knows")
    if twice := [id for id, times in accepted.items() if times > 1]:
        problems.append(f"{len(twice)} jobs were accepted twice")
    if again := sum(row.attempts > 1 for row in done):
        problems.append(f"{again} jobs were leased more than once")
    if other := sum(RoundResult.model_validate(row.result).wall_s != row.epoch for row in done):
        problems.append(f"{other} jobs have the result of another lease")
    for what in ("refused", "cancelled"):
        if number := sum(report[what] if isinstance(report[what], int) else len(report[what]) for report in reports):
            problems.append(f"{number} jobs were {what}")
    return {"accepted": accepted.total(), **{str(state): n for state, n in states.items()}}, problems


def _all(reports: list[dict[str, Any]], what: str) -> list[str]:
    return [entry for report in reports for entry in report[what]]


def _arguments() -> tuple[Setting, bool, bool]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=2, help="that simulate the agents")
    parser.add_argument("--job-seconds", type=float, default=60.0)
    parser.add_argument("--jobs", type=int, help="queued for each device; default: enough")
    parser.add_argument("--ramp", type=float, help="seconds in which agents arrive; default: as long as a job, or 5")
    parser.add_argument("--seconds", type=float, default=60.0, help="that are counted")
    parser.add_argument("--poll", type=float, default=20.0, help="longest wait of a lease request, seconds")
    parser.add_argument("--repetitions", type=int, default=3, help="pairs of runs in a result, about 5 kB each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--postgres", action="store_true", help="on a PostgreSQL server that is started for this")
    parser.add_argument("--log", action="store_true", help="print the coordinator's log to stderr")
    options = parser.parse_args()
    ramp = options.ramp if options.ramp is not None else max(5.0, options.job_seconds)
    length = ramp + options.seconds
    enough = math.ceil(length / (options.job_seconds / 2)) + 1 if options.job_seconds else 20_000 // options.agents
    setting = Setting(
        options.agents,
        options.processes,
        options.job_seconds,
        options.jobs or enough,
        ramp,
        options.seconds,
        options.poll,
        options.repetitions,
        options.seed,
    )
    return setting, options.postgres, options.log


if __name__ == "__main__":
    main()
