"""A study opened to be run: new or resumed, with its lease, and checked against the conditions that it began under."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nas.core.block import BLOCKS
from nas.core.errors import InvalidInput, NasError, StudyBusy, StudyChanged
from nas.core.progress import Log
from nas.core.quality_config import CorpusFiles
from nas.core.scoring import PUBLISHED, require_sensors
from nas.core.space import SearchSpace
from nas.core.task import TASKS
from nas.infra.store import jobs, leases, studies
from nas.infra.store.rows import Study, StudyLease, StudyState
from nas.infra.store.store import Store
from nas.measure.farm.farm import Farm
from nas.measure.protocol.calibration import Calibrator, MeasurementTarget, SavedCalibration
from nas.measure.protocol.repetitions import PROTOCOL_VERSION
from nas.model.text.corpus import CorpusRef, made_of, refer, refer_again, refer_scores
from nas.search.proxy.job import MIXES_VERSION, TRAINER_VERSION
from nas.search.proxy.tasks import SUITE_VERSION
from nas.search.spaces import space_difference
from nas.search.study.events import Calibrated, CorpusUsed, Launched, all_events, notes, stored_space
from nas.search.study.ledger import Ledger
from nas.search.study.proposals import require_studies

OnEvent = Callable[[int | None, str, Any], None]
"""Called with each event that is logged: trial, name, payload."""

_SHOWN_CHANGES = 10
"""Differences between two spaces that a message lists."""
_SCORES = "scores"
"""Key of the path of a library's file of scores, in `CorpusUsed`."""


@dataclass(frozen=True)
class LaunchOptions:
    """Options of `nas launch`.

    Args:
        space: the search space.
        study: name; with `resume`, of a study that exists.
        trials: layouts to propose, references not counted; None: as last time, or as the space says.
        base: folder that relative corpus paths are taken from.
        db: URL, or None for the default database.
        ray_address: of a running cluster, or None.
        train_gpus: GPUs per training on that cluster; None: CPU slots of nodes with GPUs share them evenly.
        resume: continue the study.
        workers: parallel trainings on a local Ray.
        warm_start: earlier studies of the database to learn from; a resumed study keeps its own.
    """

    space: SearchSpace
    study: str
    trials: int | None
    base: Path
    db: str | None = None
    ray_address: str | None = None
    train_gpus: float | None = None
    resume: bool = False
    workers: int = len(os.sched_getaffinity(0))
    warm_start: tuple[str, ...] = ()


