"""Layouts: the candidates that a search proposes.

A layout is data: width, vocabulary and one `Layer` per depth. It has two text forms. People read, type and paste one
line:

    d1024 v65536 ffn=swiglu:4608 [C3*2 A16/8 C3*2 A16/8 C3*2 A16/8 C3 A16/8 C3 A16/8 C3 A16/8 C3]

Header: width, vocabulary, `untied`, `norms=behind` or `norms=both`, `softcap=BOUND`, `vectors=128` for late
interaction, `tower=768x12` where it reads images (`nas.core.tower`), `q=q8_0` where a search chose the quantisation,
too, and the feed-forward of every layer that names no other. Then one item per layer: mixers (several, joined by `&`,
run in parallel; `-` is none), `+FFN` of its own (`+none` is none), `*count`. `^3` is a second use of layer 3.

The canonical JSON leaves out defaults, so that equal layouts have equal JSON and one id, its SHA-256:

    {"v": 1, "d_model": 64, "vocab": 256,
     "layers": [{"mixers": [{"kind": "conv", "kernel": 3}], "ffn": {"kind": "swiglu", "width": 96}}, {"share": 0}]}

Version 1 never changes the meaning of a key or a default: new behaviour is a new key.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any, Literal, get_args

from nas.core.block import BLOCKS, QUANTISED, Block, Count, Role, Scalar
from nas.core.canonical import content_hash
from nas.core.errors import InvalidInput
from nas.core.quantisation import Quantisation
from nas.core.tower import Tower

MAX_DEPTH = 1024
MAX_WIDTH = 1 << 16
MAX_VOCAB = 1 << 24
MAX_SOFTCAP = 1e9
_LEAST_VECTOR = 4

Norms = Literal["before", "behind", "both"]
"""Where the RMSNorms of a layer's blocks are: on the input, as usual, on the output, as in OLMo 2, or on both."""

_HEADER = re.compile(
    r"\s*d(?P<width>\d{1,9})\s+v(?P<vocab>\d{1,9})(?P<untied>\s+untied)?(?:\s+norms=(?P<norms>\w+))?"
    r"(?:\s+softcap=(?P<softcap>\d{1,10}(?:\.\d{1,24})?(?:e-\d{1,3})?))?(?:\s+vectors=(?P<vectors>\d{1,9}))?"
    r"(?:\s+tower=(?P<tower>\S{1,200}))?"
    r"(?:\s+q=(?P<quantisation>\S+))?"
    r"\s+ffn=(?P<ffn>\S+)\s*\[(?P<body>[^\[\]]*)\]\s*"
)
_QUANTISATION = re.compile(r"[a-z0-9][a-z0-9_.:+/-]{0,4095}")
_ITEM = re.compile(r"(?P<body>[^*]+?)(?:\*(?P<count>\d{1,4}))?")


