"""The contract of a block kind, as tests: subclass `BlockContract`, name the kind and examples of it, and run pytest.

    class TestGatedShortConv(MixerContract):
        kind = "conv"
        examples = ("C3", "C12")
        reference = staticmethod(reference_gated_short_conv)

The names of the tests say what is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

import pytest
import torch
from torch import Tensor

from nas.core.block import BLOCKS, Block
from nas.core.layout import Layer, Layout
from nas.model.nn.base import FeedForward, Mixer, Padding, State
from nas.model.nn.kinds import MODULES
from nas.model.nn.model import Model
from nas.model.nn.moe import balance_experts
from nas.model.nn.primitives import draw_weights
from nas.model.nn.seeds import stacked, unstackable
from nas.model.nn.weights import zero_padded

BATCH = 2
LENGTH = 19
_VOCAB = 64
_OTHER = Block.of("conv", kernel=3)
_FFN = Block.of("swiglu", width=64)


class Reference(Protocol):
    """A kind's formula: (resolved block, state dict, one sequence [T, D]) -> output [T, D]."""

    def __call__(self, block: Block, weights: Mapping[str, Tensor], h: Tensor, /) -> Tensor: ...


class BlockContract:
    """Properties that layouts, exporters and training rely on, for kinds of either role.

    Attributes:
        kind: the kind's name in `nas.core.block.BLOCKS` and `nas.model.nn.kinds.MODULES`.
        examples: blocks in text form, at least one per argument that changes the computation.
        reference: the kind's formula, as a static method.
        d_model: width of the examples.
        tolerance: greatest difference of outputs of size 1 in float32.
    """

    kind: ClassVar[str]
    examples: ClassVar[tuple[str, ...]]
    reference: Reference
    d_model: ClassVar[int] = 64
    tolerance: ClassVar[float] = 1e-5

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test per example."""
        if "text" in metafunc.fixturenames:
            metafunc.parametrize("text", metafunc.cls.examples)

    @pytest.fixture
    def block(self, text: str) -> Block:
        """The example."""
        return Block.parse(text, BLOCKS[self.kind].role)

    @pytest.fixture
    def module(self, block: Block) -> Mixer | FeedForward:
        """The example's module, with no weight at a special value such as one or zero."""
        module = MODULES[block.kind](block, self.d_model)
        draw_weights(module, 0, depth=4)
        noise = torch.Generator().manual_seed(1)
        for tensor in module.state_dict().values():
            tensor += 0.1 * torch.rand(tensor.shape, generator=noise)
        return module.eval()

    @pytest.fixture
    def x(self) -> Tensor:
        """Input [B, T, D] of unit size."""
        return torch.randn(BATCH, LENGTH, self.d_model, generator=torch.Generator().manual_seed(2))

    def test_stacked_modules_compute_what_each_does(self, block: Block, module: Mixer | FeedForward, x: Tensor) -> None:
        if unstackable(module):
            return  # its seeds train one after another
        other = MODULES[block.kind](block, self.d_model)
        draw_weights(other, 5, depth=4)
        pair = (module, other.eval())
        both = stacked(pair).eval()(torch.cat([x, x.flip(1)]))
        for index, (single, inputs) in enumerate(zip(pair, (x, x.flip(1)), strict=True)):
            alone, part = single(inputs), torch.utils._pytree.tree_map(lambda y: y.chunk(2)[index], both)  # noqa: B023
            torch.testing.assert_close(part, alone, atol=10 * self.tolerance, rtol=1e-4)

    def test_is_registered_under_its_name(self) -> None:
        spec = BLOCKS[self.kind]
        assert spec.name == self.kind
        assert [kind.name for kind in BLOCKS.values() if kind.letter == spec.letter] == [self.kind]
        assert issubclass(MODULES[self.kind], {"mixer": Mixer, "ffn": FeedForward}[spec.role])

    def test_text_and_json_round_trip(self, text: str, block: Block) -> None:
        assert block.format() == text
        layout = Layout.of(self.d_model, _VOCAB, [_layer(block)])
        assert Layout.parse(layout.format()) == layout
        assert Layout.from_json(layout.to_json()) == layout

    def test_counts_equal_the_module(self, block: Block, module: Mixer | FeedForward) -> None:
        count = block.spec.count(block, self.d_model)
        assert sum(weight.numel() for weight in module.parameters()) == count.total
        assert 0 < count.active <= count.total
        assert block.spec.flops(block, self.d_model, 8) <= block.spec.flops(block, self.d_model, 64)

    def test_narrow_blocks_are_valid(self, block: Block) -> None:
        for width in range(32, self.d_model + 1, 32):
            narrow = block.spec.narrow(block, self.d_model, width)
            narrow.canonical(width)
            assert narrow.kind == block.kind
            assert narrow.spec.narrow(narrow, width, width).resolve(width) == narrow.resolve(width)

    def test_shorter_sequences_add_hardly_any_weights(self, block: Block) -> None:
        for length in (16, 128, 1024):
            short = block.spec.shorten(block, self.d_model, 4096, length)
            short.canonical(self.d_model)
            assert short.kind == block.kind
            # More heads have more gates.
            assert short.spec.count(short, self.d_model).total <= 1.25 * block.spec.count(block, self.d_model).total

    def test_padded_blocks_compute_the_same(self, block: Block, module: Mixer | FeedForward, x: Tensor) -> None:
        wide = MODULES[block.kind](block.spec.pad(block, 48), self.d_model)
        wide.load_state_dict(
            {name: zero_padded(module.state_dict()[name], tensor.shape) for name, tensor in wide.state_dict().items()}
        )
        with torch.no_grad():
            self._check_close(_whole(wide.eval(), x), _whole(module, x))

    def test_draws_every_weight_from_the_seed_alone(self, block: Block) -> None:
        before = torch.get_rng_state()
        twins = [MODULES[block.kind](block, self.d_model) for _ in range(2)]
        for twin in twins:
            for weight in twin.parameters():
                weight.data.fill_(torch.nan)
            draw_weights(twin, 3, depth=4)
        assert torch.equal(torch.get_rng_state(), before)
        for name, weight in twins[0].state_dict().items():
            assert weight.isfinite().all(), name
            assert torch.equal(weight, twins[1].state_dict()[name]), name

    def test_equals_the_reference(self, module: Mixer | FeedForward, x: Tensor) -> None:
        with torch.no_grad():
            expected = torch.stack([self.reference(module.block, module.state_dict(), row) for row in x])
            self._check_close(_whole(module, x), expected)

    def test_every_weight_learns(self, module: Mixer | FeedForward, x: Tensor) -> None:
        names, weights = zip(*module.named_parameters(), strict=True)
        gradients = torch.autograd.grad(_whole(module, x).square().sum(), weights)
        for name, gradient in zip(names, gradients, strict=True):
            assert gradient.abs().max() > 0, name

    def test_packed_rows_equal_single_ones(self, block: Block) -> None:
        """Post-training packs conversations (`PackedRows`): the layout has the block wherever layouts allow it.

        In float64, as rounding grows from layer to layer. A row of more than a chunk of the recurrences is packed
        between short ones, so that one row begins in its first chunk, and one after it.
        """
        model = Model(_around(block, self.d_model), seed=3).double().train()
        noise = torch.Generator().manual_seed(1)
        for weight in model.parameters():
            weight.data += 0.1 * torch.rand(weight.shape, generator=noise)
        lengths = torch.tensor((3, 66, 5))
        rows = torch.randint(_VOCAB, (len(lengths), int(lengths.max())), generator=torch.Generator().manual_seed(4))
        together = model.logits(model.packed_features(rows, torch.arange(rows.shape[1]) < lengths[:, None]))
        packed_loads = balance_experts(model, 0.0)
        alone = torch.cat([model(row[None, :length])[0] for row, length in zip(rows, lengths, strict=True)])
        self._check_close(together, alone)
        for actual, expected in zip(packed_loads, balance_experts(model, 0.0), strict=True):
            assert torch.equal(actual, expected), "padding counts as load of experts, which balances them"
        weights = list(model.parameters())
        gradients = [torch.autograd.grad(logits.square().mean(), weights) for logits in (together, alone)]
        for actual, expected in zip(*gradients, strict=True):
            self._check_close(actual, expected)

    def _check_close(self, actual: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(
            actual, expected, rtol=0, atol=self.tolerance * max(1.0, float(expected.detach().abs().max()))
        )


class MixerContract(BlockContract):
    """Further properties of a sequence mixer: it is causal, and its states carry a sequence across chunks."""

    def test_depends_on_no_later_token(self, module: Mixer, x: Tensor) -> None:
        x.requires_grad_()
        for t in (0, LENGTH // 2, LENGTH - 2):
            (gradient,) = torch.autograd.grad(module(x)[0][:, t].square().sum(), x)
            assert gradient[:, t].abs().max() > 0
            assert torch.all(gradient[:, t + 1 :] == 0)

    def test_state_is_as_large_as_counted(self, block: Block, module: Mixer, x: Tensor) -> None:
        numbers = sum(tensor.numel() for tensor in module(x)[1]) // BATCH
        cache = block.spec.kv_bytes(block, self.d_model, LENGTH, element=4.0)
        assert 4 * numbers == cache + block.spec.state_bytes(block, self.d_model)

    @pytest.mark.parametrize("cuts", [(1,) * LENGTH, (5, 1, 9, 4)], ids=str)
    def test_chunks_equal_the_whole(self, module: Mixer, x: Tensor, cuts: tuple[int, ...]) -> None:
        state = module.init_state(BATCH, x.dtype, x.device)
        parts = []
        with torch.no_grad():
            for part in torch.split(x, list(cuts), 1):
                y, state = module(part, state)
                parts.append(y)
            whole, end = module(x)
        self._check_close(torch.cat(parts, 1), whole)
        self._check_states(state, end)

    def test_step_equals_the_whole(self, module: Mixer, x: Tensor) -> None:
        with torch.no_grad():
            _, state = module(x[:, :-1])
            before = [tensor.clone() for tensor in state]
            y, end = module.step(x[:, -1], state)
            whole, whole_end = module(x)
        self._check_close(y, whole[:, -1])
        self._check_states(end, whole_end)
        assert all(torch.equal(*pair) for pair in zip(state, before, strict=True)), "a step changed its input state"

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_padding_changes_nothing(self, module: Mixer, x: Tensor, side: str) -> None:
        """A padded chunk, and one after it, give each row what it gets alone."""
        text = torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH // 2]])
        text = text.flip(1) if side == "left" else text
        both = torch.cat([text, torch.ones_like(text)], 1)
        with torch.no_grad():
            first, state = module(x.masked_fill(~text[..., None], 0), None, Padding(text, text.cumsum(1) - 1))
            second, _ = module(x.flip(1), state, Padding(both, both.cumsum(1) - 1))
            for row in range(BATCH):
                alone, end = module(x[None, row][:, text[row]])
                self._check_close(first[row][text[row]], alone[0])
                self._check_close(second[row], module(x[None, row].flip(1), end)[0][0])

    def _check_states(self, actual: State, expected: State) -> None:
        for state, other in zip(actual, expected, strict=True):
            self._check_close(state, other)


class FeedForwardContract(BlockContract):
    """Further property of a feed-forward: tokens are independent."""

    def test_depends_on_no_other_token(self, module: FeedForward, x: Tensor) -> None:
        with torch.no_grad():
            whole = module(x)
            for t in (0, LENGTH - 1):
                self._check_close(module(x[:, t : t + 1]), whole[:, t : t + 1])


def _layer(block: Block) -> Layer:
    return Layer((block,)) if block.spec.role == "mixer" else Layer((), block)


def _around(block: Block, d_model: int) -> Layout:
    """Returns a layout with a block in shared, parallel and halved layers, and read by `kv` if its kind has that."""
    if block.spec.role == "ffn":
        layers = [Layer((_OTHER,), block), Layer(share=0), Layer((), block), Layer((_OTHER,)), Layer((_OTHER,), block)]
        return Layout.of(d_model, _VOCAB, layers)
    layers = [Layer((block,)), Layer(share=0), Layer((), _FFN), Layer((_OTHER, block), _FFN)]
    if block.spec.cache_args:
        arguments = {arg.name: block.get(arg.name) for arg in block.spec.args if arg.required}
        reader = Block.of(block.kind, **(arguments | {name: block.get(name) for name in block.spec.cache_args}), kv=0)
        layers += [Layer((reader,), _FFN), Layer((_OTHER, reader)), Layer(share=4)]
    return Layout.of(d_model, _VOCAB, layers)


def _whole(module: Mixer | FeedForward, x: Tensor) -> Tensor:
    y: Tensor = module(x)[0] if isinstance(module, Mixer) else module(x)
    return y
