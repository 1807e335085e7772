"""The plug-in's exports to llama.cpp, run with it installed by tests/integration/test_plugin_export.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from hilnas_plugin.faults import S4D_FAULTS

from nas.core.layout import Layout
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.testing.llama_cpp_gate import gate
from nas.testing.planted_faults import Fault

LAYOUT = Layout.parse("d256 v512 ffn=swiglu:512 [Z16 Z16]")


@pytest.mark.parametrize("quantisation", ["f32", "q4_0"])
@pytest.mark.parametrize("text", [LAYOUT.format(), "d256 v512 ffn=swiglu:512 [Z4 A8/4 Z7 Z1&W4/2@32]"])
def test_llama_cpp_computes_what_pytorch_does(text: str, quantisation: str, tmp_path: Path) -> None:
    report = gate(tmp_path, quantisation, Layout.parse(text), LLAMA_CPP.build(patched=True, log=print))
    assert report.passed, (report.error, report.limit)


@pytest.mark.parametrize("fault", S4D_FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault: Fault, tmp_path: Path) -> None:
    assert not gate(tmp_path, "q4_0", LAYOUT, LLAMA_CPP.build(patched=True, log=print), fault).passed