@dataclass(frozen=True, slots=True)
class Layer:
    """One residual layer: mixers side by side, then a feed-forward.

    Args:
        mixers: run in parallel on one pre-norm; none: the layer has no mixer.
        ffn: the feed-forward, or None.
        share: the layer is a second use of that earlier layer's weights (0-based); it has no blocks of its own.
    """

    mixers: tuple[Block, ...] = ()
    ffn: Block | None = None
    share: int | None = None

    @property
    def mixer(self) -> Block | None:
        """The layer's only mixer, or None where it has none; several in parallel are an `AssertionError`."""
        assert len(self.mixers) <= 1, "layer has parallel mixers"
        return self.mixers[0] if self.mixers else None

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Mixers, then the feed-forward."""
        return self.mixers + ((self.ffn,) if self.ffn else ())


@dataclass(frozen=True, slots=True)
class Params:
    """Weights of a layout, norms included.

    Args:
        total: all of them; tied embeddings count once.
        active: those that one token passes through.
        non_embedding: total without embedding and output tables.
    """

    total: int
    active: int
    non_embedding: int


@dataclass(frozen=True)
class Layout:
    """A decoder-only stack. `Layout.of`, `Layout.parse` and `Layout.from_json` check it.

    Args:
        d_model: residual width.
        vocab: rows of the embedding table.
        layers: first to last.
        tied: whether the output head is the embedding table.
        norms: where the norms of each layer's blocks are.
        softcap: bound b of the logits, which become b tanh(logit / b), as in Gemma 2; 0: none.
        quantisation: of its file, where a search chooses it: a name of the runtime's, perhaps with others for parts
            (`nas.core.quantisation`); "": that of the space or command.
        vectors: width of the vector that a late-interaction model gives to each token in place of logits, by a
            projection of its last features (LFM2 report, equation 6); 0: a language model.
        tower: in front of the language model, whose other parts know nothing of it; None: it reads text alone.

    Example:
        >>> layout = Layout.parse("d128 v256 ffn=swiglu:320 [C3 A2/1 C3]")
        >>> layout.depth, layout.layers[1].mixers[0].kind, layout.params.total
        (3, 'gqa', 583424)
        >>> Layout.from_json(layout.to_json()) == layout
        True
    """

    d_model: int
    vocab: int
    layers: tuple[Layer, ...]
    tied: bool = True
    norms: Norms = "before"
    softcap: float = 0.0
    quantisation: str = ""
    vectors: int = 0
    tower: Tower | None = None

    @staticmethod
    def of(
        d_model: int,
        vocab: int,
        layers: Sequence[Layer],
        *,
        tied: bool = True,
        norms: Norms = "before",
        softcap: float = 0.0,
        quantisation: str = "",
        vectors: int = 0,
        tower: Tower | None = None,
    ) -> Layout:
        """Returns a checked layout in canonical form.

        Raises:
            InvalidInput: a size out of range, or a layer that is not valid at its place.
        """
        if not 32 <= d_model <= MAX_WIDTH or d_model % 32:
            raise InvalidInput(
                f"d_model must be a multiple of 32 (the quantisers' block) up to {MAX_WIDTH}, not {d_model}"
            )
        if not 2 <= vocab <= MAX_VOCAB:
            raise InvalidInput(f"vocab must be in [2, {MAX_VOCAB}], not {vocab}")
        if not 1 <= len(layers) <= MAX_DEPTH:
            raise InvalidInput(f"a layout has 1 to {MAX_DEPTH} layers, not {len(layers)}")
        if norms not in get_args(Norms):
            raise InvalidInput(f"norms must be {', '.join(get_args(Norms))}, not {norms!r}")
        if not 0 <= softcap <= MAX_SOFTCAP:
            raise InvalidInput(f"softcap must be in [0, {MAX_SOFTCAP:g}], not {softcap!r}")
        if norms != "before" and any(len(layer.mixers) > 1 for layer in layers):
            raise InvalidInput(f"norms={norms}: mixers side by side have no norm behind them")
        if quantisation and not _QUANTISATION.fullmatch(quantisation):
            raise InvalidInput(f"{quantisation!r} is no name of a quantisation")
        if "+" in quantisation and (needed := Quantisation.parse(quantisation).depth) > len(layers):
            raise InvalidInput(f"q={quantisation} names layer {needed - 1}: the layout has {len(layers)} layers")
        if not 0 <= vectors <= MAX_WIDTH or (vectors and not tied):
            raise InvalidInput(f"vectors: up to {MAX_WIDTH} numbers, and no output head (untied), not {vectors}")
        if vectors and tower:
            raise InvalidInput("a layout has token vectors or a tower, not both")
        checked = tuple(_checked_layer(layer, i, layers, d_model) for i, layer in enumerate(layers))
        return Layout(d_model, vocab, checked, tied, norms, float(softcap), quantisation, vectors, tower)

    def with_layers(
        self,
        layers: Sequence[Layer],
        *,
        d_model: int | None = None,
        vocab: int | None = None,
        vectors: int | None = None,
    ) -> Layout:
        """Returns the layout with other layers, and perhaps other widths or vocabulary, checked as by `of`."""
        return Layout.of(
            d_model or self.d_model,
            vocab or self.vocab,
            layers,
            tied=self.tied,
            norms=self.norms,
            softcap=self.softcap,
            quantisation=self.quantisation,
            vectors=self.vectors if vectors is None else vectors,
            tower=self.tower,
        )

    @staticmethod
    def parse(text: str) -> Layout:
        """Parses a one-line string.

        Raises:
            InvalidInput: the text is no layout; the message quotes the part that cannot be read.
        """
        match = _HEADER.fullmatch(text)
        if match is None:
            raise InvalidInput(f"cannot read layout {text!r}: expected 'dWIDTH vVOCAB [untied] ffn=KIND:... [LAYERS]'")
        default = _parse_ffn(match["ffn"])
        layers: list[Layer] = []
        for item in match["body"].split():
            layers += _parse_item(item, default)
            if len(layers) > MAX_DEPTH:
                raise InvalidInput(f"a layout has 1 to {MAX_DEPTH} layers, not {len(layers)} or more")
        norms: Any = match["norms"] or "before"  # checked by `of`
        return Layout.of(
            int(match["width"]),
            int(match["vocab"]),
            layers,
            tied=not match["untied"],
            norms=norms,
            softcap=float(match["softcap"] or 0),
            quantisation=match["quantisation"] or "",
            vectors=int(match["vectors"] or 0),
            tower=Tower.parse(match["tower"]) if match["tower"] else None,
        )

    @property
    def plugin_versions(self) -> dict[str, str]:
        """Block kind -> version, of the kinds that other distributions add: part of the layout's result keys."""
        kinds = {block.kind for layer in self.layers for block in layer.blocks}
        versions = {kind: BLOCKS.version(kind) for kind in sorted(kinds)}
        return {kind: version for kind, version in versions.items() if version is not None}

    def format(self) -> str:
        """Returns the canonical one-line string; `Layout.parse(layout.format()) == layout`."""
        counts = Counter(layer.ffn for layer in self.layers if layer.share is None)
        default = counts.most_common(1)[0][0] if counts else None
        items = [_format_layer(layer, default) for layer in self.layers]
        runs = [(item, len(list(group))) for item, group in groupby(items)]
        body = " ".join(item if count == 1 else f"{item}*{count}" for item, count in runs)
        about = "" if self.tied else " untied"
        about += "" if self.norms == "before" else f" norms={self.norms}"
        about += f" softcap={self.softcap!r}".removesuffix(".0") if self.softcap else ""
        about += f" vectors={self.vectors}" if self.vectors else ""
        about += f" tower={self.tower.format()}" if self.tower else ""
        about += f" q={self.quantisation}" if self.quantisation else ""
        return f"d{self.d_model} v{self.vocab}{about} ffn={_format_ffn(default)} [{body}]"

    def __str__(self) -> str:
        return self.format()

    def to_json(self) -> dict[str, Any]:
        """Returns the canonical JSON."""
        about: dict[str, Any] = {} if self.tied else {"tied": False}
        about |= {} if self.norms == "before" else {"norms": self.norms}
        about |= {"softcap": self.softcap} if self.softcap else {}
        layers = [_layer_to_json(layer) for layer in self.layers]
        about |= {"quantisation": self.quantisation} if self.quantisation else {}
        about |= {"vectors": self.vectors} if self.vectors else {}
        about |= {"tower": self.tower.format()} if self.tower else {}
        return {"v": 1, "d_model": self.d_model, "vocab": self.vocab, "layers": layers, **about}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Layout:
        """Reads what `to_json` wrote.

        Raises:
            InvalidInput: another version, unknown or missing keys, or values of another type.
        """
        names = {"v", "d_model", "vocab", "layers", "tied", "norms", "softcap", "quantisation", "vectors", "tower"}
        data = _object(data, names, "layout")
        if data.get("v") != 1:
            raise InvalidInput(f"layout version {data.get('v')!r}: this build reads version 1")
        layers = [_layer_from_json(layer) for layer in _list(data.get("layers"), "layers")]
        tied = data.get("tied", True)
        if not isinstance(tied, bool):
            raise InvalidInput(f"tied must be true or false, not {tied!r}")
        softcap, quantisation = data.get("softcap", 0.0), data.get("quantisation", "")
        if isinstance(softcap, bool) or not isinstance(softcap, int | float):
            raise InvalidInput(f"softcap must be a number, not {softcap!r}")
        if not isinstance(quantisation, str):
            raise InvalidInput(f"quantisation must be a name, not {quantisation!r}")
        norms = data.get("norms", "before")
        width, vocab = _whole(data, "d_model"), _whole(data, "vocab")
        vectors = _whole(data, "vectors") if "vectors" in data else 0
        tower = data.get("tower")
        if tower is not None and not isinstance(tower, str):
            raise InvalidInput(f"tower must be a line such as 768x12, not {tower!r}")
        return Layout.of(
            width,
            vocab,
            layers,
            tied=tied,
            norms=norms,
            softcap=softcap,
            quantisation=quantisation,
            vectors=vectors,
            tower=Tower.parse(tower) if tower else None,
        )

    @cached_property
    def id(self) -> str:
        """SHA-256 of the canonical JSON, 64 hex digits, of which 12 are shown."""
        return content_hash(self.to_json())

    @cached_property
    def architecture(self) -> Layout:
        """The layout without a quantisation: what is exported, trained and supported does not depend on it."""
        return replace(self, quantisation="")

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.layers)

    def layer_at(self, index: int) -> Layer:
        """Returns the layer whose weights run at depth `index`: that layer, or the one it shares."""
        layer = self.layers[index]
        return layer if layer.share is None else self.layers[layer.share]

    def cache_source(self, index: int, mixer: int) -> tuple[int, int] | None:
        """Returns depth and mixer whose cache `mixer` at depth `index` reads (`kv=n`); None: its own, if any."""
        block = self.layer_at(index).mixers[mixer]
        source = dict(block.args).get("kv")
        if source is None:
            return None
        owner = _cache_owner(block, self.layers[int(source)], self.d_model)
        assert owner is not None, "Layout.of checked it"
        return int(source), owner

    @cached_property
    def params(self) -> Params:
        """Weight counts, equal to those of the torch module; no token passes through a tower."""
        total = active = self.d_model * (1 + self.vectors)  # the final norm, and the projection
        for layer in self.layers:
            counts = [_count(block, self.d_model) for block in layer.blocks]
            norms = self._norm_weights(layer)
            total += norms + sum(count.total for count in counts)
            active += norms + sum(count.active for count in counts)
        for index, layer in enumerate(self.layers):
            if layer.share is not None:
                active += self._norm_weights(self.layer_at(index))
                active += sum(_count(block, self.d_model).active for block in self.layer_at(index).blocks)
        table = self.d_model * self.vocab
        tables = table if self.tied else 2 * table
        tower = self.tower.weights(self.d_model) if self.tower else 0
        return Params(total + tables + tower, active + tables, total + tower)

    def _norm_weights(self, layer: Layer) -> int:
        return self.d_model * (bool(layer.mixers) + (layer.ffn is not None)) * (1 + (self.norms == "both"))

    def kv_bytes(self, context: int, element: float = 2.0) -> float:
        """Returns the bytes of key-value cache at `context` tokens, with `element` bytes a number (2: f16)."""
        return self._sum(lambda block: block.spec.kv_bytes(block, self.d_model, context, element))

    def state_bytes(self) -> float:
        """Returns the bytes of recurrent state (float32) at any context."""
        return self._sum(lambda block: block.spec.state_bytes(block, self.d_model))

    def flops(self, context: int) -> float:
        """Returns multiply-adds x 2 for one token that sees `context` tokens, output head or projection included."""
        blocks = self._sum(lambda block: block.spec.flops(block, self.d_model, context))
        return blocks + 2.0 * self.d_model * (self.vectors or self.vocab)

    def _sum(self, part: Callable[[Block], float]) -> float:
        return sum(part(block) for i in range(self.depth) for block in self.layer_at(i).blocks)


