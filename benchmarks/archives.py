"""The recorded studies: what each is of, and its sentence beside what a sceptic writes who saw the table of its front.

    python -m benchmarks.archives [--page docs/measured/recorded-studies.md]

Each study has two sentences: of all its trials, and of the first half of them, as if the search had ended there. One
whose front was measured again has the first alone: there is no second measurement of a half's front.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks.page import markdown, write_part
from benchmarks.quality.studies import scratch_store
from nas.infra.store.store import Store
from nas.search.analysis.archive import import_study, recorded_studies
from nas.search.analysis.headline import headline
from nas.search.analysis.record import StudyRecord, read_study
from nas.search.analysis.snapshot import StudySnapshot

PARTS = ("all trials", "first half")
SCEPTIC: Mapping[tuple[str, str], str] = {
    (
        "lfm2-audio",
        "all trials",
    ): "Four with an encoder half as wide are faster and a third smaller. Whether they hear as well, toy syllables"
    " cannot say.",
    (
        "lfm2-colbert",
        "all trials",
    ): "Four are faster than LFM2-ColBERT-350M and have a smaller index. Eight qualities order nothing.",
    (
        "lfm2-detokenizer",
        "all trials",
    ): "Four take half of the time, with half of the weights. Eight qualities do not say what that costs.",
    (
        "lfm2-full",
        "all trials",
    ): "Seven layouts are smaller and faster than LFM2-350M; that any is better in quality is one seed's luck.",
    (
        "lfm2-full",
        "first half",
    ): "Five layouts need less memory; trial 5 may be no faster. Of quality five values say nothing.",
    (
        "lfm2-study-selective-copy",
        "all trials",
    ): "Ten are faster and smaller. Their qualities cannot be ordered, a quarter"
    " of the front is luck, and trial 24 may be a tenth worse.",
    (
        "lfm2-study-selective-copy",
        "first half",
    ): "Six are faster and smaller, trial 24 most; its quality is anybody's guess within 8 %.",
    (
        "lfm2-study",
        "all trials",
    ): "Fourteen are faster and smaller at about equal quality; which of them is best I would not say.",
    (
        "lfm2-vl",
        "all trials",
    ): "Three are fast since they give an image 16 tokens. Whether these are enough, nine qualities do not say.",
    ("lfm2-study", "first half"): "Nine are faster and smaller; quality sorts out the bad ones and nothing else.",
    (
        "lfm2",
        "all trials",
    ): "Ten are faster and smaller than LFM2-350M at a quality within one percent; their order is open.",
    ("lfm2", "first half"): "Four are faster and smaller; six qualities are too few for a statement on quality.",
    ("two-runtimes-idle", "all trials"): "Eight are a third faster and smaller. Quality was not measured: it is noise.",
    ("two-runtimes-idle", "first half"): "Five are a third faster and smaller. Quality was not measured: it is noise.",
}
"""Study and part of it -> what somebody writes of it who doubts every number."""


def records(store: Store) -> Iterator[tuple[str, Path, StudyRecord]]:
    """Yields name, archive and record of each study that comes with hilnas."""
    for name, path in recorded_studies().items():
        with path.open("rb") as file:
            import_study(store, file, name=name)
        yield name, path, read_study(store, name)


def first_half(record: StudyRecord) -> StudyRecord:
    """Returns a study as if its search had ended after half of its proposals."""
    assert not record.named, "a second measurement is of the whole front"
    proposed = [number for number, row in record.records.items() if row.trial.origin != "reference"]
    records = {number: row for number, row in record.records.items() if number not in proposed[len(proposed) // 2 :]}
    completions = [done for done in record.log.completions if done.trial in records]
    return replace(record, records=records, log=replace(record.log, completions=completions))


def archive_row(name: str, path: Path, record: StudyRecord) -> dict[str, str]:
    """Returns what an archive is of, and how to know it: its SHA-256 and the device by its stable id."""
    space, study = record.space, record.study
    proposed = sum(row.trial.origin != "reference" for row in record.records.values())
    return {
        "study": f"`{name}`",
        "space": f"`{space.name}`",
        "proposed, complete": f"{proposed}, {len(StudySnapshot(record).counted)}",
        "runtimes": ", ".join(f"{runtime.name} {runtime.quantisation}" for runtime in space.runtimes),
        "device": ", ".join(dict.fromkeys(device.id for device in record.log.devices)),
        "seed": f"{study.seed}",
        "kB": f"{path.stat().st_size / 1000:.0f}",
        "SHA-256": f"`{hashlib.sha256(path.read_bytes()).hexdigest()}`",
    }


def headline_rows(name: str, record: StudyRecord) -> Iterator[dict[str, str]]:
    """Yields the sentence of each part of a study beside the sceptic's."""
    for part, studied in zip(PARTS, (record,) if record.named else (record, first_half(record)), strict=False):
        result = headline(StudySnapshot(studied))
        assert result is not None, "the references are measured"
        yield {"study": f"`{name}`, {part}", "hilnas": result.text, "a sceptic": SCEPTIC[name, part]}


def tables() -> dict[str, str]:
    """Returns the tables of the page."""
    archives, headlines = list[dict[str, str]](), list[dict[str, str]]()
    with scratch_store() as store:
        for name, path, record in records(store):
            archives.append(archive_row(name, path, record))
            headlines += headline_rows(name, record)
    return {"archives": markdown(archives), "headlines": markdown(headlines)}


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, help="whose parts the tables are; left out: printed")
    options = parser.parse_args()
    for name, text in tables().items():
        write_part(options.page, name, text)


if __name__ == "__main__":
    main()
