"""Every kind of block on both runtimes: parity with references, and time and memory against grouped-query attention.

    python -m benchmarks.blocks parity [--target aarch64-linux] [--only S4D S5]
    python -m benchmarks.blocks time [--minutes 6]
    python -m benchmarks.blocks train [--minutes 6]
    python -m benchmarks.blocks page

`parity` compares each module in float32 with its formula, written out token by token from its paper, and with code of
others: transformers' class of it, or a function of fla-core, where that package is installed. It compares each
runtime's file with PyTorch by the equivalence gate. `time` runs rounds of fresh processes with one thread, every block
on both runtimes in random order; its ratios are of CPU time within one round, so that other work on the machine shifts
them little. `train` does the same with the modules' forward and backward passes in PyTorch, and with those of their
formulas. Neither begins a round that may not end in time. All append to `benchmarks/recorded/blocks`, a line per
result, with the build of the runtime or the version of PyTorch: again, `parity` adds what is missing for the builds
that are here, `time` and `train` add rounds. `page` writes docs/measured/blocks.md from the latest lines.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import random
import runpy
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.lines import read_lines
from benchmarks.page import fill, table
from benchmarks.runs import digits, exported, say
from nas.core.block import Block
from nas.core.layout import Layout
from nas.core.workload import Workload
from nas.measure.runtimes import RUNTIMES
from nas.measure.runtimes.base import Build
from nas.measure.runtimes.executorch.runtime import EXECUTORCH
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.measure.runtimes.toolchain import host_target
from nas.model.nn.base import Mixer
from nas.model.nn.gla import GatedLinearAttention
from nas.model.nn.kinds import MODULES
from nas.model.nn.model import Model
from nas.model.nn.primitives import draw_weights
from nas.model.nn.transformers import to_transformers, transformers_config
from nas.testing import executorch_gate, llama_cpp_gate
from tests.support.twins import TWINS, twin_of

ROOT = Path(__file__).resolve().parent.parent
RECORDED = ROOT / "benchmarks" / "recorded" / "blocks"
PAGE = ROOT / "docs" / "measured" / "blocks.md"
WIDTH, LENGTH = 64, 150
"""Of parity in float32: longer than two chunks of every chunked form."""
FLA_GLA = "naive_recurrent_gla"
"""Function of flash-linear-attention, in the package fla-core."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Example:
    """A block whose parity is measured.

    Args:
        text: of a module of width 64.
        formula: "module:function" of the reference that is written out token by token.
        source: of the formula.
        files: the layout that runtimes carry.
        twin: transformers' class, of a module in `TWINS` or of a whole layout; or `FLA_GLA`; empty: there is none.
        layout: where `twin` is of a whole layout, that layout.
    """

    text: str
    formula: str
    source: str
    files: str
    twin: str = ""
    layout: str = ""