def narrow(layout: Layout, d_model: int, vocab: int, *, context: int = 1, length: int = 1) -> Layout:
    """Scales a layout from deploy scale to proxy scale: width `d_model`, with a vocabulary of its own.

    Widths scale by one factor and are not rounded up to a quantiser's block, so that weights keep their proportions;
    heads of attention stay >= 8 wide, and >= 16 where that at most doubles them, so there are fewer; depth, order and
    kernels stay. Several layouts can have the same proxy: they share its result and are shown as ties. At its own width
    a layout keeps its layers, so a proxy is its own proxy. A proxy has no quantisation.

    Vectors of a late-interaction model shrink by the same factor, to at least 4 numbers; so does a tower, see
    `Tower.narrow`.

    Where a proxy's sequence of `length` tokens is shorter than the `context` at deploy scale, windows, recurrent
    memories and the reach of positions shrink with it.

    Raises:
        InvalidInput: the proxy would be wider than the layout, or a size is out of range.
    """
    if d_model > layout.d_model:
        raise InvalidInput(f"proxy width {d_model} exceeds the layout's {layout.d_model}")
    if d_model == layout.d_model:
        return replace(layout, vocab=vocab, quantisation="")

    def fit(block: Block) -> Block:
        short = block.spec.shorten(block, layout.d_model, context, length) if length < context else block
        return block.spec.narrow(short, layout.d_model, d_model)

    vectors = layout.vectors and max(_LEAST_VECTOR, round(layout.vectors * d_model / layout.d_model))
    proxy = layout.architecture.with_layers(_with_blocks(layout, fit), d_model=d_model, vocab=vocab, vectors=vectors)
    return replace(proxy, tower=layout.tower and layout.tower.narrow(layout.d_model, d_model))


