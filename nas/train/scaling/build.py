"""`nas family build`: finds the pattern, runs a small search at each size, and records one member after the other.

The record is replaced as a whole after each member, and measurements are stored under their keys: a build that was
killed, or that lost a device, resumes when the same command is run again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

from nas.core.canonical import content_hash
from nas.core.durable import locked
from nas.core.errors import CandidateFailed, InfrastructureFailed, InvalidInput, NasError, Unsupported
from nas.core.family import (
    FAMILY,
    BuildDecision,
    Family,
    MeasuredModel,
    Member,
    Source,
    check_new_name,
    family_folder,
    member_folder,
    read_record,
    write_record,
)
from nas.core.layout import Layout
from nas.core.progress import Log, Progress
from nas.core.space import SearchSpace
from nas.infra.store.store import Store
from nas.measure.protocol.calibration import known_runtime
from nas.search.spaces import load_space, space_json
from nas.train.scaling.candidates import ScaledLayout, Size, candidates, parse_size
from nas.train.scaling.choose import CandidateResult, Choice, choose, tried_of
from nas.train.scaling.explain import member_decisions, pattern_decisions, pattern_in_words, quality_decision
from nas.train.scaling.measure import Measurer, measured_of, open_measurer
from nas.train.scaling.source import HELD, PER_TOKEN, Criteria, Measurements, Origin, given_origin, study_origin

_LOCK_S = 5.0
"""Longest wait for another process that builds the same family."""


class FilesWriter(Protocol):
    """Writes the files of members; `nas.train.release` has one."""

    def check(self, layout: Layout) -> None:
        """Checks that the files of a layout can be written.

        Raises:
            InvalidInput: they cannot; the message gives the reason.
        """

    def write(self, folder: Path, family: Family, member: Member, log: Log) -> object:
        """Writes a member's files with random weights; existing files and those of a trained member are kept."""


@dataclass(frozen=True)
class BuildOptions:
    """Options of `nas family build`.

    Args:
        name: of the family.
        sizes: of the members, smallest first.
        study: its front or criteria are used; None: layouts are given.
        layouts: given ones; none: the study's front.
        space: its criteria are used if there is no study.
        devices: to measure on; none: the study's or the space's.
        runtime: to measure with; None: those of the study or the space.
        vocab: rows of the embedding table; None: the parent's.
        candidates: maximum to measure per size.
        measure: whether anything is measured.
        repetitions: valid ones per workload; None: the protocol's for a first screen.
        seed: of the members' random weights.
        db: URL, or None for the default database.
        files: writes members' files; None: none are written.
    """

    name: str
    sizes: tuple[Size, ...]
    study: str | None = None
    layouts: tuple[Layout, ...] = ()
    space: str = "lfm2"
    devices: tuple[str, ...] = ()
    runtime: str | None = None
    vocab: int | None = None
    candidates: int = 4
    measure: bool = True
    repetitions: int | None = None
    seed: int = 0
    db: str | None = None
    files: FilesWriter | None = None


def build(options: BuildOptions, log: Log) -> Family:
    """Builds a family, or resumes its build.

    Raises:
        InvalidInput: a size that no scaling reaches, a study without a front, another family of that name, or a name
            that no new family can have.
        InfrastructureFailed: a device went away; decisions and measurements are kept.
    """
    origin = _origin(options)
    shapes = _shapes(options, origin)  # before any file is written
    if options.files is not None:
        for nearest, *_ in shapes.values():
            options.files.check(nearest.layout)
    folder = family_folder(options.name)
    if not (folder / FAMILY).exists():
        check_new_name(options.name)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "build.lock", _LOCK_S):
        family = _family(options, origin, folder)
        if not family.members:
            log(f"pattern: {family.pattern}")
            for decision in family.decisions:
                _log_decision(log, "family", decision)
        return _built(options, origin, family, shapes, folder, log)


def candidates_of(options: BuildOptions) -> list[tuple[Size, list[ScaledLayout]]]:
    """Returns the candidates of each size.

    Raises:
        InvalidInput: a size that no scaling reaches, or a study without a front.
    """
    return list(_shapes(options, _origin(options)).items())


