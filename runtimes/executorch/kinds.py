"""Kinds of blocks in ExecuTorch: one `ExecuTorchKind` per kind, in the registry `KINDS`.

A record says which programs run a block: their modules, constants (with the tensors of the state dict that they are cut
from, and how random weights of them are drawn) and states. Other distributions add records through entry points of the
group `nas.executorch.kinds`, with modules of their own; the runner runs any program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from nas.core.block import Block
from nas.core.layout import Norms
from nas.core.registry import Registry
from nas.measure.runtimes.executorch.programs import (
    EPS,
    MODULES,
    Constant,
    Program,
    Role,
    norm_constants,
    tap_constants,
)
from nas.model.blocks import mamba2
from nas.model.blocks.linear_attention import convolved
from nas.model.nn.rope import rope_divisors


@dataclass(frozen=True, slots=True)
class Attention:
    """Arguments of the attention kernel for a block, whose program is the same for all of them.

    Args:
        theta: RoPE base; 0: no positions.
        window: tokens seen; 0: all.
        sinks: the tensor of sink logits, below the block; None: no sinks.
        turned: numbers of a head that RoPE turns, its first ones; 0: all.
        divisors: of the angles of the pairs that turn; (): 1.
        softcap: bound b of scores, which become b tanh(score / b); 0: none.
        long: tokens beyond which the divisors are rope_long's of the block, and rope_short's below; 0: `divisors`.
        latent: sizes of a token's latent and of its key with positions, where the cache holds these; None: keys and
            values of the block's arguments `kv_heads` and `head_dim`.
    """

    theta: float
    window: int = 0
    sinks: str | None = None
    turned: int = 0
    divisors: tuple[float, ...] = ()
    softcap: float = 0.0
    long: int = 0
    latent: tuple[int, int] | None = None


@dataclass(frozen=True)
class ExecuTorchKind:
    """Describes one kind of block to ExecuTorch. Blocks are resolved wherever they are passed.

    Args:
        programs: (block, d_model) -> what runs it: one program, or of a mixture its router's, its experts', and that of
            shared experts, which reads what the router reads and adds to the stream.
        attention: of a mixer that attends over a cache, which the runner keeps.
        mixture: whether the block is a mixture of the arguments `experts` and `top_k`, with a bias per expert.
        behind: whether its modules can have norms behind them, see `ProgramModule.into` and `ProgramModule.onto`.
        stock: whether ExecuTorch's own operators compute the programs; where not, no whole graph has such a block.
        version: changes whenever the record of another distribution gives other bytes.
    """

    programs: Callable[[Block, int], tuple[Program, ...]]
    attention: Callable[[Block], Attention] | None = None
    mixture: bool = False
    behind: bool = False
    stock: bool = True
    version: str = ""


@cache
def programs_of(block: Block, d_model: int, norms: Norms = "before") -> tuple[Program, ...]:
    """Returns the programs of a block in a layout with these norms."""
    programs = KINDS[block.kind].programs(block.resolve(d_model), d_model)
    return programs if norms == "before" else tuple(_with_norms(program, d_model, norms) for program in programs)


def _with_norms(program: Program, d_model: int, norms: Norms) -> Program:
    """Returns a program with a norm on its output, and with that on its input only where there are both."""
    source = next(constant.source for constant in program.constants if constant.name == "norm_weight")
    before = [one for one in program.constants if norms == "both" or not one.name.startswith("norm_")]
    behind = norm_constants("behind", d_model, source.replace("_norm", "_out_norm"))
    sizes = (*program.sizes, ("behind", 2 if norms == "both" else 1))
    return replace(program, sizes=sizes, constants=(*before, *behind))


def _conv(block: Block, d_model: int) -> Program:
    kernel = block.int("kernel")
    parts = ("gate_in", "gate_out", "value")
    constants = (
        *norm_constants("norm", d_model, "mixer_norm.weight"),
        *(
            Constant(
                name, (d_model, d_model), "int4", "mixers.{j}.in_proj.weight", rows=(i * d_model, (i + 1) * d_model)
            )
            for i, name in enumerate(parts)
        ),
        *tap_constants(kernel, d_model, "mixers.{j}.conv.weight"),
        Constant("out", (d_model, d_model), "int4", "mixers.{j}.out.weight"),
    )
    return Program(
        "conv", f"{MODULES}:Conv", (("d_model", d_model), ("kernel", kernel)), constants, ((kernel - 1, d_model),)
    )


def _attention(block: Block, d_model: int) -> Program:
    """Returns the program of attention: RoPE, windows, sinks and bounds are arguments of the attention kernel."""
    names = ("heads", "kv_heads", "head_dim")
    heads, kv_heads, head_dim = (block.int(name) for name in names)
    projects_kv = block.get("kv") is None if block.kind == "gqa" else True
    arguments = ("qk_norm", "qk_norm_wide", "gate", "gate_wide")
    normed, wide, gated, of_numbers = (bool(block.get(name)) for name in arguments)
    gates = heads * head_dim if of_numbers else heads
    role: Role = "int4" if of_numbers else "matrix"
    rows = {"q": heads, "k": kv_heads, "v": kv_heads} if projects_kv else {"q": heads}
    norms = [name for name in ("q", "k") if normed and name in rows]
    canon = block.int("canon")
    constants = (
        *norm_constants("norm", d_model, "mixer_norm.weight"),
        *tap_constants(canon, d_model, "mixers.{j}.canon.weight"),
        *(
            Constant(name, (count * head_dim, d_model), "int4", f"mixers.{{j}}.{name}.weight")
            for name, count in rows.items()
        ),
        *(
            Constant(f"{name}_bias", (count * head_dim,), "bias", f"mixers.{{j}}.{name}.bias")
            for name, count in (rows.items() if block.get("qkv_bias") else ())
        ),
        *(
            part
            for name in norms
            for part in norm_constants(
                f"{name}_norm", head_dim * (rows[name] if wide else 1), f"mixers.{{j}}.{name}_norm.weight"
            )
        ),
        *((Constant("gate", (gates, d_model), role, "mixers.{j}.gate.weight"),) if gated else ()),
        Constant("o", (d_model, heads * head_dim), "int4", "mixers.{j}.o.weight"),
    )
    sizes = (("d_model", d_model), *((name, block.int(name)) for name in names), ("norm", normed), ("own", projects_kv))
    sizes = (*sizes, ("canon", canon)) if canon else sizes
    others = {"bias": bool(block.get("qkv_bias")), "wide": wide, "gate": gated, "gate_wide": of_numbers}
    sizes = (*sizes, *((name, True) for name, has in others.items() if has))
    states = ((canon - 1, d_model),) if canon else ()
    about = tuple((name, int(value)) for name, value in sizes)
    return Program("attention", f"{MODULES}:Attention", about, constants, states)


def _mla(block: Block, d_model: int) -> Program:
    """Returns absorbed latent attention: one product per head on either side of attention over latents."""
    names = ("heads", "latent", "head_dim", "nope_dim", "rope_dim", "query")
    heads, latent, value, nope, rope, rank = (block.int(name) for name in names)

    def matrix(name: str, rows: int, columns: int) -> Constant:
        return Constant(name, (rows, columns), "int4", f"mixers.{{j}}.{name}.weight")

    def per_head(name: str, rows: int, columns: int) -> Iterator[Constant]:
        for head in range(heads):
            cut = (head * rows, (head + 1) * rows)
            yield Constant(f"{name}{head}", (rows, columns), "int4", f"mixers.{{j}}.{name}.weight", rows=cut)

    query_width = heads * (nope + rope)
    queries: tuple[Constant, ...] = (matrix("q", query_width, d_model),)
    if rank:
        norm = norm_constants("q_norm", rank, "mixers.{j}.q_norm.weight")
        queries = (matrix("q_down", rank, d_model), *norm, matrix("q_up", query_width, rank))
    constants = (
        *norm_constants("norm", d_model, "mixer_norm.weight"),
        *queries,
        matrix("kv_down", latent + rope, d_model),
        *norm_constants("kv_norm", latent, "mixers.{j}.kv_norm.weight"),
        *per_head("k_up", latent, nope),
        *per_head("v_up", value, latent),
        matrix("o", d_model, heads * value),
    )
    sizes = (("d_model", d_model), *((name, block.int(name)) for name in names))
    return Program("mla", f"{MODULES}:LatentAttention", sizes, constants)


def _mamba2(block: Block, d_model: int) -> Program:
    names = ("state", "heads", "expand", "conv", "groups")
    narrower = (("inner", block.int("inner")),) if block.int("inner") else ()
    inner, mixed, heads = mamba2.inner_width(block, d_model), mamba2.convolved(block, d_model), block.int("heads")
    source = "mixers.{j}.in_proj.weight"
    constants = (
        *norm_constants("norm", d_model, "mixer_norm.weight"),
        Constant("gate", (inner, d_model), "int4", source, rows=(0, inner)),
        Constant("mixed", (mixed, d_model), "int4", source, rows=(inner, inner + mixed)),
        Constant("step", (heads, d_model), "matrix", source, rows=(inner + mixed, inner + mixed + heads)),
        *tap_constants(block.int("conv"), mixed, "mixers.{j}.conv.weight"),
        *((Constant("conv_bias", (mixed,), "bias", "mixers.{j}.conv.bias"),) if block.int("conv") else ()),
        Constant("dt_bias", (heads,), "bias", "mixers.{j}.dt_bias"),
        Constant("decay", (heads,), "decay", "mixers.{j}.A_log"),
        Constant("skip", (heads, 1), "norm", "mixers.{j}.D"),
        *(
            norm_constants("out_norm", inner, "mixers.{j}.norm.weight", block.int("groups"))
            if block.get("norm")
            else ()
        ),
        Constant("out", (d_model, inner), "int4", "mixers.{j}.out.weight"),
    )
    memory = (block.int("groups"), block.int("state"), inner // block.int("groups"))
    states = (*_window(block, mixed), memory)
    sizes = (("d_model", d_model), *((name, block.int(name)) for name in names), *narrower)
    return Program("mamba2", f"{MODULES}:Mamba2", sizes, constants, states)


def _gdn(block: Block, d_model: int) -> Program:
    names = ("heads", "key_heads", "head_dim", "conv")
    heads, _, size, conv = (block.int(name) for name in names)
    inner, mixed, eps = heads * size, convolved(block), float(block.get("norm_eps") or 0)
    constants = (
        *norm_constants("norm", d_model, "mixer_norm.weight"),
        Constant("qkv", (mixed, d_model), "int4", "mixers.{j}.qkv.weight"),
        *tap_constants(conv, mixed, "mixers.{j}.conv.weight"),
        Constant("length_ones", (1, size), "fill", value=1.0),
        Constant("length_eps", (1,), "fill", value=1e-6),
        Constant("beta", (heads, d_model), "matrix", "mixers.{j}.beta.weight"),
        Constant("step_size", (heads, d_model), "matrix", "mixers.{j}.step_size.weight"),
        Constant("dt_bias", (heads,), "bias", "mixers.{j}.dt_bias"),
        Constant("decay", (heads,), "decay", "mixers.{j}.A_log"),
        Constant("gate", (inner, d_model), "int4", "mixers.{j}.gate.weight"),
        *norm_constants("out_norm", size, "mixers.{j}.norm.weight", eps=eps),
        Constant("out", (d_model, inner), "int4", "mixers.{j}.out.weight"),
    )
    sizes = (("d_model", d_model), *((name, block.int(name)) for name in names))
    sizes = sizes if eps == EPS else (*sizes, ("trillion_eps", round(eps * 1e12)))
    return Program("gdn", f"{MODULES}:GatedDeltaNet", sizes, constants, (*_window(block, mixed), (heads, size, size)))


def _gla(block: Block, d_model: int) -> Program:
    names = ("heads", "head_dim", "rank")
    heads, size, rank = (block.int(name) for name in names)
    inner = heads * size
    constants = (
        *norm_constants("norm", d_model, "mixer_norm.weight"),
        *(
            Constant(name, (inner, d_model), "int4", "mixers.{j}.qkv.weight", rows=(i * inner, (i + 1) * inner))
            for i, name in enumerate("qkv")
        ),
        Constant("decay_down", (rank, d_model), "matrix", "mixers.{j}.decay_down.weight"),
        Constant("decay_up", (inner, rank), "matrix", "mixers.{j}.decay_up.weight"),
        Constant("decay_bias", (inner,), "bias", "mixers.{j}.decay_bias"),
        Constant("gate", (inner, d_model), "int4", "mixers.{j}.gate.weight"),
        *norm_constants("out_norm", size, "mixers.{j}.norm.weight"),
        Constant("out", (d_model, inner), "int4", "mixers.{j}.out.weight"),
    )
    sizes = (("d_model", d_model), *((name, block.int(name)) for name in names))
    return Program("gla", f"{MODULES}:GatedLinearAttention", sizes, constants, ((heads, size, size),))


def _mlstm(block: Block, d_model: int) -> Program:
    names = ("heads", "head_dim", "key_dim")
    heads, size, keys = (block.int(name) for name in names)
    inner, wide = heads * size, heads * keys
    rows = {"q": (0, wide), "k": (wide, 2 * wide), "v": (2 * wide, 2 * wide + inner)}
    gates = {"incoming": (0, heads), "kept": (heads, 2 * heads)}
    constants = (
        *norm_constants("norm", d_model, "mixer_norm.weight"),
        *(
            Constant(name, (end - start, d_model), "int4", "mixers.{j}.qkv.weight", rows=(start, end))
            for name, (start, end) in rows.items()
        ),
        *(Constant(name, (heads, d_model), "matrix", "mixers.{j}.gates.weight", rows=at) for name, at in gates.items()),
        *(Constant(f"{name}_bias", (heads,), "bias", "mixers.{j}.gate_bias", rows=at) for name, at in gates.items()),
        Constant("cap", (1,), "fill", value=15.0),
        Constant("per_cap", (1,), "fill", value=1.0 / 15.0),
        Constant("gate", (inner, d_model), "int4", "mixers.{j}.gate.weight"),
        Constant("out_norm_weight", (inner,), "norm", "mixers.{j}.norm_weight"),
        *(one for one in norm_constants("out_norm", size, "") if one.role == "fill"),
        Constant("out", (d_model, inner), "int4", "mixers.{j}.out.weight"),
    )
    sizes = (("d_model", d_model), *((name, block.int(name)) for name in names))
    return Program("mlstm", f"{MODULES}:MatrixLSTM", sizes, constants, ((heads, keys, size + 1),))


def _window(block: Block, channels: int) -> tuple[tuple[int, ...], ...]:
    """Returns the state of a block's convolution, if it has one."""
    taps = block.int("conv")
    return ((taps - 1, channels),) if taps else ()