def padded(layout: Layout) -> Layout:
    """Returns the layout with hidden widths rounded up to multiples of `QUANTISED`, for export.

    Weights of `layout`, padded with zeros (`nas.model.nn.weights.padded_weights`), compute the same in it.
    """
    return layout.with_layers(_with_blocks(layout, lambda block: block.spec.pad(block, QUANTISED)))


@lru_cache(maxsize=1 << 14)
def _count(block: Block, d_model: int) -> Count:
    return block.spec.count(block, d_model)


def _checked_layer(layer: Layer, index: int, layers: Sequence[Layer], d_model: int) -> Layer:
    try:
        if layer.share is not None:
            return _checked_share(layer, index, layers)
        for block in layer.mixers:
            _check_kv_source(block, index, layers, d_model)
        return _canonical_layer(layer, d_model)
    except InvalidInput as error:
        raise InvalidInput(f"layer {index}: {error.message}") from error


@lru_cache(maxsize=1 << 14)
def _canonical_layer(layer: Layer, d_model: int) -> Layer:
    for block in layer.mixers:
        _check_role(block, "mixer")
    if layer.ffn:
        _check_role(layer.ffn, "ffn")
    if not layer.blocks:
        raise InvalidInput("a layer needs a mixer or a feed-forward")
    mixers = tuple(block.canonical(d_model) for block in layer.mixers)
    return Layer(mixers, layer.ffn.canonical(d_model) if layer.ffn else None)


