"""Runs the faults: one after the other on each device, all devices in parallel."""

from __future__ import annotations

import math
import random
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from subprocess import SubprocessError
from typing import Any

from benchmarks.faults.disturbances import Disturbances
from benchmarks.faults.journal import Journal, Line
from benchmarks.faults.kinds import KINDS
from benchmarks.faults.scene import Draw, Scene
from benchmarks.faults.stage import Post, Stage, admissions, stage
from benchmarks.faults.verify import end_problems, scene_problems, unavailable
from benchmarks.faults.watch import Watch
from benchmarks.faults.work import Works, fingerprint, patiently
from benchmarks.runs import say
from nas.core.errors import NasError
from nas.infra.store import jobs
from nas.infra.store.rows import JobState

_SMALL, _BIG = 4096, 4 << 20
_ENDS_WITHIN_S = 480.0
_CALM_WITHIN_S = 480.0
_MANY_VIOLATIONS = 25
_LONG_SHARE = 0.08
_LOGS = ("coordinator", "agent")


class Campaign:
    """See `fault_campaign.py`.

    Args:
        journal: its settings, and the faults done so far.
        only: numbers of the faults to do; None: all that were not done.
        seconds: after which no fault is begun.
    """

    def __init__(self, journal: Journal, only: Sequence[int] | None = None, seconds: float = math.inf) -> None:
        self._journal, self._terms = journal, journal.terms
        finished = {line["number"] for line in journal.faults()}
        self._numbers = [number for number in range(self._terms.faults) if number not in finished]
        if only is not None:
            self._numbers = list(only)
        self._plan = plan(self._terms.seed, self._terms.faults)
        self._disturbances = Disturbances()
        self._start = time.monotonic()
        self._until = self._start + seconds

    def run(self) -> Line:
        """Runs the campaign; returns the report."""
        folder = Path(self._terms.folder)
        before = {name: _size(folder / f"{name}.log") for name in _LOGS}
        with stage(folder, self._terms.machines, self._terms.database, self._terms.kinds) as farm:
            works = Works(farm.store, self._terms.seed)
            works.admit(admissions(farm.store))
            with (
                Watch({post.id: post.machine for post in farm.posts}) as watch,
                # Open to the end: a database server that a lane started again ends with the lane's thread.
                ThreadPoolExecutor(len(farm.posts)) as lanes,
            ):
                for lane in [lanes.submit(self._lane, farm, works, watch, i) for i in range(len(farm.posts))]:
                    lane.result()
                self._calm_down(farm, watch)
                self._note_end(farm, watch, before)
        return report(self._journal)

    def _lane(self, farm: Stage, works: Works, watch: Watch, lane: int) -> None:
        """Runs one device's faults, one after the other."""
        for number in self._numbers:
            if number % len(farm.posts) != lane or len(self._journal.problems()) > _MANY_VIOLATIONS:
                continue
            if time.monotonic() > self._until:
                return
            try:
                self._journal.write(self._fault(farm, farm.posts[lane], works, watch, number))
            except (NasError, OSError, AssertionError, SubprocessError):
                # The faults of other devices continue; the report names this one.
                trouble = traceback.format_exc(limit=-4)
                self._journal.write({"number": number, "kind": self._plan[number], "violations": [trouble]})

    def _fault(self, farm: Stage, post: Post, works: Works, watch: Watch, number: int) -> Line:
        drawn = draw(self._terms.seed, number, self._plan[number], self._terms.longest_s)
        kind = KINDS[drawn.kind]
        # One that was begun before is another job: what became of the first one, nobody watched.
        name = f"{number}/{sum(line.get('begins') == number for line in self._journal.lines)}"
        self._journal.write({"begins": number})
        order = works.order(name, post.id, drawn.conduct, seconds=drawn.run_s, size=drawn.size)
        act = partial(self._disturbances.disturbed, None if kind.everywhere else post.id, kind.causes)
        scene = Scene(farm, post, works, watch, drawn, order, act)
        start = time.time()
        kind.do(scene)
        over = time.time()
        has_ended = scene.until_ended(_ENDS_WITHIN_S)
        problems = scene_problems(scene, self._disturbances)
        row = scene.row()
        if not has_ended:
            patiently(lambda: jobs.cancel(farm.store, [order.job]))
        works.forget(order, farm.agent_cache, post.files)
        line = scene.record() | {"begun": start, "over": over, "recovery_s": max(0.0, row.updated - over)}
        line |= {"state": row.state.value, "blame": row.blame, "tries": row.attempts, "violations": problems}
        line["result"] = fingerprint(row) if row.state is JobState.DONE else None
        took_s = row.updated - start
        say(f"{number:4d} {post.machine.name} {drawn.kind}, {drawn.moment}: {row.state.value} in {took_s:.1f} s")
        for problem in problems:
            say(f"     !! {problem}")
        return line

    def _calm_down(self, farm: Stage, watch: Watch) -> None:
        end = time.monotonic() + _CALM_WITHIN_S
        while time.monotonic() < end and not (farm.all_idle() and watch.quiet() and not jobs.live(farm.store)):
            time.sleep(1.0)

    def _note_end(self, farm: Stage, watch: Watch, before: Mapping[str, int]) -> None:
        folder = Path(self._terms.folder)
        done = {line["job"]: line["result"] for line in self._journal.faults() if line.get("result")}
        logs = {
            name: (folder / f"{name}.log").read_bytes()[size:].decode(errors="replace") for name, size in before.items()
        }
        problems = [*watch.take_late(), *end_problems(farm, done, logs, self._disturbances, folder)]
        line: Line = {"end": time.time(), "seconds": round(time.monotonic() - self._start, 1)}
        line |= {"restarts": {"agent": len(farm.agent.exits), "coordinator": len(farm.coordinator.exits)}}
        self._journal.write(line | {"unavailable": unavailable(logs["coordinator"]), "violations": problems})


