"""A fresh build decodes a tiny random model before anyone trusts it.

In a process of its own: a build for the wrong instruction set dies by a signal.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from nas.core.errors import InfrastructureFailed
from nas.core.layout import Layout
from nas.runtimes.base import RandomWeights
from nas.runtimes.llama_cpp.process import stream
from nas.runtimes.llama_cpp.toolchain import build_environment
from nas.runtimes.llama_cpp.writer import write_gguf

_TINY = "d256 v512 ffn=swiglu:512 [C3 A4/2]"
_DEADLINE_S = 120.0


def smoke_test(runner: Path) -> None:
    """Runs `runner` on a tiny Q4_0 model with and without repacked weights.

    Raises:
        InfrastructureFailed: it died or gave no finite logits.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny.gguf"
        write_gguf(Layout.parse(_TINY), "q4_0", RandomWeights(), model)
        for repack in ("1", "0"):
            argv = [str(runner), "--model", str(model), "--prompt", "32", "--gen", "4", "--repack", repack]
            code, tail = stream(argv, deadline_s=_DEADLINE_S, env=build_environment())
            if code != 0 or '"finite":true' not in tail:
                raise InfrastructureFailed(
                    f"the fresh llama.cpp build does not work on this machine (exit code {code}):\n{tail}"
                )