def _checked_share(layer: Layer, index: int, layers: Sequence[Layer]) -> Layer:
    if layer.blocks:
        raise InvalidInput("a layer that shares weights has no blocks of its own")
    if not 0 <= (layer.share or 0) < index or layers[layer.share or 0].share is not None:
        raise InvalidInput(f"^{layer.share} must name an earlier layer with weights of its own")
    return layer


def _check_role(block: Block, role: Role) -> None:
    if BLOCKS[block.kind].role != role:
        raise InvalidInput(f"{block.kind} is no {role}")


def _check_kv_source(block: Block, index: int, layers: Sequence[Layer], d_model: int) -> None:
    source = dict(block.args).get("kv")
    if source is None:
        return
    if source >= index or _cache_owner(block, layers[int(source)], d_model) is None:
        shape = ", ".join(block.spec.cache_args)
        raise InvalidInput(f"kv={source} must name an earlier layer with a {block.kind} cache of the same {shape}")


def _cache_owner(reader: Block, layer: Layer, d_model: int) -> int | None:
    """Returns the index of the first mixer of `layer` whose cache `reader` can read."""
    for j, mixer in enumerate(layer.mixers):
        owns = mixer.kind == reader.kind and mixer.get("kv") is None
        if owns and _cache_shape(mixer, d_model) == _cache_shape(reader, d_model):
            return j
    return None