def _convolved_heads(block: Block, d_model: int) -> Iterator[Constant]:
    """Yields the constants of queries, keys and values, perhaps convolved, and of the output."""
    inner = block.int("heads") * block.int("head_dim")
    yield from norm_constants("norm", d_model, "mixer_norm.weight")
    yield Constant("qkv", (3 * inner, d_model), "int4", "mixers.{j}.qkv.weight")
    yield from tap_constants(block.int("conv"), 3 * inner, "mixers.{j}.conv.weight")
    yield Constant("out", (d_model, inner), "int4", "mixers.{j}.out.weight")


def _linear(block: Block, d_model: int) -> Program:
    heads, size = block.int("heads"), block.int("head_dim")
    sizes = (("d_model", d_model), *((name, block.int(name)) for name in ("heads", "head_dim", "conv")))
    states = (*_window(block, 3 * heads * size), (heads, size, size + 1))
    constants = tuple(_convolved_heads(block, d_model))
    return Program("linear", f"{MODULES}:LinearAttention", sizes, constants, states)


def _deltanet(block: Block, d_model: int) -> Program:
    heads, size = block.int("heads"), block.int("head_dim")
    constants = (
        *_convolved_heads(block, d_model),
        Constant("length_ones", (1, size), "fill", value=1.0),
        Constant("length_eps", (1,), "fill", value=1e-6),
        Constant("beta", (heads, d_model), "matrix", "mixers.{j}.beta.weight"),
        *norm_constants("out_norm", size, "mixers.{j}.norm.weight"),
    )
    sizes = (("d_model", d_model), *((name, block.int(name)) for name in ("heads", "head_dim", "conv")))
    states = (*_window(block, 3 * heads * size), (heads, size, size))
    return Program("deltanet", f"{MODULES}:DeltaNet", sizes, constants, states)