class OpenedStudy:
    """A study whose lease this process has.

    Args:
        options: of the launch.
        ledger: of the study.
        corpus: of the study's proxy trainings.

    Raises:
        StudyChanged: the study began with other earlier studies.

    Attributes:
        trials: layouts to propose, references not counted.
        warm_start: names of the earlier studies that it learns from.
    """

    def __init__(self, options: LaunchOptions, ledger: Ledger, corpus: CorpusRef) -> None:
        self.space, self.ledger, self.corpus = options.space, ledger, corpus
        earlier = notes(ledger.events(), Launched)
        self.trials = options.trials or (earlier[-1].trials if earlier else options.space.search.trials)
        self.warm_start = earlier[-1].warm_start if earlier else options.warm_start
        if options.warm_start not in ((), self.warm_start):
            names = ", ".join(self.warm_start) or "no other study"
            raise StudyChanged(f"the study began with {names}; that cannot be changed", where="--warm-start")

    @classmethod
    @contextmanager
    def open(cls, options: LaunchOptions, on_event: OnEvent, log: Log) -> Iterator[OpenedStudy]:
        """Creates the study, or resumes it, and holds its lease while the context is open.

        If the context fails, the study's state says why; a new study that failed on invalid input before it ran is
        deleted, so that its name stays free.

        Args:
            options: of the launch.
            on_event: called with each event.
            log: called with a line where a dead process is taken over from.

        Raises:
            UnknownName: no such study to resume, or to learn from.
            InvalidInput: a study of this name exists, or the resumed one began with other settings.
            StudyChanged: what the resumed study is trained on is gone, or would train otherwise.
            StudyBusy: another process runs it.
        """
        # Before a database is made, because it may fail.
        new_corpus = None if options.resume else _corpus(options)
        with contextlib.closing(Store.open(options.db)) as store:
            require_studies(store, options.warm_start, options.study)
            if new_corpus is None:
                row = studies.get(store, options.study)
                _require_same_space(row, options.space)
                corpus = _same_corpus(store, row, options)
            else:
                space = options.space.model_dump(mode="json")
                seed = options.space.search.seed
                row = studies.create(store, options.study, space, seed=seed, version=version("hilnas"))
                corpus = new_corpus
            ledger = Ledger(store, row, take_lease(store, row, log), on_event)
            with _deleted_if_invalid(ledger, new=not options.resume), ledger.keep(), _failure_shown(ledger):
                study = cls(options, ledger, corpus)
                ledger.note(None, Launched(study.trials, study.warm_start))
                ledger.note(None, CorpusUsed(corpus.hash, training_versions(options.space), _sources(options, corpus)))
                yield study

    async def targets(self, farm: Farm, scratch: Path, log: Log) -> dict[tuple[str, str], MeasurementTarget]:
        """Calibrates every device with its runtimes; a resumed study keeps the calibrations that it began with.

        Args:
            farm: has the devices.
            scratch: folder for files being written.
            log: called with a line before something that takes time.

        Returns:
            (device, label of a runtime) as the space names them -> what measures there.

        Raises:
            StudyChanged: the study began under other conditions; nothing was run.
            NasError: see `Calibrator.target`.
        """
        space = self.space
        require_sensors(space, {name: farm.device(name) for name in space.devices})
        workloads = {name: space.workloads[name] for name in space.measured}
        weights = space.references.layouts()[PUBLISHED].params.active
        calibrator = Calibrator(farm, farm.jobs(self.ledger.study.id), space.protocol, scratch, log, workloads, weights)
        saved = {(note.device, note.runtime): note for note in notes(self.ledger.events(), Calibrated)}
        prepared = {
            (device, label): calibrator.prepare(device, space.labelled[label]) for device, label in space.targets
        }
        for name in prepared.keys() & saved.keys():  # all of them before the first run
            prepared[name].require_unchanged(saved[name].conditions)
        self.ledger.set_state(StudyState.RUNNING)
        targets = {}
        for name, device in prepared.items():
            if (note := saved.get(name)) is not None:
                saved_calibration = SavedCalibration(note.build, note.times, note.conditions)
                targets[name] = await calibrator.calibrated(device, saved_calibration)
                continue
            targets[name] = target = await calibrator.calibrated(device, None)
            calibrations = {
                workload: target.references[pinned].calibration for workload, pinned in device.workloads.items()
            }
            self.ledger.note(
                None,
                Calibrated(
                    *name,
                    id=device.device.id,
                    build=device.runner.build,
                    ms=target.shortest.calibration.run_ms,
                    protocol=PROTOCOL_VERSION,
                    conditions=device.conditions,
                    times=calibrations,
                ),
            )
        return targets


def take_lease(store: Store, study: Study, log: Log) -> StudyLease:
    """Takes the lease of a study, also from a process that died, and withdraws the jobs that it left.

    Raises:
        StudyBusy: another process runs it; where that one is paused, it continues.
    """
    lease = _acquire(store, study, log)
    studies.set_desired_state(store, study.id, "run")
    # Left by a process that was killed: jobs that are still needed will be queued again.
    jobs.cancel_study(store, study.id)
    return lease


def _acquire(store: Store, study: Study, log: Log) -> StudyLease:
    holder = leases.new_holder()
    try:
        return leases.acquire(store, study.id, holder)
    except StudyBusy as busy:
        old = leases.current(store, study.id)
        if old is not None and leases.has_died(old.holder):
            log(f"the process that ran {study.name} died without releasing it; taking over")
            leases.release(store, old)
            return leases.acquire(store, study.id, holder)
        if studies.get(store, study.id).desired_state != "pause":
            raise
        studies.set_desired_state(store, study.id, "run")
        raise StudyBusy(f"{busy}; it was paused, and now continues") from None