def size_candidates(origin: Origin, size: Size, vocab: int | None, number: int) -> list[ScaledLayout]:
    """Returns the candidates of a size that the runtimes support: those of their stock builds if there are any.

    Raises:
        InvalidInput: no shape has the size's weights.
        Unsupported: the runtimes support no such shape.
    """
    parent, space = origin.pattern.parent.layout, origin.criteria.space
    shapes = [(scaled, _verdicts(space, scaled.layout)) for scaled in candidates(parent, size, vocab or parent.vocab)]
    stock = [scaled for scaled, verdicts in shapes if verdicts == {"stock"}]
    carried = [scaled for scaled, verdicts in shapes if "no" not in verdicts]
    if not carried:
        reasons = "; ".join(
            f"{spec.name}: {reason}"
            for spec in space.runtimes
            for reason in known_runtime(spec).supports(shapes[0][0].layout).reasons
        )
        raise Unsupported(f"{size.name}: no runtime carries {shapes[0][0].layout}: {reasons}", where="--runtime")
    return (stock or carried)[:number]


def _verdicts(space: SearchSpace, layout: Layout) -> set[str]:
    """Returns which of stock, patched and no the runtimes give; patched is no where the space requires stock builds."""
    supports = [(known_runtime(spec).supports(layout), spec.build) for spec in space.runtimes]
    return {support.verdict if support.runs_on(build) else "no" for support, build in supports}


@dataclass
class SizeSearch:
    """Measures the candidates of a size and chooses the member.

    Args:
        origin: pattern and criteria.
        measurer: None: nothing is measured.
        log: takes one line at a time.
        refused: device that the search does not use -> error of its preparation.
    """

    origin: Origin
    measurer: Measurer | None
    log: Log
    refused: dict[str, str] = field(default_factory=dict)

    def member(self, size: Size, shapes: Sequence[ScaledLayout]) -> Member:
        """Returns the member of a size.

        Raises:
            CandidateFailed: no candidate could be measured.
            InfrastructureFailed: a device went away.
        """
        criteria, parent = self.origin.criteria, self.origin.pattern.parent.layout
        results = self._results(size, shapes)
        choice = choose(results, criteria.limits() if self.measurer else criteria.computed_limits())
        chosen = results[choice.index].scaled
        held_out, held_out_decisions = self._held_out(chosen.layout)
        params = chosen.layout.params
        return Member(
            size=size.name,
            layout=chosen.layout.format(),
            parameters=params.total,
            active=params.active,
            non_embedding=params.non_embedding,
            decisions=(
                *member_decisions(chosen, parent, size),
                *_support_decisions(criteria.space, chosen.layout),
                _layout_decision(chosen.layout, parent, choice),
                *_quality_decisions(criteria, chosen.layout, choice, measured=self.measurer is not None),
                *held_out_decisions,
            ),
            tried=tried_of(results, choice, criteria.space),
            measured=(*measured_of(results[choice.index].measurements, criteria.space), *held_out),
        )

    def _results(self, size: Size, shapes: Sequence[ScaledLayout]) -> list[CandidateResult]:
        criteria = self.origin.criteria
        if self.measurer is None:
            return [
                CandidateResult(scaled, criteria.computed_axes(scaled.layout, shapes[0].layout)) for scaled in shapes
            ]
        ran: list[tuple[ScaledLayout, Measurements, str]] = []
        for number, scaled in enumerate(shapes, 1):
            self.log(f"{size.name}: measuring candidate {number} of {len(shapes)}: {scaled.layout}")
            self.log(Progress(f"{size.name}, measured candidates", number - 1, len(shapes)))
            try:
                ran.append((scaled, self.measurer.measure(scaled.layout, criteria.space.devices), ""))
            except CandidateFailed as error:
                self.log(f"{size.name}: candidate {number} failed: {error}")
                ran.append((scaled, {}, str(error)))
        self.log(Progress(f"{size.name}, measured candidates", len(shapes), len(shapes)))
        anchor = next(((scaled.layout, measurements) for scaled, measurements, _ in ran if measurements), None)
        results = []
        for scaled, measurements, failure in ran:
            axes = criteria.axes(scaled.layout, measurements, *anchor) if anchor and measurements else {}
            results.append(CandidateResult(scaled, axes, measurements, failure))
        return results

    def _held_out(self, layout: Layout) -> tuple[tuple[MeasuredModel, ...], list[BuildDecision]]:
        """Measures the member on a device that the search did not use, if there is one."""
        measurer, space = self.measurer, self.origin.criteria.space
        if measurer is None:
            return (), []
        used = {*self.origin.searched, *(measurer.id(device) for device in space.devices)}
        device = measurer.held_out(used)
        if device is None:
            return (), [_held_out_decision("none", "no device that the search did not use is available")]
        self.log(f"measuring the winner on {device}, which the search did not use")
        try:
            self._prepare_once(measurer, device)
            measurements = measurer.measure(layout, [device])
        except NasError as error:  # the choice does not depend on it
            self.log(f"not measured on {device}: {error}")
            return (), [_held_out_decision("none", f"not measured on {device}: {error}")]
        measured = measured_of(measurements, space, searched=False)
        return measured, [_held_out_decision(device, "the search did not use it")]

    def _prepare_once(self, measurer: Measurer, device: str) -> None:
        """Prepares a device; a device that failed for an earlier size is not retried, as that takes minutes."""
        if device in self.refused:
            raise InfrastructureFailed(self.refused[device])
        try:
            measurer.prepare(device)
        except NasError as error:
            self.refused[device] = str(error)
            raise


