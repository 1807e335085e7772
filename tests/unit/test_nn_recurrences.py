"""Mixers with a memory of fixed size: the chunked form is the recurrence, forwards and backwards, and transformers'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from scipy import signal
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from nas.core.block import Block
from nas.core.errors import InvalidInput
from nas.core.layout import Layout, narrow
from nas.model.nn.cfc import reference_cfc
from nas.model.nn.deltanet import reference_deltanet
from nas.model.nn.diagonal import diagonal_scan
from nas.model.nn.gdn import delta_rule, reference_gdn, unit_length
from nas.model.nn.gla import gated_linear_attention, reference_gla
from nas.model.nn.kinds import MODULES
from nas.model.nn.linear import reference_linear
from nas.model.nn.longconv import reference_longconv
from nas.model.nn.mamba import reference_mamba, selective_scan
from nas.model.nn.mamba2 import reference_mamba2
from nas.model.nn.mlstm import reference_mlstm
from nas.model.nn.primitives import draw_weights
from nas.model.nn.rtf import rational_filter, reference_rtf
from nas.model.nn.s4 import reference_s4
from nas.model.nn.s5 import reference_s5
from nas.model.nn.ssd import ssd
from tests.support.twins import twin_of

WIDTH, LENGTH = 32, 150
CUTS = ([64, 64, 22], [63, 1, 1, 85], [1, 149], [149, 1])


def mixer(text: str, width: int = WIDTH) -> Any:
    """A module with no weight at a special value."""
    block = Block.parse(text, "mixer")
    module = MODULES[block.kind](block, width)
    draw_weights(module, 0, depth=4)
    noise = torch.Generator().manual_seed(1)
    for tensor in module.state_dict().values():
        tensor += 0.1 * torch.rand(tensor.shape, generator=noise)
    return module.eval()


def sequence(batch: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("text", "reference", "gates", "tolerance", "lengths"),
    [
        ("M8(groups=2,heads=4)", reference_mamba2, 0.0, 1e-10, (1, 63, 64, 65, 128, 150)),
        ("D2/1:8", reference_gdn, 0.0, 1e-10, (1, 64, 65, 150)),
        ("G2(rank=4)", reference_gla, 0.0, 1e-10, (1, 7, 8, 9, 40, 64, 65, 150)),
        ("X2(key_dim=5)", reference_mlstm, 0.0, 1e-8, (1, 64, 65, 150)),
        ("K2", reference_linear, 0.0, 1e-10, (1, 64, 65, 150)),
        ("N2(conv=3)", reference_deltanet, 0.0, 1e-10, (1, 64, 65, 150)),
        ("H3(conv=2)", reference_mamba, 0.0, 1e-10, (1, 150)),
        ("S4", reference_s4, 0.0, 1e-10, (1, 64, 65, 150)),
        ("S3(conv=2,liquid=1)", reference_s4, 0.0, 1e-10, (1, 150)),
        ("V5(conv=2)", reference_s5, 0.0, 1e-10, (1, 64, 65, 150)),
        ("F", reference_cfc, 0.0, 1e-10, (1, 150)),
        ("R5", reference_rtf, 0.0, 1e-10, (1, 64, 65, 150)),
        ("R70(conv=2)", reference_rtf, 0.0, 1e-10, (150,)),
        ("Y100(conv=2)", reference_longconv, 0.0, 1e-10, (1, 64, 65)),
        # Input gates at their cap, whose exponential is 3 million.
        ("X2(key_dim=5)", reference_mlstm, 30.0, 1e-8, (1, 64, 65, 150)),
    ],
)
@torch.no_grad()
def test_any_number_of_chunks_is_the_recurrence(
    text: str, reference: Callable[..., Tensor], gates: float, tolerance: float, lengths: tuple[int, ...]
) -> None:
    module = mixer(text).double()
    if gates:
        module.gate_bias[:2] += gates
    for length in lengths:
        x = sequence(1, length).double()
        expected = reference(module.block, module.state_dict(), x[0])
        torch.testing.assert_close(module(x)[0][0], expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "text", ["M8(groups=2,heads=4)", "D4/2", "G4", "X4", "K4", "N4", "N4(conv=0)", "H4", "S4", "V", "R5", "R70", "Y"]
)
@torch.no_grad()
def test_a_sequence_may_be_cut_anywhere(text: str) -> None:
    module, x = mixer(text).double(), sequence().double()
    whole, end = module(x)
    for cuts in CUTS:
        state, parts = None, []
        for part in torch.split(x, cuts, 1):
            y, state = module(part, state)
            parts.append(y)
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-10)
        torch.testing.assert_close(state, end, rtol=1e-9, atol=1e-10)


def ssd_recurrence(u: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """What `ssd` says it computes."""
    repeat = u.shape[2] // b.shape[2]
    out = []
    for t in range(u.shape[1]):
        write, read = (part[:, t].repeat_interleave(repeat, 1) for part in (b, c))
        memory = log_decay[:, t].exp()[..., None, None] * memory + u[:, t, :, :, None] * write[:, :, None]
        out.append((memory @ read[..., None])[..., 0])
    return torch.stack(out, 1), memory


def delta_recurrence(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """What `delta_rule` says it computes."""
    out = []
    for t in range(q.shape[1]):
        memory = log_decay[:, t].exp()[..., None, None] * memory
        missing = v[:, t] - (memory.mT @ k[:, t, :, :, None])[..., 0]
        memory = memory + (beta[:, t, :, None] * k[:, t])[..., None] * missing[..., None, :]
        out.append((memory.mT @ q[:, t, :, :, None])[..., 0])
    return torch.stack(out, 1), memory


def gla_recurrence(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Equation 3 of the paper (Yang et al. 2023), for a batch of heads."""
    out = []
    for t in range(q.shape[1]):
        memory = log_decay[:, t].exp()[..., None] * memory + k[:, t, :, :, None] * v[:, t, :, None]
        out.append((memory.mT @ q[:, t, :, :, None])[..., 0])
    return torch.stack(out, 1), memory


