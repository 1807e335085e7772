"""Values of a config.json of Hugging Face's transformers, and how its constants are used.

Families whose forward pass is that of `nas.model.nn.model` up to constants are read; constants become part of the
weights:

    rms_norm_eps e        Our epsilon is E = 1e-5. With c = sqrt(E / e), RMSNorm(c x; E) = RMSNorm(x; e). So the
                          embedding and every projection into the residual stream are multiplied by c, and the
                          projections in front of QK-norm, too; those in front of norms of latents by one of their own.
    embedding_multiplier  on the embedding; residual_multiplier and routed_scaling_factor on those projections
    attention_multiplier  times sqrt(head_dim) on the queries, since we divide scores by sqrt(head_dim); with QK-norm on
                          its gain. query_pre_attn_scalar of Gemma is 1 / attention_multiplier^2.
    logits_scaling        on the last norm's gain, as is what a tied embedding must not add to the logits
    attention_factor      of YaRN, squared, on the queries likewise; of LongRoPE on their rows that turn
    multipliers           of Falcon-H1, on the rows of the projections in front of them or behind them
    norms by 1 + w        w + 1 is the gain
    LayerNorm without     Means are subtracted from the embedding and from projections into the residual stream, which
      weights and biases  has none then, so that LayerNorm is RMSNorm.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from nas.core.errors import InvalidInput
from nas.core.layout import MAX_DEPTH, Layout
from nas.model.nn.transformers import TensorName
from nas.train.adapt.gguf_model import TheirTensors

EPS = 1e-5
"""Epsilon of every norm of `nas.model.nn.model`."""
_LATENT_NORM = math.sqrt(EPS / 1e-6)
"""In front of norms of latents, whose epsilon is that of transformers' classes, not the configuration's."""
MOST_SHARE = 2.0
"""A share of a head that no check lets pass, for those above 1."""
_INTO_RESIDUAL = ("o.weight", "out.weight", "down.weight")
"""Projections into the residual stream."""
ACTIVATIONS = {
    "swiglu": ("silu", "swish"),
    "relu2": ("relu2",),
    "geglu": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh"),
}
"""Block kind -> activations that it has, by their names in configurations; the first is the default."""
SEVERAL_BASES = "several bases of RoPE"

Factor = float | tuple[float, ...]
"""What a tensor is multiplied by: all of it, or each of its rows."""


@dataclass(frozen=True)
class TrainedModel:
    """A model that is adapted.

    Args:
        layout: of it.
        family: transformers' name of the architecture, or "hilnas".
        names: tensors of the files, and what ours they hold; none: they have our names. One without a name of theirs
            holds ones.
        factors: our tensor -> what it is multiplied by; those left out are as in the file.
        left_out: what the model has besides.
    """

    layout: Layout
    family: str
    names: tuple[TensorName, ...] = ()
    factors: Mapping[str, Factor] = field(default_factory=dict)
    left_out: str = ""


class Source(Protocol):
    """A model that is read."""

    @property
    def where(self) -> str:
        """Its file, for messages."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """What its config.json says, or would say."""
        ...

    @property
    def left_out(self) -> str:
        """What is not read of it."""
        ...

    @property
    def rope_dim(self) -> int:
        """Numbers of a head that RoPE turns, where the file says that apart from its configuration; 0: it does not."""
        ...

    def tensors(self) -> TheirTensors:
        """Opens the weights."""
        ...

    def has_other_head(self) -> bool:
        """Returns whether there is a head that differs from the embedding: then transformers does not tie them."""
        ...


def _rope_type(rope: Mapping[str, Any]) -> Any:
    """Returns the type of RoPE's scaling, under the name of today; that with two lists of numbers had others."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    return "longrope" if kind == "su" or (kind == "yarn" and "long_factor" in rope) else kind