def _mamba(block: Block, d_model: int) -> Program:
    names = ("state", "expand", "conv", "rank")
    state, expand, conv, rank = (block.int(name) for name in names)
    inner = expand * d_model
    in_proj, x_proj = "mixers.{j}.in_proj.weight", "mixers.{j}.x_proj.weight"
    constants = (
        *norm_constants("norm", d_model, "mixer_norm.weight"),
        Constant("value", (inner, d_model), "int4", in_proj, rows=(0, inner)),
        Constant("gate", (inner, d_model), "int4", in_proj, rows=(inner, 2 * inner)),
        *tap_constants(conv, inner, "mixers.{j}.conv.weight"),
        *((Constant("conv_bias", (inner,), "bias", "mixers.{j}.conv.bias"),) if conv else ()),
        Constant("low", (rank, inner), "matrix", x_proj, rows=(0, rank)),
        Constant("b", (state, inner), "matrix", x_proj, rows=(rank, rank + state)),
        Constant("c", (state, inner), "matrix", x_proj, rows=(rank + state, rank + 2 * state)),
        Constant("step", (inner, rank), "matrix", "mixers.{j}.dt_proj.weight"),
        Constant("dt_bias", (inner,), "bias", "mixers.{j}.dt_bias"),
        Constant("decay", (inner, state), "decay", "mixers.{j}.A_log"),
        Constant("skip", (inner,), "norm", "mixers.{j}.D"),
        Constant("out", (d_model, inner), "int4", "mixers.{j}.out.weight"),
    )
    sizes = (("d_model", d_model), *((name, block.int(name)) for name in names))
    return Program("mamba", f"{MODULES}:Mamba", sizes, constants, (*_window(block, inner), (inner, state, 1)))


