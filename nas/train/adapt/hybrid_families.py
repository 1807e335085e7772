"""Families of transformers whose layers differ, or have other mixers than attention: each has a reader of its own.

Defaults are those of transformers' configuration classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from nas.core.block import Block
from nas.core.errors import InvalidInput
from nas.core.layout import MAX_DEPTH, Layer, Layout, Norms
from nas.model.blocks.mamba2 import inner_width
from nas.model.nn.transformers import CONV_NAMES, TensorName, stock_names, tensor_names, weight_name
from nas.train.adapt.configuration import (
    ACTIVATIONS,
    EPS,
    MOST_SHARE,
    Constants,
    Options,
    TrainedModel,
    attention_shape,
    model_size,
    trained_model,
)
from nas.train.adapt.stock_families import BEFORE, GRANITE_FFN, HYBRID_EXPERTS

LayerNames = Mapping[str, Iterable[TensorName]]
"""Place in a layer of ours ("": itself) -> the tensors there, by their names below a layer of theirs."""
_NORMS = tuple(weight_name(*norm) for norm in BEFORE.items())


def _names(
    layout: Layout, layers: Iterable[LayerNames], norm: str = "norm", plus: float = 0.0
) -> tuple[TensorName, ...]:
    """Returns the tensors of a model, whose last norm is `norm` there and has `plus` added."""
    names = [weight_name("embed", "model.embed_tokens")]
    for i, parts in enumerate(layers):
        for place, part in parts.items():
            names += (name.under(f"layers.{i}{place}", f"model.layers.{i}") for name in part)
    names.append(replace(weight_name("norm", f"model.{norm}"), plus=plus))
    return (*names, *(() if layout.tied else [weight_name("head", "lm_head")]))


def _granite_hybrid(options: Options) -> TrainedModel:
    d_model, depth, vocab = model_size(options)
    options.activation()
    options.refuse_biases("attention_bias")
    attention = attention_shape(options, d_model, qk_norm=False)
    turned = options.get("position_embedding_type") == "rope"
    attention |= options.rope() if turned else {"rope_theta": 0.0}
    valid = dict.fromkeys(("attention", "full_attention"), "gqa") | dict.fromkeys(
        ("mamba", "linear_attention"), "mamba2"
    )
    named = [name for name in ("layer_types", "layers_block_type") if options.get(name) is not None]
    kinds = options.of_layers(named[0], valid, depth) if named else ["mamba2"] * depth
    mixers = {"gqa": Block.of("gqa", **attention)}
    eps = options.number("rms_norm_eps", 1e-6)
    if "mamba2" in kinds:
        mixers["mamba2"] = _granite_mamba(options, eps)
    if options.whole("num_local_experts", 8) > 0:
        ffn = HYBRID_EXPERTS.read(options)
    else:
        ffn = Block.of("swiglu", width=options.whole("shared_intermediate_size", 1024))
    layers = [Layer((mixers[kind],), ffn) for kind in kinds if kind] or [Layer((mixers["gqa"],), ffn)]
    layout = Layout.of(d_model, vocab, layers, tied=options.tied(False))
    names = _names(layout, map(_granite_layer, layout.layers))
    scores = [options.scores() if turned else 1.0] * depth
    return trained_model(options, layout, names, eps, Constants.of_granite(options), scores)


def _granite_mamba(options: Options, eps: float) -> Block:
    options.refuse_biases("mamba_proj_bias")
    options.refuse(not options.flag("mamba_conv_bias", True), "Mamba-2 without bias in its convolution")
    options.refuse_norms(eps)
    _unlimited(options)
    return Block.of(
        "mamba2",
        state=options.whole("mamba_d_state", 256),
        heads=options.whole("mamba_n_heads", 128),
        expand=options.whole("mamba_expand", 2),
        conv=options.taps("mamba_d_conv"),
        groups=options.whole("mamba_n_groups", 1),
    )


def _unlimited(options: Options) -> None:
    limit = options.get("time_step_limit", _NO_LIMIT)
    infinite = ({"__float__": "Infinity"}, "Infinity", math.inf)  # as releases of transformers write it
    options.refuse(limit not in [[0.0, value] for value in infinite], f"limited time steps ({limit})")


_NO_LIMIT = [0.0, math.inf]
_GRANITE_MAMBA = (
    weight_name("in_proj", "mamba.in_proj"),
    TensorName(("conv.weight",), "mamba.conv1d.weight", tap_axis=True),
    TensorName(("conv.bias",), "mamba.conv1d.bias"),
    *(TensorName((name,), f"mamba.{name}") for name in ("dt_bias", "A_log", "D")),
    weight_name("norm", "mamba.norm"),
    weight_name("out", "mamba.out_proj"),
)
_GRANITE_ATTENTION = tuple(weight_name(name, f"self_attn.{name}_proj") for name in "qkvo")


def _granite_layer(layer: Layer) -> LayerNames:
    assert layer.ffn is not None
    return {
        "": _NORMS,
        ".mixers.0": _GRANITE_MAMBA if layer.mixers[0].kind == "mamba2" else _GRANITE_ATTENTION,
        ".ffn": HYBRID_EXPERTS.names(layer.ffn) if layer.ffn.kind == "moe" else GRANITE_FFN,
    }


_HALVES = {
    "mamba": (
        *(weight_name(name, f"mixer.{name}") for name in ("in_proj", "x_proj", "dt_proj")),
        TensorName(("conv.weight",), "mixer.conv1d.weight", tap_axis=True),
        TensorName(("conv.bias",), "mixer.conv1d.bias"),
        TensorName(("dt_bias",), "mixer.dt_proj.bias"),
        *(TensorName((name,), f"mixer.{name}") for name in ("A_log", "D")),
        weight_name("out", "mixer.out_proj"),
    ),
    "mamba2": tuple(replace(name, upstream=name.upstream.replace("mamba.", "mixer.")) for name in _GRANITE_MAMBA),
    "gqa": tuple(weight_name(name, f"mixer.{name}_proj") for name in "qkvo"),
    "relu2": tuple(weight_name(name, f"mixer.{name}_proj") for name in ("up", "down")),
}


def _nemotron_h(options: Options) -> TrainedModel:
    """Reads layers of one block each."""
    d_model = options.whole("hidden_size")
    kinds = _nemotron_kinds(options)
    options.activation(ACTIVATIONS["relu2"], "mlp_hidden_act")
    options.activation(key="mamba_hidden_act")
    options.refuse_biases("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias")
    has_bias = options.flag("mamba_conv_bias", options.flag("use_conv_bias", True))
    options.refuse(not has_bias, "Mamba-2 without bias in its convolution")
    eps = options.number("layer_norm_epsilon", EPS)
    if "mamba2" in kinds:
        options.refuse_norms(eps)
    heads = options.whole("mamba_num_heads", 128)
    taps, groups = ("mamba_d_conv" if options.get("mamba_d_conv") else "conv_kernel"), options.whole("n_groups", 8)
    inner = heads * options.whole("mamba_head_dim", 64)
    attention = attention_shape(options, d_model, qk_norm=False, head_dim=128, kv_heads=8) | {"rope_theta": 0.0}
    ffn = Block.of("relu2", width=options.whole("intermediate_size", 21504))
    halves = {"gqa": Layer((Block.of("gqa", **attention),)), "relu2": Layer(ffn=ffn)}
    if "mamba2" in kinds:
        mamba = Block.of(
            "mamba2",
            state=options.whole("ssm_state_size", 128),
            heads=heads,
            conv=options.taps(taps),
            groups=options.whole("mamba_n_groups", groups),
            **_inner(inner, d_model),
        )
        halves["mamba2"] = Layer((mamba,))
    layers = [halves[kind] for kind in kinds if kind in halves] or [halves["gqa"]]
    layout = Layout.of(d_model, options.whole("vocab_size"), layers, tied=options.tied(False))
    return trained_model(options, layout, _names(layout, map(_half_layer, layout.layers), "norm_f"), eps)


def _inner(inner: int, d_model: int) -> dict[str, int]:
    """Returns the arguments of Mamba-2 that say how wide it is inside."""
    whole = d_model > 0 and inner % d_model == 0 and inner > 0
    return {"expand": inner // d_model} if whole else {"inner": inner}


def _falcon_h1(options: Options) -> TrainedModel:
    """Reads layers of Mamba-2 and attention beside each other, each with multipliers of its own."""
    d_model, depth, vocab = model_size(options)
    options.activation()
    options.refuse_biases("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias")
    options.refuse(not options.flag("mamba_conv_bias", True), "Mamba-2 without bias in its convolution")
    _unlimited(options)
    eps, normed = options.number("rms_norm_eps", EPS), options.flag("mamba_rms_norm")
    options.refuse(
        normed and options.flag("mamba_norm_before_gate", True), "Mamba-2 with its norm in front of the gate"
    )
    if normed:
        options.refuse_norms(eps)
    mamba = Block.of(
        "mamba2",
        state=options.whole("mamba_d_state", 256),
        heads=options.whole("mamba_n_heads", 128),
        conv=options.taps("mamba_d_conv"),
        groups=options.whole("mamba_n_groups", 1),
        norm=normed,
        **_inner(
            options.whole(
                "mamba_d_ssm", 1024 if options.has_value("mamba_d_ssm") else options.whole("mamba_expand", 2) * d_model
            ),
            d_model,
        ),
    )
    attention = Block.of("gqa", **attention_shape(options, d_model, qk_norm=False, kv_heads=8), **options.rope())
    ffn = Block.of("swiglu", width=options.whole("intermediate_size", 14336))
    layout = Layout.of(d_model, vocab, [Layer((mamba, attention), ffn)] * depth, tied=options.tied(False))
    head = options.number("lm_head_multiplier", 1.0)
    # Of a head of its own it becomes part, as in llama.cpp's converter.
    constants = Constants(options.number("embedding_multiplier", 1.0), logits=1 / head if layout.tied else 1.0)
    names = _falcon_h1_layer(mamba, attention.resolve(d_model))
    scores = [options.scores()] * depth
    model = trained_model(options, layout, _names(layout, [names] * depth, "final_layernorm"), eps, constants, scores)
    factors = dict(model.factors) | ({} if layout.tied else {"head.weight": head})
    for i in range(depth):
        for name, factor in _falcon_h1_factors(options, mamba, d_model).items():
            name = f"layers.{i}.{name}"
            factors[name] = factor if isinstance(factor, tuple) else factor * model.factors.get(name, 1.0)
    return replace(model, factors=factors)


def _falcon_h1_factors(options: Options, mamba: Block, d_model: int) -> dict[str, Any]:
    """Returns the multipliers of a layer, by the tensors that they become part of."""
    gate, down = options.numbers("mlp_multipliers", 2)
    inner, shared = inner_width(mamba, d_model), mamba.int("groups") * mamba.int("state")
    widths = (inner, inner, shared, shared, mamba.int("heads"))
    scale = options.number("ssm_in_multiplier", 1.0)
    parts = zip(options.numbers("ssm_multipliers", 5), widths, strict=True)
    read, keys = options.number("attention_in_multiplier", 1.0), options.number("key_multiplier", 1.0)
    return {
        "mixers.0.in_proj.weight": tuple(scale * part for part, width in parts for _ in range(width)),
        "mixers.0.out.weight": options.number("ssm_out_multiplier", 1.0),
        "mixers.1.q.weight": read,
        "mixers.1.k.weight": read * keys,
        "mixers.1.v.weight": read,
        "mixers.1.o.weight": options.number("attention_out_multiplier", 1.0),
        "ffn.gate.weight": gate,
        "ffn.down.weight": down,
    }


def _falcon_h1_layer(mamba: Block, attention: Block) -> LayerNames:
    return {
        "": (weight_name("mixer_norm", "input_layernorm"), weight_name("ffn_norm", "pre_ff_layernorm")),
        ".mixers.0": [name for name in _GRANITE_MAMBA if mamba.get("norm") or "norm" not in name.upstream],
        ".mixers.1": stock_names(attention),
        ".ffn": [weight_name(part, f"feed_forward.{part}_proj") for part in _FFN],
    }


def _mamba(options: Options) -> TrainedModel:
    """Reads layers of Mamba, or of Mamba-2, alone."""
    d_model, depth, vocab = model_size(options)
    second = options.get("model_type") == "mamba2"
    options.activation()
    options.refuse_biases("use_bias")
    options.refuse(not options.flag("use_conv_bias", True), "Mamba without bias in its convolution")
    eps = options.number("layer_norm_epsilon", EPS)
    shape = {"expand": options.whole("expand", 2), "conv": options.taps("conv_kernel")}
    if second:
        _unlimited(options)
        options.refuse_norms(eps)
        shape |= {"state": options.whole("state_size", 128), "heads": options.whole("num_heads", 128)}
        mixer = Block.of("mamba2", groups=options.whole("n_groups", 8), **shape)
    else:
        inner = options.whole("intermediate_size", shape["expand"] * d_model)
        options.refuse(inner != shape["expand"] * d_model, f"Mamba of inner width {inner}, other than by expand")
        if options.get("time_step_rank", "auto") != "auto":
            shape["rank"] = options.whole("time_step_rank")
        mixer = Block.of("mamba", state=options.whole("state_size", 16), **shape)
    layout = Layout.of(d_model, vocab, [Layer((mixer,))] * depth, tied=options.tied(not second))
    return trained_model(options, layout, _names(layout, map(_half_layer, layout.layers), "norm_f"), eps)


def _latent(options: Options) -> TrainedModel:
    """Reads multi-head latent attention; behind the first layers of DeepSeek-V3 feed-forwards are mixtures."""
    d_model, depth, vocab = model_size(options)
    options.activation()
    options.refuse_biases("attention_bias", "mlp_bias")
    rope = options.rope()
    options.refuse(len(rope) > 1, "scaled RoPE in latent attention")
    mixer = Block.of(
        "mla",
        heads=options.whole("num_attention_heads"),
        latent=options.whole("kv_lora_rank", 512),
        head_dim=options.whole("v_head_dim", 128),
        nope_dim=options.whole("qk_nope_head_dim", 128),
        rope_dim=options.whole("qk_rope_head_dim", 64),
        query=options.whole("q_lora_rank", 1536) if options.has_value("q_lora_rank") else 0,
        rope_theta=rope["rope_theta"],
    )
    dense, experts = Block.of("swiglu", width=options.whole("intermediate_size")), options.get("model_type") != "youtu"
    lead = options.whole("first_k_dense_replace", 3) if experts else depth
    mixture = _grouped_experts(options) if lead < depth else dense
    layers = [Layer((mixer,), dense if i < lead else mixture) for i in range(depth)]
    layout = Layout.of(d_model, vocab, layers, tied=options.tied(not experts))
    constants = Constants(experts=options.number("routed_scaling_factor", 2.5) if experts else 1.0)
    pairs = options.flag("rope_interleave", True)
    named = (_latent_layer(mixer.resolve(d_model), layer.ffn, pairs) for layer in layout.layers)
    return trained_model(options, layout, _names(layout, named), options.number("rms_norm_eps", 1e-6), constants)


def _grouped_experts(options: Options) -> Block:
    options.refuse(options.whole("n_group", 8) > 1, "groups of experts")
    count = "n_routed_experts" if options.get("n_routed_experts") is not None else "num_local_experts"
    return Block.of(
        "moe",
        experts=options.whole(count, 256),
        top_k=options.whole("num_experts_per_tok", 8),
        width=options.whole("moe_intermediate_size", 2048),
        shared=options.whole("n_shared_experts", 1),
        norm_topk=options.flag("norm_topk_prob", True),
    )


def _latent_layer(mla: Block, ffn: Block | None, pairs: bool) -> LayerNames:
    """Returns the tensors of a layer; pairs: whether RoPE turns neighbouring numbers."""
    assert ffn is not None
    heads, latent, value, nope, turned = (
        mla.int(name) for name in ("heads", "latent", "head_dim", "nope_dim", "rope_dim")
    )
    order = (*range(0, turned, 2), *range(1, turned, 2)) if pairs else range(turned)
    query = replace(
        weight_name("q_up", "self_attn.q_b_proj") if mla.int("query") else weight_name("q", "self_attn.q_proj"),
        order=(*range(nope), *(nope + i for i in order)),
    )
    ranks = (weight_name("q_down", "self_attn.q_a_proj"), weight_name("q_norm", "self_attn.q_a_layernorm"))
    # Keys and values of a head are neighbours there.
    size = nope + value
    keys, values = (
        [head * size + i for head in range(heads) for i in part] for part in (range(nope), range(nope, size))
    )
    if ffn.kind == "moe":
        feeding = [
            weight_name("router", "mlp.gate"),
            TensorName(("bias.weight",), "mlp.gate.e_score_correction_bias"),
            TensorName(("gate.weight", "up.weight"), "mlp.experts.gate_up_proj"),
            TensorName(("down.weight",), "mlp.experts.down_proj"),
        ]
        if ffn.int("shared"):
            feeding += [weight_name(f"shared.{part}", f"mlp.shared_experts.{part}_proj") for part in _FFN]
    else:
        feeding = list(stock_names(ffn))
    return {
        "": _NORMS,
        ".mixers.0": [
            *(ranks if mla.int("query") else ()),
            query,
            replace(
                weight_name("kv_down", "self_attn.kv_a_proj_with_mqa"),
                order=(*range(latent), *(latent + i for i in order)),
            ),
            weight_name("kv_norm", "self_attn.kv_a_layernorm"),
            TensorName(
                ("k_up.weight", "v_up.weight"),
                "self_attn.kv_b_proj.weight",
                axis=0,
                sizes=(heads * nope, heads * value),
                order=(*keys, *values),
                transposed=heads,
            ),
            weight_name("o", "self_attn.o_proj"),
        ],
        ".ffn": feeding,
    }


def _nemotron_kinds(options: Options) -> list[str]:
    pattern, names = options.get("hybrid_override_pattern"), options.get("layers_block_type")
    if names is None and isinstance(pattern, str):
        names = [{"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}.get(letter, letter) for letter in pattern]
    if not isinstance(names, list) or not 1 <= len(names) <= MAX_DEPTH:
        raise InvalidInput("layers_block_type must be a list of names, one a layer", where=options.where)
    valid = {
        "mamba": "mamba2",
        "linear_attention": "mamba2",
        "attention": "gqa",
        "full_attention": "gqa",
        "mlp": "relu2",
    }
    for name in names:
        options.refuse(name == "moe", "experts of squared ReLU without a gate (layers of type 'moe')")
        options.refuse(name not in (*valid, "moe"), f"layers of type {name!r}")
    return [valid.get(str(name), "") for name in names]


def _half_layer(layer: Layer) -> LayerNames:
    block = layer.mixers[0] if layer.mixers else layer.ffn
    assert block is not None
    norm, place = ("mixer_norm", ".mixers.0") if layer.mixers else ("ffn_norm", ".ffn")
    return {"": [weight_name(norm, "norm")], place: _HALVES[block.kind]}


def _lfm2(options: Options) -> TrainedModel:
    d_model, depth, vocab = model_size(options)
    options.refuse_biases("conv_bias")
    moe = options.get("model_type") == "lfm2_moe"
    attention = attention_shape(options, d_model, qk_norm=True, kv_heads=8) | options.rope(1e6)
    mixers = {"gqa": Block.of("gqa", **attention), "conv": Block.of("conv", kernel=options.whole("conv_L_cache", 3))}
    if options.get("layer_types") is None and isinstance(options.get("full_attn_idxs"), list):
        kinds = ["gqa" if i in options.get("full_attn_idxs") else "conv" for i in range(depth)]
    else:
        kinds = options.of_layers("layer_types", {"full_attention": "gqa", "conv": "conv"}, depth)
    options.refuse("conv" not in kinds, "an LFM2 without convolutions")
    dense = Block.of("swiglu", width=options.whole("intermediate_size", 7168) if moe else _lfm2_width(options))
    lead = options.whole("num_dense_layers", 2) if moe else depth
    experts = _lfm2_experts(options) if moe else dense
    layers = [Layer((mixers[kind],), dense if i < lead else experts) for i, kind in enumerate(kinds) if kind]
    layers = layers or [Layer((mixers["gqa"],), dense)]
    tied = options.tied(options.flag("tie_word_embeddings", True), "tie_embedding")
    layout = Layout.of(d_model, vocab, layers, tied=tied)
    names = () if options.missing else tuple(tensor_names(layout))
    if moe and not options.flag("use_expert_bias", True):
        options.missing.append("experts without a bias (use_expert_bias)")
    constants = Constants(experts=options.number("routed_scaling_factor", 1.0) if moe else 1.0)
    scores = [options.scores()] * depth
    return trained_model(options, layout, names, options.number("norm_eps", EPS), constants, scores)


def _lfm3(options: Options) -> TrainedModel:
    d_model, depth, vocab = model_size(options)
    options.activation()
    options.refuse_biases("conv_bias", "attention_bias")
    attention = attention_shape(options, d_model, qk_norm=True, head_dim=128, kv_heads=4)
    attention["gate"] = options.flag("use_attention_gate", True)
    mixers = {"conv": Block.of("conv", kernel=options.whole("conv_L_cache", 7))}
    orders: dict[str, tuple[int, ...]] = {}
    scores: dict[str, float] = {}
    for kind in _LFM3_ROPE:
        ropes = options.object("rope_scaling") or options.object("rope_parameters") or _LFM3_ROPE
        rope = ropes.get(kind, ropes)
        if not isinstance(rope, dict):
            raise InvalidInput("rope_parameters must be an object of objects", where=options.where)
        rope = {key: value for key, value in rope.items() if value is not None}
        shape, orders[kind] = _proportional(options, {"rope_theta": 1e6, **rope}, attention["head_dim"])
        scores[kind] = options.scores(rope)
        window = options.whole("sliding_window", 256)
        mixers[kind] = (
            Block.of("gqa", **attention, **shape)
            if kind == "full_attention"
            else Block.of("swa", window=window, **attention, **shape)
        )
    if options.get("layer_types") is None:
        names = [
            "full_attention" if i % 4 == 2 else "conv" if i % 4 or i == 0 else "sliding_attention" for i in range(depth)
        ]
    else:
        names = options.of_layers("layer_types", {name: name for name in mixers}, depth)
    ffn = Block.of("swiglu", width=options.whole("intermediate_size", 7680))
    layers = [Layer((mixers[name],), ffn) for name in names if name] or [Layer((mixers["conv"],), ffn)]
    norms: Norms = "both" if options.flag("use_sandwich_norm", True) else "before"
    layout = Layout.of(d_model, vocab, layers, tied=options.tied(True), norms=norms)
    eps = options.number("norm_eps", options.number("rms_norm_eps", EPS))
    if options.missing:
        return trained_model(options, layout, (), eps)
    named = (
        _lfm3_layer(layer.mixers[0], orders.get(name, ()), norms)
        for layer, name in zip(layout.layers, names, strict=True)
    )
    scaled = [scores.get(name, 1.0) for name in names]
    return trained_model(options, layout, _names(layout, named, "embedding_norm"), eps, scaled=scaled)


_LFM3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}


def _proportional(options: Options, rope: dict[str, Any], head_dim: int) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Returns RoPE's arguments of a layer, and the order of a head's rows.

    Of type "proportional" the first pairs of a head turn, as fast as where all do, and the others do not. With their
    rows in front that is RoPE on a part of the head, by a power of the base.
    """
    if rope.get("rope_type") != "proportional":
        return options.rope(1e6, rope=rope), ()
    options.refuse(rope.get("factor", 1.0) != 1.0, "RoPE of type 'proportional' with a factor")
    share = options.positive("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0))
    base = options.positive("rope_theta", rope.get("rope_theta"))
    pairs = int(min(share, MOST_SHARE) * head_dim // 2)
    options.refuse(not 0 < pairs <= head_dim // 2, f"RoPE of type 'proportional' on {share!r} of a head")
    if 2 * pairs == head_dim:
        return {"rope_theta": base}, ()
    half = head_dim // 2
    order = (*range(pairs), *range(half, half + pairs), *range(pairs, half), *range(half + pairs, head_dim))
    return {"rope_theta": base ** (2 * pairs / head_dim), "rope_dim": 2 * pairs}, order


def _lfm3_layer(mixer: Block, order: tuple[int, ...], norms: Norms) -> LayerNames:
    """Returns the tensors of a layer; order: of the rows of a head of queries and keys."""
    turned = ("q.weight", "k.weight", "q_norm.weight", "k_norm.weight")
    behind = {"mixer_out_norm": "post_operator_norm", "ffn_out_norm": "post_ffn_norm"} if norms == "both" else {}
    return {
        "": [weight_name(*norm) for norm in {"mixer_norm": "operator_norm", "ffn_norm": "ffn_norm", **behind}.items()],
        ".mixers.0": [
            replace(name, order=order if name.keys[0] in turned else ())
            for name in (CONV_NAMES if mixer.kind == "conv" else stock_names(mixer))
        ],
        ".ffn": [
            weight_name(part, f"feed_forward.{name}") for part, name in zip(_FFN, ("w1", "w3", "w2"), strict=True)
        ],
    }


_FFN = ("gate", "up", "down")


def _qwen3_5(options: Options) -> TrainedModel:
    """Reads attention with a gate for each of its numbers, and Gated DeltaNet."""
    d_model, depth, vocab = model_size(options)
    options.activation()
    options.refuse_biases("attention_bias")
    eps = options.number("rms_norm_eps", 1e-6)
    attention = attention_shape(options, d_model, qk_norm=True, head_dim=256, kv_heads=4)
    attention |= options.rope(part_of=attention["head_dim"], share=0.25)
    keys, values = options.whole("linear_key_head_dim", 128), options.whole("linear_value_head_dim", 128)
    options.refuse(keys != values, f"Gated DeltaNet with keys of {keys} and values of {values} numbers")
    delta = Block.of(
        "gdn",
        heads=options.whole("linear_num_value_heads", 32),
        key_heads=options.whole("linear_num_key_heads", 16),
        head_dim=values,
        conv=options.taps("linear_conv_kernel_dim"),
        norm_eps=min(eps, 1e-2),
    )
    mixers = {"full_attention": Block.of("gqa", gate=True, gate_wide=True, **attention), "linear_attention": delta}
    if options.get("layer_types") is None:
        every = max(options.whole("full_attention_interval", 4), 1)
        kinds = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(depth)]
    else:
        kinds = options.of_layers("layer_types", {name: name for name in mixers}, depth)
    ffn = Block.of("swiglu", width=options.whole("intermediate_size", 12288))
    layers = [Layer((mixers[kind],), ffn) for kind in kinds if kind] or [Layer((delta,), ffn)]
    layout = Layout.of(d_model, vocab, layers, tied=options.tied(False))
    if options.missing:
        return trained_model(options, layout, (), eps)
    named = (_qwen3_5_layer(layer.mixers[0].resolve(d_model), ffn) for layer in layout.layers)
    return trained_model(options, layout, _names(layout, named, plus=1.0), eps, scaled=[options.scores()] * depth)


def _qwen3_5_layer(mixer: Block, ffn: Block) -> LayerNames:
    return {
        "": [replace(name, plus=1.0) for name in _NORMS],
        ".mixers.0": _delta_names(mixer) if mixer.kind == "gdn" else _doubled_names(mixer),
        ".ffn": stock_names(ffn),
    }


def _doubled_names(block: Block) -> Iterator[TensorName]:
    """Yields attention whose queries have their gates behind them, head by head."""
    heads, size = block.int("heads"), block.int("head_dim")
    order = tuple(2 * size * head + part * size + i for part in (0, 1) for head in range(heads) for i in range(size))
    yield TensorName(("q.weight", "gate.weight"), "self_attn.q_proj.weight", axis=0, order=order)
    for name in stock_names(block):
        part = name.keys[0].partition(".")[0]
        if part not in ("q", "gate"):
            yield replace(name, plus=1.0 if part.endswith("_norm") else 0.0)


def _delta_names(block: Block) -> Iterator[TensorName]:
    """Yields Gated DeltaNet. Of r heads with one key they are neighbours there; here they are a whole round apart."""
    heads, groups, size = (block.int(name) for name in ("heads", "key_heads", "head_dim"))
    order = tuple(i % groups * (heads // groups) + i // groups for i in range(heads))
    values = tuple(size * head + i for head in order for i in range(size))
    keys = 2 * groups * size
    mixed = (*range(keys), *(keys + row for row in values))
    place = "linear_attn"
    yield replace(weight_name("qkv", f"{place}.in_proj_qkv"), order=mixed)
    yield TensorName(("conv.weight",), f"{place}.conv1d.weight", tap_axis=True, order=mixed)
    yield replace(weight_name("gate", f"{place}.in_proj_z"), order=values)
    yield replace(weight_name("beta", f"{place}.in_proj_b"), order=order)
    yield replace(weight_name("step_size", f"{place}.in_proj_a"), order=order)
    yield from (TensorName((name,), f"{place}.{name}", order=order) for name in ("dt_bias", "A_log"))
    yield weight_name("norm", f"{place}.norm")
    yield replace(weight_name("out", f"{place}.out_proj"), order=values, order_axis=1)


def _lfm2_width(options: Options) -> int:
    """Returns the feed-forward's width as transformers' Lfm2MLP computes it."""
    width = options.whole("block_ff_dim", options.whole("intermediate_size", 12288))
    if not options.flag("block_auto_adjust_ff_dim", True):
        return width
    width = int(options.number("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
    multiple = max(1, options.whole("block_multiple_of", 256))
    return -(-width // multiple) * multiple


def _lfm2_experts(options: Options) -> Block:
    options.refuse(
        not options.flag("norm_topk_prob", True), "experts whose weights do not add up to one (norm_topk_prob)"
    )
    return Block.of(
        "moe",
        experts=options.whole("num_experts", 32),
        top_k=options.whole("num_experts_per_tok", 4),
        width=options.whole("moe_intermediate_size", 1792),
    )


HYBRIDS: dict[str, Callable[[Options], TrainedModel]] = {
    "falcon_h1": _falcon_h1,
    "deepseek_v3": _latent,
    "mamba": _mamba,
    "mamba2": _mamba,
    "nemotron_h": _nemotron_h,
    "granitemoehybrid": _granite_hybrid,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "lfm3": _lfm3,
    "qwen3_5": _qwen3_5,
    "qwen3_5_text": _qwen3_5,
    "youtu": _latent,
}
"""transformers' `model_type` -> reader of its configuration."""
