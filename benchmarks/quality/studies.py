"""How far the qualities of archived studies can be trusted: reliability, and noise of the front.

    python -m benchmarks.quality.studies [--page docs/measured/truth.md] [ARCHIVE.jsonl.gz ...]

Archives are those of `nas study export`; by default all of benchmarks/recorded/studies. Figures are those
of `nas study show --json`. The effective dimension is the participation ratio of the correlations between the groups
that count at the last rung, over complete candidates.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.page import markdown, write_part
from benchmarks.quality.groups import effective_dimension
from nas.infra.store.store import Store
from nas.search.analysis.archive import import_study
from nas.search.analysis.report import study_report

FOLDER = Path(__file__).parents[1] / "recorded" / "studies"
Json = Mapping[str, Any]


def read(archive: Path, store: Store) -> Json:
    """Imports an archive and returns its report."""
    with archive.open("rb") as file:
        study = import_study(store, file, name=archive.name.partition(".")[0])
    return study_report(store, study.name)


def study_row(report: Json) -> dict[str, str]:
    """Returns the row of a study."""
    sure, complete = report["reliability"] or {}, report["trials"]["complete"]
    scores: dict[str, dict[str, float]] = {}
    for row in report["ranking"]:
        for group, score in (row["quality"] or {}).get("per_group", {}).items():
            scores.setdefault(group, {})[row["layout"]] = score
    dimension = effective_dimension(scores)
    trained = report["stage_seconds"]["train"]
    return {
        "study": report["study"],
        "space": f"`{report['space']['name']}`",
        "tried / complete": f"{report['trials']['proposed']} / {complete}",
        "reliability": _number_text(sure.get("overall")),
        "top third": _number_text(sure.get("top_third")),
        "noise share of the front": _number_text(sure.get("front_noise")),
        "fresh seeds": f"{sure.get('rescored', 0)} x {sure.get('seeds', 0)}",
        "deviation stated / seen": f"{_number_text(sure.get('stated_sd'), 3)} / {_number_text(sure.get('seen_sd'), 3)}",
        "groups, effective": f"{len(scores)}, {_number_text(dimension, 1)}",
        "training, s": f"{trained:.0f}",
    }


def table(archives: Sequence[Path]) -> str:
    """Returns a row for each study as Markdown."""
    with scratch_store() as store:
        return markdown([study_row(read(archive, store)) for archive in archives])


@contextmanager
def scratch_store() -> Iterator[Store]:
    """Yields an empty store in a temporary folder."""
    with (
        tempfile.TemporaryDirectory(prefix="hilnas-studies-") as folder,
        closing(Store.open(f"sqlite:///{folder}/studies.db", artifacts=Path(folder) / "artifacts")) as store,
    ):
        yield store


def _number_text(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archives", type=Path, nargs="*")
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    write_part(options.page, "studies", table(options.archives or sorted(FOLDER.glob("*.jsonl.gz"))))


if __name__ == "__main__":
    main()
