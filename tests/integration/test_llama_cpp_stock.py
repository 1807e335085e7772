"""Every kind of layout that is said to be carried loads and decodes, stored as llama.cpp's own tool stores it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from safetensors.numpy import save_file

from nas.core.layout import Layout
from nas.core.workload import Workload
from nas.measure.runtimes.base import Checkpoint, RandomWeights
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.measure.runtimes.llama_cpp.support import architecture
from nas.measure.runtimes.llama_cpp.tensors import tensors
from nas.measure.runtimes.llama_cpp.variants import Build
from nas.testing.run_plan import run_plan

CARRIED = (
    "d256 v512 ffn=swiglu:512 [C3*2 A4/2 C3 A4/1]",
    "d256 v512 untied ffn=swiglu:512 [C5 A8/2]",
    "d96 v301 ffn=swiglu:160 [C3 A6/3 A6/2]",
    "d128 v512 ffn=swiglu:352 [A8/4 C2*3]",
    "d256 v512 ffn=moe:8x2:64 [C3+swiglu:512 A4/2 C3]",
    "d128 v512 untied ffn=moe:16x4:96 [C3 A8/4]",
    "d256 v512 ffn=swiglu:512 [A8/4*3]",
    "d128 v512 ffn=swiglu:352 [A3/1:16*2]",
    "d256 v512 untied ffn=swiglu:512 [A4/4(qk_norm=0)*2]",
    "d256 v512 untied ffn=swiglu:512 [M16(heads=6,inner=192,groups=2,norm=0)&A4/2(qk_norm=0)*2]",
    "d256 v512 untied ffn=swiglu:512 [D8/4(norm_eps=1e-06)*2 A4/2(gate=1,gate_wide=1)]",
)
PATCHED = (
    "d256 v512 ffn=swiglu:512 [C3 M16 W4/2@32(sink=1) A4/2]",
    "d256 v512 ffn=moe:8x2:64 [M16(groups=2) C3+swiglu:352 A4/2+moe:8x4:96]",
)

QUANTISE = """
import sys, llama_cpp
quiet = llama_cpp.llama_log_callback(lambda *_: None)
llama_cpp.llama_log_set(quiet, None)
params = llama_cpp.llama_model_quantize_default_params()
params.ftype, params.nthread = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{sys.argv[3].upper()}"), 1
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), params))
"""


@pytest.mark.parametrize("text", CARRIED)
def test_loads_and_decodes(llama_build: Build, tmp_path: Path, text: str) -> None:
    layout, path = Layout.parse(text), tmp_path / "m.gguf"
    artifact = LLAMA_CPP.export(layout, "q4_0", RandomWeights(), path)
    plan = LLAMA_CPP.plan(artifact, llama_build.runner, Workload(prompt=70, gen=3), deadline_s=60)
    sample = LLAMA_CPP.parse(run_plan(plan, llama_build.folder, {"model": path}))
    # llama.cpp counts the bias of the router, which is no parameter of ours.
    biases = sum(tensor.shape[0] for tensor in tensors(layout, architecture(layout)) if "exp_probs_b" in tensor.name)
    assert sample.info["model_params"] == layout.params.total + biases


@pytest.mark.parametrize("quantisation", ["q4_0", "q8_0"])
@pytest.mark.parametrize("text", (*CARRIED, *PATCHED))
def test_same_bytes_as_llama_model_quantize(
    llama_build: Build, patched_build: Build, tmp_path: Path, text: str, quantisation: str
) -> None:
    """Our file of a checkpoint against the quantiser's of our float32 file: types and contents of every tensor."""
    layout = Layout.parse(text)
    trained = _checkpoint(layout, tmp_path / "c.safetensors")
    LLAMA_CPP.export(layout, "f32", trained, tmp_path / "f32.gguf")
    LLAMA_CPP.export(layout, quantisation, trained, tmp_path / "ours.gguf")
    build = patched_build if text in PATCHED else llama_build
    _llama_model_quantize(build, tmp_path / "f32.gguf", tmp_path / "theirs.gguf", quantisation)
    candidate, reference = (_tensors(tmp_path / name) for name in ("ours.gguf", "theirs.gguf"))
    assert {n: t for n, (t, _) in candidate.items()} == {n: t for n, (t, _) in reference.items()}
    for name, (_, data) in candidate.items():
        np.testing.assert_array_equal(data.ravel(), reference[name][1].ravel(), err_msg=name)


@pytest.mark.parametrize("text", CARRIED[:5])
def test_random_file_has_the_types_of_the_real_one(llama_build: Build, tmp_path: Path, text: str) -> None:
    layout = Layout.parse(text)
    LLAMA_CPP.export(layout, "f16", RandomWeights(), tmp_path / "f16.gguf")
    LLAMA_CPP.export(layout, "q4_0", RandomWeights(), tmp_path / "ours.gguf")
    _llama_model_quantize(llama_build, tmp_path / "f16.gguf", tmp_path / "theirs.gguf", "q4_0")
    candidate, reference = (_tensors(tmp_path / name) for name in ("ours.gguf", "theirs.gguf"))
    assert {n: (t, d.shape) for n, (t, d) in candidate.items()} == {n: (t, d.shape) for n, (t, d) in reference.items()}


def _checkpoint(layout: Layout, path: Path) -> Checkpoint:
    rng = np.random.default_rng(0)
    listed = tensors(layout, architecture(layout))
    shapes = {name: shape for tensor in listed for name, shape in tensor.sources.items()}
    save_file({name: 0.05 * rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}, path)
    return Checkpoint(path, hashlib.sha256(path.read_bytes()).hexdigest())


def _llama_model_quantize(build: Build, source: Path, target: Path, quantisation: str) -> None:
    environment = os.environ | {"LLAMA_CPP_LIB_PATH": str(build.folder)}
    command = [sys.executable, "-c", QUANTISE, source, target, quantisation]
    subprocess.run(command, env=environment, timeout=60, check=True)


def _tensors(path: Path) -> dict[str, tuple[str, np.ndarray]]:
    return {t.name: (t.tensor_type.name, np.array(t.data)) for t in GGUFReader(path).tensors}
