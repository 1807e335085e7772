"""Reads odd configurations and chat templates of models, and counts what no user should see.

    python -m benchmarks.model_fuzz [--seed 1] [--every 1] > result.jsonl
    python -m benchmarks.model_fuzz --page docs/measured/robustness.md result.jsonl

Every value of a configuration of every family that is read is replaced by odd ones, left out, or, two or three at a
time, replaced at random; the weights of one model lie beside all of them. Chat templates are written to fail, to run
for ever, to take memory, to reach Python, or are damaged at random. Faults are: another error than one of ours, more
than `SLOW_S` of processor time for a configuration, and more than `MEMORY_BYTES` of memory. Prints JSON lines; exit
code 1 if there was a fault.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.page import fill, table
from nas.core.errors import NasError
from nas.train.adapt.checkpoints import import_model, read_model
from nas.train.release.templates import rendered

MEMORY_BYTES = 8 << 30
SLOW_S = 5.0
LATE_S = 60.0
"""Most seconds of a template, on a busy machine: its process is ended after five of its own."""
_RANDOM = 100
"""Configurations of each family in which several values are odd at once."""

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_LLAMA: dict[str, Any] = {
    **_COMMON,
    "intermediate_size": 96,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_theta": 1e4,
    "head_dim": 16,
    "rope_scaling": None,
    "rope_parameters": None,
    "attention_bias": False,
    "mlp_bias": False,
    "quantization_config": None,
}
_SWITCH: dict[str, Any] = {
    "use_sliding_window": True,
    "sliding_window": 8,
    "max_window_layers": 1,
    "layer_types": ["full_attention", "sliding_attention"],
}
_TYPES: dict[str, Any] = {
    **_LLAMA,
    "sliding_window": 8,
    "sliding_window_pattern": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
}
_GEMMA: dict[str, Any] = {
    **_LLAMA,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 8,
    "layer_types": None,
    "query_pre_attn_scalar": 16,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "use_bidirectional_attention": None,
}
_EXPERTS: dict[str, Any] = _LLAMA | {"num_experts_per_tok": 2}
_QWEN_MOE: dict[str, Any] = {
    **_EXPERTS,
    **_SWITCH,
    "num_experts": 4,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
    "decoder_sparse_step": 1,
}
_LATENT: dict[str, Any] = {
    **_LLAMA,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "rope_interleave": True,
}
_GLM: dict[str, Any] = _LLAMA | {"attention_bias": True, "partial_rotary_factor": 0.5}
_QWEN_3_5: dict[str, Any] = {
    **_LLAMA,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.25,
}
_LONG: dict[str, Any] = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": _LLAMA,
    "arcee": _LLAMA | {"hidden_act": "relu2", "rope_scaling": _TYPES["rope_scaling"], "max_position_embeddings": 512},
    "ernie4_5": _LLAMA | {"use_bias": False},
    "granite": _LLAMA
    | {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.1, "logits_scaling": 2.0},
    "granite_swa": _TYPES | {"layer_rope_theta": [1e4, 0], "rope_scaling": None, "attention_multiplier": 0.1},
    "granitemoe": _EXPERTS | {"num_local_experts": 4, "attention_multiplier": 0.1},
    "granitemoe_swa": _EXPERTS
    | {
        "num_local_experts": 4,
        "shared_intermediate_size": 96,
        "layer_types": ["sliding_attention", "full_attention"],
        "layer_rope_theta": [1e4, 0],
        "sliding_window": 8,
    },
    "granitemoeshared": _EXPERTS | {"num_local_experts": 4, "shared_intermediate_size": 96},
    "helium": _LLAMA,
    "exaone4": _TYPES,
    "gemma": _LLAMA | {"hidden_act": "gelu"},
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA
    | {
        "attn_logit_softcapping": None,
        "rope_local_base_freq": 1e4,
        "rope_parameters": {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 1e6}},
    },
    "vaultgemma": _GEMMA,
    "glm": _GLM,
    "glm4": _GLM,
    "olmo": _LLAMA | {"clip_qkv": None},
    "olmo2": _LLAMA,
    "olmo3": _TYPES | {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {}}},
    "deepseek_v3": _LATENT
    | {
        "n_group": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.0,
        "norm_topk_prob": True,
    },
    "youtu": _LATENT,
    "mamba": {
        **_COMMON,
        "state_size": 8,
        "conv_kernel": 4,
        "expand": 2,
        "intermediate_size": 128,
        "time_step_rank": "auto",
        "use_bias": False,
        "use_conv_bias": True,
        "layer_norm_epsilon": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    },
    "mistral": _LLAMA | {"sliding_window": 4},
    "mixtral": _EXPERTS | {"num_local_experts": 4, "sliding_window": None},
    "olmoe": _EXPERTS | {"num_experts": 4, "norm_topk_prob": False, "clip_qkv": None},
    "phi3": _LLAMA | {"partial_rotary_factor": 1.0, "original_max_position_embeddings": 128, "rope_scaling": _LONG},
    "qwen2": _LLAMA | _SWITCH,
    "qwen2_moe": _QWEN_MOE | {"shared_expert_intermediate_size": 64, "qkv_bias": True},
    "qwen3": _LLAMA | _SWITCH,
    "qwen3_moe": _QWEN_MOE,
    "gemma3": {
        "text_config": _GEMMA | {"attn_logit_softcapping": None, "rope_local_base_freq": 1e4},
        "tie_word_embeddings": True,
        "vision_config": {},
    },
    "qwen3_5": {"text_config": _QWEN_3_5, "tie_word_embeddings": True},
    "qwen3_5_text": _QWEN_3_5,
    "smollm3": _LLAMA | _SWITCH | {"no_rope_layers": [1, 0], "no_rope_layer_interval": 2},
    "granitemoehybrid": {
        **_COMMON,
        "shared_intermediate_size": 96,
        "num_local_experts": 0,
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "rms_norm_eps": 1e-5,
        "position_embedding_type": "nope",
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "time_step_limit": None,
    },
    "mamba2": {
        **_COMMON,
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 1,
        "conv_kernel": 4,
        "expand": 2,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "hidden_act": "silu",
        "time_step_limit": [0.0, "Infinity"],
        "tie_word_embeddings": True,
    },
    "falcon_h1": _LLAMA
    | {
        "mamba_d_ssm": 96,
        "mamba_n_heads": 6,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_rms_norm": False,
        "time_step_limit": [0.0, {"__float__": "Infinity"}],
        "ssm_multipliers": [0.5] * 5,
        "mlp_multipliers": [0.5, 0.5],
        "key_multiplier": 0.5,
        "ssm_in_multiplier": 0.5,
        "lm_head_multiplier": 0.5,
    },
    "nemotron_h": {
        **_COMMON,
        "num_hidden_layers": 3,
        "hybrid_override_pattern": "M*-",
        "layers_block_type": None,
        "intermediate_size": 96,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 1,
        "conv_kernel": 4,
        "mlp_hidden_act": "relu2",
        "layer_norm_epsilon": 1e-5,
        "head_dim": 16,
    },
    "lfm2": {
        **_COMMON,
        "block_ff_dim": 96,
        "block_auto_adjust_ff_dim": False,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "layer_types": ["conv", "full_attention"],
        "conv_L_cache": 3,
        "conv_bias": False,
        "norm_eps": 1e-5,
    },
    "lfm3": {
        **_COMMON,
        "intermediate_size": 96,
        "head_dim": 16,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "conv_L_cache": 7,
        "conv_bias": False,
        "norm_eps": 1e-5,
        "use_sandwich_norm": True,
        "use_attention_gate": True,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        },
    },
    "lfm2_moe": {
        **_COMMON,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_dense_layers": 1,
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "layer_types": ["conv", "full_attention"],
        "conv_L_cache": 3,
        "routed_scaling_factor": 1.0,
    },
    "hilnas": {
        "hidden_size": 64,
        "vocab_size": 256,
        "layers": [
            {"mixers": [{"kind": "conv", "kernel": 3}], "ffn": {"kind": "swiglu", "width": 96}},
            {"share": 0},
        ],
        "tie_word_embeddings": True,
        "norms": "both",
        "softcap": 30.0,
        "norm_eps": 1e-5,
    },
}
"""`model_type` -> a configuration of it."""

ODD: Sequence[Any] = (
    *(None, True, False, 0, -1, 1, 3, 7, 2**31, 10**12, 10**30, -(10**30), 1e308, 1e-308, 0.5, float("nan")),
    *("", "x", "Infinity", "silu", "a" * 10_000, "\ud800", [], [1], [None], ["conv"] * 2, [["conv"]], [0] * 10_000),
    *({}, {"a": 1}, {"rope_type": "linear"}, {"rope_type": None}, {"rope_theta": None}, {"rope_theta": "x"}),
    *({"rope_theta": 10**400}, {"x": {}}, {"rope_type": ["yarn"]}),
    *({"rope_type": "yarn"}, {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": "x"}),
    *({"full_attention": 1}, {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": -1}}),
)
_LAYERS: Sequence[Any] = (
    *({"mixers": 1}, {"mixers": []}, {"mixers": [1]}, {"mixers": [{}]}, {"mixers": [{"kind": []}]}, {"share": 10**30}),
    *({"mixers": [{"kind": "conv", "kernel": 10**12}]}, {"mixers": [{"kind": "conv", "kernel": "3"}]}, {"share": "0"}),
    *({"share": -1}, {"share": 0}, {"ffn": {"kind": "swiglu", "width": 10**12}}, {"ffn": None}, {"a": 1}, [], None, 1),
)

_ASK = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
TEMPLATES: Sequence[str] = (
    "{{ 'a' * 3000000000 }}",
    "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{{ i * j }}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(x) %}{{ f(x + 1) }}{% endmacro %}{{ f(0) }}",
    "{{ 9 ** 9 ** 7 }}",
    "{{ range(10 ** 12) | list }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ messages | tojson(indent=999999999) }}",
    "{{ 'x' | center(9999999999) }}",
    "{{ lipsum(n=100000) }}",
    "{{ 1 / 0 }}",
    "{{ messages[9].content }}",
    "{{ messages[0].content.nothing.more }}",
    "{{ messages[0]['content'] + 1 }}",
    "{{ raise_exception('no') }}",
    "{{ raise_exception(messages) }}",
    "{{ strftime_now(1) }}",
    "{{ strftime_now('%' * 100000) }}",
    "{{ messages | tojson(separators=1) }}",
    "{{ self | tojson }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ ''|attr('__class__') }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends messages %}",
    "{% for %}",
    "{{",
    "{% if %}",
    "{{ messages | nofilter }}",
    "{% generation %}",
    "{% set messages = 1 %}{% for m in messages %}{% endfor %}",
    "{{ messages.append(1) }}",
    "{{ '\ud800' }}",
    "\0",
    "{{ '\\0' }}",
    "(" * 100_000,
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ " + "-" * 100_000 + "1 }}",
    "{{ " + "1+" * 50_000 + "1 }}",
    "{% if true %}" * 500,
    "x" * (1 << 25),
)
"""Chat templates that fail, run for ever, take memory or reach for Python."""
_DAMAGED = 200
_PIECES = ("{{", "}}", "{%", "%}", "{#", "'", "(", "[", "|", "%", "for", "endfor", "\0", "-", "1e999", ".", "messages")


def configurations(seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields family and configuration; the same for the same seed."""
    for family, values in FAMILIES.items():
        whole = {"model_type": family, **values}
        for name in whole:
            yield family, {key: value for key, value in whole.items() if key != name}
            for value in ODD:
                yield family, whole | {name: value}
        if family == "hilnas":
            first = values["layers"][0]
            for layer in (*_LAYERS, *ODD):
                yield family, whole | {"layers": [layer]}
                yield family, whole | {"layers": [first, layer]}
                for part in ("mixers", "ffn", "share"):
                    yield family, whole | {"layers": [first | {part: layer}]}
        chance = random.Random(f"{seed} {family}")
        for _ in range(_RANDOM):
            changed = chance.sample(sorted(whole), k=chance.choice((2, 3)))
            yield family, whole | {name: chance.choice(ODD) for name in changed}


