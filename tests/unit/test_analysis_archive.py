"""Imported archives: refused with the line, or shown on every page; and lists that hold a study that cannot be read."""

from __future__ import annotations

import copy
import gzip
import io
import json
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from cli_runner import nas
from dashboard_lab import HOST, HTML, DashboardLab, Visitor
from exhaustive import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_support import open_store
from study_support import archived_lines

from nas.core.canonical import canonical_json
from nas.core.errors import InvalidInput
from nas.infra.store import events, studies, trials
from nas.infra.store.rows import Role, Study
from nas.infra.store.store import Store
from nas.search.analysis.archive import export_study, import_study
from nas.search.analysis.hardware import hardware_report
from nas.search.analysis.report import csv_parts, study_report, study_table
from nas.search.analysis.snapshot import Snapshots
from nas.serve.api.serve import users_router

EXAMPLES = int(os.environ.get("HILNAS_FUZZ", examples(40)))
Line = dict[str, Any]


def note(trial: int | None, **payload: Any) -> Line:
    kind = "study" if trial is None else "progress"
    return {"event": {"trial": trial, "kind": kind, "payload": payload, "at": 1.8e9}}


@cache
def recorded() -> list[Line]:
    """An exported study, with notes of every kind. It is not to be changed: see `genuine`."""
    with TemporaryDirectory() as folder:
        lines = archived_lines(Path(folder))
    observation = next(line for line in lines if is_note(line, "observed"))["event"]["payload"]["observation"]
    more = [
        note(None, what="launched", trials=8, warm_start=["first"]),
        note(None, what="corpus", hash="c" * 64, versions={"trainer": 5}, made_of={}),
        note(None, what="warm start", studies=[{"study": "first", "layouts": 1}], observations=[observation]),
        {"event": {"trial": None, "kind": "study", "at": 1.8e9,
                   "payload": {"what": "marked", "trial": 1, "star": True, "tags": ["small"], "text": "try it"}}},
        {"event": {"trial": None, "kind": "study", "at": 1.8e9, "payload": profiled(lines, 1)}},
        {"attempt": {"kind": "invalid", "message": "throttled", "at": 1.8e9, "result_key": None, "stage": "measure",
                     "trial": 1, "job": "j.0", "device": "box", "payload": {"t": 90}}},
    ]  # fmt: skip
    return numbered([*lines[:-1], *more])


def profiled(lines: list[Line], trial: int) -> dict[str, Any]:
    """The note of a profile of a trial."""
    row = line_of(lines, lambda line: "trial" in line and line["trial"]["number"] == trial)["trial"]
    times = {"prefill_ms": 1.0, "prefill_share": 0.1, "decode_ms": 0.1, "decode_share": 0.1}
    whole = {"whole_ms": 10.0, "profiled_ms": 11.0, "sum_ms": 9.5}
    parts = [
        {"layer": index, "part": part, "block": "X", **times}
        for index in range(len(row["layout"]["layers"]))
        for part in ("mixer", "ffn")
    ]
    ends = [{"layer": None, "part": part, "block": None, **times} for part in ("embedding", "head")]
    profile = {
        "prefill": whole, "decode": whole, "parts": [ends[0], *parts, ends[1]],
        "operators": [{"operator": "ADD", **times}], "foreign_cpu": 0.5,
    }  # fmt: skip
    request = {"prompt": 32, "gen": 4, "threads": 1}
    named = {"what": "profiled", "trial": trial, "device": "box", "runtime": "fake", "build": "b"}
    return {**named, **request, "profile": profile}


def numbered(lines: list[Line]) -> list[Line]:
    """The lines, which lack their end, with the end that they should have."""
    return [*lines, {"end": len(lines)}]