def scan_recurrence(
    u: Tensor, step: Tensor, rate: Tensor, b: Tensor, c: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """What `selective_scan` says it computes, written to and read from all tokens at once."""
    total = (-step[..., None] * rate).cumsum(1)
    lag = torch.ones(u.shape[1], u.shape[1]).tril().bool()[None, :, :, None, None]
    spans = (total[:, :, None] - total[:, None]).masked_fill(~lag, -torch.inf).exp()  # [B, T, T, I, N]
    memories = torch.einsum("btsin,bsi,bsn->btin", spans, step * u, b) + total.exp() * memory[:, None]
    return (memories * c[:, :, None]).sum(-1), memories[:, -1]


def diagonal_recurrence(
    u: Tensor, log_decay: Tensor, write: Tensor, read: Tensor, memory: Tensor, padding: None
) -> tuple[Tensor, Tensor]:
    """What `diagonal_scan` says it computes."""
    now, out = torch.view_as_complex(memory), []
    for t in range(u.shape[1]):
        now = log_decay.exp() * now + (write * u[:, t, :, None]).sum(-1)
        out.append((read * now[..., None]).sum(-2).real)
    return torch.stack(out, 1), torch.view_as_real(now)


def filter_recurrence(u: Tensor, a: Tensor, b: Tensor, memory: Tensor, padding: None) -> tuple[Tensor, Tensor]:
    """What `rational_filter` says it computes."""
    out = []
    for t in range(u.shape[1]):
        past = memory.flip(1).mT  # [B, D, N], the last one first
        out.append((b * past).sum(-1))
        memory = torch.cat([memory[:, 1:], (u[:, t] - (a * past).sum(-1))[:, None]], 1)
    return torch.stack(out, 1), memory


class Recurrence(NamedTuple):
    """A chunked function, what it computes, the shapes of its arguments, and how these are made of free numbers."""

    chunked: Callable[..., Any]
    plain: Callable[..., Any]
    shapes: list[tuple[int, ...]]
    arguments: Callable[..., tuple[Tensor, ...]]


RECURRENCES = {
    "ssd": Recurrence(
        ssd,
        ssd_recurrence,
        [(1, 70, 4, 3), (1, 70, 4), (1, 70, 2, 5), (1, 70, 2, 5), (1, 4, 3, 5)],
        lambda u, decay, b, c, memory: (u, -decay.exp(), b, c, memory),
    ),
    "delta rule": Recurrence(
        delta_rule,
        delta_recurrence,
        [(1, 70, 2, 5), (1, 70, 2, 5), (1, 70, 2, 3), (1, 70, 2), (1, 70, 2), (1, 2, 5, 3)],
        lambda q, k, v, decay, beta, memory: (
            q, torch.nn.functional.normalize(k, dim=-1), v, -decay.exp(), beta.sigmoid(), memory
        ),
    ),
    "selective scan": Recurrence(
        selective_scan,
        scan_recurrence,
        [(1, 70, 4), (1, 70, 4), (4, 3), (1, 70, 3), (1, 70, 3), (1, 4, 3)],
        lambda u, step, rate, b, c, memory: (u, step.exp(), rate.exp(), b, c, memory),
    ),
    "diagonal scan": Recurrence(
        diagonal_scan,
        diagonal_recurrence,
        [(2, 70, 3, 2), (3, 4), (3, 4), (3, 4, 2, 2), (3, 4, 1, 2), (2, 3, 4, 2)],
        lambda u, rate, turn, write, read, memory: (
            u, torch.complex(-rate.exp(), turn), *map(torch.view_as_complex, (write, read)), memory, None
        ),
    ),
    "rational filter": Recurrence(
        rational_filter,
        filter_recurrence,
        [(2, 70, 3), (3, 4), (3, 4), (2, 4, 3)],
        lambda u, a, b, memory: (u, 0.2 * a, b, memory, None),
    ),
    "gated linear attention": Recurrence(
        gated_linear_attention,
        gla_recurrence,
        [(1, 70, 2, 5), (1, 70, 2, 5), (1, 70, 2, 3), (1, 70, 2, 5), (1, 2, 5, 3)],
        lambda q, k, v, decay, memory: (q, k, v, -decay.exp(), memory),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RECURRENCES)
def test_gradients_are_those_of_the_recurrence(name: str) -> None:
    about, draw = RECURRENCES[name], torch.Generator().manual_seed(0)
    free = [torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in about.shapes]
    results, grads = [], []
    for compute in (about.chunked, about.plain):
        pair = compute(*about.arguments(*free))
        results.append(pair)
        grads.append(torch.autograd.grad(sum(part.square().sum() for part in pair), free))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-10)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("text", "bias", "value"),
    [
        ("M8(heads=4)", "dt_bias", 80.0),
        ("D4", "dt_bias", 80.0),
        # exp(-20) a token: its product over a chunk is zero in float32, and its inverse infinite.
        ("G4", "decay_bias", -320.0),
        ("H4", "dt_bias", 80.0),
        ("S4", "dt_bias", 80.0),
        ("V", "dt_bias", 80.0),
    ],
)
def test_a_memory_that_decays_at_once_has_finite_gradients(text: str, bias: str, value: float) -> None:
    module, x = mixer(text), sequence()
    with torch.no_grad():
        getattr(module, bias).fill_(value)
    y, _ = module(x)
    y.square().sum().backward()
    assert y.isfinite().all()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in module.parameters())


