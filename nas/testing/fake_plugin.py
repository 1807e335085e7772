"""Registers `FakeRuntime` in processes that a test starts, by an entry point on PYTHONPATH."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from nas.testing.fake_runtime import FakeRuntime, Fault

_VARIABLE = "HILNAS_FAKE_RUNTIME"
_METADATA = "Metadata-Version: 2.1\nName: hilnas-fake\nVersion: 1\n"
_ENTRY_POINTS = f"[nas.runtimes]\nfake = {__name__}:RUNTIME\n"


def fake_environment(folder: Path, faults: Mapping[str, Fault] | None = None, run_s: float = 0.0) -> dict[str, str]:
    """Returns environment variables with which the registry of runtimes has "fake".

    Args:
        folder: for the plugin and its runner; made if missing.
        faults: layout id -> fault of runs of that layout.
        run_s: seconds that a run takes.
    """
    package = folder / "hilnas_fake-1.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    (package / "METADATA").write_text(_METADATA, encoding="utf-8")
    (package / "entry_points.txt").write_text(_ENTRY_POINTS, encoding="utf-8")
    options = {"folder": str(folder / "runners"), "faults": dict(faults or {}), "run_s": run_s}
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), _VARIABLE: json.dumps(options)}


def __getattr__(name: str) -> FakeRuntime:
    # RUNTIME is made on access, so that importing this module needs no environment variable.
    if name != "RUNTIME":
        raise AttributeError(name)
    options = json.loads(os.environ[_VARIABLE])
    return FakeRuntime(Path(options["folder"]), faults=options["faults"], run_s=options["run_s"])