def to_text(lines: list[Line]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def read_in(store: Store, text: str | list[Line], **options: Any) -> Study:
    """Imports an uncompressed archive."""
    return import_study(store, io.BytesIO((text if isinstance(text, str) else to_text(text)).encode()), **options)


def is_note(line: Line, what: str) -> bool:
    return "event" in line and line["event"]["payload"].get("what") == what


def line_of(lines: list[Line], matches: Callable[[Line], bool]) -> Line:
    return next(line for line in lines if matches(line))


def genuine() -> list[Line]:
    return copy.deepcopy(recorded())


class Lab:
    """Every page and every operation of the API over one store."""

    def __init__(self, folder: Path) -> None:
        self.dashboard = DashboardLab(folder)
        self.store: Store = self.dashboard.store
        app, snapshots = self.dashboard.app, Snapshots(self.store)
        app.include_router(
            users_router(self.store, self.dashboard.submitted, lambda: None, lambda: False, snapshots)
        )  # fmt: skip
        self.visitor: Visitor = self.dashboard.visitor(Role.READ)
        self.bearer = {"Authorization": f"Bearer {self.dashboard.tokens[Role.READ]}"}

    def paths(self, name: str) -> list[str]:
        """The lists, the pages of a study with their JSON twins and downloads, and the API."""
        numbers = range(len(trials.all(self.store, studies.get(self.store, name).id)))
        study = f"/studies/{name}"
        addresses = ["/studies", "/studies.json", study, f"{study}.json", f"{study}/now", f"{study}/points"]
        pages = ("trials.csv", "front.json", "log", "log.json", "report", "effects", "effects.json")
        addresses += [f"{study}/{page}" for page in pages]
        addresses += [f"{study}/trials/{number}{twin}" for number in numbers for twin in ("", ".json")]
        addresses += [f"{study}/compare{twin}?trial=0&trial=2&trial=3" for twin in ("", ".json")]
        addresses += [f"{study}/trials/2/forecasts{twin}" for twin in ("", ".json")]
        return [*addresses, "/v1/studies", f"/v1/studies/{name}", f"/v1/studies/{name}/events?limit=200", "/metrics"]

    def ask(self, path: str) -> int:
        headers = {
            "Host": HOST.removeprefix("https://"),
            **(self.bearer if path.startswith(("/v1", "/metrics")) else HTML),
        }
        return self.visitor.client.get(path, headers=headers).status_code


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = Lab(tmp_path_factory.mktemp("archives"))
    yield lab
    lab.dashboard.process.end()


def show_everything(lab: Lab, name: str) -> None:
    """Asks for every page and file of a study; each must be answered."""
    statuses = {path: lab.ask(path) for path in lab.paths(name)}
    assert set(statuses.values()) == {200}, {path: status for path, status in statuses.items() if status != 200}
    study = studies.get(lab.store, name)
    export_study(lab.store, study.id, io.BytesIO())
    snapshot = Snapshots(lab.store).get(name)
    canonical_json(study_report(lab.store, snapshot))
    assert "".join(csv_parts(*study_table(snapshot)))
    hardware_report(lab.store, name)


def test_a_genuine_archive_is_imported_and_shown(lab: Lab) -> None:
    study = read_in(lab.store, recorded(), name="genuine")
    try:
        show_everything(lab, "genuine")
    finally:
        studies.delete(lab.store, study.id)


def test_an_imported_study_is_exported_with_the_keys_of_its_results(tmp_path: Path) -> None:
    """Otherwise the second measurement of its front would be read as the first."""
    store, file = open_store(tmp_path), io.BytesIO()
    export_study(store, read_in(store, recorded(), name="imported").id, file)
    lines = [json.loads(line) for line in gzip.decompress(file.getvalue()).splitlines()]
    keys = {line["result"]["result_key"] for line in lines if "result" in line}
    again = [line["event"]["payload"]["measurements"] for line in lines if is_note(line, "remeasured")]
    assert again and {row["result"] for rows in again for row in rows} <= keys


def set_in(matches: Callable[[Line], bool], *path: str | int, value: Any) -> Callable[[list[Line]], None]:
    """Changes the value at a path of the first line that matches."""

    def change(lines: list[Line]) -> None:
        inner: Any = line_of(lines, matches)
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value

    return change


def append(*more: Line) -> Callable[[list[Line]], None]:
    def change(lines: list[Line]) -> None:
        lines[-1:] = [*more, {"end": len(lines) - 1 + len(more)}]

    return change


def header(line: Line) -> bool:
    return "format" in line


def of_note(what: str) -> Callable[[Line], bool]:
    return lambda line: is_note(line, what)


def of_kind(kind: str) -> Callable[[Line], bool]:
    return lambda line: line.get("event", {}).get("kind") == kind


def of_stage(stage: str) -> Callable[[Line], bool]:
    return lambda line: line.get("result", {}).get("stage") == stage


MEASURED = ("result", "payload", "value")
MALFORMED = {
    "no space": set_in(header, "space", value={}),
    "a space of another version": set_in(header, "space", "model", value={"width": 3}),
    "scales without the published reference": set_in(header, "scales", value={"figures": {}}),
    "scales of text": set_in(header, "scales", "figures", "published", value="fast"),
    "no scales": set_in(header, "scales", value=None),
    "no reference point of an objective": set_in(header, "reference_point", value={"quality": 0.5}),
    "a reference point of text": set_in(header, "reference_point", "quality", value="high"),
    "calibrated without a device": append(note(None, what="calibrated")),
    "launched without trials": append(note(None, what="launched")),
    "launched with trials of text": set_in(of_note("launched"), "event", "payload", "trials", value="8"),
    "a second time below nothing": set_in(
        of_note("remeasured"), "event", "payload", "measurements", 0, "figures", "latency", "value", value=-1.0
    ),
    "a second measurement without a result": set_in(
        of_note("remeasured"), "event", "payload", "measurements", 0, "result", value="none"
    ),
    "a trial is named that is not there": append(note(None, what="front named", trials=[900])),
    "told nothing": append(note(1, what="observed")),
    "told a number": set_in(of_note("observed"), "event", "payload", "observation", value=5),
    "told of no layout": set_in(of_note("observed"), "event", "payload", "observation", "layout", value={"layers": 3}),
    "told text": set_in(
        of_note("observed"), "event", "payload", "observation", "objectives", value={"quality": "good"}
    ),
    "quality is a number": set_in(of_note("quality"), "event", "payload", "quality", value=5),
    "quality of an unknown rung": set_in(of_note("quality"), "event", "payload", "rung", value=7),
    "a figure that is a number": set_in(of_kind("gated_in"), "event", "payload", "figures", value=[5]),
    "complete with a quality of nothing": set_in(of_kind("complete"), "event", "payload", "quality", value={"sd": 1.0}),
    "spent nothing": append(note(None, what="spent")),
    "warm start of nothing": append(note(None, what="warm start")),
    "corpus is a number": set_in(of_note("corpus"), "event", "payload", "hash", value=5),
    "a profile without times": set_in(of_note("profiled"), "event", "payload", "profile", value={}),
    "a profile that took less than nothing": set_in(
        of_note("profiled"), "event", "payload", "profile", "prefill", "sum_ms", value=-1.0
    ),
    "rung too high": set_in(lambda line: "training" in str(line), "event", "payload", "rung", value=40_000),
    "time beyond all calendars": set_in(lambda line: "event" in line, "event", "at", value=1e20),
    "measured a number": set_in(of_stage("measure"), *MEASURED, value=5),
    "measured nothing": set_in(of_stage("measure"), "result", "payload", value={}),
    "measured a negative time": set_in(of_stage("measure"), *MEASURED, "figures", "latency", "value", value=-1.0),
    "measured no time": set_in(of_stage("measure"), *MEASURED, "figures", "latency", "value", value=0.0),
    "an interval that ends first": set_in(of_stage("measure"), *MEASURED, "figures", "latency", "high", value=1e-9),
    "noise without a finite interval": set_in(
        of_stage("measure"), *MEASURED, "figures", "latency", "log_sd", value=400.0
    ),
    "endless repetitions": set_in(of_stage("measure"), *MEASURED, "figures", "latency", "n", value=1 << 40),
    "a drift to nothing": set_in(of_stage("measure"), *MEASURED, "repetitions", 0, "drift", value=-1),
    "a token that takes no time at all": set_in(
        of_stage("measure"), *MEASURED, "repetitions", 0, "sample", "decode_ns", 0, value=-5
    ),
    "no first token": set_in(of_stage("measure"), *MEASURED, "figures", value={}),
    "patched as text": set_in(of_stage("measure"), *MEASURED, "patched", value="no"),
    "an artifact that is a number": set_in(of_stage("export"), *MEASURED, value=5),
    "a training that is a list": set_in(of_stage("train"), *MEASURED, value=[]),
    "a whole number without end": set_in(of_stage("measure"), *MEASURED, "figures", "latency", "n", value=10**400),
    "a parent that comes later": set_in(lambda line: "trial" in line, "trial", "parents", value=[3]),
    "a reference that is none": set_in(
        lambda line: line.get("trial", {}).get("number") == 4, "trial", "origin", value="reference"
    ),
}  # fmt: skip


@pytest.mark.parametrize("tamper", MALFORMED.values(), ids=MALFORMED)
def test_what_no_reader_can_read_is_refused_with_its_line(tmp_path: Path, tamper: Callable[[list[Line]], None]) -> None:
    store, lines = open_store(tmp_path), genuine()
    tamper(lines)
    (changed,) = [n for n, (old, new) in enumerate(zip([*recorded(), None], lines, strict=False), 1) if old != new][:1]
    with pytest.raises(InvalidInput) as caught:
        read_in(store, lines)
    assert caught.value.where == f"line {changed}"
    assert studies.all(store) == []


@pytest.mark.parametrize("trial", [0, 1 << 20])
def test_a_profile_of_another_layout_is_refused(tmp_path: Path, trial: int) -> None:
    store, lines = open_store(tmp_path), genuine()
    note = line_of(lines, of_note("profiled"))["event"]["payload"]
    note["trial"] = trial
    note["profile"]["parts"] = note["profile"]["parts"][1:]
    with pytest.raises(InvalidInput, match=f"a profile of trial {trial}, which has another layout"):
        read_in(store, lines)
    assert studies.all(store) == []


@pytest.mark.parametrize("number", ["1e999", "-1e999", "1e200", "9" * 30, "NaN", "Infinity"])
def test_numbers_that_cannot_be_stored_are_refused_with_file_and_line(tmp_path: Path, home: Path, number: str) -> None:
    lines = genuine()
    at = lines.index(line_of(lines, lambda line: "attempt" in line))
    lines[at]["attempt"]["payload"] = {"t": "HERE"}
    file = tmp_path / "archive"
    file.write_text(to_text(lines).replace('"HERE"', number))
    done = nas("study", "import", str(file))
    assert done.code == 3
    assert f"{file}:{at + 1}: " in done.err
    assert json.loads(nas("study", "list", "--json").out) == {"studies": []}


def malformed_study(store: Store, name: str, space: Any) -> int:
    """A study that no import would let in, as a damaged database may hold one."""
    return studies.create(store, name, space, seed=0, version="0.2.0").id


def test_lists_survive_studies_that_cannot_be_read(tmp_path: Path, home: Path) -> None:
    lab = Lab(tmp_path)
    lab.dashboard.study("good")
    space = recorded()[0]["space"]
    malformed_study(lab.store, "spaceless", {})
    malformed_study(lab.store, "numbered", {"name": 5})
    for name, payload in {"calibrated": {"what": "calibrated"}, "launched": {"what": "launched"}}.items():
        events.append(lab.store, malformed_study(lab.store, name, space), payload)
    studies.set_scales(lab.store, malformed_study(lab.store, "scales", space), {"figures": {}})
    bad = {"spaceless", "numbered", "calibrated", "launched", "scales"}
    listed = {row["name"]: row for row in lab.visitor.client.get("/studies.json").json()["studies"]}
    assert listed.keys() == bad | {"good"}
    assert {name for name, row in listed.items() if row["problem"]} == bad
    assert lab.visitor.page("/studies").status_code == 200
    answer = lab.visitor.client.get("/v1/studies", headers=lab.bearer).json()["studies"]
    assert {row["study"] for row in answer if row["problem"]} == {"spaceless", "numbered"}
    assert {row["study"] for row in answer} == listed.keys()
    for name in bad:
        for path in (f"/studies/{name}", f"/studies/{name}.json", f"/studies/{name}/points", f"/v1/studies/{name}"):
            assert lab.ask(path) in (200, 422), path
    assert lab.ask("/studies/launched") == lab.ask("/studies/calibrated") == lab.ask("/v1/studies/scales") == 422
    done = nas("study", "list", "--db", str(lab.store.engine.url))
    assert done.code == 0 and all(name in done.out for name in listed)
    assert "spaceless: its search space is malformed" in done.err


VALUES = st.one_of(
    st.sampled_from([None, True, False, 0, 1, -1, 5, 0.5, -0.5, 1e300, -1e300, 1e-320, 10**30, 2**53, 40_000, 1e99]),
    st.sampled_from(["", "x", "0", "null", "\x00", "\u202e", "x" * 300, [], {}, [[]], [5], {"x": 5}, {"": None}]),
    st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=4),
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every path in a JSON value, but its root."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def sort_of(line: Line) -> str:
    """What a line records: lines of one sort are alike."""
    if "event" in line:
        return f"{line['event']['kind']} {line['event']['payload'].get('what')}"
    return str(line["result"]["stage"]) if "result" in line else next(iter(line))


def mutate(lines: list[Line], draw: Callable[..., Any]) -> None:
    """Drops, repeats, swaps or changes one line."""
    sort = draw(st.sampled_from(sorted({sort_of(line) for line in recorded()[:-1]})))
    alike = [number for number, line in enumerate(lines[:-1]) if line in recorded() and sort_of(line) == sort]
    number = draw(st.sampled_from(alike)) if alike else 0
    match draw(st.sampled_from(["drop", "repeat", "swap", *["change"] * 12])):
        case "drop":
            del lines[number]
        case "repeat":
            lines.insert(number, copy.deepcopy(lines[number]))
        case "swap":
            other = draw(st.integers(0, len(lines) - 2))
            lines[number], lines[other] = lines[other], lines[number]
        case _:
            change(lines, lines[number], draw)
    lines[-1] = {"end": len(lines) - 1}


def change(lines: list[Line], line: Line, draw: Callable[..., Any]) -> None:
    """Drops, renames or replaces what is at one place of a line, or repeats it under another key."""
    inner: Any = line
    path: list[Any] = []
    while isinstance(inner, dict | list) and inner and (len(path) < 2 or draw(st.integers(0, 7))):
        path.append(draw(st.sampled_from(sorted(inner) if isinstance(inner, dict) else range(len(inner)))))
        inner = inner[path[-1]]
    if not path:
        return
    holder: Any = line
    for key in path[:-1]:
        holder = holder[key]
    match draw(st.sampled_from(["drop", "repeat", "number", "replace", "replace", "replace", "other"])):
        case "drop":
            del holder[path[-1]]
        case "repeat":
            if isinstance(holder, list):
                holder.insert(path[-1], copy.deepcopy(inner))
            else:
                holder[draw(st.sampled_from(sorted(holder)) | st.text(max_size=3))] = copy.deepcopy(inner)
        case "number" if isinstance(inner, int | float) and not isinstance(inner, bool):
            holder[path[-1]] = inner * draw(st.sampled_from([0, -1, 1e-12, 1e12, 1e80, 1 + 1e-9]))
        case "other":
            other = draw(st.sampled_from(lines))
            place = draw(st.sampled_from(list(places(other)) or [()]))
            for key in place:
                other = other[key]
            holder[path[-1]] = copy.deepcopy(other)
        case _:
            holder[path[-1]] = draw(VALUES)


@settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_file_is_refused_or_shown_on_every_page(lab: Lab, data: st.DataObject) -> None:
    lines = genuine()
    for _ in range(data.draw(st.integers(1, 3))):
        mutate(lines, data.draw)
    text = to_text(lines)
    if data.draw(st.integers(0, 9)) == 0:
        at = data.draw(st.integers(0, len(text)))
        text = text[:at] + data.draw(st.sampled_from(["", "1e999", "\n", '"', "{", "]", "\x00", "9" * 400])) + text[at:]
    before = [study.name for study in studies.all(lab.store)]
    try:
        study = read_in(lab.store, text, name="copy")
    except InvalidInput as error:
        assert error.exit_code == 3
        assert [study.name for study in studies.all(lab.store)] == before
        return
    try:
        show_everything(lab, "copy")
    finally:
        studies.delete(lab.store, study.id)