def _state_space(block: Block, d_model: int, states: tuple[int, int]) -> Iterator[Constant]:
    """Yields the constants that S4 and S5 share; rates and frequencies have the shape `states`."""
    yield from norm_constants("norm", d_model, "mixer_norm.weight")
    yield from tap_constants(block.int("conv"), d_model, "mixers.{j}.conv.weight")
    yield Constant("rate", states, "decay", "mixers.{j}.A_log")
    yield Constant("frequency", states, "matrix", "mixers.{j}.A_imag")
    yield Constant("dt_bias", (states[0], 1), "bias", "mixers.{j}.dt_bias")
    yield Constant("skip", (d_model,), "norm", "mixers.{j}.D")
    yield Constant("one", (1,), "fill", value=1.0)
    yield Constant("gate", (d_model, d_model), "int4", "mixers.{j}.gate.weight")
    yield Constant("out", (d_model, d_model), "int4", "mixers.{j}.out.weight")


def _s4(block: Block, d_model: int) -> Program:
    states = block.int("state")
    read = Constant("read", (d_model, 2 * states), "matrix", "mixers.{j}.C")
    constants = (*_state_space(block, d_model, (d_model, states)), read)
    sizes = (("d_model", d_model), *((name, block.int(name)) for name in ("state", "conv", "liquid")))
    return Program("s4", f"{MODULES}:S4", sizes, constants, (*_window(block, d_model), (d_model, 2 * states, 1)))