def _held_out_decision(value: str, reason: str) -> BuildDecision:
    return BuildDecision(what="another device", value=value, reason=reason)


def _support_decisions(space: SearchSpace, layout: Layout) -> Iterator[BuildDecision]:
    for spec in space.runtimes:
        support = known_runtime(spec).supports(layout)
        reason = "the stock build carries it" if support.verdict == "stock" else "; ".join(support.reasons)
        yield BuildDecision(what=spec.name, value=f"{support.arch} on the {support.verdict} build", reason=reason)


def _layout_decision(layout: Layout, parent: Layout, choice: Choice) -> BuildDecision:
    reason = "the parent itself, which has this size: the search that found it has tried other shapes"
    reason = reason if layout == parent.architecture else choice.reason()
    return BuildDecision(what="layout", value=layout.format(), reason=reason)


def _quality_decisions(
    criteria: Criteria, layout: Layout, choice: Choice, *, measured: bool
) -> Iterator[BuildDecision]:
    if trained := criteria.trained(layout):
        reason = f"the study trained this layout's proxy, {trained[0][:12]}"
        yield BuildDecision(what="quality", value=f"{trained[1]:.4g}", reason=reason)
    if not measured:
        reason = f"not requested: {PER_TOKEN} and {HELD} at {criteria.context} tokens are computed instead"
        yield BuildDecision(what="measured", value="nothing", reason=reason)
    elif left_out := [name for name in criteria.limits() if name not in choice.names]:
        reason = "the devices could not measure these objectives"
        yield BuildDecision(what="left out", value=", ".join(left_out), reason=reason)


# The build and its record.


def _shapes(options: BuildOptions, origin: Origin) -> dict[Size, list[ScaledLayout]]:
    return {size: size_candidates(origin, size, options.vocab, options.candidates) for size in options.sizes}


def _origin(options: BuildOptions) -> Origin:
    if options.study is None:
        if not options.layouts:
            raise InvalidInput("a family is built from a study's front (--study) or from layouts (--layout): give one")
        return given_origin(load_space(options.space), options.layouts, options.devices, options.runtime)
    with contextlib.closing(Store.open(options.db, create=False)) as store:
        return study_origin(store, options.study, options.layouts, options.devices, options.runtime)


