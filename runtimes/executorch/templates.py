"""Lowered programs, each made once and kept in the user's cache.

A template is a .pte without constants and the names under which it asks for them. XNNPACK names a constant by its
bytes, so a template is lowered on bytes of its own, all different; an artifact then gives other bytes those names.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nas.core import paths
from nas.core.canonical import content_hash
from nas.core.durable import locked
from nas.core.errors import CandidateFailed, InfrastructureFailed
from nas.measure.runtimes.executorch.contents import encoded
from nas.measure.runtimes.executorch.programs import CHUNK, GROUP, MODULES, PLAIN, Constant, Format, Program

PACKAGES = ("executorch", "torchao", "torch")
_PARTIAL = ".making-"
_ABANDONED_S = 3600.0
_MAKING_S = 600.0
"""Time-out of waiting for other processes that lower programs: enough for a hundred."""
PROGRAMS_VERSION = "5de731e2e722459a05e8aaa162e30fe98ce6cb2d9c5d3fce2158322ac239c04e"
"""Another string with every change of `modules`, `lowering` or the built-in `kinds` that changes a lowered program."""


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
    """Returns the template of `program`; lowers it unless the cache has it, which loads torch and takes 1 to 7 CPU s.

    Raises:
        CandidateFailed: ExecuTorch cannot lower it (export).
        InfrastructureFailed: ExecuTorch is not installed here, or the cache cannot be written.
    """
    path = templates_folder() / template_key(program)
    if (template := _read(path)) is not None:
        return template
    with _one_maker(path):
        # Candidates that are exported side by side often need the same new program: one lowers it, the others wait.
        if (template := _read(path)) is not None:
            return template
        template = _make(program)
        _write(path, template)
    return template


def templates_folder() -> Path:
    """Returns the folder of templates."""
    return paths.cache() / "runtimes" / "executorch" / "templates"


def trim_templates(limit_bytes: int) -> int:
    """Removes templates, least recently used first, until they hold `limit_bytes`. Bytes removed.

    Raises:
        InfrastructureFailed: one cannot be removed.
    """
    used = [(path.stat(), path) for path in templates_folder().glob("[0-9a-f]*") if path.is_file()]
    # Left by a killed process.
    dead = [(path.stat(), path) for path in templates_folder().glob(f"{_PARTIAL}*")]
    abandoned = [(status, path) for status, path in dead if status.st_mtime < time.time() - _ABANDONED_S]
    excess = sum(status.st_size for status, _ in used) - limit_bytes
    removed = 0
    try:
        for status, path in sorted(used, key=lambda entry: entry[0].st_mtime):
            if removed >= excess:
                break
            path.unlink(missing_ok=True)
            removed += status.st_size
        for status, path in abandoned:
            path.unlink(missing_ok=True)
            removed += status.st_size
    except OSError as error:
        raise InfrastructureFailed(f"cannot remove from {templates_folder()}: {error.strerror}") from error
    return removed


def template_key(program: Program) -> str:
    """Returns a hash of everything that the bytes of a template depend on."""
    about: dict[str, object] = {
        "kind": program.kind,
        "sizes": dict(program.sizes),
        "chunk": CHUNK,
        "group": GROUP,
        "tools": tool_versions(),
    }
    if program.format != PLAIN:
        about["format"] = [program.format.bits, program.format.group]
    module = program.module.partition(":")[0]
    if module != MODULES:  # of another distribution: whatever changes in that file may change the program
        about["source"] = hashlib.sha256(_source(module).read_bytes()).hexdigest()
    return content_hash(about)


def _source(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise InfrastructureFailed(f"no module {module}, which a block kind names for ExecuTorch")
    return Path(spec.origin)


@functools.cache
def tool_versions() -> dict[str, str]:
    """Returns the versions of the packages that lower, and our own.

    Raises:
        InfrastructureFailed: ExecuTorch is not installed.
    """
    try:
        return {package: importlib.metadata.version(package) for package in PACKAGES} | {"own": PROGRAMS_VERSION}
    except importlib.metadata.PackageNotFoundError as error:
        raise InfrastructureFailed(
            f"{error.name} is not installed here: pip install '.[executorch]' in a checkout"
        ) from error


def _make(program: Program) -> Template:
    import torch

    from nas.measure.runtimes.executorch.lowering import lower, module_of, quantised, set_int4

    module = quantised(module_of(program))
    rng = np.random.Generator(np.random.PCG64(0))
    keys: dict[str, tuple[str, ...]] = {}
    with torch.no_grad():
        for constant in program.constants:
            if constant.role == "int4":
                values, scales = _distinct_int4(constant, rng, program.format)
                set_int4(module, constant.name, values, scales)
                weights, factors = encoded(values, scales, program.format)
                keys[constant.name] = (_digest(weights), "scale_" + _digest(factors))
            else:
                filled = _distinct(constant, rng)
                getattr(module, constant.name).copy_(torch.from_numpy(filled))
                keys[constant.name] = (_digest(filled.tobytes()),)
    pte = lower(program, module)
    return Template(pte, {name: _asked_for(pte, name, tensors) for name, tensors in keys.items()})


def _asked_for(pte: bytes, name: str, required: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the lowered program's names of a constant: XNNPACK by its bytes, ExecuTorch itself by its name."""
    for keys in (required, (name,)):
        if all(key.encode() in pte for key in keys):
            return keys
    raise CandidateFailed("export", f"the lowered program does not ask for {name}")


def _distinct_int4(
    constant: Constant, rng: np.random.Generator, form: Format = PLAIN
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    outputs, inputs = constant.shape
    most = 1 << (form.bits - 1)
    values = rng.integers(-most, most, constant.shape, np.int8)
    scales = rng.integers(64, 128, (outputs, form.scales(inputs))).astype(np.float32)
    return values, scales / np.float32(8192)  # exact as bfloat16


def _distinct(constant: Constant, rng: np.random.Generator) -> NDArray[np.float32]:
    if constant.role == "fill":
        return np.full(constant.shape, constant.value, np.float32)
    return rng.random(constant.shape, np.float32) - np.float32(0.5)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _read(path: Path) -> Template | None:
    """Returns the cached template; the first line holds the names, the rest is the program."""
    try:
        head, _, pte = path.read_bytes().partition(b"\n")
        os.utime(path)  # its age is how long it has not been used
        keys = {name: tuple(names) for name, names in json.loads(head).items()}
    except (FileNotFoundError, ValueError):
        return None
    return Template(pte, keys)


@contextlib.contextmanager
def _one_maker(path: Path) -> Iterator[None]:
    """Locks the making of a template across processes; all templates share sixteen locks."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.parent / f".lock-{path.name[0]}", _MAKING_S):
            yield
    except OSError as error:
        raise InfrastructureFailed(f"cannot keep programs in {path.parent}: {error}") from error


def _write(path: Path, template: Template) -> None:
    try:
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=_PARTIAL)
        with os.fdopen(handle, "wb") as file:
            file.write(json.dumps(template.keys, sort_keys=True).encode() + b"\n" + template.pte)
            file.flush()
            os.fsync(file.fileno())  # after a power cut a program is whole, or not there
        Path(partial).replace(path)
    except OSError as error:
        raise InfrastructureFailed(f"cannot keep a program in {path.parent}: {error}") from error
