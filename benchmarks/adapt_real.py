"""SmolLM2-135M-Instruct adapted to shares of its decode time on this machine: the curve of its children.

    python -m benchmarks.adapt real FOLDER [--long] [--budget "decode_p50<=0.77x"] [--front 0]

Requests have 512 tokens, and so have windows of scores and healing; with `--long`, 1,920 and 2,048.
FOLDER/text/ holds what is trained and scored on, a folder for each source: documentation of the kernel, manual pages in
English and German, and documentation of Python, from packages of Debian (`PACKAGES`, fetched by `apt-get download`).
FOLDER/child is the folder of results of `nas adapt`, which continues where an earlier run ended; with a larger
`--front`, a run that is done heals further children. Report: `recorded`.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.page import table
from benchmarks.runs import say
from nas.core.durable import write_durably
from nas.train.adapt.request import AdaptRequest, read_request
from tests.support.smollm2 import fetch_smollm2

PACKAGES = ("linux-doc-6.1", "manpages", "manpages-dev", "manpages-de", "python3.11-doc")
_SOURCES = {
    "kernel": (r"doc/linux-doc-6\.1/(?!.*translations).*\.(rst|txt)(\.gz)?$", 12_000_000),
    "manuals": (r"man/man\d/.*\.gz$", 6_000_000),
    "manuals-de": (r"man/de/man\d/.*\.gz$", 2_500_000),
    "python": (r"doc/python3\.11/.*\.rst(\.txt)?(\.gz)?$", 8_000_000),
}
"""Source -> path below usr/share, and bytes at most."""
_LARGEST, _SMALLEST = 300_000, 400
_MARKUP = re.compile(r'^\.\\".*\n|\\f[BIRP]|\\-', re.MULTILINE)
_SETTINGS: dict[str, Any] = {
    "alternatives": ["swa", "-"],
    "library": {"tokens": 66560, "score_tokens": 2560, "recall_tokens": 1280},
    "healing": {"tokens": 65536, "length": 512, "lr": 3e-5},
    "recall": 1.0,
    "report_tokens": 32768,
}
"""What two cores can take in an hour or two: a run with alternatives of all kinds took nothing but windows."""
_LONG: dict[str, Any] = {
    **_SETTINGS,
    "prompt": 1920,
    "alternatives": ["swa"],
    "library": {"tokens": 66560, "score_tokens": 4096, "recall_tokens": 4096},
    "healing": {"tokens": 65536, "length": 2048, "lr": 3e-5},
}


def recorded(long: bool) -> Path:
    """Returns the report of the adaptation to long requests, or to those of 512 tokens."""
    return Path(__file__).parent / "recorded" / ("adapt-real-long.json" if long else "adapt-real.json")


def run(folder: Path, long: bool, budget: str, front: int) -> None:
    """Adapts the model, or continues, and records what the children have and lose.

    Raises:
        SystemExit: a package cannot be fetched, the folder is of other requests, or `nas adapt` failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text, config, result = folder / "text", folder / "adapt.json", folder / "child"
    if not text.is_dir():
        _write_text(text)
    settings, path = _LONG if long else _SETTINGS, recorded(long)
    if config.is_file() and is_long(folder) != long:
        raise SystemExit(f"{folder} has an adaptation {'without' if long else 'with'} --long: name another folder")
    write_durably(config, json.dumps(settings).encode())
    command = [str(Path(sys.executable).with_name("nas")), "adapt", str(fetch_smollm2()), "--config", str(config)]
    command += ["--json", "-b", budget, "-o", str(result), "--library", str(folder / "library")]
    command += [part for source in _SOURCES for part in ("-c", str(text / source))] + ["--front", str(front)]
    say(" ".join(command))
    began = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    seconds = time.monotonic() - began
    report = json.loads((result / "report.json").read_bytes())
    request = json.loads((result / "request.json").read_bytes())
    curve = [json.loads(path.read_bytes()) for path in sorted((result / "curve").glob("*.json"))]
    earlier = json.loads(path.read_bytes()) if path.is_file() else {}
    same = (earlier.get("teacher"), earlier.get("settings")) == (request["teacher"], settings)
    runs = earlier["runs"] if same else []
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    record = {
        "teacher": request["teacher"],
        "settings": settings,
        "precision": request["precision"],
        "runs": [*runs, {"budget": budget, "seconds": round(seconds), "peak_bytes": peak, "front": front}],
        "report": report,
        "curve": curve,
    }
    written = json.dumps(record, indent=1).replace(f"{text}/", "")
    write_durably(path, f"{written}\n".encode())


