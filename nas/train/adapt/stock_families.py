"""Families of transformers with attention and feed-forwards in each layer, as a table of what each has of its own.

Defaults are those of transformers' configuration classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from nas.core.block import Block
from nas.core.errors import InvalidInput
from nas.core.layout import Layer, Layout, Norms
from nas.model.nn.rope import turned_numbers
from nas.model.nn.transformers import TensorName, stock_names, weight_name
from nas.train.adapt.configuration import (
    ACTIVATIONS,
    EPS,
    Constants,
    Options,
    TrainedModel,
    attention_shape,
    model_size,
    trained_model,
)

GRANITE_FFN = (
    TensorName(("gate.weight", "up.weight"), "shared_mlp.input_linear.weight", axis=0),
    weight_name("down", "shared_mlp.output_linear"),
)


@dataclass(frozen=True)
class Experts:
    """What a family's mixtures of experts have of their own, all of them scored by a softmax.

    Args:
        default: their number if the configuration has none.
        top_k: experts per token if the configuration has none.
        width: key of an expert's width.
        usual: default of it.
        norm_topk: key of whether a token's weights add up to one, which they do not by default; none: they always do.
        shared: key of the width of shared experts.
        joint_width: default of it.
        gated: whether these have a gate, as in Qwen2-MoE; else their tensors are Granite's.
        router: name of the router's module.
    """

    default: int
    top_k: int
    width: str
    usual: int
    norm_topk: str = ""
    shared: str = ""
    joint_width: int = 0
    gated: bool = False
    router: str = "gate"

    def read(self, options: Options) -> Block:
        """Returns the mixture of a configuration."""
        width = options.whole(self.width, self.usual)
        count = next((name for name in _COUNTS if options.get(name) is not None), _COUNTS[0])
        joint = options.whole(self.shared, self.joint_width) if self.shared else 0
        whole = width > 0 and joint % width == 0
        options.refuse(not whole, f"shared experts of width {joint}, no multiple of that of an expert, {width}")
        return Block.of(
            "moe",
            experts=options.whole(count, self.default),
            top_k=options.whole("num_experts_per_tok", self.top_k),
            width=width,
            shared=joint // width if whole else 0,
            shared_gate=self.gated,
            softmax=True,
            norm_topk=options.flag(self.norm_topk) if self.norm_topk else True,
        )

    def names(self, block: Block) -> Iterator[TensorName]:
        """Yields the tensors of a mixture, below a layer. Their routers have no bias."""
        yield weight_name("router", f"mlp.{self.router}")
        yield TensorName(("bias.weight",), "")
        yield TensorName(("gate.weight", "up.weight"), "mlp.experts.gate_up_proj")
        yield TensorName(("down.weight",), "mlp.experts.down_proj")
        if self.gated:
            yield weight_name("shared_gate", "mlp.shared_expert_gate")
            for part in ("gate", "up", "down"):
                yield weight_name(f"shared.{part}", f"mlp.shared_expert.{part}_proj")
        elif block.int("shared"):
            yield from (replace(name, keys=tuple(f"shared.{part}" for part in name.keys)) for name in GRANITE_FFN)


_COUNTS = ("num_experts", "num_local_experts")
"""Keys of the number of experts; transformers writes and reads either."""
BEFORE = {"mixer_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_BEHIND = {"mixer_out_norm": "post_attention_layernorm", "ffn_out_norm": "post_feedforward_layernorm"}
_GEMMA = {"mixer_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
_GLM4 = {**BEFORE, "mixer_out_norm": "post_self_attn_layernorm", "ffn_out_norm": "post_mlp_layernorm"}


@dataclass(frozen=True)
class Stock:
    """What a family of attention and dense feed-forwards has of its own; defaults are those of its configuration class.

    Args:
        tied: whether the head is the embedding.
        base: RoPE's.
        eps: of norms.
        head_dim: head size; none: width / heads.
        kv_heads: heads of keys and values if the configuration has none; None: as many as of queries.
        qk_norm: whether there is QK-norm.
        qk_norm_wide: whether it is over all heads together.
        qkv_bias: whether queries, keys and values have biases; the name of a switch that is on by default.
        ffn: block kind of the feed-forwards.
        activation: key of their activation.
        windows: what has windows: "" nothing, "all" layers, "switch" layers if use_sliding_window is set, "types" those
            that layer_types says.
        window: its size where the configuration has none; none: it has no window then.
        period: of "types" where there is no list: the last layer of each sees all tokens; below 0: the first.
        local: base of RoPE in layers with windows where that has settings of its own, with the key of the base.
        biases: switches of biases.
        pairs: whether RoPE turns neighbouring numbers.
        part: share of a head that RoPE turns if the configuration has none; None: whole heads.
        joined: what is one tensor: "qkv", and "gate_up".
        norms: our norms of a layer, and theirs.
        plus: what norms add to their weights.
        centred: whether norms are LayerNorms without weights.
        sinks: whether attention has sinks.
        constants: of a configuration.
        capped: whether logits and scores of attention are bounded if the configuration does not say so; false: scores
            never are; none: neither ever is.
        experts: of the mixtures in place of dense feed-forwards; none: there are none.
    """

    tied: bool = False
    base: float = 10000.0
    eps: float = 1e-6
    head_dim: int | None = None
    kv_heads: int | None = None
    qk_norm: bool = False
    qk_norm_wide: bool = False
    qkv_bias: bool | str = False
    ffn: str = "swiglu"
    activation: str = "hidden_act"
    windows: str = ""
    window: int | None = None
    period: int = 0
    local: tuple[str, float] | None = None
    biases: tuple[str, ...] = ("attention_bias", "mlp_bias")
    pairs: bool = False
    part: float | None = None
    joined: tuple[str, ...] = ()
    norms: Mapping[str, str] = field(default_factory=lambda: BEFORE)
    plus: float = 0.0
    centred: bool = False
    sinks: bool = False
    constants: Callable[[Options], Constants] = lambda options: Constants()
    capped: bool | None = None
    experts: Experts | None = None

    def read(self, options: Options) -> TrainedModel:
        """Reads a configuration of the family."""
        d_model, depth, vocab = model_size(options)
        # transformers takes Gemma's "gelu" for the approximation by tanh.
        gelu = ("gelu",) if options.get("model_type") == "gemma" else ()
        options.activation(ACTIVATIONS[self.ffn] + gelu, self.activation)
        options.refuse_biases(*self.biases)
        options.refuse(options.get("clip_qkv") is not None, "clipped queries, keys and values (clip_qkv)")
        options.refuse(bool(options.get("use_bidirectional_attention")), "attention to later tokens")
        attention = attention_shape(
            options, d_model, qk_norm=self.qk_norm, head_dim=self.head_dim, kv_heads=self.kv_heads
        )
        attention["qk_norm_wide"] = self.qk_norm_wide
        attention["qkv_bias"] = options.flag(self.qkv_bias, True) if isinstance(self.qkv_bias, str) else self.qkv_bias
        attention["softcap"] = options.number("attn_logit_softcapping", 50.0) if self._capped(options, "attn") else 0.0
        windows = _windows(options, depth, self)
        ropes = {
            inside: self._rope(options, attention["head_dim"], inside) for inside in {w is not None for w in windows}
        }
        layers, scores = [], []
        for window, base, ffn in zip(windows, _bases(options, windows), self._feeding(options, depth), strict=True):
            rope, scored = ropes[window is not None]
            if base == 0.0:  # no positions, so nothing scales them
                rope, scored = {"rope_theta": base}, 1.0
            shape = attention | rope | ({} if base is None else {"rope_theta": base})
            scores.append(scored)
            if self.sinks:
                mixer = Block.of("swa", window=_WIDEST if window is None else window, sink=True, **shape)
            else:
                mixer = Block.of("gqa", **shape) if window is None else Block.of("swa", window=window, **shape)
            layers.append(Layer((mixer,), ffn))
        softcap = options.number("final_logit_softcapping", 30.0) if self._capped(options, "final") else 0.0
        norms: Norms = "before" if self.norms.keys() == BEFORE.keys() else "both"
        norms = "behind" if self.norms.keys() == _BEHIND.keys() else norms
        layout = Layout.of(d_model, vocab, layers, tied=options.tied(self.tied), norms=norms, softcap=softcap)
        eps = EPS if self.centred else options.number("rms_norm_eps", self.eps)
        model = trained_model(options, layout, tuple(self._names(layout)), eps, self.constants(options), scores)
        return self._with_divisors(options, model)

    def _with_divisors(self, options: Options, model: TrainedModel) -> TrainedModel:
        """Adds LongRoPE's numbers to the factors of a model; what they multiply of scores becomes part of queries."""
        rope = options.object("rope_scaling") or options.object("rope_parameters")
        factors = dict(model.factors)
        for i, layer in enumerate(model.layout.layers):
            place, block = f"layers.{i}.mixers.0", layer.mixers[0].resolve(model.layout.d_model)
            if not block.get("rope_long"):
                continue
            turned = turned_numbers(block)
            short, long, scores = options.long_divisors(rope, turned // 2)
            factors |= {f"{place}.rope_short.weight": short, f"{place}.rope_long.weight": long}
            if block.get("qk_norm") or block.get("qkv_bias"):
                options.refuse(scores != 1, "RoPE of type 'longrope' that scales queries behind a norm or a bias")
                continue
            q = f"{place}.q.weight"
            usual = float(torch.tensor(factors.get(q, 1.0)))
            head = (usual * scores,) * turned + (usual,) * (block.int("head_dim") - turned)
            factors[q] = head * block.int("heads")
        return replace(model, factors=factors)

    def _feeding(self, options: Options, depth: int) -> list[Block]:
        """Returns the feed-forward of each layer."""
        if self.experts is None:
            return [Block.of(self.ffn, width=options.whole("intermediate_size"))] * depth
        mixture, dense = self.experts.read(options), options.get("mlp_only_layers", [])
        if not isinstance(dense, list):
            raise InvalidInput("mlp_only_layers must be a list of layers", where=options.where)
        step = max(options.whole("decoder_sparse_step", 1), 1)
        sparse = [index not in dense and (index + 1) % step == 0 for index in range(depth)]
        if all(sparse):
            return [mixture] * depth
        return [mixture if one else Block.of(self.ffn, width=options.whole("intermediate_size")) for one in sparse]

    def _capped(self, options: Options, which: str) -> bool:
        """Returns whether logits of attention ("attn") or of tokens ("final") are bounded."""
        name = f"{which}_logit_softcapping"
        if self.capped is None or (which == "attn" and not self.capped):
            return False
        return options.get(name) is not None or (self.capped and options.has_value(name))

    def _rope(self, options: Options, head_dim: int, inside: bool) -> tuple[dict[str, Any], float]:
        """Returns RoPE's arguments of layers with windows (`inside`) or without, and a factor of their scores."""
        part_of = None if self.part is None else head_dim
        if self.local is None:
            return options.rope(self.base, part_of=part_of, share=self.part or 1.0, long=True), options.scores()
        by_type = options.object("rope_parameters")
        options.refuse(
            not all(isinstance(value, dict) for value in by_type.values()),
            "RoPE that is not given for each type of layer",
        )
        values = by_type.get("sliding_attention" if inside else "full_attention")
        rope = dict(values) if isinstance(values, dict) else {}
        rope |= {} if inside else options.object("rope_scaling")
        name, base = self.local if inside else ("rope_theta", self.base)
        rope.setdefault("rope_theta", options.get(name, base))
        rope = {key: value for key, value in rope.items() if value is not None}
        return options.rope(self.base, part_of=part_of, rope=rope), options.scores(rope)

    def _names(self, layout: Layout) -> Iterator[TensorName]:
        yield replace(weight_name("embed", "model.embed_tokens"), centred=1 if self.centred else None)
        for i, layer in enumerate(layout.layers):
            prefix, upstream = f"layers.{i}", f"model.layers.{i}"
            for norm, name in self.norms.items():
                yield self._norm(norm, name).under(prefix, upstream) if not self.centred else _ones(f"{prefix}.{norm}")
            for block, place in ((layer.mixers[0].resolve(layout.d_model), "mixers.0"), (layer.ffn, "ffn")):
                assert block is not None
                yield from (name.under(f"{prefix}.{place}", upstream) for name in self._block(block))
        yield _ones("norm") if self.centred else self._norm("norm", "model.norm")
        if not layout.tied:
            yield weight_name("head", "lm_head")

    def _norm(self, name: str, upstream: str) -> TensorName:
        return replace(weight_name(name, upstream), plus=self.plus)

    def _block(self, block: Block) -> Iterator[TensorName]:
        if block.kind == "moe":
            assert self.experts is not None
            yield from self.experts.names(block)
            return
        joined = "".join(self.joined)
        for name in stock_names(block):
            part = name.keys[0].partition(".")[0]
            if part in joined and not part.endswith("_norm"):
                continue
            if self.pairs and part in ("q", "k"):
                name = replace(name, order=_pairs(block.int("head_dim"), block.int("rope_dim")))
            if part.endswith("_norm"):
                name = replace(name, plus=self.plus)
            yield replace(name, centred=0) if self.centred and part in ("o", "down") else name
        if self.sinks and block.kind == "swa":
            yield TensorName(("sinks.weight",), "self_attn.sinks")
        if block.spec.role == "mixer" and "qkv" in self.joined:
            rows = tuple(block.int(heads) * block.int("head_dim") for heads in ("heads", "kv_heads", "kv_heads"))
            yield TensorName(tuple(f"{name}.weight" for name in "qkv"), "self_attn.qkv_proj.weight", axis=0, sizes=rows)
        if block.spec.role == "ffn" and "gate_up" in self.joined:
            yield TensorName(("gate.weight", "up.weight"), "mlp.gate_up_proj.weight", axis=0)


_WIDEST = 1 << 20
"""Window of a layer that sees all tokens and has sinks, which blocks of windows have."""


def _ones(name: str) -> TensorName:
    return TensorName((f"{name}.weight",), "")


def _pairs(head_dim: int, turned: int) -> tuple[int, ...]:
    """Returns the order of rows where RoPE turns neighbours among the first `turned` (0: all) numbers of a head."""
    turned = turned or head_dim
    return (*range(0, turned, 2), *range(1, turned, 2), *range(turned, head_dim))


def _windows(options: Options, depth: int, stock: Stock) -> list[int | None]:
    """Returns the window of each layer; None: it sees all tokens."""
    kind = options.get("model_type")
    valid = {name: name for name in ("full_attention", "sliding_attention")}
    default = stock.window if options.has_value("sliding_window") else None
    value = options.get("sliding_window", default)
    if stock.windows == "all":
        return [None if value is None else options.whole("sliding_window", value)] * depth
    switched = stock.windows == "switch" and options.flag("use_sliding_window")
    if not options.has_value("sliding_window") or (not switched and (stock.windows != "types" or value is None)):
        return [None] * depth
    qwen = kind in ("qwen2", "qwen3")
    window = options.whole("sliding_window", 4096 if qwen else default)
    if options.get("layer_types") is not None:
        within = [kind == "sliding_attention" for kind in options.of_layers("layer_types", valid, depth)]
    elif stock.windows == "types":
        period = max(options.whole("sliding_window_pattern", abs(stock.period)), 1)
        within = [(i + (stock.period > 0)) % period != 0 for i in range(depth)]
    elif qwen:
        within = [i >= options.whole("max_window_layers", 28) for i in range(depth)]
    elif kind == "qwen2_moe":
        within = [i % 2 == 0 and i < options.whole("max_window_layers", 28) for i in range(depth)]
    else:
        within = [kind != "smollm3" or base == 0.0 for base in _bases(options, [None] * depth)]
    return [window if inside else None for inside in within]


def _bases(options: Options, windows: list[int | None]) -> list[float | None]:
    """Returns RoPE's base of each layer where the family's layers differ, 0: no positions; None: the model's."""
    kind, depth = options.get("model_type"), len(windows)
    if kind == "exaone4" and options.has_value("sliding_window"):
        return [0.0 if window is None else None for window in windows]
    if kind in ("granite_swa", "granitemoe_swa") and options.get("layer_rope_theta") is not None:
        bases = options.get("layer_rope_theta")
        if not isinstance(bases, list) or len(bases) != depth:
            raise InvalidInput(f"layer_rope_theta must be a list of {depth} numbers", where=options.where)
        return [0.0 if base == 0 else options.positive("layer_rope_theta", base) for base in bases]
    if kind != "smollm3":
        return [None] * depth
    flags = options.get("no_rope_layers")
    if flags is None:
        interval = options.whole("no_rope_layer_interval", 4)
        return [None if (i + 1) % max(interval, 1) != 0 else 0.0 for i in range(depth)]
    if not isinstance(flags, list) or len(flags) < depth:
        raise InvalidInput(f"no_rope_layers must be a list of {depth} numbers", where=options.where)
    return [None if flag else 0.0 for flag in flags[:depth]]


_GEMMA_2 = Stock(
    tied=True, head_dim=256, kv_heads=4, ffn="geglu", activation="hidden_activation", windows="types", window=4096,
    period=2,
    norms={**_GEMMA, **_BEHIND}, plus=1.0, constants=Constants.of_gemma, capped=True,
)  # fmt: skip
_GEMMA_3 = replace(_GEMMA_2, base=1e6, qk_norm=True, period=6, local=("rope_local_base_freq", 1e4), capped=False)
_GRANITE_EXPERTS = Experts(8, 2, "intermediate_size", 11008, router="router")
_GRANITE_SHARED = replace(_GRANITE_EXPERTS, shared="shared_intermediate_size")
HYBRID_EXPERTS = replace(_GRANITE_SHARED, joint_width=1024)
STOCK = {
    "arcee": Stock(eps=1e-5, ffn="relu2"),
    "ernie4_5": Stock(tied=True, base=5e5, eps=1e-5, head_dim=128, kv_heads=2, biases=("use_bias",), pairs=True),
    "exaone4": Stock(eps=1e-5, kv_heads=32, qk_norm=True, windows="types", window=4096, period=4, norms=_BEHIND),
    "gemma": Stock(tied=True, head_dim=256, kv_heads=16, ffn="geglu", plus=1.0, constants=Constants.of_gemma),
    "gemma2": _GEMMA_2,
    "gemma3": _GEMMA_3,
    "gemma3_text": _GEMMA_3,
    "glm": Stock(
        eps=1.5625e-7, head_dim=128, kv_heads=2, qkv_bias="attention_bias", biases=(), pairs=True, part=0.5,
        joined=("gate_up",),
    ),
    "glm4": Stock(
        eps=1.5625e-7, head_dim=128, kv_heads=2, qkv_bias="attention_bias", biases=(), pairs=True, part=0.5,
        joined=("gate_up",), norms=_GLM4,
    ),
    "granite": Stock(constants=Constants.of_granite),
    "granitemoe": Stock(constants=Constants.of_granite, experts=_GRANITE_EXPERTS),
    "granitemoe_swa": Stock(
        windows="types", window=128, period=-4, sinks=True, constants=Constants.of_granite, experts=_GRANITE_SHARED
    ),
    "granitemoeshared": Stock(constants=Constants.of_granite, experts=_GRANITE_SHARED),
    "granite_swa": Stock(
        tied=True, eps=1e-5, kv_heads=4, windows="types", window=128, period=-4, sinks=True,
        constants=Constants.of_granite,
    ),
    "helium": Stock(base=1e5, eps=1e-8, head_dim=128, kv_heads=20, pairs=True),
    "llama": Stock(),
    "mistral": Stock(kv_heads=8, windows="all", window=4096),
    "mixtral": Stock(
        base=1e6, eps=1e-5, kv_heads=8, windows="all", experts=Experts(8, 2, "intermediate_size", 14336)
    ),
    "olmo": Stock(centred=True),
    "olmo2": Stock(eps=1e-5, qk_norm=True, qk_norm_wide=True, norms=_BEHIND),
    "olmo3": Stock(
        base=5e5, eps=1e-5, qk_norm=True, qk_norm_wide=True, windows="types", window=4096, period=4, local=("", 5e5),
        norms=_BEHIND,
    ),
    "olmoe": Stock(
        eps=1e-5, qk_norm=True, qk_norm_wide=True,
        experts=Experts(64, 8, "intermediate_size", 2048, norm_topk="norm_topk_prob"),
    ),
    "phi3": Stock(eps=1e-5, windows="all", part=1.0, joined=("qkv", "gate_up")),
    "qwen2": Stock(kv_heads=32, qkv_bias=True, biases=(), windows="switch"),
    "qwen2_moe": Stock(
        kv_heads=16, qkv_bias="qkv_bias", biases=(), windows="switch", window=4096,
        experts=Experts(
            60, 4, "moe_intermediate_size", 1408, norm_topk="norm_topk_prob",
            shared="shared_expert_intermediate_size", joint_width=5632, gated=True,
        ),
    ),
    "qwen3_moe": Stock(
        kv_heads=4, qk_norm=True, windows="switch", window=4096,
        experts=Experts(128, 8, "moe_intermediate_size", 768, norm_topk="norm_topk_prob"),
    ),
    "qwen3": Stock(head_dim=128, kv_heads=32, qk_norm=True, windows="switch"),
    "smollm3": Stock(tied=True, base=2e6, kv_heads=4, windows="switch"),
    "vaultgemma": replace(_GEMMA_2, norms=_GEMMA),
}  # fmt: skip
