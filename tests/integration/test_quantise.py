"""`nas quantise` with llama.cpp's own quantiser: budgets of bytes and divergence, odd widths, and what is kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from cli_runner import nas

from benchmarks.quantise import THREADS, TIMED, table_of_times
from nas.core import paths
from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.measure.runtimes.base import RandomWeights
from nas.measure.runtimes.llama_cpp.gguf_file import GgufFile
from nas.measure.runtimes.llama_cpp.variants import Build
from nas.train.adapt.made_types import MadeTypes, trim
from nas.train.release.files import write_files
from nas.train.release.options import FileOptions

pytestmark = pytest.mark.usefixtures("one_thread", "fast_binding")

LAYOUTS = {
    "llama": "d96 v640 ffn=swiglu:256 [A3/1(qk_norm=0)*2]",
    "lfm2moe": "d256 v640 untied ffn=moe:8x2:64 [C3+swiglu:512 A4/2 C3]",
}
NORMS = "F32"
KILLS = 3


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, tools_build: Build) -> dict[str, Path]:
    """Returns architecture -> a file of F16 with random weights."""
    folder = tmp_path_factory.mktemp("members")
    options = FileOptions(transformers=False, gguf=("f16",), license="apache-2.0")
    for name, layout in LAYOUTS.items():
        write_files(folder / name, Layout.parse(layout), RandomWeights(1), options, print)
    return {name: folder / f"{name}/gguf/{name}-F16.gguf" for name in LAYOUTS}


@pytest.fixture
def source(sources: dict[str, Path]) -> Path:
    return sources["llama"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(40):
        lines = (
            f"{number} {line}: the quick brown fox jumps over the lazy dog {line * number % 97}" for line in range(40)
        )
        (folder / f"{number}.txt").write_text("\n".join(lines))
    return folder


def quantised(source: Path, corpus: Path, output: Path, *options: str) -> dict[str, Any]:
    common = ("--corpus", str(corpus), "--parts", "1", "--windows", "2", "--types", "q4_0,q4_k", "--json")
    done = nas("quantise", str(source), "--output", str(output), *common, *options)
    assert done.code == 0, done.err
    report: dict[str, Any] = json.loads(done.out)
    return report


def test_a_file_keeps_its_budget_of_bytes_and_loses_less_with_more(
    source: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NAS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/runtimes").symlink_to(REAL_CACHE / "runtimes")
    whole = quantised(source, corpus, tmp_path / "whole.gguf", "--budget", "file_size<=1GB")
    assert set(whole["types"].values()) == {"q8_0"}, "where all is allowed, what loses least is chosen"
    sizes = {score["name"]: score["size"] for score in whole["beside"]}
    middle = 0.8 * sizes["q8_0"] + 0.2 * sizes["q4_0"]
    records = sorted(paths.cache().glob("divergences/*.json"))
    path = tmp_path / "middle.gguf"
    report = quantised(source, corpus, path, "--budget", f"file_size<={middle / 1e6:.6f}MB")
    new = set(paths.cache().glob("divergences/*.json")) - set(records)
    assert len(new) == 1, "only the chosen file is new: all others are kept by content"
    assert path.stat().st_size == report["score"]["size"] <= middle
    assert report["expected"]["file_size"] == pytest.approx(path.stat().st_size / 1e6, rel=1e-3)
    assert whole["score"]["kl"] < report["score"]["kl"] and len(set(report["types"].values())) > 1
    kinds = {tensor: stored.type_name for tensor, stored in GgufFile.read(path).tensors.items()}
    for slot, kind in report["types"].items():
        role = slot.rpartition(".")[0]
        named = {kinds[tensor] for tensor in kinds if tensor.removesuffix(".weight").split(".", 2)[-1] == role}
        assert named == {kind.upper()}, slot
    assert all(kind == NORMS for tensor, kind in kinds.items() if tensor.endswith("norm.weight"))


def test_divergence_is_a_budget(sources: dict[str, Path], source: Path, corpus: Path, tmp_path: Path) -> None:
    options = ("--budget", "kl<=0.5", "--minimise", "file_size")
    report = quantised(sources["lfm2moe"], corpus, tmp_path / "small.gguf", *options)
    assert report["expected"]["kl"] <= 0.5 and report["budgets"][0]["value"] == report["score"]["kl"]
    assert report["types"]["ffn_down_exps.1"] in ("q8_0", "q4_0"), "its rows are of 64"
    with_none = nas("quantise", str(source), "-o", str(tmp_path / "no.gguf"), "-c", str(corpus), "-b", "kl<=1e-9",
                    "-b", "file_size<=0.001MB", "--parts", "1", "--windows", "2", "--types", "q8_0")  # fmt: skip
    assert with_none.code == 3 and "no choice of types keeps the budgets; least, each alone" in with_none.err
    assert not (tmp_path / "no.gguf").exists()


@pytest.mark.exhaustive  # minutes; the same files are compared in the other tests
def test_a_killed_command_writes_the_same_file_when_it_is_repeated(source: Path, corpus: Path, tmp_path: Path) -> None:
    def command(name: str) -> subprocess.Popen[bytes]:
        folder = tmp_path / name
        for part in ("cache", "tmp"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        runtimes = folder / "cache/runtimes"
        if not runtimes.is_symlink():
            runtimes.symlink_to(REAL_CACHE / "runtimes")
        argv = [sys.executable, "-c", "from nas.cli.main import main; main()", "quantise", str(source)]
        argv += ["-o", str(folder / "out.gguf"), "-c", str(corpus), "-b", "file_size<=0.35MB"]
        argv += ["--parts", "1", "--windows", "2", "--types", "q4_0", "--no-importance"]
        variables = {"NAS_CACHE": str(folder / "cache"), "TMPDIR": str(folder / "tmp")}
        return subprocess.Popen(argv, env=os.environ | variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    start = time.monotonic()
    assert command("whole").wait() == 0
    duration = time.monotonic() - start
    content, path = (tmp_path / "whole/out.gguf").read_bytes(), tmp_path / "killed/out.gguf"
    path.parent.mkdir()
    path.write_bytes(b"an older file")
    random, codes = Random(0), []
    for _ in range(KILLS):
        process = command("killed")
        with suppress(subprocess.TimeoutExpired):
            process.wait(random.uniform(0.05, 0.4) * duration)
        process.kill()
        codes.append(process.wait())
        assert path.read_bytes() in (b"an older file", content)
    assert -signal.SIGKILL in codes, "no kill came while it worked"
    assert command("killed").wait() == 0
    assert path.read_bytes() == content
    assert not any((tmp_path / "killed/tmp").glob("hilnas-quantise-*"))


@pytest.mark.exhaustive  # by default the other tests see that files are made and compared once
def test_types_are_made_and_compared_once(
    source: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NAS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/runtimes").symlink_to(REAL_CACHE / "runtimes")
    log: list[str] = []

    def types(text: str, importance_from: str = "") -> MadeTypes:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        return MadeTypes(source, ["q4_0", "q8_0"], text, importance_from, 4, folder, log.append)

    with pytest.raises(InvalidInput, match="tokens, and 1,024 are compared"), types("a few words") as short:
        short.make()
    texts = "\n".join(path.read_text() for path in sorted(corpus.iterdir()))
    needed = r"importance matrix has .* tokens, and 1,024 are needed"
    with pytest.raises(InvalidInput, match=needed), types(texts, "few words " * 100) as short:
        short.make()
    assert not list((tmp_path / "cache/quantised").glob("*/*.gguf")), "texts are looked at before files are made"
    with types(texts) as first:
        assert first.make() == {}
        losses = {name: first.bits(path).loss for path, name in first.files.items()}
        sizes = {name: path.stat().st_size for path, name in first.files.items()}
        assert trim(0) == 0, "they are used"
    assert sizes["q4_0"] < sizes["q8_0"] < sizes["source"]
    kl = {name: loss.kl for name, loss in losses.items() if loss is not None}
    assert kl["source"] < kl["q8_0"] < kl["q4_0"]
    assert losses["source"] is not None and losses["source"].bits == 0
    with monkeypatch.context() as nothing_new, types(texts) as again:
        nothing_new.setattr("nas.train.adapt.made_types.quantise_file", None)
        nothing_new.setattr("nas.train.adapt.quantise.divergence", None)
        assert again.make() == {} and {name: again.bits(path).loss for path, name in again.files.items()} == losses
    with types(texts, texts) as weighed:
        assert weighed.make() == {}
        pairs = zip(first.files, weighed.files, strict=True)
        same = [one.read_bytes() == other.read_bytes() for one, other in pairs]
        loss = weighed.bits(list(weighed.files)[1]).loss
    assert same == [True, False, True], "llama.cpp rounds Q8_0 without weights"
    assert loss is not None and loss.kl != kl["q4_0"]
    other = MadeTypes(source, ["q4_0", "q8_0"], texts, texts[1:], 4, tmp_path, log.append)
    assert not set(other.files).intersection(list(weighed.files)[1:]), "files are kept by the matrix's text"
    assert trim(0) == 2 * (sizes["q4_0"] + sizes["q8_0"])


@pytest.mark.exhaustive
def test_times_are_measured_by_type_and_number_of_threads(source: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/runtimes").symlink_to(REAL_CACHE / "runtimes")
    argv = [sys.executable, "-m", "benchmarks.quantise", "--times", "--source", str(source), "--rounds", "1"]
    environment = os.environ | {"NAS_CACHE": str(tmp_path / "cache")}
    record = json.loads(subprocess.run(argv, check=True, stdout=subprocess.PIPE, env=environment).stdout)
    assert record["rows"].keys() == {f"{name} {count}" for name in ("source", *TIMED) for count in THREADS}
    assert all(min(row["decode_ms"] + row["prompt_tps"]) > 0 for row in record["rows"].values())
    assert record["rows"]["q4_0 1"]["size"] < record["rows"]["q8_0 1"]["size"] < record["rows"]["source 1"]["size"]
    lines = table_of_times(record).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| F16", *(f"| {name.upper()}" for name in TIMED)]


@pytest.mark.parametrize(
    "options, message",
    [
        ((), "without a budget the largest file loses least"),
        (("--budget", "quality<=1"), "quality"),
        (("--budget", "file_size<=1MB", "--types", "q4_9"), "did you mean"),
        (("--budget", "file_size<=1MB", "--minimise", "quality"), "is no cost"),
        (("--budget", "kl<=.1.2"), "no number"),
    ],
)
def test_wrong_options_are_named_before_anything_is_computed(
    options: tuple[str, ...], message: str, source: Path, corpus: Path, tmp_path: Path
) -> None:
    done = nas("quantise", str(source), "--corpus", str(corpus), "--output", str(tmp_path / "out.gguf"), *options)
    assert done.code in (2, 3) and message in done.err and "Traceback" not in done.err


def test_a_text_that_is_too_short_is_named(source: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a few words")
    output = tmp_path / "out.gguf"
    done = nas("quantise", str(source), "-c", str(tmp_path / "text"), "-o", str(output), "-b", "file_size<=1MB")
    assert done.code == 3 and "tokens, and 4,096 are compared: give more text" in done.err and not output.exists()


REAL_CACHE = paths.cache()