def is_long(folder: Path) -> bool:
    """Returns whether a folder is of long requests."""
    return "prompt" in json.loads((folder / "adapt.json").read_bytes())


def request_of(folder: Path, budget: str) -> AdaptRequest:
    """Returns what `run` asks of `nas adapt` in a folder where it has run."""
    keys = {
        "model": fetch_smollm2(),
        "budget": (budget,),
        "corpus": tuple(folder / "text" / source for source in _SOURCES),
        "output": folder / "child",
        "library_folder": folder / "library",
    }
    return read_request(folder / "adapt.json", keys)


def rows(record: dict[str, Any]) -> str:
    """Returns the table of the model and its children, fastest last."""
    report = record["report"]
    model, budget = report["teacher"], next(iter(report["budgets"]))
    base = model["measured"][budget]
    children = {row["layout"]: row for row in [*record["curve"], report["child"]]}
    names = [*report["text"], "all"]
    lines = [["the model", "1.00", f"{base:.2f}", f"{model['bits_per_byte']:.3f}", *["" for _ in names], ""]]
    for row in sorted(children.values(), key=lambda row: -row["measured"][budget]):
        value, before = row["measured"][budget], row.get("bits_per_byte_before_healing")
        changes = [_percent(row["bits_per_byte_change"][name]) for name in names]
        unhealed = "" if before is None else f"{before / model['bits_per_byte'] - 1:+.1%}"
        figures = [f"{base / value:.2f}", f"{value:.2f}", f"{row['bits_per_byte']:.3f}", *changes, unhealed]
        lines.append([_replaced(row["choice"]), *figures])
    head = ["what is replaced", "decode, times as fast", "ms a token", "bits per byte"]
    return table([*head, *(f"{name}, change" for name in names), "all, before healing"], lines)


def _replaced(choice: list[list[Any]]) -> str:
    """Returns how many blocks became which."""
    defaults = re.compile(r"qk_norm=0,?|rope_theta=\d+,?|\(\)")
    counts = Counter(defaults.sub("", defaults.sub("", block or "none")) for _, _, block in choice)
    return ", ".join(f"{count} `{name}`" for name, count in counts.most_common())


def _percent(change: list[float | None]) -> str:
    value, low, high = change
    assert value is not None
    interval = "" if low is None or high is None else f" ({low:+.1%} to {high:+.1%})"
    return f"{value:+.1%}{interval}"


@contextmanager
def unpacked(packages: Iterable[str]) -> Iterator[Path]:
    """Fetches packages of Debian, and yields the scratch folder of their usr/share in the context."""
    with tempfile.TemporaryDirectory() as scratch:
        say(f"fetching {', '.join(packages)}")
        subprocess.run(["apt-get", "download", "-q", *packages], cwd=scratch, check=True)
        for package in Path(scratch).glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", package, f"{scratch}/root"], check=True)
        yield Path(scratch, "root/usr/share")


def _write_text(text: Path) -> None:
    """Unpacks the packages, and writes the folder of each source."""
    with unpacked(PACKAGES) as share:
        partial = share / "text"
        for source, (pattern, size) in _SOURCES.items():
            (partial / source).mkdir(parents=True)
            for number, document in enumerate(_documents(share, pattern, size)):
                (partial / source / f"{number}.txt").write_text(document)
        copy = text.with_name(f"{text.name}.partial")  # of a copy that was killed, some documents would be missing
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(partial, copy)
        copy.rename(text)


def _documents(share: Path, pattern: str, size: int) -> Iterator[str]:
    """Yields different documents in random order, until they have so many bytes."""
    paths = sorted(path for path in share.rglob("*") if re.match(pattern, str(path.relative_to(share))))
    random.Random(0).shuffle(paths)
    digests = set()
    for path in paths:
        if path.is_symlink() or not path.is_file():
            continue
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        digest = hashlib.sha256(content).digest()
        if digest in digests or not _SMALLEST <= len(content) <= min(_LARGEST, size):
            continue
        digests.add(digest)
        size -= len(content)
        yield _MARKUP.sub("", content.decode("utf-8", "replace"))