def _family(options: BuildOptions, origin: Origin, folder: Path) -> Family:
    """Returns the recorded family, or a new one without members.

    Raises:
        InvalidInput: the recorded one was built from other inputs.
    """
    inputs = _inputs(options, origin)
    recorded = read_record(folder / FAMILY, Family)
    if recorded is not None:
        if recorded.provenance.get("inputs") != inputs:
            raise InvalidInput(
                f"family {options.name} was built from other winners or with other options (study "
                f"{recorded.study or 'none'}, seed {recorded.seed}); give another name, or remove {folder}",
                where="--name",
            )
        return recorded
    pattern, criteria = origin.pattern, origin.criteria
    quality = quality_decision(criteria, pattern.parent.layout, studied=options.study is not None)
    return Family(
        name=options.name,
        study=options.study,
        made=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        seed=options.seed,
        pattern=pattern_in_words(pattern.parent.layout),
        sources=tuple(
            Source(layout=winner.layout.format(), trial=winner.trial, objectives=dict(winner.objectives))
            for winner in pattern.winners
        ),
        decisions=(*pattern_decisions(pattern), *criteria.decisions, quality),
        members=(),
        provenance={"hilnas": version("hilnas"), "space": criteria.space.name, "inputs": inputs},
    )


def _inputs(options: BuildOptions, origin: Origin) -> str:
    """Returns the hash of the inputs that all members of a family share."""
    criteria = origin.criteria
    return content_hash(
        {
            "winners": [winner.layout.id for winner in origin.pattern.winners],
            "parent": origin.pattern.parent.layout.id,
            "space": space_json(criteria.space),
            "reference_point": list(criteria.reference_point or ()),
            "quality": criteria.quality,
            "vocab": options.vocab,
            "candidates": options.candidates,
            "measure": options.measure,
            "repetitions": options.repetitions,
            "seed": options.seed,
        }
    )


def _built(
    options: BuildOptions,
    origin: Origin,
    family: Family,
    shapes: dict[Size, list[ScaledLayout]],
    folder: Path,
    log: Log,
) -> Family:
    members = {member.size: member for member in family.members}
    undecided = {size: scaled for size, scaled in shapes.items() if size.name not in members}
    for size in options.sizes:
        if size.name in members:
            log(f"{size.name}: decided by an earlier run: {members[size.name].layout}")
            _write_files(options, family, members[size.name], log)
    with _measurer(options, origin, bool(undecided), folder, log) as measurer:
        search = SizeSearch(origin, measurer, log)
        for size, scaled in undecided.items():
            with _with_advice(folder, size.name):
                member = search.member(size, scaled)
            for decision in member.decisions:
                _log_decision(log, size.name, decision)
            family = _with(family, member, measurer)
            write_record(folder / FAMILY, family)
            _write_files(options, family, member, log)
    return family


@contextmanager
def _measurer(
    options: BuildOptions, origin: Origin, undecided: bool, folder: Path, log: Log
) -> Iterator[Measurer | None]:
    if not (options.measure and undecided):
        yield None
        return
    space = origin.criteria.space
    repetitions = options.repetitions or space.protocol.screen_repetitions
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(contextlib.closing(Store.open(options.db)))
        with _with_advice(folder, "devices"):
            measurer = stack.enter_context(open_measurer(store, space, repetitions, log))
        yield measurer


@contextmanager
def _with_advice(folder: Path, what: str) -> Iterator[None]:
    """Adds advice to failures of the infrastructure."""
    try:
        yield
    except InfrastructureFailed as error:
        raise InfrastructureFailed(
            f"{what}: {error}\nall decisions ({folder}) and measurements are kept: run the same command to resume"
        ) from error


def _with(family: Family, member: Member, measurer: Measurer | None) -> Family:
    members = sorted((*family.members, member), key=lambda member: (parse_size(member.size).total, member.size))
    benches = measurer.benches.values() if measurer else ()
    builds = {f"{bench.runtime.name} on {bench.device.id}": bench.runner.build for bench in benches}
    return family.model_copy(update={"members": tuple(members), "provenance": {**family.provenance, **builds}})


def _write_files(options: BuildOptions, family: Family, member: Member, log: Log) -> None:
    if options.files is not None:
        options.files.write(member_folder(family.name, member.size), family, member, log)


def _log_decision(log: Log, whose: str, decision: BuildDecision) -> None:
    log(f"{whose}: {decision.what}: {decision.value} ({decision.reason})")