def _s5(block: Block, d_model: int) -> Program:
    states = block.int("state")
    constants = (
        *_state_space(block, d_model, (states, 1)),
        Constant("write", (2 * states, d_model), "int4", "mixers.{j}.B.weight"),
        Constant("read", (d_model, 2 * states), "int4", "mixers.{j}.C.weight"),
    )
    sizes = (("d_model", d_model), *((name, block.int(name)) for name in ("state", "conv")))
    return Program("s5", f"{MODULES}:S5", sizes, constants, (*_window(block, d_model), (states, 1, 2)))


def _gated_ffn(block: Block, d_model: int) -> Program:
    sizes = (("d_model", d_model), ("width", block.int("width")))
    constants = (*norm_constants("norm", d_model, "ffn_norm.weight"), *_gated(block, d_model))
    name, module = ("geglu", "GeGLU") if block.kind == "geglu" else ("swiglu", "SwiGLU")
    return Program(name, f"{MODULES}:{module}", sizes, constants, inputs=1)


def _relu2(block: Block, d_model: int) -> Program:
    width = block.int("width")
    constants = (
        *norm_constants("norm", d_model, "ffn_norm.weight"),
        Constant("up", (width, d_model), "int4", "ffn.up.weight"),
        Constant("down", (d_model, width), "int4", "ffn.down.weight"),
    )
    return Program("relu2", f"{MODULES}:SquaredReLU", (("d_model", d_model), ("width", width)), constants, inputs=1)


def _moe(block: Block, d_model: int) -> tuple[Program, ...]:
    """Returns the programs of router and expert, and of shared experts, if any, that of all of them."""
    shared = (_shared(block, d_model),) if block.int("shared") else ()
    return (_router(block, d_model), _expert(block, d_model), *shared)


def _router(block: Block, d_model: int) -> Program:
    """Returns the program before the experts: the norm and the router's logits."""
    experts = block.int("experts")
    router = Constant("router", (experts, d_model), "matrix", "ffn.router.weight")
    constants = (*norm_constants("norm", d_model, "ffn_norm.weight"), router)
    return Program("router", f"{MODULES}:Router", (("d_model", d_model), ("experts", experts)), constants, inputs=1)