@pytest.mark.parametrize("how", ["autocast", "weights"])
@pytest.mark.parametrize(
    ("text", "bias", "value"),
    [
        ("M16(heads=4)", "dt_bias", -6.0),
        ("D4/2", "dt_bias", -6.0),
        ("G4", "decay_bias", 6.0),
        ("X4", "gate_bias", 6.0),
        ("H4", "dt_bias", -6.0),
        ("S4", "dt_bias", -6.0),
    ],
)
@torch.no_grad()
def test_memories_that_decay_slowly_keep_small_numbers_in_half_precision(
    text: str, bias: str, value: float, how: str
) -> None:
    """A memory in bfloat16 loses what a token adds once it is 256 times as large."""
    module, x = mixer(text), sequence(1, 400)
    getattr(module, bias)[-4:] = value  # of mLSTM the forget gates
    expected, _ = module(x)
    if how == "weights":
        module, x = module.bfloat16(), x.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        whole, state = module(x)
        assert state[-1].dtype == torch.float32
        steps, state = [], None
        for token in x.split(1, 1):
            y, state = module(token, state)
            steps.append(y)
    rounding, error = ((output.float() - expected).norm() for output in (whole, torch.cat(steps, 1)))
    assert error < 1.3 * rounding < 0.03 * expected.norm()


@pytest.mark.parametrize(("text", "length"), [("X2", 150), ("K1", 3000)])
@torch.no_grad()
def test_sums_exceed_no_range_in_float16(text: str, length: int) -> None:
    """Released folders are float16 unless one asks for another type."""
    module, x = mixer(text), sequence(1, length)
    if text == "X2":
        module.gate_bias[:2] += 30.0  # input gates, whose exponentials are then 3 million
    expected, _ = module(x)
    y, _ = module.half()(x.half())
    assert y.dtype == torch.float16
    assert (y - expected)[:, -50:].norm() < 0.02 * expected[:, -50:].norm()


