"""llama.cpp's runner for Android: hilnas's pinned source, patches and flags, by the NDK's toolchain file.

    python make.py FOLDER

Needs `$ANDROID_NDK`. Not run yet: see ../README.md.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from nas.measure.runtimes.build_cache import variant_named
from nas.measure.runtimes.llama_cpp import source
from nas.measure.runtimes.llama_cpp.compile import compile_library, compile_static_runner, library_flags
from nas.measure.runtimes.llama_cpp.variants import BUILDS, VARIANTS, BuildDetails
from nas.measure.runtimes.llama_cpp.patches import apply_patches, patch_hashes
from nas.measure.runtimes.toolchain import Toolchain, find_build_tools

API = 28
"""Android 9."""


def main(out: Path) -> None:
    """Compiles the runner into `out`, which must not be there yet."""
    ndk = Path(os.environ["ANDROID_NDK"])
    compilers = ndk / "toolchains" / "llvm" / "prebuilt" / "linux-x86_64" / "bin"
    cc = str(compilers / f"aarch64-linux-android{API}-clang")
    variant = variant_named("armv8.2", "aarch64-linux", VARIANTS)
    details = BuildDetails(
        sdist=source.SHA256,
        patches=patch_hashes(),
        runner_c=BUILDS.runner_hash(),
        variant=variant.name,
        target="aarch64-android",
        flags=(*library_flags(variant, static=True), f"-DGGML_CPU_ARM_ARCH={variant.march}"),
        compiler=ndk.name,
        tools=False,
        static=True,
    )
    cmake, ninja = find_build_tools()
    toolchain = Toolchain(cc, f"{cc}++", cmake, ninja, details.compiler)
    android = [
        f"-DCMAKE_TOOLCHAIN_FILE={ndk / 'build' / 'cmake' / 'android.toolchain.cmake'}",
        "-DANDROID_ABI=arm64-v8a",
        f"-DANDROID_PLATFORM=android-{API}",
    ]
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as work:
        tree = source.unpack(source.fetch(print), Path(work) / "source")
        apply_patches(tree)
        library = compile_library(tree, Path(work) / "cmake", details, toolchain, android, print)
        compile_static_runner(tree, library, out, toolchain)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
