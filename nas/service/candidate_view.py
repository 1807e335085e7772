"""One candidate's view, read from the database: its own rows and the reference layouts', however large the study is."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nas.core.layout import Layout
from nas.core.measurement import Measurement, Repetition
from nas.core.metrics import METRICS
from nas.core.scoring import Place, check_budgets, places
from nas.core.space import Objective, SearchSpace
from nas.core.workload import Workload
from nas.runtimes.base import Artifact
from nas.service.candidate_models import (
    AncestorView,
    ArtifactView,
    CandidateView,
    CommandView,
    EvaluationView,
    ObjectiveView,
    PlaceView,
    RepetitionView,
)
from nas.service.layout_view import layout_view
from nas.service.record import CORPUS, Figures, Record, read_trials
from nas.service.scales import PUBLISHED, figures_from_json
from nas.service.stored_space import stored_space
from nas.service.trainings import trainings
from nas.store import artifacts, events, results, studies, trials
from nas.store.rows import Result, Study
from nas.store.store import Store

_GENERATIONS = 8
_ANCESTORS = 32
_BENCH_FLAGS = ("prompt", "gen", "context", "threads")


@dataclass(frozen=True)
class _Study:
    """What the views of a study's candidates have in common."""

    row: Study
    space: SearchSpace
    published: Figures | None
    references: Mapping[str, Record]
    corpora: Sequence[str]


def candidate_views(store: Store, name: str, numbers: Sequence[int]) -> list[CandidateView]:
    """The views of some trials of a study, in the order asked for.

    Raises:
        UnknownName: no such study, or no such trial.
        InvalidInput: its space is none of this version's.
    """
    study = _read(store, name)
    records = read_trials(store, study.row, study.space, dict.fromkeys(numbers))
    return [_view(store, study, records[number]) for number in numbers]


def _read(store: Store, name: str) -> _Study:
    row = studies.get(store, name)
    space = stored_space(row)
    rows = {
        reference: trials.by_layout(store, row.id, layout.id)
        for reference, layout in space.references.layouts().items()
    }
    names = {each.number: reference for reference, each in rows.items() if each is not None}
    records = read_trials(store, row, space, names)
    return _Study(
        row=row,
        space=space,
        published=figures_from_json(row.scales["figures"][PUBLISHED]) if row.scales else None,
        references={names[number]: record for number, record in records.items()},
        corpora=sorted({event.payload["hash"] for event in events.notes(store, row.id, CORPUS)}),
    )


def _view(store: Store, study: _Study, record: Record) -> CandidateView:
    trial, space = record.trial, study.space
    stored = results.of_trial(store, trial.study, trial.number)
    written = _artifacts(store, record, stored)
    named = {each.trial.number: reference for reference, each in study.references.items()}
    windows = [space.workloads[workload].window for workload in space.measured]
    return CandidateView(
        study=study.row.name,
        trial=trial.number,
        name=named.get(trial.number, f"trial {trial.number}"),
        state=trial.status.state.value,
        rung=trial.status.rung,
        reason=trial.status.reason,
        origin=trial.origin,
        operator=trial.operator,
        record={key: value for key, value in (trial.record or {}).items() if key != "layout"},
        created=trial.created,
        updated=trial.updated,
        noisy=record.noisy,
        layout=layout_view(record.layout, max(windows), *windows),
        objectives=tuple(_objectives(study, record)),
        budgets=tuple(check_budgets(space, record.figures, study.published or {}, final=True)),
        places=tuple(_place(study, place, taken) for place, taken in sorted(record.measurements.items())),
        evaluations=tuple(_evaluations(study, record)),
        trainings=tuple(trainings(space.quality, record.layout, stored, study.corpora)),
        artifacts=tuple(written),
        ancestors=tuple(_ancestors(store, study, record)),
        commands=tuple(_commands(record, written)),
    )


def _objectives(study: _Study, record: Record) -> Iterator[ObjectiveView]:
    own = record.axes(study.space, study.published)
    theirs = {name: each.axes(study.space, study.published) for name, each in study.references.items()}
    for index, (objective, reached) in enumerate(zip(study.space.objectives, own, strict=True)):
        columns = {name: axis.value if (axis := axes[index]) else None for name, axes in theirs.items()}
        rung = record.quality.rung if record.quality and METRICS[objective.metric].source == "proxy" else None
        if rung is not None:
            columns = _qualities(study, rung)
        unit, direction = _meaning(study.space, objective)
        yield ObjectiveView(
            name=objective.name,
            metric=objective.metric,
            unit=unit,
            direction=direction,
            value=reached.value if reached else None,
            coordinate=reached.coordinate if reached else None,
            sd=reached.sd if reached else None,
            rung=rung,
            references=columns,
        )


def _qualities(study: _Study, rung: str) -> dict[str, float | None]:
    """Reference -> its quality at a rung."""
    return {name: each.rungs[rung].value if rung in each.rungs else None for name, each in study.references.items()}


def _meaning(space: SearchSpace, objective: Objective) -> tuple[str, str]:
    metric = METRICS[objective.metric]
    ratio = metric.source != "proxy" and len(places(space, objective)) > 1
    return ("x", "min") if ratio else (metric.unit, metric.direction)


