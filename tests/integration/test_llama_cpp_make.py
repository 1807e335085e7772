"""The runner makes model files from recipes, byte for byte as they would have been sent."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from nas.core.layout import Layout
from nas.measure.runtimes.base import RandomWeights
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.measure.runtimes.llama_cpp.variants import Build
from nas.measure.runtimes.toolchain import EMULATION, emulator_of

LAYOUTS = (
    "d256 v512 ffn=swiglu:512 [C3 A4/2 C3 A4/1]",
    "d96 v300 untied ffn=swiglu:256 [C5 A6/2 C5 A6/3]",  # rows that fall back to other types
    "d256 v512 untied ffn=moe:8x2:64 [M16 A4/2 C3+swiglu:512 W4/2@32(sink=1) C5 A8/8(qk_norm=0)]",
)


def make(build: Build, recipe: Path, output: Path, emulator: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    argv = [*emulator, str(build.executable), "--recipe", str(recipe), "--output", str(output)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    LLAMA_CPP.export(Layout.parse(LAYOUTS[0]), "q4_0", RandomWeights(), tmp_path / "recipe", recipe=True)
    return tmp_path / "recipe"


@pytest.mark.parametrize("quantisation", LLAMA_CPP.quantisations)
@pytest.mark.parametrize("text", LAYOUTS)
def test_the_same_bytes(llama_build: Build, tmp_path: Path, text: str, quantisation: str) -> None:
    layout, output = Layout.parse(text), tmp_path / "made"
    LLAMA_CPP.export(layout, quantisation, RandomWeights(3), tmp_path / "file")
    LLAMA_CPP.export(layout, quantisation, RandomWeights(3), tmp_path / "recipe", recipe=True)
    done = make(llama_build, tmp_path / "recipe", output)
    assert done.returncode == 0, done.stdout
    assert output.read_bytes() == (tmp_path / "file").read_bytes()


@pytest.mark.needs("arm64")
@pytest.mark.timeout(1800)  # compiles, where no cache has the build
def test_the_same_bytes_on_arm64(tmp_path: Path) -> None:
    target, layout = "aarch64-linux", Layout.parse(LAYOUTS[2])
    arm = LLAMA_CPP.build(target, log=print, patched=True)
    emulator = emulator_of(target, arm.executable)
    assert emulator is not None, f"no emulator here: apt-get install {EMULATION}"
    for quantisation in LLAMA_CPP.quantisations:
        LLAMA_CPP.export(layout, quantisation, RandomWeights(3), tmp_path / "file")
        LLAMA_CPP.export(layout, quantisation, RandomWeights(3), tmp_path / "recipe", recipe=True)
        done = make(arm, tmp_path / "recipe", tmp_path / quantisation, emulator)
        assert done.returncode == 0, done.stdout
        assert (tmp_path / quantisation).read_bytes() == (tmp_path / "file").read_bytes()


@pytest.mark.parametrize(
    "change",
    [
        lambda text: b"",
        lambda text: b"GGUF" + text,
        lambda text: text.replace(b"hilnas-recipe 1", b"hilnas-recipe 2"),
        lambda text: text[: len(text) // 3],
        lambda text: text[:-20],
        lambda text: text.replace(b"tile 0 ", b"tile 15 "),
        lambda text: text.replace(b"tile 0 ", b"tile 0 99999999999999"),
        lambda text: text.replace(b"ones", b"twos"),
        lambda text: text.replace(b"q4_0", b"q9_9"),
        lambda text: text.replace(b"q4_0 ", b"q4_0 -1"),
        lambda text: text.replace(b"hilnas-recipe 1 0 ", b"hilnas-recipe 1 0 99999999999999999999999"),
    ],
)
def test_a_damaged_recipe_is_refused(llama_build: Build, recipe: Path, tmp_path: Path, change: object) -> None:
    assert callable(change)
    recipe.write_bytes(change(recipe.read_bytes()))
    done = make(llama_build, recipe, tmp_path / "made")
    assert done.returncode == 65 and "recipe" in done.stdout, (done.returncode, done.stdout)


def test_a_file_is_never_written_over(llama_build: Build, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    done = make(llama_build, recipe, tmp_path / "kept")
    assert done.returncode == 74 and "File exists" in done.stdout
    assert (tmp_path / "kept").read_text() == "kept"


def test_a_full_disk_is_told(llama_build: Build, recipe: Path) -> None:
    """A file-size limit refuses the write in the middle; its signal is ignored, because a full disk sends none."""
    argv = [str(llama_build.executable), "--recipe", str(recipe), "--output", str(recipe.with_name("made"))]
    script = f"trap '' XFSZ; ulimit -f 100; exec {' '.join(argv)}"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 74 and "File too large" in done.stdout