EXAMPLES = {
    "conv": Example(
        "C3",
        "nas.model.nn.conv:reference_gated_short_conv",
        "LFM2",
        "d256 v512 ffn=swiglu:512 [C3 C5*2]",
        "Lfm2ForCausalLM",
        "d64 v128 ffn=swiglu:160 [C3*2 A4/2 C3]",
    ),
    "gqa": Example(
        "A4/2",
        "nas.model.nn.gqa:reference_gqa",
        "Ainslie 2023",
        "d256 v512 ffn=swiglu:512 [A8/4 A4/1]",
        "Qwen3ForCausalLM",
        "d64 v128 ffn=swiglu:96 [A4/2*3]",
    ),
    "gqa with Canon": Example(
        "A4/2(canon=4)",
        "nas.model.nn.gqa:reference_gqa",
        "Allen-Zhu 2025",
        "d256 v512 ffn=swiglu:512 [A8/4(canon=4)*2]",
    ),
    "swa": Example(
        "W4/2@32",
        "nas.model.nn.swa:reference_swa",
        "Beltagy 2020",
        "d256 v512 ffn=swiglu:512 [W4/2@32*3]",
        "Qwen3ForCausalLM",
        "d64 v128 ffn=swiglu:96 [A4/2 W4/2@32*2]",
    ),
    "swa with sinks": Example(
        "W4/2@32(qk_norm=0,rope_theta=10000,sink=1)",
        "nas.model.nn.swa:reference_swa",
        "gpt-oss",
        "d256 v512 ffn=swiglu:512 [W4/2@32(sink=1)*3]",
        "GptOssAttention",
    ),
    "mla": Example(
        "L4/32(rope_theta=10000)",
        "nas.model.nn.mla:reference_mla",
        "DeepSeek-V2",
        "d256 v512 ffn=swiglu:512 [L4/64*2]",
        "DeepseekV2Attention",
    ),
    "mla, compressed queries": Example(
        "L4/32(query=24,rope_theta=10000)",
        "nas.model.nn.mla:reference_mla",
        "DeepSeek-V2",
        "d256 v512 ffn=relu2:512 [L4/64 L4/64(query=96)]",
        "DeepseekV2Attention",
    ),
    "mamba2": Example(
        "M16(heads=4)",
        "nas.model.nn.mamba2:reference_mamba2",
        "Dao 2024",
        "d256 v512 ffn=swiglu:512 [M16*3]",
        "Mamba2Mixer",
    ),
    "gdn": Example(
        "D4/2",
        "nas.model.nn.gdn:reference_gdn",
        "Yang 2024",
        "d256 v512 ffn=swiglu:512 [D8/4*2]",
        "Qwen3NextGatedDeltaNet",
    ),
    "gla": Example("G4", "nas.model.nn.gla:reference_gla", "Yang 2023", "d256 v512 ffn=swiglu:512 [G8*2]", FLA_GLA),
    "mlstm": Example(
        "X4",
        "nas.model.nn.mlstm:reference_mlstm",
        "Beck 2024",
        "d256 v512 ffn=swiglu:512 [X4*2]",
        "xLSTMLayer",
    ),
    "linear attention": Example(
        "K4",
        "nas.model.nn.linear:reference_linear",
        "Katharopoulos 2020",
        "d256 v512 ffn=swiglu:512 [K8 K8(conv=4)]",
    ),
    "DeltaNet": Example(
        "N4",
        "nas.model.nn.deltanet:reference_deltanet",
        "Yang 2024",
        "d256 v512 ffn=swiglu:512 [N8 N8(conv=0)]",
    ),
    "Mamba": Example(
        "H",
        "nas.model.nn.mamba:reference_mamba",
        "Gu 2023",
        "d256 v512 ffn=swiglu:512 [H H(conv=0)]",
        "MambaMixer",
    ),
    "S4D": Example(
        "S16",
        "nas.model.nn.s4:reference_s4",
        "Gu 2022",
        "d256 v512 ffn=swiglu:512 [S S(conv=4)]",
    ),
    "Liquid-S4": Example(
        "S16(liquid=1)",
        "nas.model.nn.s4:reference_s4",
        "Hasani 2022",
        "d256 v512 ffn=swiglu:512 [S(liquid=1) S(conv=4,liquid=1)]",
    ),
    "S5": Example(
        "V",
        "nas.model.nn.s5:reference_s5",
        "Smith 2022",
        "d256 v512 ffn=swiglu:512 [V V(conv=4)]",
    ),
    "CfC": Example(
        "F",
        "nas.model.nn.cfc:reference_cfc",
        "Hasani 2022",
        "d256 v512 ffn=swiglu:512 [F F(conv=4)]",
    ),
    "RTF": Example(
        "R",
        "nas.model.nn.rtf:reference_rtf",
        "Parnichkun 2024",
        "d256 v512 ffn=swiglu:512 [R R(conv=4)]",
    ),
    "long convolution": Example(
        "Y",
        "nas.model.nn.longconv:reference_longconv",
        "Poli 2023",
        "d256 v512 ffn=swiglu:512 [Y(conv=0) Y]",
    ),
    "swiglu": Example(
        "swiglu:160",
        "nas.model.nn.swiglu:reference_swiglu",
        "Shazeer 2020",
        "d256 v512 ffn=swiglu:512 [C3 A4/2+swiglu:768]",
        "Qwen3ForCausalLM",
        "d64 v128 ffn=swiglu:96 [A4/2*3]",
    ),
    "relu2": Example(
        "relu2:160",
        "nas.model.nn.relu2:reference_relu2",
        "So 2021",
        "d256 v512 ffn=relu2:512 [C3 A4/2]",
        "ArceeMLP",
    ),
    "moe": Example(
        "moe:8x2:48",
        "nas.model.nn.moe:reference_moe",
        "LFM2",
        "d256 v512 ffn=moe:8x2:64 [A4/2*2]",
        "Lfm2MoeForCausalLM",
        "d64 v128 ffn=moe:8x2:32 [C3+swiglu:96*2 A4/2 C3 A4/2]",
    ),
    "moe with shared experts": Example(
        "moe:8x2:48(shared=1)",
        "nas.model.nn.moe:reference_moe",
        "Dai 2024",
        "d256 v512 ffn=moe:8x2:64(shared=2) [C3 A4/2]",
        "DeepseekV3MoE",
    ),
}