class Options:
    """The values of a config.json, and what of them no layout can say."""

    def __init__(self, config: Mapping[str, Any], source: Source, where: str) -> None:
        self._config, self._source, self.where = config, source, where
        self.missing: list[str] = []

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a value, or `default` where it is missing or null."""
        value = self._config.get(name)
        return default if value is None else value

    def has_value(self, name: str) -> bool:
        """Returns whether a value is not null; a missing one is the class's default."""
        return name not in self._config or self._config[name] is not None

    def whole(self, name: str, default: int | None = None) -> int:
        """Returns a whole number."""
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise InvalidInput(f"{name} must be a whole number, not {value!r}", where=self.where)
        return value

    def taps(self, name: str) -> int:
        """Returns how many tokens the convolution in front of a recurrence reads; 4 where none is named."""
        taps = self.whole(name, 4)
        self.refuse(taps < 2, f"convolutions of {taps} taps ({name})")
        return max(taps, 2)

    def number(self, name: str, default: float) -> float:
        """Returns a positive number."""
        return self.positive(name, self.get(name, default))

    def numbers(self, name: str, count: int, inside: Mapping[str, Any] | None = None) -> list[float]:
        """Returns `count` positive numbers, of the object `inside` if that is given; ones where there are none."""
        values = self.get(name, [1.0] * count) if inside is None else inside.get(name)
        if not isinstance(values, list) or len(values) != count:
            raise InvalidInput(f"{name} must be a list of {count} numbers", where=self.where)
        return [self.positive(name, value) for value in values]

    def flag(self, name: str, default: bool = False) -> bool:
        """Returns a truth value."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise InvalidInput(f"{name} must be true or false, not {value!r}", where=self.where)
        return value

    def tied(self, default: bool, name: str = "tie_word_embeddings") -> bool:
        """Returns whether the head is the embedding: as configured under `name`, unless the files hold another head."""
        return self.flag(name, default) and not self._source.has_other_head()

    def refuse(self, when: bool, what: str) -> None:
        """Adds `what` to the list of what is missing."""
        if when and what not in self.missing:
            self.missing.append(what)

    def refuse_biases(self, *names: str) -> None:
        """Refuses biases that one of the switches `names` turns on."""
        for name in names:
            self.refuse(self.flag(name), f"biases ({name})")

    def refuse_norms(self, eps: float) -> None:
        """Refuses norms of Mamba-2, which no factor changes, of another epsilon than ours."""
        self.refuse(eps != EPS, f"Mamba-2 with norms of epsilon {eps:g}, other than {EPS:g}")

    def of_layers(self, name: str, valid: Mapping[str, str], depth: int) -> list[str]:
        """Returns the list `name` with one of `valid`'s values per layer."""
        values = self.get(name)
        if not isinstance(values, list) or len(values) != depth:
            raise InvalidInput(f"{name} must be a list of {depth} names", where=self.where)
        for value in values:
            self.refuse(not isinstance(value, str) or value not in valid, f"layers of type {value!r}")
        return [valid.get(str(value), "") for value in values]

    def activation(self, valid: tuple[str, ...] = ("silu", "swish"), key: str = "hidden_act") -> None:
        """Refuses an activation that is none of `valid`, by default SiLU."""
        name = self.get(key, valid[0])
        self.refuse(name not in valid, f"activation {name!r}")

    def object(self, name: str) -> dict[str, Any]:
        """Returns the values of an object that are not null; {} where there is none."""
        value = self.get(name) or {}
        if not isinstance(value, dict):
            raise InvalidInput(f"{name} must be an object", where=self.where)
        return {name: part for name, part in value.items() if part is not None}

    def rope(
        self,
        default: float = 10000.0,
        *,
        part_of: int | None = None,
        share: float = 1.0,
        rope: Mapping[str, Any] | None = None,
        long: bool = False,
    ) -> dict[str, Any]:
        """Returns RoPE's base and scaling, as arguments of blocks; refuses partial RoPE, and scaling of other forms.

        As in transformers, `rope_scaling` replaces `rope_parameters`, and the base in it wins over one beside it. Where
        the family turns a part of each head, `part_of` is the head size and `share` the default; where its layers
        differ, `rope` is what stands for `rope_parameters`. With `long`, the caller reads LongRoPE's numbers.
        """
        rope = (self.object("rope_scaling") or self.object("rope_parameters")) if rope is None else rope
        kind = _rope_type(rope)
        scaled = kind in ("linear", "llama3", "yarn") or (long and kind == "longrope")
        types = "'linear', 'llama3', 'yarn' and, in most types, 'longrope'"
        self.refuse(kind != "default" and not scaled, f"RoPE of type {kind!r}: blocks have {types}")
        self.refuse(any(isinstance(value, dict) for value in rope.values()), SEVERAL_BASES)
        share = rope.get("partial_rotary_factor", self.get("partial_rotary_factor", share))
        share = min(self.positive("partial_rotary_factor", share), MOST_SHARE)
        self.refuse(part_of is None and share != 1, f"RoPE on a part of each head ({share!r})")
        part = {"rope_dim": int(part_of * share)} if part_of and share != 1 else {}
        part = {"rope_dim": self._source.rope_dim} if self._source.rope_dim else part
        self.refuse(bool(part) and kind == "yarn", "RoPE of type 'yarn' on a part of each head")
        theta = rope.get("rope_theta", self.get("rope_theta", self.get("theta", default)))
        return {"rope_theta": self.positive("rope_theta", theta)} | part | (self._scaling(rope, kind) if scaled else {})

    def _scaling(self, rope: Mapping[str, Any], kind: str) -> dict[str, Any]:
        """Returns `rope_factor`, of "llama3" and "yarn" also `rope_tokens`."""
        length = "original_max_position_embeddings"
        if kind == "longrope":
            return {"rope_long": self._original(rope)}
        factor = self.positive("factor", self._factor(rope))
        self.refuse(factor < 1, f"RoPE that is sped up (factor {factor:g})")
        if kind == "linear" or factor <= 1:
            return {"rope_factor": max(factor, 1.0)}
        original = rope.get(length, self.get("max_position_embeddings"))
        tokens = {"rope_factor": factor, "rope_tokens": self.whole(length, original)}
        if kind == "yarn":
            turns = [rope.get("beta_fast") or 32, rope.get("beta_slow") or 1]
            self.refuse(turns != [32, 1], f"RoPE of type 'yarn' with other bounds {turns} than 32 and 1")
            self.refuse(rope.get("truncate", True) is not True, "RoPE of type 'yarn' between pairs (truncate)")
            return {**tokens, "rope_yarn": True}
        turns = [rope.get(f"{name}_freq_factor") for name in ("low", "high")]
        self.refuse(turns != [1, 4], f"RoPE of type 'llama3' with other factors of low and high frequencies {turns}")
        return tokens

    def _original(self, rope: Mapping[str, Any]) -> int:
        """Returns the length of a text before its positions are scaled."""
        length = "original_max_position_embeddings"
        usual = 4096 if self.get("model_type") == "phi3" else self.get("max_position_embeddings")
        return self.whole(length, rope.get(length, usual))

    def _factor(self, rope: Mapping[str, Any]) -> Any:
        """Returns the factor of scaling; that of YaRN may follow from the lengths."""
        length = rope.get("original_max_position_embeddings")
        if rope.get("factor") is not None or rope.get("rope_type", rope.get("type")) != "yarn" or not length:
            return rope.get("factor")
        lengths = (self.positive("max_position_embeddings", self.get("max_position_embeddings")), length)
        return lengths[0] / self.positive("original_max_position_embeddings", lengths[1])

    def long_divisors(self, rope: Mapping[str, Any], pairs: int) -> tuple[tuple[float, ...], tuple[float, ...], float]:
        """Returns LongRoPE's divisors of angles, of short and of long texts, and a factor of what turns of queries."""
        short, long = (tuple(self.numbers(f"{name}_factor", pairs, rope)) for name in ("short", "long"))
        length = self.positive("original_max_position_embeddings", self._original(rope))
        factor = self.positive("factor", rope.get("factor") or self.number("max_position_embeddings", length) / length)
        usual = math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(length)) if length > 1 else 1.0
        return short, long, self.positive("attention_factor", rope.get("attention_factor") or usual) ** 2

    def scores(self, rope: Mapping[str, Any] | None = None) -> float:
        """Returns what YaRN multiplies products of queries and keys by; 1 for RoPE of other types.

        rope: settings of some layers; None: those of all.
        """
        rope = (self.object("rope_scaling") or self.object("rope_parameters")) if rope is None else rope
        if _rope_type(rope) != "yarn":
            return 1.0
        factor = self.positive("factor", self._factor(rope))
        parts = [self.positive(name, rope[name]) for name in ("mscale", "mscale_all_dim") if rope.get(name)]
        scales = [0.1 * part * math.log(max(factor, 1.0)) + 1.0 for part in (parts if len(parts) == 2 else (1.0, 0.0))]
        return self.positive("attention_factor", rope.get("attention_factor", scales[0] / scales[1])) ** 2

    def positive(self, name: str, value: Any) -> float:
        """Returns `value` if it is a positive number."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise InvalidInput(f"{name} must be a positive number, not {value!r}", where=self.where)
        return float(value)


def model_size(options: Options) -> tuple[int, int, int]:
    """Returns width, depth and vocabulary."""
    depth = options.whole("num_hidden_layers")
    if not 1 <= depth <= MAX_DEPTH:
        raise InvalidInput(f"num_hidden_layers must be in [1, {MAX_DEPTH}], not {depth}", where=options.where)
    return options.whole("hidden_size"), depth, options.whole("vocab_size")


def attention_shape(
    options: Options, d_model: int, *, qk_norm: bool, head_dim: int | None = None, kv_heads: int | None = None
) -> dict[str, Any]:
    """Returns arguments of the attention blocks; `head_dim` and `kv_heads` are defaults of the family."""
    heads = options.whole("num_attention_heads")
    usual = d_model // max(heads, 1)
    return {
        "heads": heads,
        "kv_heads": options.whole(
            "num_key_value_heads", kv_heads if kv_heads and options.has_value("num_key_value_heads") else heads
        ),
        "head_dim": options.whole("head_dim", head_dim if head_dim and options.has_value("head_dim") else usual),
        "qk_norm": qk_norm,
    }


@dataclass(frozen=True)
class Constants:
    """Constants of a configuration that become part of the weights; see the module.

    Args:
        embedding: times the embedding.
        residual: times what blocks add.
        attention: times products of queries and keys; None: 1 / sqrt(head_dim).
        logits: what logits are divided by.
        experts: times what the experts add that are chosen.
    """

    embedding: float = 1.0
    residual: float = 1.0
    attention: float | None = None
    logits: float = 1.0
    experts: float = 1.0

    @staticmethod
    def of_granite(options: Options) -> Constants:
        """Returns those of Granite."""
        names = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
        return Constants(*(options.number(name, 1.0) for name in names))

    @staticmethod
    def of_gemma(options: Options) -> Constants:
        """Returns those of Gemma, whose embedding is multiplied by the root of the width."""
        scalar = None
        if options.get("model_type") != "gemma":
            scalar = 1 / math.sqrt(options.number("query_pre_attn_scalar", 256))
        return Constants(math.sqrt(max(options.whole("hidden_size"), 1)), attention=scalar)


def trained_model(
    options: Options,
    layout: Layout,
    names: tuple[TensorName, ...],
    eps: float,
    constants: Constants = Constants(),
    scaled: Sequence[float] = (),
) -> TrainedModel:
    """Returns the model with the factors that turn its constants into weights; see the module.

    scaled: what scores of each layer are multiplied by, besides `constants`; (): by nothing.
    """
    options.refuse(not 1e-15 <= eps <= 1e-2, f"norms of epsilon {eps:g}")
    norm = math.sqrt(EPS / eps)
    embedding, residual = norm * constants.embedding, norm * constants.residual
    # Without a norm in front, blocks read the stream as it is.
    read = 1 / norm if layout.norms == "behind" else 1.0
    factors: dict[str, Any] = {"embed.weight": embedding}
    factors["norm.weight"] = 1 / ((embedding if layout.tied else 1.0) * constants.logits)
    for i, layer in enumerate(layout.layers):
        places = [(block, "mixer", f"layers.{i}.mixers.{j}") for j, block in enumerate(layer.mixers)]
        for block, part, prefix in [*places, *([(layer.ffn, "ffn", f"layers.{i}.ffn")] if layer.ffn else [])]:
            added = residual if layout.norms == "before" else norm  # times the gain of the norm behind
            factors[f"layers.{i}.{part}_out_norm.weight"] = residual
            factors |= {f"{prefix}.{name}": added for name in _INTO_RESIDUAL}
            if block.kind == "moe":
                factors[f"{prefix}.down.weight"] = added * constants.experts
                factors[f"{prefix}.shared.down.weight"] = added
                factors[f"{prefix}.bias.weight"] = 0.0 if block.get("softmax") else 1.0
            if block.kind == "mla":
                latent, turned = block.int("latent"), block.resolve(layout.d_model).int("rope_dim")
                factors[f"{prefix}.q_down.weight"] = _LATENT_NORM
                factors[f"{prefix}.kv_down.weight"] = (_LATENT_NORM,) * latent + (1.0,) * turned
            factors |= {f"{prefix}.{name}.weight": read for name in ("v", "gate", "up")}
            if block.kind in ("gqa", "swa"):
                size = block.resolve(layout.d_model).int("head_dim")
                scores = 1.0 if constants.attention is None else constants.attention * math.sqrt(size)
                scores *= scaled[i] if scaled else 1.0
                normed = norm if block.get("qk_norm") else 1.0
                gain = "q_norm.weight" if block.get("qk_norm") else "q.weight"
                factors |= {f"{prefix}.{name}.weight": normed * read for name in ("q", "k")}
                factors |= {f"{prefix}.{name}.bias": normed for name in ("q", "k")}
                factors[f"{prefix}.{gain}"] = factors.get(f"{prefix}.{gain}", 1.0) * scores
                if not block.get("qk_norm"):
                    factors[f"{prefix}.q.bias"] = scores
    keys = {key for name in names for key in name.keys}
    used = {name: factor for name, factor in factors.items() if name in keys and factor != 1.0}
    return TrainedModel(layout, str(options.get("model_type")), names, used)