def templates(seed: int) -> Iterator[str]:
    """Yields chat templates; the same for the same seed."""
    yield from TEMPLATES
    chance = random.Random(seed)
    for _ in range(_DAMAGED):
        text = list(_ASK)
        for _ in range(chance.randint(1, 4)):
            place = chance.randrange(len(text))
            text[place : place + chance.choice((0, 1, 5))] = chance.choice(_PIECES)
        yield "".join(text)


def read_configuration(folder: Path, config: Mapping[str, Any]) -> tuple[str, str]:
    """Reads a configuration, and weights that lack most tensors; returns what became of it, and the error."""
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    start = time.process_time()
    outcome = _outcome(lambda: read_model(folder))
    weights = _outcome(lambda: import_model(folder, folder / "out" / "model.safetensors"))
    if weights[0] == "fault":
        return weights
    if (spent := time.process_time() - start) > SLOW_S:
        return "fault", f"{spent:.0f} s of processor time"
    if (peak := resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) > MEMORY_BYTES:
        return "fault", f"{peak >> 20} MB of memory"
    return outcome


def render_template(template: str) -> tuple[str, str]:
    """Renders a conversation in a template; returns what became of it, and the error."""
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}]
    start = time.monotonic()
    outcome = _outcome(lambda: rendered(template, {"messages": messages, "tools": None}, "tokenizer_config.json"))
    late = time.monotonic() - start
    return ("fault", f"{late:.0f} s") if late > LATE_S else outcome