def test_long_queries_and_keys_get_length_one_in_float16() -> None:
    x = torch.full((1, 128), 30.0)
    torch.testing.assert_close(unit_length(x.half()).float(), unit_length(x), rtol=1e-3, atol=0)


@torch.no_grad()
def test_a_delta_network_is_the_delta_rule_of_transformers_without_decay() -> None:
    module, x = mixer("N4"), sequence()
    mixed, _ = module.convolved(module.qkv(x), module.init_state(2, x.dtype, x.device), None)
    q, k, v = module.by_head(torch.nn.functional.silu(mixed))
    beta = module.beta(x).sigmoid()
    y, _ = torch_recurrent_gated_delta_rule(
        q, k, v, torch.zeros_like(beta), beta, None, False, use_qk_l2norm_in_kernel=True
    )
    torch.testing.assert_close(module(x)[0], module.out(module.norm(y).flatten(2)), rtol=0, atol=1e-5)


def scipy_response(module: Any, n: Any, b: Tensor, read: Tensor, u: Tensor) -> Tensor:
    """Returns the response [T, outputs] of one complex state, module.A_log[n], to inputs [T, inputs].

    Real and imaginary part are the two states of a real system, which scipy discretises: b [2, inputs], read [outputs,
    2].
    """
    rate, frequency = -module.A_log[n].exp(), module.A_imag[n]
    a = torch.stack([rate, -frequency, frequency, rate]).view(2, 2)
    step = torch.nn.functional.softplus(module.dt_bias[n if module.dt_bias.dim() == module.A_log.dim() else n[0]])
    system = [matrix.numpy() for matrix in (a, b, read, torch.zeros(len(read), b.shape[1], dtype=b.dtype))]
    a, b, c, _, dt = signal.cont2discrete(system, step.item())
    _, y, _ = signal.dlsim((a, b, c @ a, c @ b, dt), u.numpy())  # scipy reads a state before its step
    return torch.from_numpy(y)


@torch.no_grad()
def test_diagonal_state_spaces_are_those_of_scipy() -> None:
    module, x = mixer("S3").double(), sequence(1, 90).double()
    real, imag = module.C.chunk(2, 1)
    one = torch.tensor([[1.0], [0.0]]).double()
    columns = [
        sum(
            scipy_response(module, (d, n), one, 2 * torch.stack([real[d, n], -imag[d, n]])[None], x[0, :, d : d + 1])
            for n in range(3)
        )
        for d in range(WIDTH)
    ]
    torch.testing.assert_close(module(x)[0], module.output(torch.cat(columns, 1)[None], x), rtol=0, atol=1e-10)


@torch.no_grad()
def test_a_shared_state_space_is_that_of_scipy() -> None:
    module, x = mixer("V3").double(), sequence(1, 90).double()
    y = sum(scipy_response(module, n, module.B.weight[n::3], module.C.weight[:, n::3], x[0]) for n in range(3))
    torch.testing.assert_close(module(x)[0], module.output(y[None], x), rtol=0, atol=1e-10)


@torch.no_grad()
def test_a_rational_transfer_function_is_a_filter_of_scipy() -> None:
    module, x = mixer("R5").double(), sequence(1, 90).double()
    columns = [
        signal.lfilter([0.0, *module.b[d].tolist()], [1.0, *module.a[d].tolist()], x[0, :, d].numpy())
        for d in range(WIDTH)
    ]
    y = torch.from_numpy(np.stack(columns, 1))[None]
    torch.testing.assert_close(module(x)[0], module.output(y, x), rtol=0, atol=1e-10)


