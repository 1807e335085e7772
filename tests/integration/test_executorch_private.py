"""Private parts of ExecuTorch that the exporter and the runner rely on, each by name.

When a new version breaks one of these, `runtimes/executorch` has to follow: `lowering.py` and `runner.cpp` say where.

Lowering takes minutes, and gives the same bytes as long as its sources and its packages stay as they are. So most tests
that lower run by default only after a change of `SOURCES`, until `LOWERED_FROM` is that of the new ones.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import re
import subprocess
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

from nas.core.block import Block
from nas.core.layout import Layout
from nas.measure.runtimes.base import RandomWeights
from nas.measure.runtimes.executorch import lowering
from nas.measure.runtimes.executorch.compile import installed_sdk
from nas.measure.runtimes.executorch.contents import pack_int4
from nas.measure.runtimes.executorch.kinds import KINDS, programs_of
from nas.measure.runtimes.executorch.modules import ProgramModule
from nas.measure.runtimes.executorch.programs import GROUP, Program
from nas.measure.runtimes.executorch.runtime import EXECUTORCH
from nas.measure.runtimes.executorch.templates import _distinct, _distinct_int4, template_key

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[2]
(CONV,) = programs_of(Block.of("conv", kernel=3), 64)
(SWIGLU,) = programs_of(Block.of("swiglu", width=64), 64)
EVERY_KIND = (
    "d64 v96 ffn=swiglu:64"
    " [C3 W2/1@8(sink=1) M16 A2/1 C5+moe:8x2:32(shared=1) L2/32 D2 G2+geglu:64 X2+relu2:64 K2 N2 H S4 V16]"
)
SOURCES = (
    *(f"runtimes/executorch/{name}.py" for name in ("kinds", "lowering", "modules", "programs", "templates")),
    "nas/model/blocks/linear_attention.py",
    "nas/model/blocks/mamba2.py",
)
"""Of lowered programs; what else is in an artifact is pinned in tests/unit/test_versions.py."""
LOWERED_FROM = "41ff9ee38920ccf0e8970c2f69285bea45cdc4549c3081c1a46b7a556870d449"
"""SHA-256 of the syntax trees of `SOURCES` with which all tests of this file last passed."""


def lowered_before() -> list[pytest.MarkDecorator]:
    """Returns the mark of tests that passed with these very sources."""
    code = "".join(ast.dump(ast.parse((ROOT / source).read_text())) for source in SOURCES)  # without comments
    return [pytest.mark.exhaustive] if hashlib.sha256(code.encode()).hexdigest() == LOWERED_FROM else []


def filled(program: Program) -> ProgramModule:
    module, rng = lowering.quantised(lowering.module_of(program)), np.random.default_rng(0)
    with torch.no_grad():
        for constant in program.constants:
            if constant.role == "int4":
                lowering.set_int4(module, constant.name, *_distinct_int4(constant, rng))
            else:
                getattr(module, constant.name).copy_(torch.from_numpy(_distinct(constant, rng)))
    return module


def test_versions_are_the_pinned_ones() -> None:
    pinned = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["executorch"]
    assert pinned == [f"{name}=={importlib.metadata.version(name)}" for name in ("executorch", "torchao")]


def test_kept_passes_exist() -> None:
    """`XNNPACKPassManager.passes`."""
    with lowering.quiet():
        from executorch.backends.xnnpack._passes import XNNPACKPassManager

        names = [one.__name__ for one in XNNPACKPassManager(None).passes]
    assert set(lowering.KEPT_PASSES) < set(names)


@pytest.mark.parametrize(
    "program", [pytest.param(program, marks=lowered_before(), id=program.kind) for program in (CONV, SWIGLU)]
)
def test_left_out_passes_change_no_byte(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    few = lowering.lower(program, filled(program))
    with lowering.quiet():
        from executorch.backends.xnnpack._passes import XNNPACKPassManager

        every = tuple(one.__name__ for one in XNNPACKPassManager(None).passes)
    monkeypatch.setattr(lowering, "KEPT_PASSES", every)
    assert lowering.lower(program, filled(program)) == few


def test_constants_lie_outside_under_their_hash() -> None:
    """`meta["custom"]["delegate_constant_tag"]`, and names that are the SHA-256 of what they stand for."""
    module = filled(SWIGLU)
    pte = lowering.lower(SWIGLU, module)
    packed = pack_int4(getattr(module, "gate").weight.qdata.numpy())  # noqa: B009 - a module, for mypy a tensor
    assert hashlib.sha256(packed).hexdigest().encode() in pte
    assert packed not in pte and len(pte) < 8192
    names = set(re.findall(rb"(?:scale_)?[0-9a-f]{64}", pte))
    assert len(names) == 3 * 2 + 2, "three matrices with scales, a mean, an epsilon"
    assert b"norm_weight" in pte, "what ExecuTorch itself reads is called by its name"


def test_packing_is_xnnpacks() -> None:
    """`NodeVisitor.convert_to_qc4w`."""
    with lowering.quiet():
        from executorch.backends.xnnpack.operators.node_visitor import NodeVisitor
    values = np.random.default_rng(0).integers(-8, 8, (5, 2 * GROUP), np.int8)
    assert NodeVisitor.convert_to_qc4w(torch.from_numpy(values)).numpy().tobytes() == pack_int4(values)


@pytest.mark.parametrize("program", [pytest.param(SWIGLU, marks=lowered_before(), id="swiglu")])
def test_lowering_the_same_again_gives_the_same_bytes(program: Program) -> None:
    assert lowering.lower(program, filled(program)) == lowering.lower(program, filled(program))


def test_other_programs_have_other_names() -> None:
    assert template_key(SWIGLU) != template_key(CONV)


@pytest.mark.parametrize(
    ("library", "symbol"),
    [
        ("libexecutorch_threadpool.so", "executorch::extension::threadpool::get_threadpool()"),
        ("libexecutorch_threadpool.so", "ThreadPool::_unsafe_reset_threadpool(unsigned int)"),
        ("libexecutorch_threadpool.so", "ThreadPool::run(executorch::runtime::FunctionRef<void (unsigned long)>"),
        ("libexecutorch_backend_xnnpack.so", "XNNWorkspaceManager::set_sharing_mode("),
    ],
)
def test_libraries_export_what_no_header_declares(library: str, symbol: str) -> None:
    listed = subprocess.run(
        ["nm", "-DC", "--defined-only", str(installed_sdk().library(library))],
        check=True,
        capture_output=True,
        text=True,
    )
    assert symbol in listed.stdout


def test_no_library_needs_torch() -> None:
    libraries = [*(installed_sdk().folder / "lib").glob("libexecutorch*.so")]
    assert libraries
    for path in libraries:
        dynamic = subprocess.run(["readelf", "-d", str(path)], check=True, capture_output=True, text=True).stdout
        assert "libtorch" not in dynamic and "libc10" not in dynamic


def test_every_kind_is_every_kind() -> None:
    of_others = {point.name for point in importlib.metadata.entry_points(group=KINDS.group)}
    kinds = {block.kind for layer in Layout.parse(EVERY_KIND).layers for block in layer.blocks}
    assert kinds == set(KINDS) - of_others


@pytest.mark.parametrize("text", [pytest.param(EVERY_KIND, marks=lowered_before(), id="every kind")])
def test_bytes_of_every_kind_of_block_are_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Lowered here and now: other bytes need another WRITER_VERSION or PROGRAMS_VERSION, or stored results lie."""
    monkeypatch.setenv("NAS_CACHE", str(tmp_path / "cache"))
    artifact = EXECUTORCH.export(Layout.parse(text), "8da4w", RandomWeights(3), tmp_path / "model")
    assert artifact.sha256 == "1484698056b37b2d37ea9c036807e1f64c43b1048cfa3319def7c151336c32d6"
