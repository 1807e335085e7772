"""Kills processes of a search at random moments, resumes it, and checks that nothing was lost or repeated.

    python benchmarks/kill_campaign.py --kills 20 --seed 0 [--database postgresql]

What is killed, always by SIGKILL: the launch itself, a Ray worker, the device agent, or the runner it measures with.
Studies follow each other until all kills are done; the last one is then finished. Prints JSON; exit code 1 if a check
failed; the folder with its state is then kept. Builds of llama.cpp are taken from the user's cache.

    python benchmarks/kill_campaign.py --page docs/measured/faults.md benchmarks/recorded/kills-*.json

writes the table of campaigns, whose results are given, into a page.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import shutil
import string
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml
from sqlalchemy import select

from nas.core import paths
from nas.core.space import SearchSpace
from nas.core.trial import TrialState
from nas.infra.store import jobs, outcomes, results, studies, trials
from nas.infra.store.models import result_use
from nas.infra.store.rows import JobState, StudyState
from nas.infra.store.store import Store
from nas.search.proxy.job import weights_file
from nas.search.study.check import support_filter
from nas.search.study.events import all_events
from nas.search.study.proposals import replay
from nas.testing.fake_plugin import fake_environment

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.page import fill, table
from tests.support.postgres import CARELESS, server

VICTIMS = ("launch", "worker", "agent", "runner")
ORPHANS_GONE_S = 15.0
_TRANSIENT = 4
_RUN_LIMIT_S = 1800.0
_LAUNCH = (sys.executable, "-c", "from nas.cli.main import main; main()", "launch", "--yes")


@dataclass
class Campaign:
    """One campaign.

    Args:
        space: YAML of the space.
        trials: layouts per study.
        kills: to do.
        rng: chooses moments and processes.
        pause_s: longest time between two kills.
        home: NAS_HOME; also holds the space of each study.
        url: of the database.
        until: time (`time.monotonic`) after which nothing is killed any more.
        launch_share: of the kills that hit the launch; where it takes minutes to start, few let it come far.
    """

    space: dict[str, Any]
    trials: int
    kills: int
    rng: random.Random
    pause_s: float
    home: Path
    url: str
    until: float = math.inf
    launch_share: float = 0.25
    done: list[dict[str, Any]] = field(default_factory=list)
    launches: int = 0
    problems: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    _spared: set[str] = field(default_factory=set)
    """Models whose runner was killed once: a second time would rightly count as the candidate's failure."""

    def run(self) -> None:
        """Kills the wanted number of processes, then lets the last study finish."""
        while True:
            self._new_study()
            while not self._launch_once():
                pass
            if self._over:
                return

    @property
    def _over(self) -> bool:
        return len(self.done) >= self.kills or time.monotonic() >= self.until

    def _new_study(self) -> None:
        number = len(self.names)
        self.names.append(f"campaign-{number}")
        search = self.space.get("search", {}) | {"seed": number}
        self._space_file.write_text(yaml.safe_dump(self.space | {"search": search}))

    @property
    def _space_file(self) -> Path:
        return self.home / f"space-{len(self.names) - 1}.yaml"

    def _launch_once(self) -> bool:
        """Launches once, with kills while any are left; returns whether the study finished."""
        with opened(self.home, self.url) as store:
            resume = ["--resume"] if self.names[-1] in {study.name for study in studies.all(store)} else []
        argv = [*_LAUNCH, "--space", str(self._space_file), "--study", self.names[-1], "--trials", str(self.trials)]
        self.launches += 1
        with (self.home / "launch.log").open("ab") as log:
            process = psutil.Popen([*argv, *resume], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        killed = self._harass(process)
        family = family_of(self.home)
        try:
            code = process.wait(_RUN_LIMIT_S)
        except psutil.TimeoutExpired:
            self.problems.append(f"launch {self.launches} did not end within {_RUN_LIMIT_S:.0f} s")
            process.kill()
            raise
        self._expect_gone(family)
        if not killed and code not in (0, _TRANSIENT):
            raise SystemExit(f"launch {self.launches} ended with {code}; see {self.home / 'launch.log'}")
        return code == 0

    def _harass(self, process: psutil.Popen) -> bool:
        """Kills a process at random intervals; returns whether the launch itself was killed."""
        while not self._over:
            try:
                process.wait(self.rng.uniform(0.2, self.pause_s))
            except psutil.TimeoutExpired:
                launched, others = VICTIMS[0], VICTIMS[1:]
                victim = launched if self.rng.random() < self.launch_share else self.rng.choice(others)
                if self._kill(process, victim) and victim == launched:
                    return True
            else:
                return False
        return False

    def _kill(self, launch: psutil.Popen, kind: str) -> bool:
        """Kills a process of that kind, if there is one; waits a little for short-lived ones."""
        until = time.monotonic() + self.pause_s
        while time.monotonic() < until and launch.is_running():
            for process in victims(launch, kind):
                if kind == "runner" and not self._spare_next_time(process):
                    continue
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
                    self.done.append({"kind": kind, "launch": self.launches, "pid": process.pid, "at": time.time()})
                    return True
            time.sleep(0.01)
        return False

    def _spare_next_time(self, runner: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            argv = runner.cmdline()
            model = argv[argv.index("--model") + 1]
            if model not in self._spared:
                self._spared.add(model)
                return True
        return False

    def _expect_gone(self, family: list[psutil.Process]) -> None:
        """Records processes that remain after a while, and ends them."""
        _, alive = psutil.wait_procs(family, ORPHANS_GONE_S)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    self.problems.append(f"launch {self.launches} left {' '.join(process.cmdline())[:120]}")
                    process.kill()


def victims(launch: psutil.Popen, kind: str) -> list[psutil.Process]:
    """Returns processes of one kind below the launch, or the launch itself."""
    if kind == "launch":
        return [launch]
    processes = []
    with contextlib.suppress(psutil.Error):
        for process in launch.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if kind_of(process.cmdline()) == kind:
                    processes.append(process)
    return processes


def kind_of(argv: list[str]) -> str | None:
    """Returns the kind of a process, by its command line."""
    line = " ".join(argv)
    if line.startswith(("ray::export", "ray::train", "ray::gate")):
        return "worker"
    if "nas.measure.devices.agent.agent" in argv:
        return "agent"
    return "runner" if "--model" in argv and "/bundles/" in line else None


def family_of(home: Path) -> list[psutil.Process]:
    """Returns every other process that uses this home, by its environment or its files."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_family = process.environ().get("NAS_HOME") == str(home) or str(home) in " ".join(process.cmdline())
            if is_family and process.pid != os.getpid():
                processes.append(process)
    return processes


@contextlib.contextmanager
def opened(home: Path, url: str) -> Iterator[Store]:
    """Opens the campaign's database."""
    store = Store.open(url, artifacts=home / "artifacts")
    try:
        yield store
    finally:
        store.close()


def check(store: Store, names: list[str]) -> Iterator[str]:
    """Returns problems in the stored studies."""
    firsts: Counter[str] = Counter()
    for name in names:
        study = studies.get(store, name)
        rows, log = trials.all(store, study.id), all_events(store, study.id)
        if study.state is not StudyState.COMPLETE:
            yield f"{name} is {study.state}"
        if [row.number for row in rows] != list(range(len(rows))):
            yield f"{name}: trial numbers {[row.number for row in rows]}"
        for row in rows:
            if not row.status.terminal or row.status.state is TrialState.FAILED:
                yield f"{name}: trial {row.number} is {row.status.state}: {row.status.reason}"
        space = SearchSpace.model_validate(study.space)
        yield from (f"{name}: replay: {line}" for line in replay(space, support_filter(space), rows, log))
        with store.read() as connection:  # the results that the study itself made
            query = select(result_use.c.result_key).where(result_use.c.study == study.id, result_use.c.first)
            firsts.update(connection.scalars(query))
        yield from (f"{name}: job {job.id} is {job.state}" for job in jobs.live(store) if job.study == study.id)
    yield from (f"result {key[:12]} was counted {count} times" for key, count in firsts.items() if count > 1)
    for key in firsts:
        yield from repeated(store, key)


def repeated(store: Store, key: str) -> Iterator[str]:
    """Returns work for a key that continued after its result was stored."""
    result = results.get(store, key)
    assert result is not None
    for job in jobs.of_key(store, key):
        if job.state is JobState.DONE and job.updated > result.created:
            yield f"job {job.id} ran after its measurement was stored"
    yield from (
        f"{result.stage} {key[:12]} was tried after it was stored"
        for attempt in outcomes.attempts_of_key(store, key)
        if attempt.at > result.created
    )
    if result.stage == "train" and "value" in result.payload:
        weights = weights_file(store.artifacts.parent / "work" / "checkpoints", key)
        if weights.stat().st_mtime > result.created:
            yield f"training {key[:12]} wrote its weights again after it was stored"


def default_space() -> dict[str, Any]:
    """Returns lfm2-demo with trainings of seconds."""
    file = Path(__file__).parents[1] / "search_spaces" / "lfm2-demo.yaml"
    space: dict[str, Any] = yaml.safe_load(file.read_text())
    space["quality"]["rungs"] = [
        {"name": "recall", "tasks": {"induction": {"steps": 60}}, "keep": 0.5},
        {"name": "short", "lm_steps": 60, "keep": 0.5},
        {"name": "long", "lm_steps": 120, "seeds": [0, 1]},
    ]
    space["quality"]["min_reference"] = 0.01
    return space | {"protocol": {"screen_repetitions": 2, "confirm_repetitions": 10}}


@contextlib.contextmanager
def database(home: Path, kind: str) -> Iterator[str]:
    """Yields the URL of a database, "sqlite" or "postgresql"; a server runs while the context is open."""
    if kind == "sqlite":
        yield f"sqlite:///{home / 'hilnas.db'}"
        return
    with server(CARELESS) as running:
        yield running.create("kills")


def prepare(home: Path, *, fake: bool) -> dict[str, Any]:
    """Creates a home and a cache for this campaign, with links to the builds; returns the space to search."""
    cache = home / "cache"
    cache.mkdir(parents=True)
    (cache / "runtimes").symlink_to(paths.cache() / "runtimes")
    os.environ |= {"NAS_HOME": str(home), "NAS_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    if not fake:
        return default_space()
    sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / folder) for folder in ("integration", "unit")]
    from study_lab import SPACE

    os.environ |= fake_environment(home / "plugin", run_s=0.1)
    sys.path.insert(0, str(home / "plugin"))
    text = home / "alphabet.txt"
    text.write_text((string.ascii_letters + string.digits) * 1200)
    return SPACE | {"quality": SPACE["quality"] | {"corpus": [str(text)]}}


def campaign_table(results: Sequence[dict[str, Any]]) -> str:
    """Returns a table of what campaigns printed, a column for each."""
    names = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}
    rows = [
        ["space", *(f"`{result['space']}`" for result in results)],
        ["kills", *(sum(result["kills"].values()) for result in results)],
        *([f"kills: {kind}", *(result["kills"].get(kind, 0) for result in results)] for kind in VICTIMS),
        ["studies, launches", *(f"{len(result['studies'])}, {result['launches']}" for result in results)],
        ["violations", *(len(result["problems"]) for result in results)],
        ["minutes", *(f"{result['seconds'] / 60:.0f}" for result in results)],
    ]
    return table(["", *(f"{names[result['database']]}, seed {result['seed']}" for result in results)], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--space", type=Path, help="YAML file; default: lfm2-demo with short trainings")
    parser.add_argument("--fake", action="store_true", help="a tiny space, on a runtime that is a script")
    parser.add_argument("--trials", type=int, default=6, help="per study")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--pause", type=float, default=8.0, help="longest time between kills, in seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--launch-share", type=float, default=0.25, help="of the kills that hit the launch itself")
    parser.add_argument("--seconds", type=float, default=math.inf, help="kill nothing after this time")
    parser.add_argument("--page", type=Path, help="Markdown page that gets the table of results; nothing is run")
    parser.add_argument("results", type=Path, nargs="*", help="what campaigns printed, for --page")
    args = parser.parse_args()
    if args.page:
        results = [json.loads(path.read_text()) for path in args.results]
        fill(args.page, "measured: kill_campaign", f"\n{campaign_table(results)}\n")
        return 0
    home = Path(tempfile.mkdtemp(prefix="hilnas-kills-"))
    start = time.monotonic()
    # The server is started before this home is in the environment, by which a launch's processes are recognised.
    with database(home, args.database) as url:
        space = prepare(home, fake=args.fake)
        if args.space:
            space = yaml.safe_load(args.space.read_text())
        os.environ["NAS_DB"] = url
        campaign = Campaign(
            space,
            args.trials,
            args.kills,
            random.Random(args.seed),
            args.pause,
            home,
            url,
            start + args.seconds,
            args.launch_share,
        )
        campaign.run()
        with opened(home, url) as store:
            problems = [*campaign.problems, *check(store, campaign.names)]
    report = {
        "seed": args.seed,
        "database": args.database,
        "space": space["name"],
        "trials": args.trials,
        "pause_s": args.pause,
        "launch_share": args.launch_share,
        "kills": Counter(kill["kind"] for kill in campaign.done),
        "launches": campaign.launches,
        "studies": campaign.names,
        "problems": problems,
        "seconds": round(time.monotonic() - start, 1),
    }
    if problems:
        report["home"] = str(home)
    else:
        shutil.rmtree(home)
    print(json.dumps(report, indent=2))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