@torch.no_grad()
def test_a_closed_form_cell_is_that_of_ncps_after_a_unit_of_time() -> None:
    """The arithmetic of ncps.torch.CfCCell, whose gate has one map times the time between tokens and one without."""
    module, x = mixer("F6(units=9)").double(), sequence(1, 40).double()
    weights = {name: tensor.numpy() for name, tensor in module.state_dict().items()}
    joint = np.concatenate([weights["input.weight"], weights["hidden.weight"]], 1)
    (w1, w2, w_time), (b1, b2, b_time) = (np.split(weights[f"heads.{name}"], 3) for name in ("weight", "bias"))
    w_a, elapsed, hidden, rows = np.random.default_rng(0).normal(size=w_time.shape), 1.0, np.zeros(6), []
    for token in x[0].numpy():
        z = 1.7159 * np.tanh(0.666 * (joint @ np.concatenate([token, hidden]) + weights["input.bias"]))
        gate = 1 / (1 + np.exp(-(w_a @ z * elapsed + (w_time - w_a) @ z + b_time)))
        hidden = np.tanh(w1 @ z + b1) * (1 - gate) + gate * np.tanh(w2 @ z + b2)
        rows.append(weights["out.weight"] @ hidden)
    torch.testing.assert_close(module(x)[0][0], torch.from_numpy(np.stack(rows)), rtol=0, atol=1e-12)


@torch.no_grad()
def test_a_key_that_repeats_is_written_as_often_as_it_comes() -> None:
    """The worst case of the delta rule's triangular system: one key over and over, never forgotten."""
    k = torch.nn.functional.normalize(torch.ones(1, 1, 1, 8), dim=-1).expand(1, 200, 1, 8)
    v = torch.randn(1, 200, 1, 4, generator=torch.Generator().manual_seed(0))
    flat = torch.zeros(1, 200, 1)
    y, _ = delta_rule(k, k, v, flat, flat + 0.999, torch.zeros(1, 1, 8, 4))
    torch.testing.assert_close(y, v, rtol=0, atol=0.02)


@torch.no_grad()
def test_gates_at_their_cap_are_exact_in_float32() -> None:
    module, exact, x = mixer("X2"), mixer("X2").double(), sequence(1)
    for one in (module, exact):
        one.gate_bias += 30.0  # all comes in, nothing is forgotten
    torch.testing.assert_close(module(x)[0], exact(x.double())[0].float(), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("text", "tolerance", "changed"),
    [
        ("M16(heads=4)", 1e-4, "D"),
        ("M(heads=8)", 1e-4, "D"),
        ("M8(groups=2,heads=4)", 1e-4, "D"),
        ("M8(conv=3,expand=3,heads=6)", 1e-4, "D"),
        ("D4/2:8", 1e-5, "A_log"),
        ("D4", 1e-5, "A_log"),
        ("D2/1:16(conv=3)", 1e-5, "A_log"),
        ("X4", 1e-4, "fgate_preact.bias"),
        ("X2(key_dim=16)", 1e-4, "fgate_preact.bias"),
        ("H", 1e-5, "D"),
        ("H5(conv=3,expand=3,rank=7)", 1e-5, "D"),
    ],
)
@torch.no_grad()
def test_outputs_are_those_of_transformers(text: str, tolerance: float, changed: str) -> None:
    module, x = mixer(text), sequence()
    twin = twin_of(module, WIDTH)
    torch.testing.assert_close(module(x)[0], twin(x), rtol=0, atol=tolerance)
    twin.module.get_parameter(changed).add_(0.5)
    assert (module(x)[0] - twin(x)).abs().max() > 10 * tolerance


@pytest.mark.parametrize(
    ("text", "width", "weights"),
    [
        # A linear layer of Qwen3-Next: 16 key heads and 32 value heads of 128 numbers, 4 taps.
        ("D32/16:128", 2048, 2048 * (2 * 2048 + 2 * 4096 + 64) + 4 * 8192 + 64 + 128 + 4096 * 2048),
        # Section 4.4 of the paper with keys as wide as values: five projections of d x d, and 16 d + 16 d to decays.
        ("G4", 1024, 5 * 1024 * 1024 + 2 * 16 * 1024 + 1024 + 256),
        # xLSTM-7B: 8 heads, keys of half the width of values.
        ("X8", 4096, 4096 * (2048 * 2 + 4096 * 3 + 16) + 16 + 4096),
    ],
)
def test_a_mixer_has_as_many_weights_as_published(text: str, width: int, weights: int) -> None:
    block = Block.parse(text, "mixer")
    assert block.spec.count(block, width).total == weights


def test_the_published_mamba_has_as_many_weights() -> None:
    assert Layout.parse("d768 v50280 ffn=none [H*24]").params.total == 129_135_360


