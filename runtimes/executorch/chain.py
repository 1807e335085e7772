"""Rules of the layouts that ExecuTorch carries, and a layout as the chain of calls that the runner makes.

That is programs, methods (a program with weights), caches, and steps in order. Every mix of the kinds of blocks in
`kinds` is carried, as long as groups of 4-bit weights fit its widths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nas.core.block import Block
from nas.core.errors import UnknownName, Unsupported
from nas.core.layout import Layout
from nas.core.profile import Part
from nas.core.quantisation import Quantisation
from nas.measure.runtimes.base import Support
from nas.measure.runtimes.executorch.kinds import KINDS, MISSING, Attention, programs_of
from nas.measure.runtimes.executorch.programs import FORMATS, GROUP, Constant, Program, head_program

QUANTISATIONS = ("8da4w",)
"""What a release writes. Further ones are in `FORMATS`."""
ARCH = "blocks"


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
        """Returns the name of the state dict's tensor that `constant` is cut from."""
        return self.prefix + constant.source.format(j=self.mixer)


@dataclass(frozen=True, slots=True)
class Cache:
    """Keys and values of one attention layer; `window` 0: of the whole context.

    Where `latent` is not 0, a token has one key of `head_dim` numbers, whose first `latent` are the value, too.
    """

    kv_heads: int
    head_dim: int
    window: int
    latent: int = 0


@dataclass(frozen=True, slots=True)
class Attend:
    """What the attention kernel of a step reads.

    Args:
        cache: number of the cache.
        about: arguments of the block.
        sinks: the state dict's tensor of sink logits.
    """

    cache: int
    about: Attention
    sinks: str | None


@dataclass(frozen=True, slots=True)
class Step:
    """One program call.

    Args:
        layer: that it is part of.
        part: of that layer.
        method: index of the method; of a mixture its router's, and the experts' follow it.
        parallel: reads what the step before it read, and adds to that step's output.
        attend: of attention.
        moe: the mixture.
    """

    layer: int
    part: Part
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
    def __init__(self, layout: Layout, quantisation: str) -> None:
        self.layout, self.types = layout, stored_types(quantisation)
        self.methods: list[Method] = []
        self.caches: list[Cache] = []
        self.steps: list[Step] = []
        self.method_of: dict[tuple[int, str], int] = {}
        self.cache_of: dict[tuple[int, int], int] = {}

    def build(self) -> Chain:
        for depth in range(self.layout.depth):
            self._layer(depth)
        layout = self.layout
        head = head_program(layout.d_model, layout.vocab, layout.tied).stored_as(self.types.at("embedding"))
        self.methods.append(Method(head, ""))
        return Chain(tuple(self.methods), tuple(self.caches), tuple(self.steps))

    def _layer(self, depth: int) -> None:
        share = self.layout.layers[depth].share
        owner, layer = depth if share is None else share, self.layout.layer_at(depth)
        for j, block in enumerate(layer.mixers):
            (program,) = self._programs(block, "mixers", owner)
            method = self._method(owner, f"mixer{j}", Method(program, f"layers.{owner}.", j))
            attend = self._attend(depth, owner, j, block)
            self.steps.append(Step(depth, "mixer", method, parallel=j > 0, attend=attend))
        if layer.ffn is not None:
            self._ffn(depth, owner, layer.ffn)

    def _attend(self, depth: int, owner: int, j: int, block: Block) -> Attend | None:
        attention = KINDS[block.kind].attention
        if attention is None:
            return None
        block = block.resolve(self.layout.d_model)
        about = attention(block)
        source = self.layout.cache_source(depth, j)
        if source is None:
            self.cache_of[depth, j] = len(self.caches)
            self.caches.append(_cache(block, about))
        sinks = f"layers.{owner}.mixers.{j}.{about.sinks}" if about.sinks else None
        return Attend(self.cache_of[source or (depth, j)], about, sinks)

    def _ffn(self, depth: int, owner: int, block: Block) -> None:
        first, *others = self._programs(block, "ffn", owner)
        prefix = f"layers.{owner}."
        mixture = KINDS[block.kind].mixture
        experts = [Method(others[0], prefix, expert=e) for e in range(block.int("experts"))] if mixture else []
        method = self._method(owner, "ffn", Method(first, prefix), *experts)
        self.steps.append(Step(depth, "ffn", method, moe=block if mixture else None))
        for program in others[1:]:
            method = self._method(owner, "shared", Method(program, prefix))
            self.steps.append(Step(depth, "ffn", method, parallel=True))

    def _programs(self, block: Block, role: str, owner: int) -> list[Program]:
        name = self.types.at(role, owner, self.layout.depth)
        programs = programs_of(block, self.layout.d_model, self.layout.norms)
        return [program.stored_as(name) for program in programs]

    def _method(self, owner: int, place: str, *methods: Method) -> int:
        """Returns the index of the first of `methods`; a layer that shares weights runs the methods of its owner."""
        if (owner, place) not in self.method_of:
            self.method_of[owner, place] = len(self.methods)
            self.methods.extend(methods)
        return self.method_of[owner, place]


def _cache(block: Block, about: Attention) -> Cache:
    if about.latent:
        return Cache(1, sum(about.latent), about.window, about.latent[0])
    return Cache(block.int("kv_heads"), block.int("head_dim"), about.window)


def build_chain(layout: Layout, quantisation: str = QUANTISATIONS[0]) -> Chain:
    """Returns the chain of a layout that `supports` accepts, in a quantisation; raises what `stored_types` does."""
    return _Builder(layout, quantisation).build()


def stored_types(quantisation: str) -> Quantisation:
    """Returns which of `FORMATS` each part of a file has.

    Raises:
        UnknownName: it names another one, or another role.
        InvalidInput: it cannot be read.
    """
    types = Quantisation.parse(quantisation)
    for name in sorted(types.names):
        if name not in FORMATS:
            raise UnknownName("quantisation of ExecuTorch", name, FORMATS)
    return types


def supports(layout: Layout) -> Support:
    """Returns stock, since ExecuTorch's own libraries run it, or no with every reason."""
    if layout.vectors:
        return Support("no", None, ("vectors of tokens: its runner reports logits",))
    if layout.tower:
        return Support("no", None, (f"a tower of {layout.tower.media}: its programs take token ids alone",))
    for rules in (_kinds, _widths):
        if reasons := tuple(dict.fromkeys(rules(layout))):
            return Support("no", None, reasons)
    return Support("stock", ARCH)


def require(layout: Layout) -> None:
    """Raises `Unsupported`, with every reason, for a layout that ExecuTorch does not carry."""
    if not (support := supports(layout)):
        raise Unsupported(f"ExecuTorch does not carry this layout: {'; '.join(support.reasons)}")


def _kinds(layout: Layout) -> Iterator[str]:
    for layer in layout.layers:
        for block in layer.blocks:
            if block.kind not in KINDS:
                missing = f", {MISSING[block.kind]}" if block.kind in MISSING else ""
                yield f"{block.kind} blocks: there is no ExecuTorch program of them{missing}"
            elif layout.norms != "before" and not KINDS[block.kind].behind:
                yield f"{block.kind} blocks with norms behind them (norms={layout.norms}): their programs have none"


def _widths(layout: Layout) -> Iterator[str]:
    for method in build_chain(layout).methods:
        for constant in method.program.constants:
            if constant.role == "int4" and constant.shape[1] % GROUP:
                what = constant.source.replace("{j}", str(method.mixer)) or constant.name
                yield (f"{what} has rows of {constant.shape[1]} numbers: 4-bit weights come in groups of {GROUP}")