ARRANGEMENTS = {
    "shared caches": "d256 v512 ffn=swiglu:512 [A8/4 C3 A8/4(kv=0)*2]",
    "shared weights": "d256 v512 ffn=swiglu:512 [C3 A8/4 M16 ^0 ^1 ^2]",
    "parallel mixers": "d256 v512 ffn=swiglu:512 [C3&A8/4 M16&W4/2@32]",
    "mLSTM, windows and sinks in parallel": "d256 v512 ffn=swiglu:512 [X4&W8/4@32(sink=1)*2]",
    "layers of one half": "d256 v512 ffn=swiglu:512 [- A8/4+none C3]",
}
"""Layouts of known blocks whose layers are put together in other ways."""
FILES = {name: example.files for name, example in EXAMPLES.items()} | ARRANGEMENTS

MIXERS = {
    "gqa": "A8/4",
    "gqa with Canon": "A8/4(canon=4)",
    "swa": "W8/4@512",
    "mla": "L8/128",
    "conv": "C3",
    "mamba2": "M",
    "gdn": "D4",
    "gla": "G4",
    "mlstm": "X4",
}
FEED_FORWARDS = {
    "swiglu": "swiglu:2048",
    "relu2": "relu2:3072",
    "moe": "moe:8x2:1024",
    "moe with shared experts": "moe:8x1:1024(shared=1)",
}
"""With as many active weights."""
TIMED_WIDTH = 512
TIMED = {name: f"d{TIMED_WIDTH} v512 ffn=swiglu:256 [{text}*2]" for name, text in MIXERS.items()} | {
    name: f"d{TIMED_WIDTH} v512 ffn={text} [A8/4*2]" for name, text in FEED_FORWARDS.items()
}
CONTEXTS = (1024, 4096)
GEN = 32
TRAINED, SHORT = 1024, 64
"""Tokens of `train`: of modules, and of the formulas, which take minutes for more, and of modules beside them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("parity", "time", "train", "page"))
    parser.add_argument("--target", default=host_target(), help="machine of parity; another's runs by emulation")
    parser.add_argument("--only", nargs="+", choices=FILES, default=list(FILES), help="names of blocks, of parity")
    parser.add_argument("--minutes", type=float, default=6.0, help="of `time` and `train`")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "parity":
        measure_parity(options.target, options.only)
    elif options.what == "time":
        measure_time(60 * options.minutes)
    elif options.what == "train":
        measure_training(60 * options.minutes)
    else:
        tables = (parity_tables(recorded("parity")), time_tables(recorded("time")), train_tables(recorded("train")))
        fill(PAGE, "measured", "".join(f"\n{part.rstrip()}\n" for parts in tables for part in parts) + "\n")


def recorded(name: str) -> list[Row]:
    """Returns the results of a file, first to last."""
    return read_lines(RECORDED / f"{name}.jsonl")


def record(name: str, rows: Iterable[Row]) -> None:
    """Appends results to a file."""
    RECORDED.mkdir(parents=True, exist_ok=True)
    with (RECORDED / f"{name}.jsonl").open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def measure_parity(target: str, names: Sequence[str]) -> None:
    """Adds a line for each file that has none of the runtime's build for `target`; here, one for each module, too."""
    if target == host_target():
        modules = {name: EXAMPLES[name] for name in names if name in EXAMPLES}
        record("parity", [{"block": name, "by": "float32", **float_parity(one)} for name, one in modules.items()])
    done = {(row["block"], row["by"], row.get("build", "")) for row in recorded("parity")}
    place = "host" if target == host_target() else target
    builds: dict[str, Any] = {
        "llama.cpp": LLAMA_CPP.build(place, log=say, patched=True),
        "executorch": EXECUTORCH.build(place, log=say),
    }
    for name, text in ((name, FILES[name]) for name in names):
        for by in ("llama.cpp f32", "llama.cpp q4_0", "executorch 8da4w"):
            runtime, _, quantisation = by.partition(" ")
            runtime_build = builds[runtime]
            if (name, by, build_id(runtime_build)) not in done:
                say(f"{name}: {by} on {target}")
                row = {"block": name, "by": by, "target": target, "build": build_id(runtime_build)}
                record("parity", [row | file_parity(text, runtime, quantisation, runtime_build)])