def _expert(block: Block, d_model: int) -> Program:
    """Returns the program of an expert; all experts of a mixture run the same program on weights of their own."""
    sizes = (("d_model", d_model), ("width", block.int("width")))
    return Program("expert", f"{MODULES}:Expert", sizes, tuple(_gated(block, d_model)), inputs=1)


def _shared(block: Block, d_model: int) -> Program:
    joint = Block.of("swiglu", width=block.int("shared") * block.int("width"))
    sizes: tuple[tuple[str, int], ...] = (("d_model", d_model), ("width", joint.int("width")))
    constants = (*norm_constants("norm", d_model, "ffn_norm.weight"), *_gated(joint, d_model, "ffn.shared"))
    if block.get("shared_gate"):
        sizes = (*sizes, ("gate", 1))
        constants = (*constants, Constant("own_gate", (1, d_model), "matrix", "ffn.shared_gate.weight"))
    return Program("shared", f"{MODULES}:Shared", sizes, constants)


def _gated(block: Block, d_model: int, place: str = "ffn") -> Iterator[Constant]:
    width = block.int("width")
    for name in ("gate", "up"):
        yield Constant(name, (width, d_model), "int4", f"{place}.{name}.weight")
    yield Constant("down", (d_model, width), "int4", f"{place}.down.weight")


def _theta(block: Block) -> float:
    return float(block.get("rope_theta") or 0)


def _attended(block: Block) -> Attention:
    windowed = block.kind == "swa"
    return Attention(
        _theta(block),
        window=block.int("window") if windowed else 0,
        sinks="sinks.weight" if windowed and block.get("sink") else None,
        turned=block.int("rope_dim"),
        divisors=rope_divisors(block),
        softcap=float(block.get("softcap") or 0),
        long=block.int("rope_long"),
    )


_ATTENTION = ExecuTorchKind(lambda block, d_model: (_attention(block, d_model),), _attended, behind=True)
_GATED_FFN = ExecuTorchKind(lambda block, d_model: (_gated_ffn(block, d_model),), behind=True)

KINDS: Registry[ExecuTorchKind] = Registry(
    "block kind that ExecuTorch runs",
    "nas.executorch.kinds",
    {
        "conv": ExecuTorchKind(lambda block, d_model: (_conv(block, d_model),), behind=True),
        "gqa": _ATTENTION,
        "swa": _ATTENTION,
        "mla": ExecuTorchKind(
            lambda block, d_model: (_mla(block, d_model),),
            lambda block: Attention(_theta(block), latent=(block.int("latent"), block.int("rope_dim"))),
            behind=True,
            stock=False,
        ),
        "mamba2": ExecuTorchKind(lambda block, d_model: (_mamba2(block, d_model),), behind=True),
        "gdn": ExecuTorchKind(lambda block, d_model: (_gdn(block, d_model),), behind=True, stock=False),
        "gla": ExecuTorchKind(lambda block, d_model: (_gla(block, d_model),), behind=True, stock=False),
        "mlstm": ExecuTorchKind(lambda block, d_model: (_mlstm(block, d_model),), behind=True, stock=False),
        "linear": ExecuTorchKind(lambda block, d_model: (_linear(block, d_model),), behind=True, stock=False),
        "deltanet": ExecuTorchKind(lambda block, d_model: (_deltanet(block, d_model),), behind=True, stock=False),
        "mamba": ExecuTorchKind(lambda block, d_model: (_mamba(block, d_model),), behind=True, stock=False),
        "s4": ExecuTorchKind(lambda block, d_model: (_s4(block, d_model),), behind=True, stock=False),
        "s5": ExecuTorchKind(lambda block, d_model: (_s5(block, d_model),), behind=True, stock=False),
        "swiglu": _GATED_FFN,
        "geglu": _GATED_FFN,
        "relu2": ExecuTorchKind(lambda block, d_model: (_relu2(block, d_model),), behind=True),
        "moe": ExecuTorchKind(_moe, mixture=True),
    },
)

MISSING = {
    "cfc": "as no operator runs a network token by token, each on the result of the last one",
    "longconv": "as the runner's growing caches belong to attention, and no operator convolves over one",
    "rtf": "as the runner's recurrences have a decay for each number, and a companion form mixes them",
}
"""Kind without a program -> what ExecuTorch and the runner lack."""
