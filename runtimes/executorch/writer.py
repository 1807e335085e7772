"""Writes a layout as an artifact; the package's docstring describes the format."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Generic, TypeVar, cast

from nas.core.layout import Layout
from nas.measure.runtimes.base import Checkpoint, Weights
from nas.measure.runtimes.executorch.chain import QUANTISATIONS, Chain, Method, Step, build_chain
from nas.measure.runtimes.executorch.contents import CheckpointContents, Contents, RandomContents, constant_sizes
from nas.measure.runtimes.executorch.programs import CHUNK, Constant
from nas.measure.runtimes.executorch.templates import Template, template
from nas.measure.runtimes.recipe import Fill, Recipe
from nas.measure.runtimes.writing import Written, hashed, replacing, write_drawn

WRITER_VERSION = "2"
"""Raise it with every change of this package that changes the bytes of a file."""

Part = TypeVar("Part")
MAGIC = b"HILNASET"
VERSION = 1
ALIGN = 64


def write_artifact(
    layout: Layout,
    weights: Weights,
    destination: Path,
    quantisation: str = QUANTISATIONS[0],
    *,
    recipe: bool = False,
) -> Written:
    """Writes the file, or (`recipe`, random weights) its recipe, and renames it to `destination`.

    Raises:
        CandidateFailed: ExecuTorch cannot lower a program (export).
        InvalidInput: the checkpoint does not fit the layout.
        InfrastructureFailed: the file cannot be written, or ExecuTorch is not installed.
    """
    chain = build_chain(layout, quantisation)
    templates = [template(program) for program in chain.programs]
    if isinstance(weights, Checkpoint):
        with CheckpointContents(weights.verified()) as trained, replacing(destination) as partial:
            plan = _Plan(layout, chain, templates, trained)
            return Written(hashed(itertools.chain([plan.header], _aligned(plan.parts())), partial))
    random = RandomContents()
    described = _Plan(layout, chain, templates, random)
    fills = tuple(described.parts())
    with replacing(destination) as partial:
        drawn = Recipe(weights.seed, described.header, random.pools, fills, ALIGN)
        return write_drawn(drawn, partial, recipe=recipe)


def _aligned(parts: Iterable[bytes]) -> Iterator[bytes]:
    for part in parts:
        yield part + bytes(-len(part) % ALIGN)


def _size(part: object) -> int:
    return part.size if isinstance(part, Fill) else len(cast(bytes, part))


class _Plan(Generic[Part]):
    """An artifact's header and what follows it; contents are made one at a time, on demand."""

    def __init__(self, layout: Layout, chain: Chain, templates: list[Template], contents: Contents[Part]) -> None:
        self.layout, self.chain, self.templates, self.contents = layout, chain, templates, contents
        self.end = 0
        self.lines: list[str] = []
        self.makers: list[tuple[tuple[int, ...], Callable[[], tuple[Part, ...]]]] = []
        self.fills: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._describe()

    @property
    def header(self) -> bytes:
        """All that no weights are in: the records, and the programs."""
        text = ("\n".join(self.lines) + "\n").encode()
        prefix = MAGIC + VERSION.to_bytes(4, "little") + bytes(4) + len(text).to_bytes(8, "little") + text
        return b"".join(_aligned([prefix, *(template.pte for template in self.templates)]))

    def parts(self) -> Iterator[Part]:
        """Yields the parts after the header, in file order."""
        for sizes, make in self.makers:
            content = make()
            assert tuple(map(_size, content)) == sizes
            yield from content

    def _describe(self) -> None:
        layout, chain = self.layout, self.chain
        vocab, d_model = layout.vocab, layout.d_model
        self._line("model", d_model, vocab, CHUNK)
        for program in self.templates:  # first of all sections: `header` ends with them
            self._line("program", self._advance(len(program.pte)), len(program.pte))
        rows, scales = self._place((vocab * d_model, 4 * vocab), lambda: self.contents.embedding(vocab, d_model))
        self._line("embedding", rows, vocab * d_model, scales, 4 * vocab)
        for method in chain.methods:
            self._method(method)
        for cache in chain.caches:
            if cache.latent:
                self._line("latents", cache.latent, cache.head_dim - cache.latent)
            else:
                self._line("cache", cache.kv_heads, cache.head_dim, cache.window)
        for step in chain.steps:
            self._step(step)
        self._softcap(layout.softcap)
        self._line("head", len(chain.methods) - 1)

    def _method(self, method: Method) -> None:
        index = self.chain.programs.index(method.program)
        keys = self.templates[index].keys
        listed = [
            (key, offset, size, constant.shape if len(keys[constant.name]) == 1 else ())
            for constant in method.program.constants
            for key, offset, size in zip(
                keys[constant.name],
                self._constant(method, constant),
                constant_sizes(constant, method.program.format),
                strict=True,
            )
        ]
        unique = {key: (offset, size, shape) for key, offset, size, shape in listed}
        self._line("method", index, len(unique))
        for key, (offset, size, shape) in unique.items():
            self._line("data", key, offset, size, *shape)

    def _constant(self, method: Method, constant: Constant) -> tuple[int, ...]:
        def make() -> tuple[Part, ...]:
            return self.contents.constant(method, constant)

        if constant.role != "fill":
            return self._place(constant_sizes(constant, method.program.format), make)
        same = (constant.shape, constant.value)
        if same not in self.fills:
            self.fills[same] = self._place(constant_sizes(constant, method.program.format), make)
        return self.fills[same]

    def _step(self, step: Step) -> None:
        if step.attend is not None:
            about = step.attend.about
            heads = self.chain.methods[step.method].program.size("heads")
            sinks = self._vector(step.attend.sinks, heads) if step.attend.sinks else "-"
            if about.long:
                method = self.chain.methods[step.method]
                turned = about.turned or method.program.size("head_dim")
                place = f"{method.prefix}mixers.{method.mixer}"
                vectors = [self._vector(f"{place}.{name}.weight", turned // 2) for name in ("rope_short", "rope_long")]
                self._line("longrope", turned, about.long, *vectors)
            elif about.turned or about.divisors:
                self._line("rope", about.turned, *map(repr, about.divisors))
            self._softcap(about.softcap)
            self._line("attention", step.method, int(step.parallel), step.attend.cache, repr(about.theta), sinks)
        elif step.moe is not None:
            experts = step.moe.int("experts")
            if step.moe.get("softmax") or not step.moe.get("norm_topk"):
                self._line("scores", step.moe.int("softmax"), step.moe.int("norm_topk"))
            bias = self._vector(f"{self.chain.methods[step.method].prefix}ffn.bias.weight", experts)
            self._line("moe", step.method, step.moe.int("top_k"), experts, bias)
        elif self.chain.methods[step.method].program.inputs == 1:
            self._line("ffn", step.method)
        else:
            self._line("mixer", step.method, int(step.parallel))

    def _softcap(self, bound: float) -> None:
        if bound:
            self._line("softcap", repr(bound))

    def _vector(self, tensor: str, length: int) -> int:
        return self._place((4 * length,), lambda: (self.contents.vector(tensor, length),))[0]

    def _place(self, sizes: tuple[int, ...], make: Callable[[], tuple[Part, ...]]) -> tuple[int, ...]:
        self.makers.append((sizes, make))
        return tuple(self._advance(size) for size in sizes)

    def _advance(self, size: int) -> int:
        """Returns the offset of a section of `size` bytes, which comes next."""
        offset, self.end = self.end, self.end + -(-size // ALIGN) * ALIGN
        return offset

    def _line(self, *words: object) -> None:
        self.lines.append(" ".join(map(str, words)))