def training_versions(space: SearchSpace) -> dict[str, Any]:
    """Returns the version of everything that trains proxies of a space: trainer, suite of tasks, plug-ins."""
    kinds = {block.kind for block in (*space.mixers, *space.ffn)}
    versions = {kind: BLOCKS.version(kind) for kind in sorted(kinds)}
    for layout in space.references.layouts().values():
        versions |= layout.plugin_versions
    tasks = {stage.task or name for rung in space.quality.rungs for name, stage in rung.tasks.items()}
    versions |= {name: TASKS.version(name) for name in sorted(tasks)}
    plugins = {name: version for name, version in versions.items() if version is not None}
    mixes = {} if space.quality.library is None else {"mixes": MIXES_VERSION}
    return {"trainer": TRAINER_VERSION, "suite": SUITE_VERSION} | mixes | plugins


def _corpus(options: LaunchOptions) -> CorpusRef:
    """Returns the reference to what qualities are computed from: the corpus, or a library's file of scores."""
    quality = options.space.quality
    if quality.library is not None:
        return refer_scores(quality.library, options.base)
    return refer(quality.corpus, options.base)


def _same_corpus(store: Store, study: Study, options: LaunchOptions) -> CorpusRef:
    """Returns the corpus that a resumed study began with.

    Raises:
        StudyChanged: that corpus is gone, or this version or a plug-in trains otherwise.
    """
    used = notes(all_events(store, study.id), CorpusUsed)
    if not used:
        return _corpus(options)
    began, versions = used[-1], training_versions(options.space)
    changes = [
        f"version {old} of {name}, which is {versions[name]} now"
        for name, old in began.versions.items()
        if name in versions and versions[name] != old
    ]
    if changes:
        raise StudyChanged(
            f"study {options.study!r} began with {'; '.join(changes)}. Its qualities would not compare, so install "
            "what it began with, or begin a new study",
            where="--resume",
        )
    if (library := options.space.quality.library) is None:
        return refer_again(options.space.quality.corpus, options.base, began.hash)
    if not (options.base / library.path).is_file():  # resumed without the space's file
        library = library.model_copy(update={"path": began.made_of.get(_SCORES, library.path)})
    scores = refer_scores(library, options.base)
    if scores.hash != began.hash:
        raise StudyChanged(
            f"study {options.study!r} began with another content of {library.path}. Its qualities"
            " would not compare, so restore the file or begin a new study",
            where="quality.path",
        )
    return scores


def _sources(options: LaunchOptions, corpus: CorpusRef) -> dict[str, str]:
    """Returns the versions of what a corpus was taken from, or the path of a library's scores; empty: of files."""
    if options.space.quality.library is not None and isinstance(corpus.source, CorpusFiles):
        return {_SCORES: corpus.source.files[0]}
    return made_of(corpus)


def _require_same_space(study: Study, space: SearchSpace) -> None:
    if changes := space_difference(stored_space(study), space):
        text = "\n  ".join(changes[:_SHOWN_CHANGES] + ["..."] * (len(changes) > _SHOWN_CHANGES))
        raise InvalidInput(
            f"study {study.name!r} began with another search space; it cannot be resumed:\n  {text}", where="--resume"
        )


@contextmanager
def _deleted_if_invalid(ledger: Ledger, *, new: bool) -> Iterator[None]:
    """Deletes a new study if its launch fails on invalid input before it ran, so that its name stays free."""
    try:
        yield
    except InvalidInput:
        states = {event.payload.get("state") for event in ledger.events()}
        if new and not states.intersection((StudyState.RUNNING, StudyState.PAUSED)):
            studies.delete(ledger.store, ledger.study.id)
        raise


@contextmanager
def _failure_shown(ledger: Ledger) -> Iterator[None]:
    """Sets the state of a study that ends by an exception, and why, so that it does not seem to run."""
    try:
        yield
    except StudyChanged:
        raise  # nothing was done
    except BaseException as error:
        stopped = isinstance(error, KeyboardInterrupt)
        reason = None if stopped else str(error) if isinstance(error, NasError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(NasError):  # the study was lost, or the database is what failed
            ledger.set_state(StudyState.STOPPED if stopped else StudyState.FAILED, reason)
        raise
