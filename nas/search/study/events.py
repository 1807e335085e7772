"""The event log of a study: the name and payload of every note, and what is computed from the log alone.

The log (`nas.infra.store.events`) holds two sorts of events. Transitions of trials have a kind of their own and a
payload that `nas.core.trial` documents. Notes have the kind `progress` (of a trial) or `study` (of the study as a
whole) and a payload {"what": NAME, ...}; each class here is one of them. Names and fields are kept in
databases and archives. Readers skip names that they do not know.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple, Self, TypeVar

from pydantic import Field, PlainSerializer, TypeAdapter, ValidationError

from nas.core.device import DeviceText
from nas.core.errors import InvalidInput
from nas.core.measurement import Figure, ReferenceTimes
from nas.core.profile import ProfileSummary
from nas.core.space import SearchSpace
from nas.core.trial import Event, EventKind
from nas.core.units import show_number, show_spread
from nas.core.workload import Workload
from nas.infra.store import events
from nas.infra.store.rows import Json, Study
from nas.infra.store.store import Store
from nas.measure.devices.attachments import Tag
from nas.search.proposers import Observation
from nas.search.proposers.api import Coordinate, RungNumber, StoredLayout
from nas.search.proxy.quality import Quality

UNREADABLE = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, AssertionError)
"""What reading malformed JSON raises, beside `InvalidInput`."""

LEAST_FIGURE = 1e-15
"""Least measured figure, in its unit."""
MOST_FIGURE = 1e15
"""Greatest measured figure, in its unit."""


Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Number = Annotated[int, Field(ge=0, lt=1 << 31)]
Seconds = Annotated[float, Field(ge=0, lt=1 << 37)]
Positive = Annotated[float, Field(ge=LEAST_FIGURE, le=MOST_FIGURE)]
StoredObservation = Annotated[Observation, PlainSerializer(Observation.to_json)]
StoredQuality = Annotated[Quality, PlainSerializer(Quality.to_json)]
T = TypeVar("T")
NoteType = TypeVar("NoteType", bound="Note")


_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}


def adapter(kind: type[T]) -> TypeAdapter[T]:
    """Returns the validator of a class, which is made once."""
    return _ADAPTERS.get(kind) or _ADAPTERS.setdefault(kind, TypeAdapter(kind))


@dataclass(frozen=True)
class Note:
    """The payload of a note; each subclass is one `what`."""

    what: ClassVar[str]

    def to_json(self) -> Json:
        """Returns the payload as it is stored."""
        return {"what": self.what, **adapter(type(self)).dump_python(self, mode="json")}

    @classmethod
    def read(cls, payload: Mapping[str, Any]) -> Self | None:
        """Reads any event's payload; None if it is not of this class.

        Raises:
            InvalidInput: it is of this class and malformed.
        """
        if payload.get("what") != cls.what:
            return None
        try:
            return adapter(cls).validate_python(payload)
        except UNREADABLE as error:
            raise InvalidInput(f"a malformed note {cls.what!r}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Launched(Note):
    """A process began to run the study.

    Args:
        trials: layouts to propose, references not counted.
        warm_start: names of the earlier studies that this one learns from.
    """

    what: ClassVar[str] = "launched"
    trials: Number
    warm_start: tuple[str, ...] = ()


@dataclass(frozen=True)
class Calibrated(Note):
    """A device and a runtime are ready to measure.

    Args:
        device: its name in the space.
        runtime: its label there.
        id: of the device.
        build: of the runtime's runner.
        ms: timed work of a run of the reference model, of the shortest workload.
        protocol: version of the measurement protocol that the study's figures are measured by.
        conditions: those of `PreparedDevice`, which a resumed study must find unchanged.
        times: workload -> times of the reference model.
    """

    what: ClassVar[str] = "calibrated"
    device: DeviceText
    runtime: DeviceText
    id: DeviceText
    build: DeviceText
    ms: Positive
    protocol: Number
    conditions: Mapping[str, Any]
    times: Mapping[DeviceText, ReferenceTimes]


@dataclass(frozen=True)
class CorpusUsed(Note):
    """What proxies are trained on and by.

    Args:
        hash: of the text that language models are trained on, or of a library's file of scores.
        versions: of the trainer, of the suite of tasks, and of block kinds and tasks of plug-ins; a resumed study must
            find them unchanged.
        made_of: versions of Python or of the packages that the text was taken from; `scores`: path of a library's file;
            empty: files.
    """

    what: ClassVar[str] = "corpus"
    hash: Hash
    versions: Mapping[str, Any]
    made_of: Mapping[str, str]


@dataclass(frozen=True)
class Observed(Note):
    """An observation of a trial was passed to the proposer, in the order of the log."""

    what: ClassVar[str] = "observed"
    observation: StoredObservation


@dataclass(frozen=True)
class ReferencePointFixed(Note):
    """The reference point was passed to the proposer: objective -> coordinate."""

    what: ClassVar[str] = "reference point"
    point: Mapping[str, Coordinate]


@dataclass(frozen=True)
class WarmStarted(Note):
    """Earlier studies were passed to the proposer.

    Args:
        studies: a row for each: its name, and what was taken and left out.
        observations: of their layouts, under this study's names.
    """

    what: ClassVar[str] = "warm start"
    studies: Sequence[Json]
    observations: Sequence[StoredObservation]


@dataclass(frozen=True)
class Expected(Note):
    """The forecast of one proposal, when it was made.

    Args:
        gain: in hypervolume; None if no model chose the layout.
        hypervolume: of the study at that time.
        batch: layouts that are evaluated in parallel.
    """

    what: ClassVar[str] = "expected gain"
    gain: Annotated[float, Field(ge=-MOST_FIGURE, le=MOST_FIGURE)] | None
    hypervolume: Annotated[float, Field(ge=0, le=MOST_FIGURE)]
    batch: Number

    @property
    def of_batch(self) -> float | None:
        """Upper bound of the gain of a whole batch: no other of its layouts is expected to gain more."""
        return None if self.gain is None else self.gain * self.batch


@dataclass(frozen=True)
class Closed(Note):
    """No more layouts are proposed.

    Args:
        rule: trials, hours, gain or space.
        message: a sentence for people.
    """

    what: ClassVar[str] = "closed"
    rule: str
    message: str


@dataclass(frozen=True)
class QualityKnown(Note):
    """A trial's quality at a rung.

    Args:
        rung: its index.
        quality: relative to the published reference.
    """

    what: ClassVar[str] = "quality"
    rung: RungNumber
    quality: StoredQuality


@dataclass(frozen=True)
class AnchorsChosen(Note):
    """Layouts that the noise of the qualities is estimated from, beside the references.

    Args:
        layouts: references are not among them.
    """

    what: ClassVar[str] = "anchors"
    layouts: Sequence[StoredLayout]


@dataclass(frozen=True)
class Rescored(Note):
    """A trial's quality on fresh seeds, which from then on is its quality.

    Args:
        quality: relative to the published reference on the same seeds.
        per_seed: seed -> the quality that it alone gives.
    """

    what: ClassVar[str] = "rescored"
    quality: StoredQuality
    per_seed: Mapping[Annotated[int, Field(ge=0, lt=10**10)], Coordinate]


@dataclass(frozen=True)
class Named(Note):
    """The layouts of the front that are measured again, as the first measurement chose them; the newest is valid.

    Args:
        trials: in the order in which they are spoken of.
    """

    what: ClassVar[str] = "front named"
    trials: Annotated[tuple[Number, ...], Field(max_length=100)]


@dataclass(frozen=True)
class SecondFigures:
    """The figures of one measurement of a `Remeasured` round.

    Args:
        device: its name in the space.
        runtime: its label there.
        workload: its name there.
        result: key of the result that holds all of the measurement.
        figures: those that objectives need.
    """

    device: DeviceText
    runtime: DeviceText
    workload: DeviceText
    result: Hash
    figures: Mapping[str, Figure]


@dataclass(frozen=True)
class Remeasured(Note):
    """A round of the second measurement of a trial. It chose nothing, and no proposer sees it.

    Args:
        round: from 0.
        measurements: one for each device, runtime and workload.
    """

    what: ClassVar[str] = "remeasured"
    round: Annotated[int, Field(ge=0, lt=1000)]
    measurements: Annotated[tuple[SecondFigures, ...], Field(max_length=1000)]


@dataclass(frozen=True)
class Spent(Note):
    """Seconds that a stage without a stored result took: "propose"."""

    what: ClassVar[str] = "spent"
    stage: str
    seconds: Seconds


@dataclass(frozen=True)
class Marked(Note):
    """What a person wrote about a trial, at any time. The newest of a trial is valid; the log has the earlier ones.

    Args:
        trial: number.
        star: whether the trial has one.
        tags: words.
        text: a note.
    """

    what: ClassVar[str] = "marked"
    trial: Number
    star: bool
    tags: Annotated[tuple[Tag, ...], Field(max_length=20)]
    text: Annotated[str, Field(max_length=500)]


@dataclass(frozen=True)
class Profiled(Note):
    """A profile of a trial's layout that a person kept, by `nas bench --profile --trial`.

    Args:
        trial: number.
        device: id.
        runtime: name.
        build: of the runner that measures.
        prompt: tokens.
        gen: decoded tokens.
        threads: of the runner.
        profile: its times.
    """

    what: ClassVar[str] = "profiled"
    trial: Number
    device: DeviceText
    runtime: DeviceText
    build: DeviceText
    prompt: Number
    gen: Number
    threads: Number
    profile: ProfileSummary


BY_PEOPLE = (Marked.what, Profiled.what)
"""Notes that people add at any time: they are no work of an orchestrator."""


def all_events(store: Store, study: int, after: int = 0) -> list[Event]:
    """Reads the log of a study, oldest first, behind the event `after`."""
    log: list[Event] = []
    while page := events.since(store, study, log[-1].id if log else after):
        log += page
    return log


def notes(log: Iterable[Event], kind: type[NoteType]) -> list[NoteType]:
    """Returns the notes of one class, oldest first."""
    return [note for event in log if (note := kind.read(event.payload)) is not None]


def marks(log: Iterable[Event]) -> dict[int, Marked]:
    """Returns trial -> what people wrote about it, of those with a star, a tag or a note."""
    newest = {mark.trial: mark for mark in notes(log, Marked)}
    return {trial: mark for trial, mark in newest.items() if mark.star or mark.tags or mark.text}


def event_line(trial: int | None, kind: str, payload: Mapping[str, Any]) -> str | None:
    """Formats an event as a line; None for events without information for users.

    Args:
        trial: its number; None: of the study as a whole.
        kind: of the event.
        payload: as stored.
    """
    subject = "study" if trial is None else f"trial {trial}"
    if trial is not None and kind == "progress" and payload.get("what") in (QualityKnown.what, Rescored.what):
        fresh = " on fresh seeds" if payload["what"] == Rescored.what else ""
        return f"{subject}: {_quality(payload['quality'], fresh)}"
    if kind in ("study", "progress"):
        if trial is None and payload.get("reason"):
            return f"{subject}: {payload.get('state')}: {payload['reason']}"
        message = payload.get("message")
        return f"{subject}: {payload.get('what')}: {message}" if message else None
    return f"{subject}: {_transition(kind, payload)}"


_IN_WORDS: Mapping[str, str] = {
    EventKind.MEASURING: "measuring",
    EventKind.BORDERLINE: "near a budget, measured again",
    EventKind.GATED_IN: "within the budgets",
    EventKind.CONFIRMING: "promoted to the end, measured again with more repetitions",
    EventKind.INFEASIBLE: "breaks a budget",
    EventKind.RETRIED: "tried again",
}
"""What transitions are called where their kinds are no plain words."""


def _transition(kind: str, payload: Mapping[str, Any]) -> str:
    """Formats a change of a trial's state, such as 'within the budgets: latency 2498 ms, memory 279 MB'."""
    what = _IN_WORDS.get(kind, kind)
    if kind == EventKind.TRAINING and "rung" in payload:
        what = f"training at rung {payload.get('name', payload['rung'])}"
    details = [_quality(payload["quality"])] if payload.get("quality") else []
    details += [
        f"{figure['name']} {show_number(figure['value'], figure['low'], figure['high'])} {figure['unit']}".rstrip()
        for figure in payload.get("figures", ())
    ]
    details += [str(payload["reason"])] if payload.get("reason") else []
    return f"{what}: {', '.join(details)}" if details else what


