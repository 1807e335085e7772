"""Pages of docs/measured are what their commands write today, of the results that are recorded in the repository."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from benchmarks import audio, blocks, gguf_models, quantise, retrieval, retrieval_compare, vision
from benchmarks.page import fill
from benchmarks.quality import rounding

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "benchmarks/recorded"
PAGES = ROOT / "docs/measured"
COMMAND = re.compile(r"^    (?:\.venv/bin/)?python (.* --page (docs/measured/[\w-]+\.md).*?)(?: +#.*)?$", re.MULTILINE)
MEASURE = {
    "benchmarks.adapt", "benchmarks.audio", "benchmarks.claims", "benchmarks.command_fuzz", "benchmarks.gguf_models",
    "benchmarks.model_fuzz",
    "benchmarks.quality.narrowing", "benchmarks.quality.rounding", "benchmarks.quality.throughput",
    "benchmarks.quantise", "benchmarks.real_study", "benchmarks.retrieval", "benchmarks.retrieval_compare",
    "benchmarks/executorch_equivalence.py",
    "benchmarks/family_files.py", "benchmarks/hardware_model.py", "benchmarks/llama_cpp_equivalence.py",
    "benchmarks/server_attacks.py", "benchmarks.vision",
}  # fmt: skip
"""Commands that write a page of what they measure, or of models whose last digits depend on the processor."""
SLOW = {"benchmarks.noise.report"}
"""Commands that take minutes."""
ELSEWHERE = {"benchmarks.archives", "benchmarks.front"}
"""Commands whose pages have a test of their own."""


def commands() -> list[ParameterSet]:
    lines = {match[1] for page in PAGES.glob("*.md") for match in COMMAND.finditer(page.read_text("utf-8"))}
    pure = sorted(line for line in lines if "--from" in line or not (MEASURE | ELSEWHERE) & set(line.split()))
    return [pytest.param(line, marks=[pytest.mark.exhaustive] * bool(SLOW & set(line.split()))) for line in pure]


@pytest.mark.parametrize("command", commands())
def test_a_page_is_what_its_command_writes(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [
        str(name) for word in shlex.split(command) for name in (sorted(ROOT.glob(word)) if "*" in word else [word])
    ]
    place = words.index("--page") + 1
    page, copy = ROOT / words[place], tmp_path / "measured" / Path(words[place]).name
    copy.parent.mkdir()
    (tmp_path / "img").mkdir()  # of plots beside the page
    shutil.copy(page, copy)
    words[place] = str(copy)
    monkeypatch.chdir(ROOT)
    if words[0] == "-m":
        monkeypatch.setattr(sys, "argv", words[1:])
        importlib.import_module(words[1]).main()
    else:
        subprocess.run([sys.executable, *words], check=True)
    assert copy.read_text("utf-8") == page.read_text("utf-8")


def record(name: str) -> dict[str, object]:
    content: dict[str, object] = json.loads((RECORDED / f"{name}.json").read_text("utf-8"))
    return content


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("audio", lambda page: audio.write_page(page, record("audio"))),
        ("model-files", lambda page: gguf_models.write_page(page, record("gguf-models"))),
        ("quantising", lambda page: quantise.write_page(page, record("quantise"))),
        ("quantising", lambda page: fill(page, "times", quantise.table_of_times(record("quantise-times")))),
        ("quantising", lambda page: fill(page, "rounding", rounding.as_table(record("rounding")))),
        ("retrieval", lambda page: retrieval_compare.write_page(page, record("retrieval-compare"))),
        ("retrieval", lambda page: retrieval.write_page(page, record("retrieval"), False)),
        ("retrieval", lambda page: retrieval.write_page(page, record("retrieval-small"), True)),
        ("vision", lambda page: vision.write_page(page, record("vision"))),
    ],
)
def test_a_page_shows_what_is_recorded(name: str, write: Callable[[Path], None], tmp_path: Path) -> None:
    page, copy = PAGES / f"{name}.md", tmp_path / f"{name}.md"
    shutil.copy(page, copy)
    write(copy)
    assert copy.read_text("utf-8") == page.read_text("utf-8")


def test_the_page_of_blocks_shows_what_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "blocks.md"
    shutil.copy(blocks.PAGE, copy)
    before = blocks.PAGE.read_text("utf-8")
    monkeypatch.setattr(blocks, "PAGE", copy)
    monkeypatch.setattr(sys, "argv", ["blocks", "page"])
    blocks.main()
    assert copy.read_text("utf-8") == before
