"""`nas family build`: the pattern, a small search at each size, and a record that grows member by member.

The record is replaced as a whole after each member, and measurements are kept under their keys as they come in: a
build that was killed, or that lost a device, goes on where it was when it is run again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

from nas.core.canonical import content_hash
from nas.core.durable import locked
from nas.core.errors import InfrastructureFailed, InvalidInput
from nas.core.family import (
    FAMILY,
    Decision,
    Family,
    Member,
    Source,
    read_record,
    write_record,
)
from nas.core.layout import Layout
from nas.family.measure import Measurer, open_measurer
from nas.family.scale import Scaled
from nas.family.search import SizeSearch, size_candidates
from nas.family.sizes import Size, parse_size
from nas.family.sources import Origin, given_origin, study_origin
from nas.family.words import pattern_decisions, pattern_in_words, quality_decision
from nas.search_spaces import load_space, space_json
from nas.service.families import family_folder, member_folder
from nas.store.store import Store

Log = Callable[[str], None]
_LOCK_S = 5.0


class FilesWriter(Protocol):
    """What writes the files of members."""

    def check(self, layout: Layout) -> None:
        """Refuses a layout whose files could not be written.

        Raises:
            InvalidInput: saying why.
        """

    def write(self, folder: Path, family: Family, member: Member, log: Log) -> object:
        """Writes a member's files with random weights; what is there already stays, and all of a trained member's."""


@dataclass(frozen=True)
class BuildOptions:
    """What `nas family build` was asked for.

    Args:
        name: of the family.
        sizes: what to build, smallest first.
        study: whose front or terms; None: layouts are given.
        layouts: given ones; none: the study's front.
        space: whose terms, where there is no study.
        devices: to measure on; none: the study's or the space's.
        runtime: to measure with; None: the study's or the space's.
        vocab: rows of the embedding table; None: the parent's.
        candidates: most that are measured at a size.
        measure: whether anything is measured.
        repetitions: that must be valid, for each workload; None: the protocol's at its first screen.
        accept_noise: keep refused repetitions, marked.
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
    accept_noise: bool = False
    seed: int = 0
    db: str | None = None
    files: FilesWriter | None = None


def build(options: BuildOptions, log: Log) -> Family:
    """Builds a family, or goes on with it.

    Args:
        options: what was asked for.
        log: told every decision, and what takes time.

    Raises:
        InvalidInput: a size that no scaling reaches, a study without a front, or another family of that name.
        InfrastructureFailed: a device went away or is too noisy; what was decided and measured is kept.
    """
    origin = _origin(options)
    shapes = _shapes(options, origin)  # what is refused here leaves nothing behind
    if options.files is not None:
        for candidates in shapes.values():
            options.files.check(candidates[0].layout)
    folder = family_folder(options.name)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "build.lock", _LOCK_S):
        family = _begun(options, origin, folder)
        if not family.members:
            log(f"pattern: {family.pattern}")
            for decision in family.decisions:
                _tell(log, "family", decision)
        return _built(options, origin, family, shapes, folder, log)


def plan(options: BuildOptions) -> list[tuple[Size, list[Scaled]]]:
    """What a build would try at each size.

    Raises:
        InvalidInput: a size that no scaling reaches, or a study without a front.
    """
    return list(_shapes(options, _origin(options)).items())


def _shapes(options: BuildOptions, origin: Origin) -> dict[Size, list[Scaled]]:
    return {size: size_candidates(origin, size, options.vocab, options.candidates) for size in options.sizes}


def _origin(options: BuildOptions) -> Origin:
    if options.study is None:
        if not options.layouts:
            raise InvalidInput("a family is built from a study's front (--study) or from layouts (--layout): give one")
        return given_origin(load_space(options.space), options.layouts, options.devices, options.runtime)
    with contextlib.closing(Store.open(options.db, create=False)) as store:
        return study_origin(store, options.study, options.layouts, options.devices, options.runtime)


