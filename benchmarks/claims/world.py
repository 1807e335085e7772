"""Studies in memory whose true values are known: their figures and scores have noise of known size.

From the figures and scores on, everything is the product's own: quality scales, objectives, the order in which layouts
are named, snapshots, fronts and sentences.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nas.core.comparison import naming_order
from nas.core.layout import Layout
from nas.core.measurement import Figure
from nas.core.scoring import ATTENTION, PUBLISHED, Figures, MeasurementKey, figures_json
from nas.core.space import SearchSpace
from nas.core.stats import Z95
from nas.core.trial import Event, EventKind, TrialState, TrialStatus
from nas.infra.store.rows import Study, StudyState, Trial
from nas.search.analysis.record import Completion, MeasurementSummary, Record, StudyLog, StudyRecord, axes_of
from nas.search.analysis.snapshot import StudySnapshot
from nas.search.proxy.quality import Anchors, QualityScale, fix_scale
from nas.search.study.events import Named, Remeasured, Rescored, SecondFigures

Floats = NDArray[np.float64]
KEY = MeasurementKey("local", "llama.cpp", "chat")
RUNG_SEEDS, ANCHOR_SEEDS, FRESH_SEEDS = (0, 1), (0, 1, 2, 3), (100, 101, 102, 103)
_ANCHORS, _ROUNDS = 6, 5
_CHAT = {"workload": "chat"}


@cache
def space() -> SearchSpace:
    """Returns the space of all simulated studies: quality against latency, one rung of two seeds."""
    return SearchSpace.model_validate({
        "name": "simulated",
        "model": {"d_model": 128, "depth": {"min": 2, "max": 4}, "vocab": 256},
        "mixers": {"conv": {"kernel": 3}, "gqa": {"heads": 2, "kv_heads": [1, 2]}},
        "ffn": {"swiglu": {"width": {"min": 32, "max": 16384, "step": 32}}},
        "runtimes": [{"name": KEY.runtime, "quantisation": "q4_0"}],
        "workloads": {"chat": {"prompt": 64, "gen": 16}},
        "objectives": [{"name": "quality", "metric": "quality"}, {"name": "latency", "metric": "latency", **_CHAT}],
        "references": {
            "published": "d128 v256 ffn=swiglu:320 [C3 A2/1 C3]",
            "attention": "d128 v256 ffn=swiglu:352 [A2/1*3]",
        },
        "quality": {
            "proxy_d_model": 32,
            "rungs": [{"name": "only", "lm_steps": 6, "seeds": list(RUNG_SEEDS)}],
            "anchors": {"layouts": _ANCHORS - 2, "seeds": list(ANCHOR_SEEDS)},
            "rescore": {"seeds": list(FRESH_SEEDS)},
        },
        "protocol": {"remeasure": {"rounds": _ROUNDS}},
    })  # fmt: skip


@cache
def layout(number: int) -> Layout:
    """Returns a layout for each trial, each with a proxy of its own."""
    return Layout.parse(f"d128 v256 ffn=swiglu:{32 * (number + 20)} [C3 A2/1 C3]")


@dataclass(frozen=True)
class Noise:
    """Standard deviations.

    Args:
        device: of the logarithm of a figure, which states it correctly.
        moment: of what all figures of one moment share, which no figure states.
        seed: of the score of one seed, without what all layouts share under it.
    """

    device: float = 0.02
    moment: float = 0.03
    seed: float = 0.03


class World:
    """Makes studies.

    Args:
        rng: of all noise.
        noise: its size.
    """

    def __init__(self, rng: np.random.Generator, noise: Noise = Noise()) -> None:
        self.rng, self.noise = rng, noise
        self._shifts: dict[int, float] = {}

    def figure(self, log_value: float, moment: float = 0.0) -> Figure:
        """Returns a measured figure of a true value; its noise is stated as it is."""
        sd = self.noise.device
        value = math.exp(log_value + moment + sd * self.rng.standard_normal())
        low, high = (value * math.exp(side * Z95 * sd) for side in (-1, 1))
        return Figure(value=value, low=low, high=high, log_sd=sd, n=10, unit="ms")

    def scores(self, quality: float, seeds: Sequence[int]) -> dict[int, dict[str, float]]:
        """Returns seed -> scores of a layout of true quality; each seed shifts all layouts alike."""
        for seed in seeds:
            self._shifts.setdefault(seed, 0.03 * self.rng.standard_normal())
        drawn = quality + self.noise.seed * self.rng.standard_normal(len(seeds))
        return {seed: {"lm/text": float(value + self._shifts[seed])} for seed, value in zip(seeds, drawn, strict=True)}

    def scale(self) -> tuple[QualityScale, Mapping[str, Mapping[int, Mapping[str, float]]]]:
        """Returns the scale of the rung, and the scores of the references there."""
        references = {name: self.scores(true, RUNG_SEEDS) for name, true in ((PUBLISHED, 1.0), (ATTENTION, 0.95))}
        true = [1.0, 0.95, *self.rng.normal(0.95, 0.1, _ANCHORS - 2)]
        anchors = Anchors([self.scores(value, ANCHOR_SEEDS) for value in true], {"lm": len(RUNG_SEEDS)})
        scale = fix_scale("only", references[PUBLISHED], [references[ATTENTION]], minimum=0.01, anchors=anchors)
        return scale, references

    def study(self, log_latency: Floats, quality: Floats, *, second: bool = True) -> StudyRecord:
        """Returns a complete study.

        Args:
            log_latency: [N] true logarithms of the candidates' latency; that of the published reference is 0.
            quality: [N] their true qualities; that of the published reference is 1.
            second: whether the front was measured again, by figures and by seeds.
        """
        self._shifts = {}
        scale, references = self.scale()
        baselines = {name: {KEY: {"latency": self.figure(true)}} for name, true in ((PUBLISHED, 0.0), (ATTENTION, 0.1))}
        rows: dict[int, Record] = {}
        for number, name in enumerate((PUBLISHED, ATTENTION)):
            estimate = scale.quality(references[name])
            rows[number] = _record(number, "reference", space().references.layouts()[name], baselines[name], estimate)
        for place, (log_value, true) in enumerate(zip(log_latency.tolist(), quality.tolist(), strict=True)):
            number = 2 + place
            figures = {KEY: {"latency": self.figure(log_value)}}
            estimate = scale.quality(self.scores(true, RUNG_SEEDS))
            rows[number] = _record(number, "proposal", layout(place), figures, estimate)
        log = StudyLog(launched=True)
        log.completions = [Completion(number, 0.0, 0.0) for number in rows if number >= 2]
        point = [-0.5, 0.7]
        record = StudyRecord(_row(scale, baselines, point), space(), rows, baselines[PUBLISHED], point, log)
        for row in rows.values():
            row.axes = axes_of(row, record)
        if second:
            self._measure_again(record, scale, log_latency, quality)
        return record

    def _measure_again(self, record: StudyRecord, scale: QualityScale, log_latency: Floats, quality: Floats) -> None:
        """Names the front, measures it in turns and trains it on fresh seeds, as a study does when its search ends."""
        counted = {
            number: axes for number in record.records if number >= 2 if (axes := _known_axes(record.records[number]))
        }
        reference_axes = _known_axes(record.records[0])
        named = naming_order(counted, reference_axes, record.reference_point or [])
        settings = record.space.protocol.remeasure
        assert settings is not None, "the space has it"
        note = Named(tuple(named[: settings.members])).to_json()
        record.log.notes.append(Event(id=1, study=1, trial=None, kind=EventKind.STUDY, payload=note, at=0.0))
        true = {0: (0.0, 1.0), 1: (0.1, 0.95)} | {
            number: (float(log_latency[number - 2]), float(quality[number - 2])) for number in counted
        }
        for round_ in range(settings.rounds):
            moment = self.noise.moment * self.rng.standard_normal()
            for number in (0, *named[: settings.members]):
                figures = {"latency": self.figure(true[number][0], moment)}
                row = SecondFigures(*KEY, result="0" * 64, figures=figures)
                record.records[number].remeasured[round_] = Remeasured(round_, (row,))
        fresh = {number: self.scores(true[number][1], FRESH_SEEDS) for number in (0, 1, *named)}
        again = scale.rescored(fresh[0]).with_noise_of(list(fresh.values()))
        for number, scores in fresh.items():
            row_ = record.records[number]
            row_.quality = again.quality(scores)
            row_.rescored = Rescored(row_.quality, again.per_seed(scores))
            row_.axes = axes_of(row_, record)


def snapshot(record: StudyRecord) -> StudySnapshot:
    """Returns the snapshot of a study that its sentences are made of; their last one, of reliability, is left out."""
    result = StudySnapshot(record)
    result.cached("reliability", lambda: None)
    return result


def _known_axes(record: Record) -> list[Any]:
    return [axis for axis in record.axes if axis is not None]


def _record(number: int, origin: Any, of: Layout, figures: Figures, quality: Any) -> Record:
    trial = Trial(
        study=1, number=number, layout={}, layout_id=of.id, origin=origin, parents=(), operator=None, record=None,
        status=TrialStatus(TrialState.COMPLETE, 0), created=0.0, updated=0.0,
    )  # fmt: skip
    text = {key: json.dumps({name: figure.model_dump() for name, figure in by.items()}) for key, by in figures.items()}
    measured = {key: MeasurementSummary("0" * 64, value) for key, value in text.items()}
    return Record(trial, of, measurements=measured, quality=quality, rungs={"only": quality})


def _row(scale: QualityScale, baselines: Mapping[str, Figures], point: Sequence[float]) -> Study:
    scales = {
        "figures": {name: figures_json(figures) for name, figures in baselines.items()},
        "quality": {scale.rung: scale.model_dump(mode="json")},
    }
    names = [objective.name for objective in space().objectives]
    return Study(
        id=1, name="simulated", space={}, space_hash="", state=StudyState.COMPLETE, desired_state="run", seed=0,
        version="0", created=0.0, scales=scales, reference_point=dict(zip(names, point, strict=True)), proposer=None,
    )  # fmt: skip
