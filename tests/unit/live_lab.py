"""What the tests of live studies and pages share: a study whose trials end as a test says, and many trials at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from sqlalchemy import text
from store_support import StillClock, key, open_store, proposal
from study_support import figure, tiny_space

from nas.core.measurement import Figure, Measurement
from nas.core.scoring import ATTENTION, PUBLISHED, MeasurementKey, figures_json
from nas.core.space import SearchSpace
from nas.core.trial import EventKind
from nas.infra.store import events, results, studies, trials
from nas.infra.store.rows import Origin, StudyState
from nas.infra.store.store import Store
from nas.measure.protocol.repetitions import PROTOCOL_VERSION
from nas.search.study.events import Launched

CONDITIONS: dict[str, Any] = {"protocol": 3, "conditions": {}, "times": {}}
CORNER = {"quality": 0.0, "latency": 1.0, "memory": 1.0}
_PLACE = MeasurementKey("local", "fake", "chat")
_TO_COMPLETE = (
    EventKind.EXPORTED, EventKind.MEASURING, EventKind.GATED_IN, EventKind.TRAINING, EventKind.CONFIRMING,
    EventKind.COMPLETE,
)  # fmt: skip


def figures(latency: float, memory: float, n: int = 3) -> dict[str, Figure]:
    """The figures that the tiny space's objectives and budgets name; the published reference has 1 of each."""
    return {
        "latency": figure(latency, 0.01, n=n),
        "peak_rss": figure(memory, 0.02, unit="MB", n=n),
        "decode_p50": figure(1.0, n=n),
        "ttft": figure(1.0, n=n),
        "file_size": figure(1.0, unit="MB", n=n),
    }


class LiveLab:
    """A store with studies of the tiny space."""

    def __init__(self, folder: Path) -> None:
        self.clock = StillClock()
        self.store: Store = open_store(folder, self.clock)
        self._serial = 0

    def study(self, name: str = "study", *, judged: bool = True, **changes: Any) -> int:
        """A running study of four trials to come, of the tiny space with `changes`; `judged`: see `judge`."""
        space = tiny_space(**changes).model_dump(mode="json")
        id = studies.create(self.store, name, space, seed=0, version="0").id
        calibrated = {"what": "calibrated", "device": "local", "runtime": "fake", "id": "box", "build": "b", "ms": 1.0}
        events.append(self.store, id, calibrated | CONDITIONS)
        events.append(self.store, id, Launched(4).to_json())
        studies.set_state(self.store, id, StudyState.RUNNING)
        if judged:
            self.judge(id)
        return id

    def judge(self, study: int) -> None:
        """The references have been measured: from now on there are coordinates and a reference point."""
        runtimes = SearchSpace.model_validate(studies.get(self.store, study).space).runtimes
        places = [_PLACE._replace(runtime=runtime.name) for runtime in runtimes]
        record = figures_json({place: figures(1.0, 1.0) for place in places})
        studies.set_scales(self.store, study, {"figures": {PUBLISHED: record, ATTENTION: record}})
        studies.freeze_reference(self.store, study, CORNER)

    def propose(self, study: int, origin: Origin = "proposal") -> int:
        """A new trial's number."""
        self._serial += 1
        trial = proposal(32 * self._serial, origin=origin)
        if origin == "reference":
            layout = tiny_space().references.layouts()[PUBLISHED]
            trial = replace(trial, layout=layout.to_json(), layout_id=layout.id)
        return trials.propose(self.store, study, [trial])[0].number

    def note_quality(self, study: int, trial: int, quality: float) -> None:
        """Notes the trial's quality, for the first time or again."""
        entry = {"rung": "first", "value": quality, "per_group": {}, "sd": 0.01, "n_seeds": 2}
        trials.add_event(self.store, study, trial, EventKind.PROGRESS, {"what": "quality", "rung": 0, "quality": entry})

    def measure(
        self,
        study: int,
        trial: int,
        latency: float,
        memory: float,
        *,
        n: int = 3,
        runtime: str = "fake",
        calibration_ms: float | None = None,
    ) -> None:
        """Stores a measurement of the trial, which took two seconds."""
        self._serial += 1
        measurement = Measurement(
            artifact="a", runtime=runtime, build="b", patched=False, device="box",
            workload=tiny_space().workloads["chat"], figures=figures(latency, memory, n), repetitions=[],
            refused_share=0.0, protocol=PROTOCOL_VERSION, calibration_ms=calibration_ms,
        )  # fmt: skip
        outcome = {"value": measurement.model_dump(mode="json"), "seconds": 2.0}
        results.put(self.store, key(self._serial), "measure", outcome, seconds=2.0, trial=(study, trial))
        self.clock.time += 2

    def complete(
        self, study: int, quality: float, latency: float, memory: float, origin: Origin = "proposal", **options: Any
    ) -> int:  # fmt: skip
        """A new trial that became complete with these figures."""
        trial = self.propose(study, origin)
        self.measure(study, trial, latency, memory, **options)
        self.note_quality(study, trial, quality)
        for kind in _TO_COMPLETE:
            payload = {"rung": 0} if kind is EventKind.TRAINING else {}
            trials.add_event(self.store, study, trial, kind, payload)
            self.clock.time += 1
        return trial

    def multiply(self, study: int, trial: int, copies: int) -> None:
        """Copies a trial, its events and its measurement, with other figures: in the database, in one transaction."""
        number = "(SELECT max(number) FROM trial WHERE study = :study)"
        many = "WITH RECURSIVE nth(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM nth WHERE i < :copies) "
        # Bits of a multiplicative hash: spread evenly, and the same each time.
        luck = "((i * 2654435761) % 1000003 / 1000003.0)"
        statements = (
            "CREATE TEMP TABLE copy AS " + many + f"SELECT i, i + {number} AS number, printf('%064x', i) AS key, "
            f"{luck} AS luck, ((i * 40503) % 65537 / 65537.0) AS other FROM nth",
            "INSERT INTO trial SELECT study, copy.number, copy.key, layout, origin, parents, operator, record, created,"
            " state, rung, reason, retryable, updated FROM trial, copy WHERE study = :study AND trial.number = :trial",
            "INSERT INTO event (study, trial, kind, payload, at) SELECT study, copy.number, kind,"
            " json_replace(payload, '$.quality.value', 0.5 + luck), at + copy.i FROM copy, event"
            " WHERE study = :study AND trial = :trial ORDER BY copy.i, event.id",
            "INSERT INTO result SELECT copy.key, stage, json_replace(payload, '$.value.figures.latency.value',"
            " 0.5 + other, '$.value.figures.peak_rss.value', 2 - luck - other / 2), seconds, created + copy.i"
            " FROM copy, result NATURAL JOIN result_use WHERE study = :study AND trial = :trial",
            "INSERT INTO result_use SELECT :study, copy.number, copy.key, 1 FROM copy",
            "DROP TABLE copy",
        )
        with self.store.write() as connection:
            for statement in statements:
                parameters = {"study": study, "trial": trial, "copies": copies}
                bound = {name: value for name, value in parameters.items() if f":{name}" in statement}
                connection.execute(text(statement), bound)
