"""Late-interaction models that hilnas trained, for transformers: last features, without an output head."""

from transformers.modeling_outputs import BaseModelOutput

from nas.train.release.hf_code.modeling_hilnas import HilnasCache, HilnasForCausalLM


class HilnasEncoder(HilnasForCausalLM):
    """The features of a language model of `config.layers`, in front of its output head."""

    def __init__(self, config):
        super().__init__(config)
        for layer in self.layers.values() if getattr(config, "bidirectional", False) else ():
            for mixer in layer.mixers:
                mixer.both_ways = True

    def forward(self, input_ids=None, attention_mask=None, inputs_embeds=None, return_dict=None, **kwargs):
        """Returns the features after the final norm.

        Args:
            attention_mask: [B, T]; 0 is padding, on either side.
        """
        cache, x = HilnasCache(), self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        x = self.norm(self._layers(x, cache, self._padding(attention_mask, cache, x), False, None))
        output = BaseModelOutput(last_hidden_state=x)
        return output.to_tuple() if return_dict is False else output


__all__ = ["HilnasEncoder"]
