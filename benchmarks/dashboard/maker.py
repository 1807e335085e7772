"""Adds studies of many trials to a store without a search: imports them as files, and adds trials one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

from benchmarks.dashboard.candidates import CORNER, DEVICES, Judge
from benchmarks.dashboard.lives import Measurement, Step, cut_short, life, new_layouts, rng_of
from nas.core.canonical import canonical_json, content_hash
from nas.core.layout import Layout
from nas.core.scoring import ATTENTION, PUBLISHED, figures_json
from nas.core.trial import EventKind
from nas.infra.store import results, studies, trials
from nas.infra.store.rows import NewTrial, StudyState
from nas.infra.store.store import Store
from nas.measure.protocol.repetitions import PROTOCOL_VERSION
from nas.search.analysis.archive import FORMAT, VERSION, import_study
from nas.search.proposers.sampling import Sampler
from nas.search.study.events import Calibrated, Launched

FLYING = 24
"""The last trials of a study that still runs have not ended."""

_BEGAN = 1.7e9
_TRIAL_S = 20.0
_STEP_S = 1.5


def add_study(
    store: Store,
    name: str,
    judge: Judge,
    file: Path,
    *,
    trials: int,
    seed: int,
    running: bool,
    say: Callable[[int], None] = lambda count: None,
) -> int:
    """Writes a study's file, as `nas study export` does, and imports it; returns its id."""
    with file.open("w", encoding="utf-8") as out:
        for number, line in enumerate(_lines(name, judge, trials, seed, running, say)):
            out.write(canonical_json(line if "end" not in line else {"end": number}) + "\n")
    with file.open("rb") as source:
        study = import_study(store, source).id
    studies.set_state(store, study, StudyState.RUNNING if running else StudyState.COMPLETE)
    studies.set_desired_state(store, study, "run")
    return study


class Orchestrator:
    """Adds trials to a study as its orchestrator would, each step in a transaction of its own.

    Args:
        store: where the study is.
        study: its id.
        judge: of its layouts.
    """

    def __init__(self, store: Store, study: int, judge: Judge) -> None:
        self._store, self._study, self._judge = store, study, judge
        layout_ids = {row.layout_id for row in trials.all(store, study)}
        self._rng = rng_of(study, len(layout_ids))
        self._layouts = new_layouts(Sampler(judge.space), self._rng, layout_ids)

    def add(self) -> int:
        """Adds one trial, which ends; returns its number."""
        layout = next(self._layouts)
        number = trials.propose(self._store, self._study, [NewTrial(layout.to_json(), layout.id)])[0].number
        for step in life(self._judge, layout, self._rng):
            self._take(number, step)
        return number

    def _take(self, number: int, step: Step) -> None:
        store, study = self._store, self._study
        if isinstance(step, Measurement):
            key = _key(study, number, step.device)
            seconds = step.payload["seconds"]
            results.put(store, key, "measure", step.payload, seconds=seconds, trial=(study, number))
        else:
            trials.add_event(store, study, number, step.kind, step.payload)


def _lines(
    name: str, judge: Judge, trials: int, seed: int, running: bool, say: Callable[[int], None]
) -> Iterator[dict[str, Any]]:
    rng, references = rng_of(seed), [*judge.space.references.layouts().values()]
    yield _header(name, judge, seed)
    yield from _opening(judge, trials + FLYING)
    layout_ids = {layout.id for layout in references}
    layouts = islice(new_layouts(Sampler(judge.space), rng, layout_ids), trials)
    for number, layout in enumerate(references):
        yield from _trial(number, layout, life(judge, layout, rng, reference=True), "reference")
    for done, layout in enumerate(layouts):
        steps = life(judge, layout, rng)
        if running and done >= trials - FLYING:
            steps = cut_short(steps, rng)
        yield from _trial(len(references) + done, layout, steps, "proposal")
        if done % 1000 == 999:
            say(done + 1)
    yield {"end": 0}


def _header(name: str, judge: Judge, seed: int) -> dict[str, Any]:
    figures = figures_json(judge.published())
    return {
        "format": FORMAT,
        "v": VERSION,
        "name": name,
        "space": judge.space.model_dump(mode="json"),
        "seed": seed,
        "version": "0",
        "created": _BEGAN,
        "state": "paused",
        "reference_point": CORNER,
        "proposer": None,
        "scales": {"figures": {PUBLISHED: figures, ATTENTION: figures}},
    }


def _opening(judge: Judge, trials: int) -> Iterator[dict[str, Any]]:
    figures = figures_json(judge.published())
    calibrated = [
        {
            "what": Calibrated.what,
            "id": id,
            "device": device,
            "runtime": "llama.cpp",
            "build": "b",
            "ms": 361.0,
            "protocol": PROTOCOL_VERSION,
            "conditions": {},
            "times": {},
        }
        for device, id in DEVICES.items()
    ]
    payloads: list[dict[str, Any]] = [
        {"what": Launched.what, "trials": trials, "warm_start": []},
        *calibrated,
        {"scales": {"figures": {PUBLISHED: figures, ATTENTION: figures}}},
        {"reference_point": CORNER},
    ]
    for payload in payloads:
        yield _event(None, EventKind.STUDY, payload, _BEGAN)


def _trial(number: int, layout: Layout, steps: Iterator[Step], origin: str) -> Iterator[dict[str, Any]]:
    began = _BEGAN + _TRIAL_S * number
    yield {
        "trial": {
            "number": number,
            "layout_id": layout.id,
            "layout": layout.to_json(),
            "origin": origin,
            "parents": [],
            "operator": None,
            "record": None,
            "created": began,
        }
    }
    yield _event(number, EventKind.PROPOSED, {}, began)
    for step, at in zip(steps, count(began + _STEP_S, _STEP_S), strict=False):
        if isinstance(step, Measurement):
            key, seconds = _key(0, number, step.device), step.payload["seconds"]
            result = {"stage": "measure", "payload": step.payload, "seconds": seconds, "created": at}
            yield {"result": {"result_key": key, **result}}
            yield {"use": {"trial": number, "result_key": key, "first": True}}
        else:
            yield _event(number, step.kind, step.payload, at)


def _event(trial: int | None, kind: EventKind, payload: dict[str, Any], at: float) -> dict[str, Any]:
    return {"event": {"trial": trial, "kind": kind.value, "payload": payload, "at": at}}


def _key(study: int, trial: int, device: str) -> str:
    return content_hash({"made": study, "trial": trial, "device": device})