def report(journal: Journal) -> Line:
    """Returns the summary of a campaign, over all its runs."""
    faults, ends = journal.faults(), [line for line in journal.lines if "end" in line]
    restarts: Counter[str] = Counter()
    for line in ends:
        restarts.update(line["restarts"])
    return {
        "seed": journal.terms.seed,
        "database": journal.terms.database,
        "machines": journal.terms.machines,
        "machine_kinds": list(journal.terms.kinds),
        "faults": len(faults),
        "left": journal.terms.faults - len({line["number"] for line in faults}),
        "kinds": dict(sorted(Counter(line["kind"] for line in faults).items())),
        "moments": dict(sorted(Counter(line["moment"] for line in faults if "moment" in line).items())),
        "late": sum(line.get("late", False) for line in faults),
        "jobs": dict(Counter(f"{line['state']} {line['blame'] or ''}".strip() for line in faults if "state" in line)),
        "tries": dict(sorted(Counter(line["tries"] for line in faults if "tries" in line).items())),
        "recovery_s": recoveries(faults),
        "restarts": dict(restarts),
        "answers_503": sum(line["unavailable"] for line in ends),
        "runs": len(ends),
        "seconds": round(sum(line["seconds"] for line in ends), 1),
        "violations": [
            {"what": problem, "fault": {name: value for name, value in line.items() if name != "violations"}}
            for line, problem in journal.problems()
        ],
    }


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def plan(seed: int, count: int) -> list[str]:
    """Returns kinds of all faults: first each kind once, then by weight."""
    rng = random.Random(f"{seed}/plan")
    deck = [name for name, kind in KINDS.items() for _ in range(kind.weight - 1)]
    first = list(KINDS)
    rng.shuffle(first)
    rng.shuffle(deck)
    return list(islice([*first, *islice(cycle(deck), count)], count))


def draw(seed: int, number: int, kind: str, longest_s: float) -> Draw:
    """Draws the parameters of a fault."""
    rng = random.Random(f"{seed}/{number}")
    moment = rng.choice(KINDS[kind].moments)
    seconds = rng.uniform(1, 8) if rng.random() > _LONG_SHARE else rng.uniform(8, 60)
    conduct = rng.choice(KINDS[kind].conducts)
    return Draw(
        number=number,
        kind=kind,
        moment=moment,
        delay_s=round(rng.uniform(0, 0.05 if moment == "ending" else 0.4), 2),
        seconds=round(min(seconds, longest_s), 2),
        conduct=conduct,
        run_s=round(rng.uniform(1.5, 3) if moment == "running" else rng.uniform(0.2, 1.5), 2),
        size=_BIG if moment in ("fetching", "pushing") else _SMALL,
        choice=round(rng.random(), 3),
    )


def recoveries(faults: Sequence[Line]) -> dict[str, Any]:
    """Returns seconds from the end of a disturbance to the end of the affected job."""
    recovered = [line for line in faults if "recovery_s" in line and not line["late"]]
    kinds = {name: [line["recovery_s"] for line in recovered if line["kind"] == name] for name in KINDS}
    every = [line["recovery_s"] for line in recovered]
    return {name: _spread(values) for name, values in {"all": every, **kinds}.items() if values}


def _spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    p90 = ordered[math.ceil(0.9 * len(ordered)) - 1]
    return {"median": round(statistics.median(ordered), 1), "p90": round(p90, 1), "max": round(ordered[-1], 1)}
