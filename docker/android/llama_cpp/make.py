"""llama.cpp's runner for Android: hilnas's pinned source, patches and flags, by the NDK's toolchain file.

    python make.py FOLDER

Needs `$ANDROID_NDK`. Not run yet: see ../README.md.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from nas.measure.runtimes.llama_cpp import source
from nas.measure.runtimes.llama_cpp.compile import (
    RUNNER_FLAGS,
    compile_library,
    compile_static_runner,
    library_flags,
    unpacked_source,
)
from nas.measure.runtimes.llama_cpp.patches import patch_hashes
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.measure.runtimes.llama_cpp.variants import LlamaCppSpec
from nas.measure.runtimes.toolchain import Compiler

API = 28
"""Android 9."""


def main(out: Path) -> None:
    """Compiles the runner into `out`, which must not be there yet."""
    ndk = Path(os.environ["ANDROID_NDK"])
    compilers = ndk / "toolchains" / "llvm" / "prebuilt" / "linux-x86_64" / "bin"
    cc = str(compilers / f"aarch64-linux-android{API}-clang")
    variant = LLAMA_CPP.variant_for("aarch64-linux", None, "armv8.2")
    spec = LlamaCppSpec(
        version=source.COMMIT,
        sdist=source.SHA256,
        patches=patch_hashes(),
        runner=LLAMA_CPP.source_hash(LLAMA_CPP.runner_sources),
        runner_flags=RUNNER_FLAGS[True],
        variant=variant.name,
        target="aarch64-android",
        flags=(*library_flags(variant, static=True), f"-DGGML_CPU_ARM_ARCH={variant.march}"),
        compiler=ndk.name,
        static=True,
    )
    compiler = Compiler(cc, f"{cc}++", spec.compiler)
    android = [
        f"-DCMAKE_TOOLCHAIN_FILE={ndk / 'build' / 'cmake' / 'android.toolchain.cmake'}",
        "-DANDROID_ABI=arm64-v8a",
        f"-DANDROID_PLATFORM=android-{API}",
    ]
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as work:
        tree = unpacked_source(spec, Path(work), print)
        library = compile_library(tree, Path(work) / "cmake", spec, compiler, android, print)
        compile_static_runner(tree, library, out, compiler, spec, LLAMA_CPP.runner_sources[0])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