def _outcome(action: Any) -> tuple[str, str]:
    try:
        action()
    except NasError as error:
        return "refused", str(error)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return "fault", f"{type(error).__name__}: {str(error)[:200]} ({Path(where.filename).name}:{where.lineno})"
    return "read", ""


def run(seed: int, every: int) -> Iterator[dict[str, Any]]:
    """Yields the outcome of each N-th case."""
    with tempfile.TemporaryDirectory(prefix="hilnas-models-") as name:
        folder = Path(name)
        save_file({"model.embed_tokens.weight": torch.ones(256, 64)}, folder / "model.safetensors")
        for number, (family, config) in enumerate(configurations(seed)):
            if number % every == 0:
                result, error = read_configuration(folder, config)
                yield {"group": family, "result": result, "error": error, "case": repr(config)[:400]}
    for number, template in enumerate(templates(seed)):
        if number % every == 0:
            result, error = render_template(template)
            yield {"group": "chat templates", "result": result, "error": error, "case": template[:400]}


def summary(outcomes: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table: of each group how many were read, refused in a line, and faults."""
    results = ("read", "refused", "fault")
    rows: list[list[object]] = []
    for group in [*dict.fromkeys(outcome["group"] for outcome in outcomes), "all"]:
        of_group = [outcome["result"] for outcome in outcomes if group in (outcome["group"], "all")]
        rows.append([group, len(of_group), *map(of_group.count, results)])
    return table(["", "cases", "read", "refused", "faults"], rows)


def main() -> None:
    """Runs the benchmark, or writes its table into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=int, default=1, help="run only each N-th case")
    parser.add_argument("--page", type=Path, help="write the table of RESULT into this page")
    parser.add_argument("result", nargs="?", type=Path)
    arguments = parser.parse_args()
    if arguments.page:
        lines = arguments.result.read_text(encoding="utf-8").splitlines()
        fill(arguments.page, "measured: model_fuzz", summary([json.loads(line) for line in lines]))
        return
    resource.setrlimit(resource.RLIMIT_AS, (2 * MEMORY_BYTES, 2 * MEMORY_BYTES))
    outcomes = []
    for outcome in run(arguments.seed, arguments.every):
        outcomes.append(outcome)
        print(json.dumps(outcome), flush=True)
        if outcome["result"] == "fault":
            print(f"{outcome['error']}: {outcome['case']!a}", file=sys.stderr, flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"{summary(outcomes)}at most {peak} MB of memory", file=sys.stderr)
    sys.exit(any(outcome["result"] == "fault" for outcome in outcomes))


if __name__ == "__main__":
    main()