def _place(study: _Study, place: Place, taken: Measurement) -> PlaceView:
    base = (study.published or {}).get(place, {})
    ratios = {
        name: figure.value / theirs
        for name, figure in taken.figures.items()
        if figure.value is not None and name in base and (theirs := base[name].value)
    }
    shared = ("build", "patched", "artifact", "noisy", "refused_share", "drift", "calibration_ms", "wall_s", "figures")
    return PlaceView(
        place=place,
        device_id=taken.device,
        workload=taken.workload,
        ratios=ratios,
        repetitions=tuple(_repetition(each) for each in taken.repetitions),
        **{name: getattr(taken, name) for name in shared},
    )


def _repetition(taken: Repetition) -> RepetitionView:
    sample, conditions = taken.sample, taken.conditions
    return RepetitionView(
        valid=taken.valid,
        reason=taken.reason,
        attempt=taken.attempt,
        ttft_ms=sample.ttft_ms if sample else None,
        token_ms=tuple(ns / 1e6 for ns in sample.decode_ns) if sample else (),
        drift=taken.drift,
        temperature_c=conditions.temperature_c,
        temperature_unread=conditions.unread.get("temperature_c"),
        throttled=conditions.throttled,
        governor=conditions.governor,
        power_source=conditions.power_source,
    )


def _evaluations(study: _Study, record: Record) -> Iterator[EvaluationView]:
    for rung, quality in record.rungs.items():
        means = _qualities(study, rung)
        yield EvaluationView(rung=rung, group="", value=quality.value, sd=quality.sd, references=means)
        for group, value in quality.per_group.items():
            theirs = {name: each.rungs.get(rung) for name, each in study.references.items()}
            scores = {name: each.per_group.get(group) if each else None for name, each in theirs.items()}
            yield EvaluationView(rung=rung, group=group, value=value, sd=None, references=scores)


def _artifacts(store: Store, record: Record, stored: Sequence[Result]) -> list[ArtifactView]:
    exports = [row.payload["value"] for row in stored if row.stage == "export" and "value" in row.payload]
    return [_artifact(store, record, Artifact.model_validate(value)) for value in exports]


def _artifact(store: Store, record: Record, written: Artifact) -> ArtifactView:
    return ArtifactView(
        sha256=written.sha256,
        size=written.size,
        runtime=written.runtime,
        quantisation=written.quantisation,
        arch=written.arch,
        patched=written.patched,
        weights=written.weights,
        scale="deploy" if written.layout_id == record.layout.id else "proxy",
        stored=written.stored.sha256,
        recipe=written.recipe is not None,
        kept=artifacts.get(store, written.stored.sha256) is not None,
    )


def _ancestors(store: Store, study: _Study, record: Record) -> Iterator[AncestorView]:
    """Nearest first, each once, as far back as is worth showing."""
    seen = {record.trial.number}
    generation = record.trial.parents
    for generations in range(1, _GENERATIONS + 1):
        numbers = [number for number in dict.fromkeys(generation) if number not in seen]
        generation = ()
        for number in numbers:
            if len(seen) > _ANCESTORS:
                return
            seen.add(number)
            row = trials.get(store, study.row.id, number)
            yield AncestorView(
                trial=number,
                generations=generations,
                layout=Layout.from_json(row.layout).format(),
                layout_id=row.layout_id,
                state=row.status.state.value,
                origin=row.origin,
                operator=row.operator,
                parents=row.parents,
            )
            generation += row.parents


def _commands(record: Record, written: Sequence[ArtifactView]) -> Iterator[CommandView]:
    """The same layout measured and exported again, by the same protocol and from the same random weights."""
    layout = shlex.quote(record.layout.format())
    quantisations = {each.sha256: each.quantisation for each in written}
    for place, taken in sorted(record.measurements.items()):
        counted = sum(each.valid for each in taken.repetitions)
        flags = [f"--{flag} {getattr(taken.workload, flag)}" for flag in _BENCH_FLAGS]
        if quantisation := quantisations.get(taken.artifact):
            flags.insert(0, f"-q {shlex.quote(quantisation)}")
        where = f"--runtime {shlex.quote(place.runtime)} --device {shlex.quote(place.device)}"
        yield CommandView(
            what=f"measure {place.workload} on {place.device}/{place.runtime}",
            command=f"nas bench {layout} {where} {' '.join(flags)} --reps {max(2, counted)}",
            beside=_beside(taken.workload),
        )
    for each in written:
        if each.scale == "deploy":
            target = f"--runtime {shlex.quote(each.runtime)} -q {shlex.quote(each.quantisation)}"
            seed = each.weights.removeprefix("random:")
            yield CommandView(
                what=f"write the {each.runtime} file", beside=(),
                command=f"nas export {layout} {target} --seed {shlex.quote(seed)} -o model",
            )  # fmt: skip


def _beside(workload: Workload) -> tuple[str, ...]:
    """What the workload had otherwise than `nas bench` has it, and cannot be told to."""
    plain = Workload(**{flag: getattr(workload, flag) for flag in _BENCH_FLAGS}).key()
    # Cores are pinned by the device, not by who asks.
    return tuple(f"{k} {v}" for k, v in workload.key().items() if plain[k] != v and k != "affinity")
