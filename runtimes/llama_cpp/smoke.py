"""A fresh build decodes a tiny random model before anyone trusts it.

In a process of its own: a build for the wrong instruction set dies by a signal.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from nas.core.errors import InfrastructureFailed
from nas.core.layout import Layout
from nas.runtimes.base import RandomWeights
from nas.runtimes.host import emulator_of
from nas.runtimes.llama_cpp.builds import BuildDetails
from nas.runtimes.llama_cpp.writer import write_gguf
from nas.runtimes.process import stream
from nas.runtimes.toolchain import build_environment

_TINY = Layout.parse("d256 v512 ffn=swiglu:512 [C3 A4/2]")
_PATCHED_TINY = Layout.parse("d256 v512 ffn=swiglu:512 [C3 M16 A4/2]")
_DEADLINE_S = 120.0


def smoke_test(runner: Path, details: BuildDetails, log: Callable[[str], None]) -> None:
    """Runs `runner` on tiny Q4_0 models with and without repacked weights; a foreign one where qemu can.

    Raises:
        InfrastructureFailed: it died or gave no finite logits.
    """
    emulator = emulator_of(details.target)
    if emulator is None:
        log(f"no smoke test: this machine has no qemu-user for {details.target} (Debian: qemu-user-static)")
        return
    log("smoke test: a tiny random model")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny.gguf"
        for layout in (_TINY, _PATCHED_TINY) if details.patches else (_TINY,):
            write_gguf(layout, "q4_0", RandomWeights(), model)
            for repack in ("1", "0"):
                argv = [*emulator, str(runner), "--model", str(model), "--prompt", "32", "--gen", "4"]
                _check([*argv, "--repack", repack])


def _check(argv: list[str]) -> None:
    code, tail = stream(argv, deadline_s=_DEADLINE_S, env=build_environment())
    if code != 0 or '"finite":true' not in tail:
        raise InfrastructureFailed(
            f"the fresh llama.cpp build does not work on this machine (exit code {code}):\n{tail}"
        )
