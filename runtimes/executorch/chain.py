"""A layout as what the runner executes: programs, methods (a program with weights), caches, and steps in order."""

from __future__ import annotations

from dataclasses import dataclass

from nas.core.block import Block
from nas.core.layout import Layout
from nas.runtimes.executorch.programs import (
    Constant,
    Program,
    expert_program,
    head_program,
    mixer_program,
    router_program,
    swiglu_program,
)


@dataclass(frozen=True, slots=True)
class Method:
    """A program with the weights of one place in the model.

    Args:
        program: what runs.
        prefix: of its tensors in the state dict, such as "layers.3.".
        mixer: number of the mixer in its layer.
        expert: number of the expert in its mixture; None: no expert.
    """

    program: Program
    prefix: str
    mixer: int = 0
    expert: int | None = None

    def tensor(self, constant: Constant) -> str:
        """The name of the state dict's tensor that `constant` is cut from."""
        return self.prefix + constant.source.format(j=self.mixer)


@dataclass(frozen=True, slots=True)
class Cache:
    """Keys and values of one attention layer; `window` 0: of the whole context."""

    kv_heads: int
    head_dim: int
    window: int


@dataclass(frozen=True, slots=True)
class Attend:
    """What the attention kernel needs to know.

    Args:
        cache: number of the cache that is read.
        theta: RoPE base; 0: no positions.
        sinks: the state dict's tensor of sink logits.
    """

    cache: int
    theta: float
    sinks: str | None


@dataclass(frozen=True, slots=True)
class Step:
    """One program call.

    Args:
        method: index of the method; of a mixture its router's, and the experts' follow it.
        parallel: reads what the step before it read, and adds to that step's output.
        attend: of attention.
        moe: the mixture.
    """

    method: int
    parallel: bool = False
    attend: Attend | None = None
    moe: Block | None = None


@dataclass(frozen=True, slots=True)
class Chain:
    """All of a model but its embedding; the last method is the head's, which no step names."""

    methods: tuple[Method, ...]
    caches: tuple[Cache, ...]
    steps: tuple[Step, ...]

    @property
    def programs(self) -> tuple[Program, ...]:
        """Each distinct program once, in order of first use."""
        return tuple(dict.fromkeys(method.program for method in self.methods))


class _Builder:
    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.methods: list[Method] = []
        self.caches: list[Cache] = []
        self.steps: list[Step] = []
        self.method_of: dict[tuple[int, str], int] = {}
        self.cache_of: dict[tuple[int, int], int] = {}

    def build(self) -> Chain:
        for depth in range(self.layout.depth):
            self._layer(depth)
        layout = self.layout
        self.methods.append(Method(head_program(layout.d_model, layout.vocab, layout.tied), ""))
        return Chain(tuple(self.methods), tuple(self.caches), tuple(self.steps))

    def _layer(self, depth: int) -> None:
        share = self.layout.layers[depth].share
        owner, layer = depth if share is None else share, self.layout.own(depth)
        for j, block in enumerate(layer.mixers):
            method = self._method(owner, f"mixer{j}", Method(self._mixer(block), f"layers.{owner}.", j))
            self.steps.append(Step(method, parallel=j > 0, attend=self._attend(depth, owner, j, block)))
        if layer.ffn is not None:
            self._ffn(owner, layer.ffn)

    def _mixer(self, block: Block) -> Program:
        return mixer_program(block, self.layout.d_model)

    def _attend(self, depth: int, owner: int, j: int, block: Block) -> Attend | None:
        if block.kind not in ("gqa", "swa"):
            return None
        block = block.resolve(self.layout.d_model)
        source = self.layout.cache_source(depth, j)
        if source is None:
            window = block.int("window") if block.kind == "swa" else 0
            self.cache_of[depth, j] = len(self.caches)
            self.caches.append(Cache(block.int("kv_heads"), block.int("head_dim"), window))
        sinks = f"layers.{owner}.mixers.{j}.sinks.weight" if block.kind == "swa" and block.get("sink") else None
        return Attend(self.cache_of[source or (depth, j)], float(block.get("rope_theta") or 0), sinks)

    def _ffn(self, owner: int, block: Block) -> None:
        d_model, prefix = self.layout.d_model, f"layers.{owner}."
        if block.kind == "swiglu":
            self.steps.append(Step(self._method(owner, "ffn", Method(swiglu_program(block, d_model), prefix))))
            return
        experts = [Method(expert_program(block, d_model), prefix, expert=e) for e in range(block.int("experts"))]
        router = Method(router_program(block, d_model), prefix)
        self.steps.append(Step(self._method(owner, "ffn", router, *experts), moe=block))

    def _method(self, owner: int, place: str, *methods: Method) -> int:
        """Index of the first of `methods`; a layer that shares weights runs the methods of its owner."""
        if (owner, place) not in self.method_of:
            self.method_of[owner, place] = len(self.methods)
            self.methods.extend(methods)
        return self.method_of[owner, place]


def build_chain(layout: Layout) -> Chain:
    """The chain of a layout that `nas.runtimes.executorch.support` accepts."""
    return _Builder(layout).build()
