"""Sentence and picture of archived studies, for the question whether a reader understands them in ten seconds.

    python -m benchmarks.ten_seconds [--page docs/measured/ten-seconds.md]

The page has a place `<!-- NAME -->` for each archive of benchmarks/recorded/studies, named after its file. Sentences
are those of the study page and of `nas study show`, pictures those of `nas study front --picture`.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from benchmarks.quality.page import fill
from benchmarks.quality.studies import FOLDER, read
from nas.infra.store.store import Store
from nas.search.analysis.plot import draw_front

PAGE = Path(__file__).parents[1] / "docs" / "measured" / "ten-seconds.md"


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, default=PAGE)
    page: Path = parser.parse_args().page
    pictures = page.parent.parent / "img" / page.stem
    pictures.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hilnas-ten-seconds-") as folder:
        store = Store.open(f"sqlite:///{folder}/studies.db", artifacts=Path(folder) / "artifacts")
        try:
            for archive in sorted(FOLDER.glob("*.jsonl.gz")):
                report, _ = read(archive, store)
                name = report["study"]
                sentence = report["headline"]["text"] if report["headline"] else "The references are not measured yet."
                png, _ = draw_front(report, Path(folder) / name)
                shutil.copy(png, pictures / f"{name}.png")
                fill(page, name, f"> {sentence}\n\n![The front of {name}](../img/{page.stem}/{name}.png)\n")
        finally:
            store.close()


if __name__ == "__main__":
    main()
