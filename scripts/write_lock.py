"""Resolves pyproject.toml into requirements.lock: exact versions of everything but torch.

torch is left out because its build is the host's choice (CPU or CUDA, from whichever index the user has configured);
its version is pinned in pyproject.toml.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from setup_venv import ROOT, ensure_uv, pip_settings, run, uv_environment

EXTRAS = ("search", "executorch", "postgres", "build", "test")
FROM_TORCH = re.compile(r"(torch|triton|nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+)\b")
"""Names of torch itself and of what only its CUDA build brings along."""

HEADER = (
    "# Written by `make lock` from pyproject.toml. torch follows pyproject.toml, built as the host's index offers it.\n"
)


def main() -> None:
    """Writes requirements.lock."""
    lock = ROOT / "requirements.lock"
    resolved = Path(f"{lock}.new")
    command = [ensure_uv(), "pip", "compile", "pyproject.toml", "--quiet", "--universal", "--python-version", "3.11"]
    command += ["--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links", "--upgrade"]
    command += [f"--extra={extra}" for extra in EXTRAS]
    try:
        run([*command, "-o", str(resolved)], uv_environment(pip_settings()) | os.environ)
        lines = [line for line in resolved.read_text().splitlines() if not FROM_TORCH.match(line)]
        resolved.write_text(HEADER + "\n".join(lines) + "\n")
        resolved.replace(lock)
    finally:
        resolved.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
