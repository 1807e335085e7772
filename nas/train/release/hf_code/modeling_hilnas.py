"""Models that hilnas found, for transformers: their layers, a cache and padding. Needs torch and transformers only.

Padding, on either side, is hidden from the text: inputs of mixers are zero there, scans skip it, attention does not
see it, and positions count the tokens of the text. So each row of a padded batch gets what it gets alone.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from nas.core.block import Block
from nas.core.layout import Layer
from nas.model.nn.base import Padding
from nas.model.nn.layer import ResidualLayer
from nas.model.nn.primitives import Linear, RMSNorm, Weights, bounded
from nas.train.release.hf_code.configuration_hilnas import HilnasConfig

_NORM_EPS = 1e-5


class HilnasCache:
    """State per depth and mixer, which the mixer's class describes.

    A mixer that reads another layer's cache has none of its own.
    """

    is_compileable = False

    def __init__(self):
        self.length = 0
        self.states = {}
        self.text = None  # [B, length]: which tokens are text; None: all

    def get_seq_length(self, layer_idx=0):
        return self.length

    def reorder_cache(self, beam_idx):
        self.states = {
            place: tuple(part.index_select(0, beam_idx.to(part.device)) for part in state)
            for place, state in self.states.items()
        }
        if self.text is not None:
            self.text = self.text.index_select(0, beam_idx.to(self.text.device))


class HilnasForCausalLM(PreTrainedModel, GenerationMixin):
    """A language model of `config.layers`."""

    config_class = HilnasConfig
    supports_gradient_checkpointing = True
    _no_split_modules = ("ResidualLayer",)

    def __init__(self, config):
        super().__init__(config)
        if config.norm_eps != _NORM_EPS:
            raise ValueError(f"norm_eps must be {_NORM_EPS}, not {config.norm_eps}")
        width = config.hidden_size
        self.embed = nn.Embedding(config.vocab_size, width)
        owners = {str(i): layer for i, layer in enumerate(config.layers) if layer.get("share") is None}
        self.layers = nn.ModuleDict(
            {i: ResidualLayer(_layer(layer), width, config.norms) for i, layer in owners.items()}
        )
        self.norm = RMSNorm(width)
        self.head = None if config.tie_word_embeddings else Linear(width, config.vocab_size)
        self.gradient_checkpointing = False
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module):
        """Draws start values of tensors that no checkpoint has filled."""
        if not isinstance(module, Weights):
            super()._init_weights(module)
            return
        tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        loaded = [(tensor, tensor.clone()) for tensor in tensors if getattr(tensor, "_is_hf_initialized", False)]
        seed = int(torch.randint(1 << 31, ()))
        module.draw(torch.Generator().manual_seed(seed), self.config.num_hidden_layers)
        for tensor, values in loaded:
            tensor.copy_(values)

    @classmethod
    def _supports_default_dynamic_cache(cls):
        return False

    def get_input_embeddings(self):
        return self.embed

    def set_input_embeddings(self, value):
        self.embed = value

    def get_output_embeddings(self):
        return self.head

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        output_hidden_states=None,
        return_dict=None,
        logits_to_keep=0,
        **kwargs,
    ):
        """Returns logits and, where asked for, the loss, the cache and the hidden states.

        Args:
            attention_mask: [B, T], or with the tokens in the cache [B, past + T]; 0 is padding, on either side.
            output_hidden_states: also return the embeddings and the output of each layer, of the last one after the
                final norm.
        """
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if self.gradient_checkpointing and self.training:
            use_cache, past_key_values = False, None
        cache = HilnasCache() if past_key_values is None else past_key_values
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        padding = self._padding(attention_mask, cache, x)
        inputs = [] if output_hidden_states else None
        x = self.norm(self._layers(x, cache, padding, use_cache or past_key_values is not None, inputs))
        hidden_states = None if inputs is None else (*inputs, x)
        x = x[:, -logits_to_keep:] if isinstance(logits_to_keep, int) else x[:, logits_to_keep]
        logits = F.linear(x, self.embed.weight if self.head is None else self.head.weight)
        logits = bounded(logits, self.config.softcap)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        output = CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=cache if use_cache else None, hidden_states=hidden_states
        )
        return output.to_tuple() if return_dict is False else output

    def _padding(self, attention_mask, cache, x):
        """Adds the mask of `x` to that of the cache; None: no token is padding."""
        batch, length = x.shape[:2]
        text = torch.ones(batch, length, dtype=torch.bool, device=x.device)
        if attention_mask is not None:
            if attention_mask.dim() != 2 or attention_mask.shape[1] < length:
                raise ValueError(f"attention_mask must be [batch, tokens], not {list(attention_mask.shape)}")
            text = attention_mask[:, -length:].bool()
        if cache.text is None:
            if bool(text.all()):
                return None
            cache.text = text.new_ones(batch, cache.length)
        cache.text = torch.cat([cache.text, text], 1)
        positions = cache.text.cumsum(1) - 1
        if bool((text[:, 1:] & ~text[:, :-1] & (positions[:, -length:][:, 1:] > 0)).any()):
            raise ValueError("padding must come before or after a text, or after a part of it that the cache holds")
        return Padding(cache.text, positions)

    def _layers(self, x, cache, padding, use_cache, inputs):
        """Returns the output of the last layer.

        Args:
            use_cache: whether the cache is used afterwards.
            inputs: gets the input of each layer; None: they are not needed.
        """
        past, length, after = cache.length, x.shape[1], {}
        checkpointing = self.gradient_checkpointing and self.training
        read = {tuple(block["reads"]) for _, blocks in self._blocks() for block in blocks if "reads" in block}
        for depth, (owner, blocks) in enumerate(self._blocks()):
            if inputs is not None:
                inputs.append(x)
            layer, places = self.layers[owner], [(depth, index) for index in range(len(blocks))]
            states = [
                after[tuple(block["reads"])] if "reads" in block else cache.states.get(place)
                for place, block in zip(places, blocks, strict=True)
            ]
            # A cache that one layer hands to another is no input of a checkpoint, and would get no gradient.
            if checkpointing and not any(states) and not read.intersection(places):
                x = self._gradient_checkpointing_func(partial(_output, layer, states, padding), x)
                continue
            x, states = layer(x, states, padding=padding)
            for place, block, state in zip(places, blocks, states, strict=True):
                if "reads" not in block and (use_cache or place in read):
                    after[place] = state
        cache.states, cache.length = after, past + length
        return x

    def _blocks(self):
        """Yields, for each depth, the key of the layer whose weights run there, and its mixers."""
        for depth, layer in enumerate(self.config.layers):
            owner = depth if layer.get("share") is None else layer["share"]
            yield str(owner), self.config.layers[owner].get("mixers", [])


def _layer(layer):
    """Returns a layer of config.json for `ResidualLayer`."""
    ffn = layer.get("ffn")
    return Layer(tuple(map(_block, layer.get("mixers", []))), _block(ffn) if ffn else None)


def _block(block):
    return Block.of(**{name: value for name, value in block.items() if name != "reads"})


def _output(layer, states, padding, x):
    return layer(x, states, padding=padding)[0]