def build_id(build: Build) -> str:
    """Returns the first digits of a build's id, as rows hold it."""
    return build.runner.build[:12]


def float_parity(example: Example) -> Row:
    """Returns greatest errors of a module, relative to the greatest number of what it is compared with."""
    module, formula = _module(example.text, WIDTH), _formula(example)
    noise = torch.Generator().manual_seed(1)
    for tensor in module.state_dict().values():
        tensor += 0.1 * torch.rand(tensor.shape, generator=noise)
    module.eval()
    x = torch.randn(1, LENGTH, WIDTH, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        whole = _output(module, x)
        row = {"example": example.text, "formula": _error(whole[0], formula(module.block, module.state_dict(), x[0]))}
        if isinstance(module, Mixer):
            row["steps"] = _error(_by_steps(module, x), whole)
    row["future"] = _seen_of_the_future(module, x)
    row["theirs"] = _error_of_theirs(example, module, x)
    module.double()
    block_x, formula_x = (x.double().requires_grad_() for _ in range(2))
    torch.autograd.backward(_output(module, block_x).square().sum())
    weights = {name: weight.detach() for name, weight in module.state_dict().items()}
    torch.autograd.backward(formula(module.block, weights, formula_x[0]).square().sum())
    assert block_x.grad is not None and formula_x.grad is not None
    return row | {"gradient": _error(block_x.grad, formula_x.grad)}


def _module(text: str, width: int) -> Any:
    block = Block.parse(text, "ffn" if text[0].islower() else "mixer")
    module = MODULES[block.kind](block, width)
    draw_weights(module, 0, depth=4)
    return module


def _formula(example: Example) -> Callable[..., Tensor]:
    place, _, function = example.formula.partition(":")
    formula: Callable[..., Tensor] = getattr(importlib.import_module(place), function)
    return formula


def _error_of_theirs(example: Example, module: Any, x: Tensor) -> float | None:
    if not example.twin:
        return None
    with torch.no_grad():
        if example.twin == FLA_GLA:
            return _fla_error(module, x)
        if not example.layout:
            twin = twin_of(module, WIDTH)
            assert type(twin.module).__name__ == example.twin and module.block.kind in TWINS
            return _error(_output(module, x), twin(x))
        layout = Layout.parse(example.layout)
        model = Model(layout, seed=3).eval()
        noise = torch.Generator().manual_seed(4)
        for tensor in model.state_dict().values():
            tensor += 0.05 * torch.randn(tensor.shape, generator=noise)
        upstream = AutoModelForCausalLM.from_config(AutoConfig.for_model(**transformers_config(layout))).eval()
        assert type(upstream).__name__ == example.twin
        upstream.load_state_dict(to_transformers(layout, model.state_dict()), strict=False)
        upstream.tie_weights()
        ids = torch.randint(1, 128, (2, LENGTH), generator=torch.Generator().manual_seed(0))
        return _error(model(ids), upstream(ids).logits)


def _fla_error(module: GatedLinearAttention, x: Tensor) -> float | None:
    """Returns the module's error where fla-core computes the recurrence; None: it is not installed."""
    try:
        path = importlib.metadata.distribution("fla-core").locate_file("fla/ops/gla/naive.py")
    except importlib.metadata.PackageNotFoundError:
        say(f"gla is not compared with {FLA_GLA}: fla-core is not installed (pip install --no-deps fla-core)")
        return None
    # The file alone: the package around it imports Triton.
    compute = runpy.run_path(str(path))[FLA_GLA]
    output = _output(module, x)

    def recurrence(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        y, memory = compute(q * q.shape[-1] ** 0.5, k, v, log_decay, memory, output_final_state=True)  # it divides q
        return y, memory

    with mock.patch("nas.model.nn.gla.gated_linear_attention", recurrence):
        return _error(output, _output(module, x))


def _output(module: Any, x: Tensor) -> Tensor:
    y: Tensor = module(x)[0] if isinstance(module, Mixer) else module(x)
    return y


def _by_steps(module: Mixer, x: Tensor) -> Tensor:
    parts, state = [], module.init_state(1, x.dtype, x.device)
    for t in range(x.shape[1]):
        y, state = module.step(x[:, t], state)
        parts.append(y)
    return torch.stack(parts, 1)


def _seen_of_the_future(module: Any, x: Tensor) -> float:
    """Returns the greatest gradient of outputs with respect to later inputs: 0 of a causal block."""
    x, at = x.clone().requires_grad_(), LENGTH // 2
    (gradient,) = torch.autograd.grad(_output(module, x)[:, at].square().sum(), x)
    return float(gradient[:, at + 1 :].abs().max())


def _error(result: Tensor, expected: Tensor) -> float:
    return float(f"{float((result - expected).abs().max() / expected.abs().max()):.2g}")


def file_parity(text: str, runtime: str, quantisation: str, runtime_build: Any) -> Row:
    """Returns error and limit of the equivalence gate, or why the runtime refuses the layout."""
    layout = Layout.parse(text)
    support = RUNTIMES[runtime].supports(layout)
    if not support:
        return {"layout": text, "refused": "; ".join(support.reasons)}
    with tempfile.TemporaryDirectory() as folder:
        if runtime == "llama.cpp":
            report = llama_cpp_gate.gate(Path(folder), quantisation, layout, runtime_build)
        else:
            report = executorch_gate.gate(Path(folder), layout, runtime_build)
    return {
        "layout": text,
        "error": digits(report.error),
        "limit": digits(report.limit),
        "passed": bool(report.passed),
    }


def measure_time(budget_s: float) -> None:
    """Adds rounds; the time begins when all files are written."""
    with ExitStack() as stack:
        models = {
            (runtime, name): stack.enter_context(exported(Layout.parse(text), runtime))
            for name, text in TIMED.items()
            for runtime in RUNTIMES
            if RUNTIMES[runtime].supports(Layout.parse(text))
        }
        places = [
            (*key, context) for key in models for context in CONTEXTS if key[1] in MIXERS or context == CONTEXTS[0]
        ]

        def measured(number: int, order: random.Random) -> Iterable[Row]:
            for runtime, name, context in order.sample(places, len(places)):
                sample = models[runtime, name].run(Workload(prompt=context, gen=GEN, threads=1))
                yield {
                    "round": number,
                    "runtime": runtime,
                    "build": build_id(models[runtime, name].build),
                    "block": name,
                    "context": context,
                    "prefill_cpu_ms": sample.prefill_cpu_ms,
                    "decode_cpu_ms": round(statistics.median(sample.decode_cpu_ns or [0]) / 1e6, 4),
                    "peak_rss_mb": sample.peak_rss_mb,
                }

        add_rounds("time", budget_s, measured)


def add_rounds(name: str, budget_s: float, measured: Callable[[int, random.Random], Iterable[Row]]) -> None:
    """Appends rounds to a file, as many as end in time; `measured` takes a round's number and what draws its order."""
    number = max((row["round"] for row in recorded(name)), default=0)
    start, longest, order = time.monotonic(), 0.0, random.Random(number)
    while time.monotonic() - start + longest < budget_s:
        number, started = number + 1, time.monotonic()
        record(name, list(measured(number, order)))
        longest = max(longest, time.monotonic() - started)
        say(f"round {number}: {time.monotonic() - started:.0f} s")


def measure_training(budget_s: float) -> None:
    """Adds rounds: forward and backward passes of each block of `TIMED`, and of its formula."""
    passes = {
        (name, form, tokens): run_pass
        for name, text in (MIXERS | FEED_FORWARDS).items()
        for form, tokens, run_pass in training_passes(name, text)
    }
    for run_pass in passes.values():
        run_pass()  # the first pass of a form allocates what later ones reuse

    def measured(number: int, order: random.Random) -> Iterable[Row]:
        for name, form, tokens in order.sample(list(passes), len(passes)):
            start = time.process_time()
            passes[name, form, tokens]()
            cpu_ms = round((time.process_time() - start) * 1e3, 2)
            yield {
                "round": number,
                "torch": torch.__version__,
                "block": name,
                "form": form,
                "tokens": tokens,
                "cpu_ms": cpu_ms,
            }

    add_rounds("train", budget_s, measured)


def training_passes(name: str, text: str) -> Iterable[tuple[str, int, Callable[[], None]]]:
    """Yields form, tokens, and a function that computes gradients of the block's weights and input."""
    module = _module(text, TIMED_WIDTH).train()
    x = torch.randn(1, TRAINED, TIMED_WIDTH, generator=torch.Generator().manual_seed(2))
    formula = _formula(EXAMPLES[name])

    def of_module(tokens: int) -> None:
        torch.autograd.backward(_output(module, x[:, :tokens].clone().requires_grad_()).square().sum())

    def of_formula() -> None:
        weights = module.state_dict(keep_vars=True)
        y = formula(module.block, weights, x[0, :SHORT].clone().requires_grad_())
        torch.autograd.backward(y.square().sum())

    yield "module", TRAINED, partial(of_module, TRAINED)
    yield "module", SHORT, partial(of_module, SHORT)
    yield "formula", SHORT, of_formula


def parity_tables(rows: Sequence[Row]) -> list[str]:
    """Returns the tables of `parity`."""
    floats = {row["block"]: row for row in rows if row["by"] == "float32"}
    files = {(row["block"], row["by"], row["target"]): row for row in rows if row["by"] != "float32"}
    targets = list(dict.fromkeys(target for _, _, target in files))
    acausal = [name for name, row in floats.items() if row["future"]]
    modules = [
        (
            name,
            EXAMPLES[name].source,
            row["formula"],
            row["gradient"],
            row.get("steps", "-"),
            EXAMPLES[name].twin or "none",
            "-" if row["theirs"] is None else row["theirs"],
        )
        for name, row in floats.items()
    ]
    head = ("block", "formula of", "error", "of gradients", "steps", "code of others", "error")
    columns = [(target, way) for way in ("llama.cpp f32", "llama.cpp q4_0", "executorch 8da4w") for target in targets]
    lines = [(name, *(_gate(files.get((name, way, target))) for target, way in columns)) for name in FILES]
    return [
        "### Modules in float32",
        table(head, modules),
        f"Outputs with a gradient with respect to a later input: {', '.join(acausal) or 'none'}.",
        "### Files: error / limit",
        table(("block", *(f"{way}, {target}" for target, way in columns)), lines),
    ]


def _gate(row: Row | None) -> str:
    if row is None:
        return "not run"
    if "refused" in row:
        return "refused"
    return f"{row['error']:.2g} / {row['limit']:.2g}" + " FAILED" * (not row["passed"])


def time_tables(rows: Sequence[Row]) -> list[str]:
    """Returns the tables of `time`: of the rounds of the last one's builds."""
    builds: dict[int, set[Any]] = {}
    for row in rows:
        builds.setdefault(row["round"], set()).add((row["runtime"], row.get("build")))
    rounds = [number for number in builds if builds[number] == builds[max(builds)]]
    of = {(row["runtime"], row["block"], row["context"], row["round"]): row for row in rows}

    def ratio(runtime: str, name: str, base: str, context: int, what: str) -> str:
        if (runtime, name, context, rounds[0]) not in of:
            return "-"
        return ranged([of[runtime, name, context, n][what] / of[runtime, base, context, n][what] for n in rounds])

    def growth(runtime: str, name: str) -> str:
        if (runtime, name, CONTEXTS[0], rounds[0]) not in of:
            return "-"
        first, last = (
            statistics.median(of[runtime, name, context, n]["peak_rss_mb"] for n in rounds) for context in CONTEXTS
        )
        return f"{last - first:.1f}"

    if not rounds:
        return []
    head = ("block", *(f"{what} at {context}" for context in CONTEXTS for what in ("prefill", "decode")))
    parts = []
    runtimes = [name for name in RUNTIMES if any(row["runtime"] == name for row in rows)]
    for runtime in runtimes:
        lines = [
            (
                name,
                *(
                    ratio(runtime, name, "gqa", context, what)
                    for context in CONTEXTS
                    for what in ("prefill_cpu_ms", "decode_cpu_ms")
                ),
            )
            for name in MIXERS
            if name != "gqa"
        ]
        parts += [f"### Mixers over grouped-query attention, {runtime}, {len(rounds)} rounds", table(head, lines)]
    short = ("block", *(f"{runtime}: {what}" for runtime in runtimes for what in ("prefill", "decode")))
    lines = [
        (
            f"{name} (`{FEED_FORWARDS[name]}`)",
            *(
                ratio(runtime, name, "swiglu", CONTEXTS[0], what)
                for runtime in runtimes
                for what in ("prefill_cpu_ms", "decode_cpu_ms")
            ),
        )
        for name in FEED_FORWARDS
        if name != "swiglu"
    ]
    parts += ["### Feed-forwards of as many active weights over SwiGLU, at 1024", table(short, lines)]
    memory = [
        (
            name,
            *(f"{_cache_mb(name, context):.2f}" for context in CONTEXTS),
            f"{_cache_mb(name, CONTEXTS[1]) - _cache_mb(name, CONTEXTS[0]):.2f}",
            *(growth(runtime, name) for runtime in runtimes),
        )
        for name in MIXERS
    ]
    columns = (
        "block",
        *(f"cache and state at {context}, MB" for context in CONTEXTS),
        "growth by arithmetic, MB",
        *(f"growth of peak memory, {runtime}, MB" for runtime in runtimes),
    )
    return [*parts, "### Memory over context", table(columns, memory)]


def train_tables(rows: Sequence[Row]) -> list[str]:
    """Returns the table of `train`: of the rounds of the last one's version of PyTorch."""
    if not rows:
        return []
    version = rows[-1]["torch"]
    of = {(row["block"], row["form"], row["tokens"], row["round"]): row["cpu_ms"] for row in rows}
    rounds = list(dict.fromkeys(row["round"] for row in rows if row["torch"] == version))

    def ratio(over: tuple[str, str, int], under: tuple[str, str, int]) -> str:
        return ranged([of[*over, n] / of[*under, n] for n in rounds])

    lines = [
        (
            f"{name} (`{text}`)",
            base,
            ratio((name, "module", TRAINED), (base, "module", TRAINED)),
            ratio((name, "formula", SHORT), (name, "module", SHORT)),
        )
        for blocks, base in ((MIXERS, "gqa"), (FEED_FORWARDS, "swiglu"))
        for name, text in blocks.items()
    ]
    head = ("block", "over", f"time at {TRAINED}", f"its formula's time over its own at {SHORT}")
    return [f"### Forward and backward in PyTorch {version}, {len(rounds)} rounds", table(head, lines)]


def ranged(ratios: Sequence[float]) -> str:
    """Returns the median, with the least and the greatest."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _cache_mb(name: str, context: int) -> float:
    layout = Layout.parse(TIMED[name])
    return (layout.kv_bytes(Workload(prompt=context, gen=GEN).window) + layout.state_bytes()) / 1e6


if __name__ == "__main__":
    main()