def _begun(options: BuildOptions, origin: Origin, folder: Path) -> Family:
    """The family as it is on record, or a new one without members.

    Raises:
        InvalidInput: the one on record was built from other inputs.
    """
    inputs = _inputs(options, origin)
    known = read_record(folder / FAMILY, Family)
    if known is not None:
        if known.provenance.get("inputs") != inputs:
            raise InvalidInput(
                f"family {options.name} was built from other winners or with other options (study "
                f"{known.study or 'none'}, seed {known.seed}); give another name, or remove {folder}",
                where="--name",
            )
        return known
    pattern, terms = origin.pattern, origin.terms
    decisions = [*pattern_decisions(pattern), *terms.decisions]
    decisions.append(quality_decision(terms, pattern.parent.layout, studied=options.study is not None))
    return Family(
        name=options.name,
        study=options.study,
        made=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        seed=options.seed,
        pattern=pattern_in_words(pattern.parent.layout),
        sources=tuple(
            Source(layout=each.layout.format(), trial=each.trial, objectives=dict(each.objectives))
            for each in pattern.winners
        ),
        decisions=tuple(decisions),
        members=(),
        provenance={"hilnas": version("hilnas"), "space": terms.space.name, "inputs": inputs},
    )


def _inputs(options: BuildOptions, origin: Origin) -> str:
    """What all members of a family have in common: with the same, a member that was decided stays decided."""
    terms = origin.terms
    return content_hash(
        {
            "winners": [each.layout.id for each in origin.pattern.winners],
            "parent": origin.pattern.parent.layout.id,
            "space": space_json(terms.space),
            "corner": list(terms.corner or ()),
            "quality": terms.quality,
            "vocab": options.vocab,
            "candidates": options.candidates,
            "measure": options.measure,
            "repetitions": options.repetitions,
            "seed": options.seed,
        }
    )


def _built(
    options: BuildOptions, origin: Origin, family: Family, shapes: dict[Size, list[Scaled]], folder: Path, log: Log
) -> Family:
    known = {member.size: member for member in family.members}
    planned = {size: each for size, each in shapes.items() if size.name not in known}
    for size in options.sizes:
        if size.name in known:
            log(f"{size.name}: decided already: {known[size.name].layout}")
            _write_files(options, family, known[size.name], log)
    with _measurer(options, origin, bool(planned), folder, log) as measurer:
        search = SizeSearch(origin, measurer, log)
        for size, candidates in planned.items():
            with _kept(folder, size.name):
                member = search.member(size, candidates)
            for decision in member.decisions:
                _tell(log, size.name, decision)
            family = _with(family, member, _builds(measurer))
            write_record(folder / FAMILY, family)
            _write_files(options, family, member, log)
    return family


@contextmanager
def _measurer(options: BuildOptions, origin: Origin, wanted: bool, folder: Path, log: Log) -> Iterator[Measurer | None]:
    if not (options.measure and wanted):
        yield None
        return
    space = origin.terms.space
    repetitions = options.repetitions or space.protocol.screen_repetitions
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(contextlib.closing(Store.open(options.db)))
        with _kept(folder, "devices"):
            measurer = stack.enter_context(open_measurer(store, space, repetitions, options.accept_noise, log))
        yield measurer


@contextmanager
def _kept(folder: Path, what: str) -> Iterator[None]:
    """Says what to do where the infrastructure fails."""
    try:
        yield
    except InfrastructureFailed as error:
        raise InfrastructureFailed(
            f"{what}: {error}\nwhat was decided ({folder}) and measured is kept: run the same command to go on"
        ) from error


def _with(family: Family, member: Member, builds: dict[str, str]) -> Family:
    members = sorted((*family.members, member), key=lambda each: (parse_size(each.size).total, each.size))
    return family.model_copy(update={"members": tuple(members), "provenance": {**family.provenance, **builds}})


def _builds(measurer: Measurer | None) -> dict[str, str]:
    benches = measurer.benches.values() if measurer else ()
    return {f"{bench.runtime.name} on {bench.device.id}": bench.runner.build for bench in benches}


def _write_files(options: BuildOptions, family: Family, member: Member, log: Log) -> None:
    if options.files is not None:
        options.files.write(member_folder(family.name, member.size), family, member, log)


def _tell(log: Log, whose: str, decision: Decision) -> None:
    log(f"{whose}: {decision.what}: {decision.value} ({decision.reason})")