def _cache_shape(block: Block, d_model: int) -> list[Scalar | None]:
    resolved = block.resolve(d_model)
    return [resolved.get(name) for name in block.spec.cache_args]


def _with_blocks(layout: Layout, change: Callable[[Block], Block]) -> list[Layer]:
    return [
        replace(layer, mixers=tuple(map(change, layer.mixers)), ffn=change(layer.ffn) if layer.ffn else None)
        for layer in layout.layers
    ]


def _format_ffn(ffn: Block | None) -> str:
    return ffn.format() if ffn else "none"


def _format_layer(layer: Layer, default: Block | None) -> str:
    if layer.share is not None:
        return f"^{layer.share}"
    mixers = "&".join(block.format() for block in layer.mixers) or "-"
    return mixers if layer.ffn == default else f"{mixers}+{_format_ffn(layer.ffn)}"


def _parse_item(item: str, default: Block | None) -> list[Layer]:
    match = _ITEM.fullmatch(item)
    count = 0 if match is None else int(match["count"] or 1)
    if match is None or not count:
        raise InvalidInput(f"cannot read layer {item!r}: expected MIXER[+FFN][*COUNT] or ^LAYER")
    return [_parse_layer(match["body"], default)] * count


def _parse_layer(body: str, default: Block | None) -> Layer:
    if re.fullmatch(r"\^\d{1,4}", body):
        return Layer(share=int(body[1:]))
    mixers, plus, ffn = body.partition("+")
    blocks = () if mixers == "-" else tuple(Block.parse(part, "mixer") for part in mixers.split("&"))
    return Layer(blocks, _parse_ffn(ffn) if plus else default)


def _parse_ffn(text: str) -> Block | None:
    return None if text == "none" else Block.parse(text, "ffn")


def _layer_to_json(layer: Layer) -> dict[str, Any]:
    if layer.share is not None:
        return {"share": layer.share}
    mixers = {"mixers": [_block_to_json(block) for block in layer.mixers]} if layer.mixers else {}
    return mixers | ({"ffn": _block_to_json(layer.ffn)} if layer.ffn else {})


def _block_to_json(block: Block) -> dict[str, Scalar | str]:
    return {"kind": block.kind, **dict(block.args)}


def _layer_from_json(data: Any) -> Layer:
    layer = _object(data, {"mixers", "ffn", "share"}, "layer")
    mixers = tuple(_block_from_json(block) for block in _list(layer.get("mixers", []), "mixers"))
    ffn = _block_from_json(layer["ffn"]) if "ffn" in layer else None
    return Layer(mixers, ffn, _whole(layer, "share") if "share" in layer else None)


def _block_from_json(data: Any) -> Block:
    if not isinstance(data, Mapping) or not isinstance(data.get("kind"), str):
        raise InvalidInput(f"a block is an object with a kind, not {data!r}")
    return Block.of(**data) if any(isinstance(value, list | dict) for value in data.values()) else _known_block(**data)


@lru_cache(maxsize=1 << 14, typed=True)
def _known_block(kind: str, **args: Scalar) -> Block:
    """Returns a checked block; a study has some hundred different ones, and each is checked once."""
    return Block.of(kind, **args)


def _object(data: Any, keys: set[str], what: str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise InvalidInput(f"{what} must be an object, not {data!r}")
    if unknown := set(data) - keys:
        raise InvalidInput(f"unknown key in {what}: {', '.join(sorted(unknown))}; valid: {', '.join(sorted(keys))}")
    return data


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidInput(f"{what} must be a list, not {value!r}")
    return value


def _whole(data: Mapping[str, Any], key: str) -> int:
    value = data.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidInput(f"{key} must be a whole number, not {value!r}")
    return value