def _quality(quality: Mapping[str, Any], fresh: str = "") -> str:
    """Formats a quality, such as 'quality 1.02 ± 0.01 (rung short, 2 seeds)'."""
    seeds = quality.get("n_seeds")
    what = ", ".join([f"rung {quality['rung']}", *([f"{seeds} seed{'s' if seeds > 1 else ''}"] if seeds else [])])
    return f"quality{fresh} {show_spread(quality['value'], quality.get('sd'))} ({what})"


class CalibratedDevice(NamedTuple):
    """A device that took part in a study.

    Args:
        id: of the device.
        name: in the space.
        cores: workload -> cores that it ran on there.
        threads: workload -> threads that it ran with there; none of logs that do not say.
    """

    id: str
    name: str
    cores: tuple[tuple[str, tuple[int, ...]], ...]
    threads: tuple[tuple[str, int], ...]

    def placed(self, name: str, workload: Workload) -> Workload:
        """Returns the workload `name` of the space as it was run there."""
        place = {"affinity": dict(self.cores).get(name), "threads": dict(self.threads).get(name)}
        return workload.model_copy(update={key: value for key, value in place.items() if value is not None})


def calibrated_devices(log: Iterable[Event]) -> list[CalibratedDevice]:
    """Returns the devices that took part, in the order of the log."""
    devices = []
    for event in log:
        if event.payload.get("what") == Calibrated.what:
            conditions = event.payload.get("conditions", {})
            cores = tuple((name, tuple(places)) for name, places in conditions.get("cores", {}).items())
            threads = tuple(conditions.get("threads", {}).items())
            devices.append(CalibratedDevice(event.payload["id"], event.payload["device"], cores, threads))
    return devices


