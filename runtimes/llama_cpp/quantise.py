"""llama.cpp's own quantiser on a whole file: types that `writer` does not write.

python -m nas.runtimes.llama_cpp.quantise SOURCE DESTINATION FTYPE THREADS
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

from nas.core.plan import PlanFile
from nas.runtimes.building import plan_file
from nas.runtimes.llama_cpp.binding import run_module
from nas.runtimes.llama_cpp.builds import Build
from nas.runtimes.writing import replacing

FILE_TYPES = {"q8_0": 7, "q4_k_m": 15}
"""`llama_ftype` of include/llama.h, without an importance matrix."""

_LEAST_S, _BYTES_A_SECOND = 60.0, 4e6  # a tenth of what one slow core does


def quantise_file(build: Build, source: Path, quantisation: str, destination: Path, threads: int) -> PlanFile:
    """Writes `source`, a file of f16 or f32, with other types at `destination`, atomically.

    Args:
        build: whose libraries to use; it must know the file's architecture.
        source: the file to read.
        quantisation: a key of `FILE_TYPES`.
        destination: where to.
        threads: how many; the result does not depend on it.

    Raises:
        CandidateFailed: llama.cpp refuses the file or dies on it (crash).
        InfrastructureFailed: the file cannot be written.
    """
    with replacing(destination) as partial:
        arguments = [str(partial), str(FILE_TYPES[quantisation]), str(threads)]
        deadline_s = _LEAST_S + source.stat().st_size / _BYTES_A_SECOND
        run_module(build, __name__, source, arguments, deadline_s=deadline_s)
        return plan_file(partial)


def _main(source: str, destination: str, file_type: str, threads: str) -> None:
    import llama_cpp

    said: list[bytes] = []
    keep = llama_cpp.llama_log_callback(lambda level, text, data: said.append(text))
    llama_cpp.llama_log_set(keep, ctypes.c_void_p())
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = int(file_type), int(threads)
    if llama_cpp.llama_model_quantize(source.encode(), destination.encode(), params):
        raise SystemExit(b"".join(said[-5:]).decode(errors="replace"))


if __name__ == "__main__":
    _main(*sys.argv[1:])
