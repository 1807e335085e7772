"""The equivalence gate on real artifacts: right graphs pass, and each planted fault fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from executorch_gating import QUANTISATION, gate, hold_against

from nas.core.errors import CandidateFailed
from nas.core.layout import Layout
from nas.runtimes.executorch.builds import Build
from nas.runtimes.executorch.runtime import EXECUTORCH
from nas.testing.planted_faults import FAULTS, PLANTED, Fault, checkpoint

pytestmark = pytest.mark.timeout(900)  # blocks are lowered the first time

RIGHT = (
    "d256 v512 ffn=swiglu:512 [C3 A8/4 C3 A8/4]",
    "d96 v300 untied ffn=swiglu:256 [C5 A6/2 C5 A6/3]",
    "d128 v512 ffn=swiglu:352 [A4/2:32(qk_norm=0)*4]",
    "d160 v512 ffn=swiglu:352 [A8/4:20 W8/2@16:20(rope_theta=0) C3 ^0]",
    "d256 v512 ffn=swiglu:512 [W4/2@32 W4/1@32(sink=1)]",
    "d256 v512 ffn=swiglu:512 [M16 M16(groups=2)]",
    "d256 v512 ffn=moe:8x2:64 [C3+swiglu:512 A8/4 C3 A8/4]",
    "d128 v512 ffn=swiglu:352 [A8/4 C3&W4/2@8 A8/4(kv=0)+none C3+none ^1 -]",
    "d256 v512 ffn=moe:8x2:64 [C3+swiglu:512 M16 W4/2@32 A8/4]",
)


@pytest.mark.parametrize("text", RIGHT)
def test_right_graphs_pass(executorch_build: Build, tmp_path: Path, text: str) -> None:
    report = gate(tmp_path, Layout.parse(text))
    assert report.passed, (report.error, report.limit)


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if not fault.earlier], ids=lambda fault: str(fault.name))
def test_planted_faults_fail(executorch_build: Build, tmp_path: Path, fault: Fault) -> None:
    report = gate(tmp_path, PLANTED, fault.exported(PLANTED), fault.weights)
    with pytest.raises(CandidateFailed) as failure:
        report.require()
    assert failure.value.reason == "gate"


def test_lost_tokens_fail(executorch_build: Build, tmp_path: Path) -> None:
    """State that does not reach the next call: caches that keep nothing but the current token."""
    right, model = PLANTED, tmp_path / "model"
    EXECUTORCH.export(right, QUANTISATION, checkpoint(right, tmp_path / "wrong"), model)
    content = model.read_bytes()
    assert content.count(b"\ncache 4 32 0") == 2
    model.write_bytes(content.replace(b"\ncache 4 32 0", b"\ncache 4 32 1"))
    assert not hold_against(right, tmp_path, model).passed


def test_file_that_the_runner_refuses_is_the_candidates_failure(executorch_build: Build, tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(b"no model" * 100)
    with pytest.raises(CandidateFailed, match="refused"):
        hold_against(PLANTED, tmp_path, tmp_path / "model")
