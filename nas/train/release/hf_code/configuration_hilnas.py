"""Configuration of models that hilnas found. This file needs transformers only."""

from transformers import PretrainedConfig


class HilnasConfig(PretrainedConfig):
    """A stack of residual layers, each with blocks of its own.

    Args:
        layers: from first to last {"mixers": [block, ...], "ffn": block or null} or {"share": index of the earlier
            layer whose weights it uses}; a block is {"kind": name, ...its arguments}.
        hidden_size: width of the residual stream.
        vocab_size: rows of the embedding.
        norm_eps: of every RMSNorm; other values than 1e-5 are refused.
        tie_word_embeddings: whether the output head is the embedding.
        norms: where the RMSNorms of blocks are: "before", "behind" or "both".
        softcap: bound of the logits; 0: none.
        max_position_embeddings: tokens that the model is meant for.
    """

    model_type = "hilnas"
    keys_to_ignore_at_inference = ("past_key_values",)

    def __init__(
        self,
        layers=(),
        hidden_size=1024,
        vocab_size=65536,
        norm_eps=1e-5,
        tie_word_embeddings=True,
        norms="before",
        softcap=0.0,
        max_position_embeddings=32768,
        **kwargs,
    ):
        self.layers = list(layers)
        self.num_hidden_layers = len(self.layers)
        self.hidden_size = hidden_size
        self.vocab_size = vocab_size
        self.norm_eps = norm_eps
        self.norms, self.softcap = norms, softcap
        self.max_position_embeddings = max_position_embeddings
        self.use_cache = kwargs.pop("use_cache", True)
        kwargs.pop("num_hidden_layers", None)
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