def test_the_published_mamba2_has_as_many_weights() -> None:
    assert Layout.parse("d768 v50288 ffn=none [M*24]").params.total == 128_989_632


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("M", 3 * (2048 + 2 * 128) + 32 * 64 * 128),
        ("D8/4", 3 * (2 * 4 + 8) * 128 + 8 * 128 * 128),
        ("G8", 8 * 128 * 128),
        ("X4", 4 * 128 * 257),
        ("K8", 8 * 128 * 129),
        ("N8", 3 * 3 * 1024 + 8 * 128 * 128),
        ("N8(conv=0)", 8 * 128 * 128),
        ("H", 3 * 2048 + 2048 * 16),
        ("S16(conv=4)", 3 * 1024 + 2 * 16 * 1024),
        ("V", 1024),
        ("F", 512),
        ("R(conv=4)", 3 * 1024 + 16 * 1024),
    ],
)
def test_state_is_that_of_the_convolution_and_the_heads(text: str, numbers: int) -> None:
    layout = Layout.parse(f"d1024 v65536 ffn=swiglu:4608 [{text}]")
    assert layout.state_bytes() == 4 * numbers
    assert layout.kv_bytes(1 << 20) == 0


@pytest.mark.parametrize(
    ("mixers", "width", "length", "proxy"),
    [
        # At the sequence of deploy scale heads keep their size, down to one that is as wide as the layer.
        ("D8 D16/8:128", 256, 4096, "d256 v256 ffn=swiglu:1152 [D2 D4/2:128]"),
        ("G8 X8(key_dim=128)", 256, 4096, "d256 v256 ffn=swiglu:1152 [G2 X2(key_dim=128)]"),
        ("X4", 64, 4096, "d64 v256 ffn=swiglu:288 [X1]"),
        # A 32nd of the sequence takes keys of a 32nd, and 32 times the heads.
        ("D8 D16/8:128", 256, 128, "d256 v256 ffn=swiglu:1152 [D64 D128/64:4]"),
        ("G8 X8(key_dim=128)", 256, 128, "d256 v256 ffn=swiglu:1152 [G64 X64(key_dim=4)]"),
        # One head of keys that 32 share: as wide as a proxy's least head allows.
        ("D32/1", 32, 16, "d32 v256 ffn=swiglu:144 [D32/1:2]"),
        ("D8 G8 X4", 64, 16, "d64 v256 ffn=swiglu:288 [D32 G32 X16]"),
    ],
)
def test_proxies_have_fewer_heads_and_narrower_ones_for_shorter_sequences(
    mixers: str, width: int, length: int, proxy: str
) -> None:
    layout = Layout.parse(f"d1024 v65536 ffn=swiglu:4608 [{mixers}]")
    assert narrow(layout, width, 256, context=4096, length=length).format() == proxy


@pytest.mark.parametrize(("text", "width"), [("M", 2048), ("D64:4", 64)])
def test_step_sizes_and_decays_start_in_the_published_ranges(text: str, width: int) -> None:
    block = Block.parse(text, "mixer")
    module: Any = MODULES[block.kind](block, width)
    draw_weights(module, 5, depth=2)
    step, rate = torch.nn.functional.softplus(module.dt_bias), module.A_log.exp()
    assert 0.9e-3 < step.min() < 2e-3 and 5e-2 < step.max() < 0.11
    assert 0.99 < rate.min() < 3 and 14 < rate.max() < 16.01
    if block.kind == "mamba2":
        assert torch.all(module.D == 1) and torch.all(module.conv.bias == 0)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("d32 v64 ffn=none [M(expand=1)]", "inner width 32 is no multiple of 64; give the heads"),
        ("d64 v64 ffn=none [M(heads=3)]", "3 heads do not divide the inner width 128"),
        ("d64 v64 ffn=none [M(groups=3,heads=4)]", "3 groups do not divide 4 heads"),
        ("d32 v64 ffn=none [D3]", "3 heads do not divide d_model 32; give the head size"),
        ("d64 v64 ffn=none [D4/3]", "3 heads of queries and keys do not divide 4 heads"),
        ("d32 v64 ffn=none [G3]", "3 heads do not divide d_model 32; give the head size"),
        ("d32 v64 ffn=none [K4(conv=1)]", "a convolution has at least 2 taps; 0 for none"),
        ("d32 v64 ffn=none [H(conv=1)]", "a convolution has at least 2 taps; 0 for none"),
        ("d32 v64 ffn=none [S(conv=1)]", "a convolution has at least 2 taps; 0 for none"),
        ("d32 v64 ffn=none [X3]", "3 heads do not divide d_model 32; give the head size"),
    ],
)
def test_heads_that_do_not_fit_are_refused(text: str, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        Layout.parse(text)
