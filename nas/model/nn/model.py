"""A layout as a language model: embedding, pre-norm residual layers, final RMSNorm, output head.

State dict (D width, V vocabulary, i depth, j mixer of the layer; a linear weight is [outputs, inputs], no biases):

    embed.weight                  [V, D]
    layers.i.mixer_norm.weight    [D]       layers with a mixer, unless norms=behind
    layers.i.mixer_out_norm.weight [D]      layers with a mixer, norms=behind and norms=both
    layers.i.mixers.j.*                     see the module's class, which `nas.model.nn.kinds.MODULES` names
    layers.i.ffn_norm.weight      [D]       layers with a feed-forward, as mixer_norm
    layers.i.ffn_out_norm.weight  [D]       layers with a feed-forward, as mixer_out_norm
    layers.i.ffn.*                          see the module's class
    norm.weight                   [D]
    head.weight                   [V, D]    untied layouts only
    projection.weight             [W, D]    layouts with token vectors only
    tower.*                                 layouts with a tower only, see `nas.model.nn.tower`

A layer that shares weights (`^n`) has no tensors of its own: index i is left out. No two names alias one tensor. Heads
are stored one after another in the rows of a weight.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nas.core.errors import Unsupported
from nas.core.layout import Layout
from nas.model.nn.base import Mixer, Padding, State
from nas.model.nn.layer import PackedRows, ResidualLayer
from nas.model.nn.primitives import Embedding, Linear, RMSNorm, bounded, draw_weights, linear

ModelState = list[list[State]]
"""State per depth and mixer; () for a mixer that reads another layer's cache."""


class Model(nn.Module):
    """The module of a layout.

        model = Model(Layout.parse("d64 v256 ffn=swiglu:128 [C3 A4/2]"), seed=0).eval()
        logits = model(torch.tensor([[1, 2, 3]]))              # [1, 3, 256]
        logits, state = model.prefill(torch.tensor([[1, 2]]))  # [1, 2, 256]
        logits, state = model.step(torch.tensor([3]), state)   # [1, 256]

    Whatever takes token ids [B, T] takes embeddings [B, T, D] in their place, too.

    Args:
        layout: what to build.
        seed: start values; a tensor's values depend on seed, name and shape alone (and on the depth, for projections
            into the residual stream), so that layouts that differ in one layer start alike elsewhere. None: weights
            are left as allocated, for loading a checkpoint or for the meta device.
    """

    def __init__(self, layout: Layout, seed: int | None = 0) -> None:
        super().__init__()
        self.layout, self.softcap, self._both_ways = layout, layout.softcap, False
        self.embed = Embedding(layout.vocab, layout.d_model)
        owners = {str(i): layer for i, layer in enumerate(layout.layers) if layer.share is None}
        self.layers = nn.ModuleDict(
            {i: ResidualLayer(layer, layout.d_model, layout.norms) for i, layer in owners.items()}
        )
        self.norm = RMSNorm(layout.d_model)
        self.head = None if layout.tied else Linear(layout.d_model, layout.vocab)
        if layout.vectors:
            self.projection = Linear(layout.d_model, layout.vectors)
        if layout.tower:
            from nas.model.nn.tower import open_tower

            self.tower = open_tower(layout.tower, layout.d_model, seed or 0)
        self._layer_names = [str(i if layer.share is None else layer.share) for i, layer in enumerate(layout.layers)]
        self._sources = [
            [layout.cache_source(depth, j) for j in range(len(layout.layer_at(depth).mixers))]
            for depth in range(layout.depth)
        ]
        if seed is not None:
            draw_weights(self, seed, layout.depth)
            if layout.tower:
                self.tower.connector.draw(seed, self.embed.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, T, V] of token ids [B, T]."""
        return self.logits(self.features(tokens))

    def features(self, tokens: Tensor) -> Tensor:
        """Returns the input of the output head, [B, T, D], for token ids [B, T]."""
        return self._run(tokens, None)[0]

    def read_both_ways(self) -> None:
        """Lets mixers see the tokens behind as well as those before, as encoders do; then there is no state.

        Raises:
            Unsupported: a mixer reads one way only.
        """
        self._both_ways = True
        for mixer in (module for module in self.modules() if isinstance(module, Mixer)):
            if reason := mixer.one_way():
                raise Unsupported(f"reads one way only, so the model cannot be bidirectional: {reason}")
            mixer.both_ways = True

    def packed_features(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Returns the input of the output head for the positions of `mask`, [N, D], computing no others but in mixers.

        tokens: ids [B, T]; mask: [B, T], of each row the first positions.
        """
        padding = Padding(mask, torch.arange(mask.shape[1], device=mask.device).expand_as(mask))
        return self._run(tokens, None, PackedRows.of(mask), padding if self._both_ways else None)[0][0]

    def vectors(self, tokens: Tensor) -> Tensor:
        """Returns vectors of norm 1 [B, T, W] of token ids [B, T], if the layout has any (LFM2 report, equation 6)."""
        return F.normalize(self.projection(self.features(tokens)).float(), dim=-1)

    def answers(self, numbers: Tensor, tokens: Tensor) -> Tensor:
        """Logits [B, T, V] of token ids [B, T] behind what a task shows, int64 [B, R, C]; the layout has a tower."""
        prefix = self.tower(numbers)
        features = self.features(torch.cat([prefix, self.embed(tokens)], 1))
        return self.logits(features[:, prefix.shape[1] :])

    def logits(self, features: Tensor) -> Tensor:
        """Applies the output head: [..., D] -> [..., V]."""
        return bounded(linear(features, self.embed.weight if self.head is None else self.head.weight), self.softcap)

    def prefill(self, tokens: Tensor, state: ModelState | None = None) -> tuple[Tensor, ModelState]:
        """Reads the next chunk of a prompt.

        Args:
            tokens: ids [B, T].
            state: after the previous chunk; None: the prompt starts here.

        Returns:
            Logits [B, T, V] and the state after the chunk; `state` itself stays as it was.
        """
        features, after = self.read(tokens, state)
        return self.logits(features), after

    def read(self, tokens: Tensor, state: ModelState | None = None) -> tuple[Tensor, ModelState]:
        """Does the same as `prefill` without the output head: returns its input, [B, T, D]."""
        return self._run(tokens, state)

    def step(self, token: Tensor, state: ModelState) -> tuple[Tensor, ModelState]:
        """Decodes one token: ids [B] -> logits [B, V] and the state after it."""
        logits, after = self.prefill(token[:, None], state)
        return logits[:, 0], after

    def _run(
        self,
        tokens: Tensor,
        state: ModelState | None,
        packed: PackedRows | None = None,
        padding: Padding | None = None,
    ) -> tuple[Tensor, ModelState]:
        inputs = packed.pack(tokens) if packed else tokens
        x = inputs if inputs.is_floating_point() else self.embed(inputs)
        after: ModelState = []
        for depth, sources in enumerate(self._sources):
            earlier = state[depth] if state else [None] * len(sources)
            before = [after[source[0]][source[1]] if source else s for source, s in zip(sources, earlier, strict=True)]
            x, new = self.layers[self._layer_names[depth]](x, before, packed, padding)
            after.append([() if source else s for source, s in zip(sources, new, strict=True)])
        return self.norm(x), after