def elapsed(log: Sequence[Event]) -> list[float]:
    """Returns the seconds that an orchestrator had run at each event: from each launch to the event before the next.

    What people add is no work of an orchestrator. Where the clock was set back, no time passed.
    """
    total, is_launched, at, seconds = 0.0, False, 0.0, []
    for event in log:
        what = event.payload.get("what")
        if what not in BY_PEOPLE:
            total += max(0.0, event.at - at) if is_launched and what != Launched.what else 0.0
            is_launched, at = is_launched or what == Launched.what, event.at
        seconds.append(total)
    return seconds


def expectations(log: Iterable[Event]) -> dict[int, Expected]:
    """Returns what was expected of each trial, in the order of the log."""
    return {
        event.trial: expected
        for event in log
        if event.trial is not None and (expected := Expected.read(event.payload)) is not None
    }


def closing(log: Iterable[Event]) -> Closed | None:
    """Returns why no more layouts are proposed; None while they are, also since a launch asked for more of them."""
    most, closed = 0, None
    for event in log:
        if (launched := Launched.read(event.payload)) is not None and launched.trials > most:
            most, closed = launched.trials, None
        closed = Closed.read(event.payload) or closed
    return closed


def ending(log: Iterable[Event]) -> Json | None:
    """Returns `closing` as {rule, message}."""
    closed = closing(log)
    return {"rule": closed.rule, "message": closed.message} if closed else None


def stored_space(study: Study) -> SearchSpace:
    """Returns the search space of a study; raises `InvalidInput` where `read_space` does."""
    try:
        return read_space(study.space)
    except InvalidInput as error:
        raise InvalidInput(f"study {study.name}: {error}") from None


def read_space(space: Mapping[str, Any]) -> SearchSpace:
    """Reads a stored search space.

    Raises:
        InvalidInput: another version of hilnas stored it and this one cannot read it, or it was never valid.
    """
    try:
        return SearchSpace.model_validate(space)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidInput(f"this version cannot read its space: {where}: {first['msg']}") from None
