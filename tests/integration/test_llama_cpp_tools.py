"""llama.cpp's own programs open what we write for the stock build: released files, and exports for measuring."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from nas.core.layout import Layout
from nas.measure.runtimes.base import RandomWeights
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.measure.runtimes.llama_cpp.support import architecture
from nas.measure.runtimes.llama_cpp.variants import TOOLS, Build
from nas.train.release.files import write_files
from nas.train.release.options import FileOptions

LAYOUTS = {
    "lfm2": "d256 v640 ffn=swiglu:512 [C3*2 A4/2 C3]",
    "lfm2moe": "d256 v640 untied ffn=moe:8x2:64 [C3+swiglu:512 A4/2 C3]",
    "qwen3": "d128 v640 ffn=swiglu:352 [A4/2*3]",
    "llama": "d64 v640 ffn=swiglu:160 [A4/2(qk_norm=0)*3]",
}
TOKENS = 8


def run(build: Build, tool: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Runs a program with nothing but the libraries beside it."""
    argv = [str(build.folder / tool), *args]
    done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=120, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done


@pytest.fixture(scope="module", params=LAYOUTS)
def released(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, llama_build: Build) -> Path:
    layout = Layout.parse(LAYOUTS[request.param])
    assert architecture(layout) == request.param
    folder = tmp_path_factory.mktemp("member") / "tiny"
    options = FileOptions(transformers=False, gguf=("q4_0", "f16", "q4_k_m"), license="apache-2.0")
    write_files(folder, layout, RandomWeights(1), options, print)
    return folder / "gguf"


@pytest.mark.parametrize("quantisation", ["Q4_0", "F16", "Q4_K_M"])
def test_text_goes_on(tools_build: Build, released: Path, quantisation: str) -> None:
    model = str(released / f"tiny-{quantisation}.gguf")
    options = ("-n", str(TOKENS), "-c", "256", "-t", "1", "--temp", "0", "--ignore-eos", "--no-warmup", "-no-cnv")
    argv = ("llama-completion", "-m", model, "-p", "Once upon a time", *options)
    # It prints from a thread that its exit does not always wait for, so one run in thirty loses its last lines;
    # beside busy processes most do.
    runs = (run(tools_build, *argv) for _ in range(30))
    assert any(
        "Once upon a time" in done.stdout
        and re.search(rf"eval time = .* / +{TOKENS - 1} runs", done.stdout + done.stderr)
        for done in runs
    )


def bench(build: Build, model: Path) -> None:
    options = ("-p", "32", "-n", "4", "-r", "1", "-t", "1", "--no-warmup", "-o", "json")
    rows = json.loads(run(build, "llama-bench", "-m", str(model), *options).stdout)
    assert [(row["n_prompt"], row["n_gen"]) for row in rows] == [(32, 0), (0, 4)]
    assert all(row["avg_ts"] > 0 for row in rows)


def test_llama_bench_opens_released_files(tools_build: Build, released: Path) -> None:
    bench(tools_build, released / "tiny-Q4_0.gguf")


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("quantisation", ["q4_0", "f16"])
def test_llama_bench_opens_exports_for_measuring(
    tools_build: Build, tmp_path: Path, name: str, quantisation: str
) -> None:
    """They have random weights and no tokenizer."""
    LLAMA_CPP.export(Layout.parse(LAYOUTS[name]), quantisation, RandomWeights(1), tmp_path / "m.gguf")
    bench(tools_build, tmp_path / "m.gguf")


def test_the_tools_use_the_libraries_that_are_measured(tools_build: Build, llama_build: Build) -> None:
    for name in llama_build.spec.files:
        assert (tools_build.folder / name).read_bytes() == (llama_build.folder / name).read_bytes(), name
    assert {path.name for path in tools_build.folder.iterdir()} >= {*TOOLS}
