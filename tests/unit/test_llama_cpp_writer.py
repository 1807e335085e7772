"""GGUF files: the same bytes everywhere, finite weights, and nothing half-written."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, quants
from safetensors.numpy import save_file

from nas.core.errors import InfrastructureFailed, InvalidInput, Unsupported
from nas.core.layout import Layout
from nas.measure.runtimes.base import Checkpoint, RandomWeights
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.measure.runtimes.llama_cpp.support import architecture
from nas.measure.runtimes.llama_cpp.tensors import tensors
from nas.measure.runtimes.llama_cpp.writer import WRITER_VERSION, write_gguf

TINY = Layout.parse("d64 v96 ffn=swiglu:96 [C3 A4/2]")
MOE = Layout.parse("d256 v512 untied ffn=moe:8x2:64 [C3+swiglu:512 A4/2 C3]")


PINNED = {"q4_0": "23f8dc5c7d260ec5", "q8_0": "92698c37eecd7540", "f16": "aa3e0f72fc06a0c7", "f32": "e282e59c9cf0b093"}


ALL_KINDS = Layout.parse("d64 v96 ffn=swiglu:64 [C3 W2/1@8(sink=1) M16 A2/1 C5+moe:8x2:32]")
PINNED_ALL = {"q4_0": "25d93a7c44b64e21", "f16": "e9c557389e37df00", "f32": "7e3e2b1322882fe9"}


def checkpoint(layout: Layout, path: Path, **changes: np.ndarray | None) -> Checkpoint:
    """Gaussian weights; a change replaces or (None) removes the tensor whose dots are written as '__'."""
    rng = np.random.default_rng(0)
    listed = tensors(layout, architecture(layout))
    shapes = {name: shape for tensor in listed for name, shape in tensor.sources.items()}
    state = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    for name, value in changes.items():
        name = name.replace("__", ".")
        state.pop(name, None)
        if value is not None:
            state[name] = value
    save_file(state, path)
    return Checkpoint(path, hashlib.sha256(path.read_bytes()).hexdigest())


def test_bytes_are_pinned(tmp_path: Path) -> None:
    """A change of these bytes must raise WRITER_VERSION, or stored results would stand for other files."""
    hashes = {q: write_gguf(TINY, q, RandomWeights(3), tmp_path / q).file.sha256[:16] for q in PINNED}
    assert (WRITER_VERSION, hashes) == ("3", PINNED)


def test_roles_have_types_of_their_own(tmp_path: Path) -> None:
    def types(quantisation: str) -> dict[str, str]:
        path = tmp_path / quantisation
        artifact = LLAMA_CPP.export(MOE, quantisation, RandomWeights(3), path)
        assert artifact.quantisation == quantisation
        return {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(path).tensors}

    plain = {name: types(name) for name in ("q4_0", "q8_0", "f16")}
    mixed = types("q8_0+ffn:q4_0+embedding:f16")
    for tensor in tensors(MOE, architecture(MOE)):
        in_ffn, in_table = ".ffn." in tensor.source, tensor.source in ("embed.weight", "head.weight")
        expected = plain["q4_0" if in_ffn else "f16" if in_table else "q8_0"][tensor.name]
        assert mixed[tensor.name] == expected, tensor.name
    assert {"Q4_0", "Q8_0", "F16"} <= set(mixed.values())


@pytest.mark.parametrize(
    ("quantisation", "message"),
    [
        ("q8_0+ff:q4_0", "unknown role of tensors 'ff'; did you mean 'ffn'"),
        ("q8_0+ffn:q4", "unknown quantisation of llama.cpp 'q4'; did you mean 'q4_k'"),
        ("q8_0+ffn:q4_0+ffn:f16", "ffn is named twice"),
        ("q8_0+", "unknown role of tensors ''"),
    ],
)
def test_wrong_roles_and_types_are_named(quantisation: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=message):
        LLAMA_CPP.export(TINY, quantisation, RandomWeights(3), tmp_path / "m.gguf")
    assert not list(tmp_path.iterdir())


def test_bytes_of_every_kind_of_block_are_pinned(tmp_path: Path) -> None:
    """In our architecture, which holds them all."""
    hashes = {q: write_gguf(ALL_KINDS, q, RandomWeights(3), tmp_path / q).file.sha256[:16] for q in PINNED_ALL}
    assert hashes == PINNED_ALL


@pytest.mark.parametrize("quantisation", LLAMA_CPP.quantisations)
def test_random_weights_are_finite_and_of_usual_size(tmp_path: Path, quantisation: str) -> None:
    LLAMA_CPP.export(MOE, quantisation, RandomWeights(1), tmp_path / "m.gguf")
    for tensor in GGUFReader(tmp_path / "m.gguf").tensors:
        values = quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.isfinite(values).all(), tensor.name
        if tensor.name.endswith(("attn_q.weight", "token_embd.weight", "ffn_up_exps.weight", "output.weight")):
            assert 0.015 < values.std() < 0.025, (tensor.name, values.std())


def test_layers_differ(tmp_path: Path) -> None:
    write_gguf(Layout.parse("d64 v96 ffn=swiglu:96 [C3 C3 A4/2]"), "q4_0", RandomWeights(), tmp_path / "m.gguf")
    data = {tensor.name: tensor.data for tensor in GGUFReader(tmp_path / "m.gguf").tensors}
    assert (data["blk.0.ffn_up.weight"] != data["blk.1.ffn_up.weight"]).any()


def test_file_holds_every_weight(tmp_path: Path) -> None:
    write_gguf(MOE, "f32", RandomWeights(), tmp_path / "m.gguf")
    counts = {tensor.name: int(tensor.n_elements) for tensor in GGUFReader(tmp_path / "m.gguf").tensors}
    biases = sum(count for name, count in counts.items() if "exp_probs_b" in name)
    assert sum(counts.values()) - biases == MOE.params.total


def test_checkpoint_values_arrive(tmp_path: Path) -> None:
    trained = checkpoint(TINY, tmp_path / "c.safetensors", norm__weight=np.arange(64, dtype=np.float32))
    write_gguf(TINY, "f32", trained, tmp_path / "m.gguf")
    data = {tensor.name: tensor.data for tensor in GGUFReader(tmp_path / "m.gguf").tensors}
    np.testing.assert_array_equal(data["token_embd_norm.weight"], np.arange(64))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm__weight": None}, "lacks norm.weight"),
        ({"extra__weight": np.ones(3, np.float32)}, "extra.weight"),
        ({"norm__weight": np.ones(65, np.float32)}, r"norm.weight has shape \(65,\)"),
        ({"norm__weight": np.full(64, np.nan, np.float32)}, "NaN"),
    ],
)
def test_checkpoint_that_does_not_fit(tmp_path: Path, changes: dict[str, np.ndarray | None], message: str) -> None:
    trained = checkpoint(TINY, tmp_path / "c.safetensors", **changes)
    with pytest.raises(InvalidInput, match=message):
        write_gguf(TINY, "f32", trained, tmp_path / "m.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["c.safetensors"]


def test_weights_that_are_too_large_for_float16_are_refused(tmp_path: Path) -> None:
    trained = checkpoint(TINY, tmp_path / "c.safetensors", embed__weight=np.full((96, 64), 7e4, np.float32))
    with pytest.raises(Unsupported, match=r"embed\.weight holds values that float16 does not"):
        write_gguf(TINY, "f16", trained, tmp_path / "m.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["c.safetensors"]
    write_gguf(TINY, "f32", trained, tmp_path / "m.gguf")


def test_checkpoint_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("hello")
    with pytest.raises(InvalidInput, match="not a safetensors file"):
        write_gguf(TINY, "f32", Checkpoint(tmp_path / "c", hashlib.sha256(b"hello").hexdigest()), tmp_path / "m.gguf")


def test_checkpoint_that_changed_or_is_gone(tmp_path: Path) -> None:
    trained = checkpoint(TINY, tmp_path / "c.safetensors")
    checkpoint(TINY, trained.path, norm__weight=np.full(64, 2, np.float32))
    for _ in range(2):
        with pytest.raises(InvalidInput, match=f"missing, or changed since it was checkpoint {trained.sha256[:12]}"):
            write_gguf(TINY, "f32", trained, tmp_path / "m.gguf")
        trained.path.unlink(missing_ok=True)


def test_disk_that_fills_up(tmp_path: Path) -> None:
    """A file-size limit makes the kernel refuse a write in the middle, as a full disk does."""
    code = f"""
import resource
from pathlib import Path
from nas.core.errors import InfrastructureFailed
from nas.core.layout import Layout
from nas.measure.runtimes.base import RandomWeights
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    LLAMA_CPP.export(Layout.parse({MOE.format()!r}), "q4_0", RandomWeights(), Path({str(tmp_path / "m.gguf")!r}))
except InfrastructureFailed as error:
    print("told:", error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "told: cannot write" in done.stdout and "File too large" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_unwritable_folder_is_no_candidates_fault(tmp_path: Path) -> None:
    with pytest.raises(InfrastructureFailed, match="cannot write"):
        write_gguf(TINY, "q4_0", RandomWeights(), tmp_path / "missing" / "m.gguf")


def test_importing_the_runtime_loads_neither_torch_nor_gguf() -> None:
    code = (
        "import sys, nas.measure.runtimes.llama_cpp.runtime; print([m for m in ('torch', 'gguf') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
