"""Lowered programs, each made once and kept in the user's cache.

A template is a .pte without constants and the names under which it asks for them. XNNPACK names a constant by its
bytes, so a template is lowered on bytes of its own, all different; an artifact then gives other bytes those names.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nas.core import paths
from nas.core.canonical import content_hash
from nas.core.errors import CandidateFailed, InfrastructureFailed
from nas.runtimes.executorch.numbers import bfloat16_bytes, pack_int4
from nas.runtimes.executorch.programs import CHUNK, GROUP, Constant, Program

PACKAGES = ("executorch", "torchao", "torch")
_SOURCES = ("programs.py", "modules.py", "ops.py", "lowering.py")


@dataclass(frozen=True, slots=True)
class Template:
    """A lowered program.

    Args:
        pte: the file's bytes.
        keys: constant -> what `pte` calls it; of "int4" two, the weights and the scales.
    """

    pte: bytes
    keys: dict[str, tuple[str, ...]]


def template(program: Program) -> Template:
    """The template of `program`, lowered now unless the cache has it; lowering loads torch and takes 1 to 7 CPU s.

    Raises:
        CandidateFailed: ExecuTorch cannot lower it (export).
        InfrastructureFailed: ExecuTorch is not installed here, or the cache cannot be written.
    """
    path = templates_folder() / template_key(program)
    if (found := _read(path)) is not None:
        return found
    made = _make(program)
    _write(path, made)
    return made


def templates_folder() -> Path:
    """Where templates lie."""
    return paths.cache() / "runtimes" / "executorch" / "templates"


def template_key(program: Program) -> str:
    """Of everything that the bytes of a template depend on."""
    return content_hash(
        {"kind": program.kind, "sizes": dict(program.sizes), "chunk": CHUNK, "group": GROUP, "tools": tool_versions()}
    )


@functools.cache
def tool_versions() -> dict[str, str]:
    """Versions of what lowers, our own sources among them.

    Raises:
        InfrastructureFailed: ExecuTorch is not installed.
    """
    own = hashlib.sha256(b"".join(Path(__file__).with_name(name).read_bytes() for name in _SOURCES)).hexdigest()
    try:
        return {package: importlib.metadata.version(package) for package in PACKAGES} | {"own": own}
    except importlib.metadata.PackageNotFoundError as error:
        raise InfrastructureFailed(f"{error.name} is not installed here: install hilnas[executorch]") from error


def _make(program: Program) -> Template:
    import torch

    from nas.runtimes.executorch.lowering import lower, module_of, quantised, set_int4

    module = quantised(module_of(program))
    rng = np.random.Generator(np.random.PCG64(0))
    keys: dict[str, tuple[str, ...]] = {}
    with torch.no_grad():
        for constant in program.constants:
            if constant.role == "int4":
                values, scales = _distinct_int4(constant, rng)
                set_int4(module, constant.name, values, scales)
                keys[constant.name] = (_digest(pack_int4(values)), "scale_" + _digest(bfloat16_bytes(scales)))
            else:
                filled = _distinct(constant, rng)
                getattr(module, constant.name).copy_(torch.from_numpy(filled))
                keys[constant.name] = (_digest(filled.tobytes()),)
    pte = lower(program, module)
    return Template(pte, {name: _asked_for(pte, name, wanted) for name, wanted in keys.items()})


def _asked_for(pte: bytes, name: str, wanted: tuple[str, ...]) -> tuple[str, ...]:
    """How the lowered program calls a constant: XNNPACK by its bytes, ExecuTorch itself by its name."""
    for keys in (wanted, (name,)):
        if all(key.encode() in pte for key in keys):
            return keys
    raise CandidateFailed("export", f"the lowered program does not ask for {name}")


def _distinct_int4(constant: Constant, rng: np.random.Generator) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    outputs, inputs = constant.shape
    values = rng.integers(-8, 8, constant.shape, np.int8)
    scales = rng.integers(64, 128, (outputs, inputs // GROUP)).astype(np.float32)
    return values, scales / np.float32(8192)  # exact as bfloat16


def _distinct(constant: Constant, rng: np.random.Generator) -> NDArray[np.float32]:
    if constant.role == "fill":
        return np.full(constant.shape, constant.value, np.float32)
    return rng.random(constant.shape, np.float32) - np.float32(0.5)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _read(path: Path) -> Template | None:
    """The kept template; the first line holds the names, the rest is the program."""
    try:
        head, _, pte = path.read_bytes().partition(b"\n")
        keys = {name: tuple(names) for name, names in json.loads(head).items()}
    except (FileNotFoundError, ValueError):
        return None
    return Template(pte, keys)


def _write(path: Path, made: Template) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=".making-")
        with os.fdopen(handle, "wb") as file:
            file.write(json.dumps(made.keys, sort_keys=True).encode() + b"\n" + made.pte)
        Path(partial).replace(path)
    except OSError as error:
        raise InfrastructureFailed(f"cannot keep a program in {path.parent}: {error}") from error
