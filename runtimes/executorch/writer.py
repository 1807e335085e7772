"""Writes a layout as an artifact; the format stands in the package's docstring."""

from __future__ import annotations

import contextlib
import hashlib
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

from nas.core.errors import InfrastructureFailed
from nas.core.layout import Layout
from nas.core.plan import PlanFile
from nas.runtimes.base import Checkpoint, Weights
from nas.runtimes.executorch.chain import Chain, Method, Step, build_chain
from nas.runtimes.executorch.checkpoint import CheckpointContents
from nas.runtimes.executorch.contents import Contents, constant_sizes
from nas.runtimes.executorch.programs import CHUNK, Constant
from nas.runtimes.executorch.random_weights import RandomContents
from nas.runtimes.executorch.templates import Template, template

WRITER_VERSION = "1"
"""Raise it with every change of this package that changes the bytes of a file."""

MAGIC, VERSION, ALIGN = b"HILNASET", 1, 64


def write_artifact(layout: Layout, weights: Weights, destination: Path) -> PlanFile:
    """Writes the file beside `destination` and renames it into place.

    Returns:
        Its hash and size.

    Raises:
        CandidateFailed: ExecuTorch cannot lower a program (export).
        InvalidInput: the checkpoint does not fit the layout.
        InfrastructureFailed: the file cannot be written, or ExecuTorch is not installed.
    """
    chain = build_chain(layout)
    templates = [template(program) for program in chain.programs]
    unfinished = destination.with_name(f"{destination.name}.{uuid.uuid4().hex}.partial")
    with _contents(weights) as contents, _write_errors_told(destination, unfinished):
        plan = _Plan(layout, chain, templates, contents)
        with unfinished.open("wb") as file:
            digest = plan.write(file)
        size = unfinished.stat().st_size
        unfinished.replace(destination)
    return PlanFile(sha256=digest, size=size)


@contextlib.contextmanager
def _contents(weights: Weights) -> Iterator[Contents]:
    if isinstance(weights, Checkpoint):
        with CheckpointContents(weights.path) as checkpoint:
            yield checkpoint
    else:
        yield RandomContents(weights.seed)


@contextlib.contextmanager
def _write_errors_told(destination: Path, unfinished: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InfrastructureFailed(f"cannot write {destination}: {error}; is the disk full?") from error
    finally:
        unfinished.unlink(missing_ok=True)


@dataclass
class _Plan:
    """The header, and what lies behind it; contents are made one at a time, when they are written."""

    layout: Layout
    chain: Chain
    templates: list[Template]
    contents: Contents
    lines: list[str] = field(default_factory=list)
    parts: list[tuple[tuple[int, ...], Callable[[], tuple[bytes, ...]]]] = field(default_factory=list)
    end: int = 0
    fills: dict[tuple[object, ...], tuple[int, ...]] = field(default_factory=dict)

    def write(self, file: BinaryIO) -> str:
        """Writes everything; returns the SHA-256."""
        self._describe()
        header = ("\n".join(self.lines) + "\n").encode()
        prefix = MAGIC + VERSION.to_bytes(4, "little") + bytes(4) + len(header).to_bytes(8, "little") + header
        digest = hashlib.sha256()

        def put(content: bytes) -> None:
            content += bytes(-len(content) % ALIGN)
            digest.update(content)
            file.write(content)

        put(prefix)
        for sizes, make in self.parts:
            made = make()
            assert tuple(map(len, made)) == sizes
            for content in made:
                put(content)
        return digest.hexdigest()

    def _describe(self) -> None:
        layout, chain = self.layout, self.chain
        vocab, d_model = layout.vocab, layout.d_model
        self._line("model", d_model, vocab, CHUNK)
        rows, scales = self._place(
            (vocab * d_model, 4 * vocab), lambda: self.contents.embedding(layout.vocab, layout.d_model)
        )
        self._line("embedding", rows, vocab * d_model, scales, 4 * vocab)
        for made in self.templates:
            (offset,) = self._place((len(made.pte),), partial(_single, made.pte))
            self._line("program", offset, len(made.pte))
        for method in chain.methods:
            self._method(method)
        for cache in chain.caches:
            self._line("cache", cache.kv_heads, cache.head_dim, cache.window)
        for step in chain.steps:
            self._step(step)
        self._line("head", len(chain.methods) - 1)

    def _method(self, method: Method) -> None:
        index = self.chain.programs.index(method.program)
        keys = self.templates[index].keys
        listed = [
            (key, offset, size, constant.shape if len(keys[constant.name]) == 1 else ())
            for constant in method.program.constants
            for key, offset, size in zip(
                keys[constant.name], self._constant(method, constant), constant_sizes(constant), strict=True
            )
        ]
        unique = {key: (offset, size, shape) for key, offset, size, shape in listed}
        self._line("method", index, len(unique))
        for key, (offset, size, shape) in unique.items():
            self._line("data", key, offset, size, *shape)

    def _constant(self, method: Method, constant: Constant) -> tuple[int, ...]:
        def make() -> tuple[bytes, ...]:
            return self.contents.constant(method, constant)

        if constant.role != "fill":
            return self._place(constant_sizes(constant), make)
        same = (constant.shape, constant.value)
        if same not in self.fills:
            self.fills[same] = self._place(constant_sizes(constant), make)
        return self.fills[same]

    def _step(self, step: Step) -> None:
        if step.attend is not None:
            sinks = self._vector(step.attend.sinks, self._heads(step)) if step.attend.sinks else "-"
            theta = repr(step.attend.theta)
            self._line("attention", step.method, int(step.parallel), step.attend.cache, theta, sinks)
        elif step.moe is not None:
            experts = step.moe.int("experts")
            bias = self._vector(f"{self.chain.methods[step.method].prefix}ffn.bias.weight", experts)
            self._line("moe", step.method, step.moe.int("top_k"), experts, bias)
        elif self.chain.methods[step.method].program.kind == "swiglu":
            self._line("ffn", step.method)
        else:
            self._line("mixer", step.method, int(step.parallel))

    def _heads(self, step: Step) -> int:
        return self.chain.methods[step.method].program.size("heads")

    def _vector(self, tensor: str, length: int) -> int:
        return self._place((4 * length,), lambda: (self.contents.vector(tensor, length),))[0]

    def _place(self, sizes: tuple[int, ...], make: Callable[[], tuple[bytes, ...]]) -> tuple[int, ...]:
        offsets = []
        for size in sizes:
            offsets.append(self.end)
            self.end += -(-size // ALIGN) * ALIGN
        self.parts.append((sizes, make))
        return tuple(offsets)

    def _line(self, *words: object) -> None:
        self.lines.append(" ".join(map(str, words)))


def _single(content: bytes) -> tuple[bytes, ...]:
    return (content,)
