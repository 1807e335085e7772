"""Multi-head latent attention (DeepSeek-V2, section 2.1; PLM; Zebra-Llama): keys and values of one latent a token."""

from __future__ import annotations

from nas.core.block import QUANTISED, Arg, Block, Caches, Count, Scalar
from nas.core.errors import InvalidInput
from nas.model.blocks.attention import AttentionKind, narrow_heads


class MultiHeadLatentAttention(AttentionKind):
    """`L16/512`: 16 heads over latents of 512 numbers, values of size d_model / 16 unless given as `L16/512:64`.

    A head's key has `nope_dim` numbers made of the latent, and `rope_dim` numbers with positions that all heads share.
    The cache of a token is its latent and its shared key. Work is counted as runtimes compute it, absorbed: queries are
    mapped to the space of latents, and mixed latents to values.
    """

    name = "mla"
    letter = "L"
    hue = 6
    syntax = "{heads}/{latent}[:{head_dim}]"
    doc = "multi-head latent attention"
    args = (
        Arg("heads", int, "heads", required=True, low=1, high=1024),
        Arg(
            "latent",
            int,
            "numbers of a token's latent, of which keys and values are made",
            required=True,
            low=1,
            high=1 << 16,
        ),
        Arg("head_dim", int, "numbers of a head's value; d_model / heads unless given", low=2, high=1024),
        Arg("nope_dim", int, "numbers of a head's key without positions; head_dim unless given", low=1, high=1024),
        Arg("rope_dim", int, "numbers of the key with positions; half of head_dim unless given", low=2, high=1024),
        Arg("query", int, "rank of queries; 0: not compressed", default=0, low=0, high=1 << 16),
        Arg("rope_theta", float, "RoPE base, at least 1; 0: no positions", default=1e6, low=0, high=1e12),
    )

    def derived(self, block: Block, d_model: int) -> dict[str, Scalar]:
        head_dim, heads = block.get("head_dim"), block.int("heads")
        if head_dim is None and d_model % heads:
            return {}
        size = d_model // heads if head_dim is None else int(head_dim)
        parts: dict[str, Scalar] = {"nope_dim": size, "rope_dim": max(2, size // 4 * 2)}
        return parts | ({"head_dim": d_model // heads} if d_model % heads == 0 else {})

    def check(self, block: Block, d_model: int) -> None:
        if block.get("head_dim") is None:
            raise InvalidInput(f"mla: {block.int('heads')} heads do not divide d_model {d_model}; give the head size")
        if block.int("rope_dim") % 2:
            raise InvalidInput(f"mla: rope_dim {block.int('rope_dim')} is odd; RoPE turns pairs")
        theta = float(block.get("rope_theta") or 0)
        if 0 < theta < 1:
            raise InvalidInput(f"mla: rope_theta {theta} must be 0 (no positions) or at least 1")

    def count(self, block: Block, d_model: int) -> Count:
        block = block.resolve(d_model)
        heads, latent, value, nope, rope, rank = (
            block.int(name) for name in ("heads", "latent", "head_dim", "nope_dim", "rope_dim", "query")
        )
        query_width = heads * (nope + rope)
        queries = rank * (d_model + 1 + query_width) if rank else d_model * query_width
        weights = queries + d_model * (latent + rope) + latent + heads * latent * (nope + value)
        weights += heads * value * d_model
        return Count(weights, weights)

    def flops(self, block: Block, d_model: int, context: int) -> float:
        full = block.resolve(d_model)
        attention = 2.0 * full.int("heads") * (2 * full.int("latent") + full.int("rope_dim")) * context
        return 2.0 * self.count(block, d_model).active + attention

    def kv_bytes(self, block: Block, d_model: int, context: int, element: float) -> float:
        full = block.resolve(d_model)
        return (full.int("latent") + full.int("rope_dim")) * context * element

    def state_bytes(self, block: Block, d_model: int) -> float:
        return 0.0

    def narrow(self, block: Block, d_model: int, to: int) -> Block:
        """Heads as in other attention, and the parts of a head as theirs; latents and ranks in exact proportion."""
        if to == d_model:
            return block
        full = block.resolve(d_model)
        size = full.int("head_dim")
        heads, _, narrowed = narrow_heads(full.int("heads"), 1, size, d_model, to)
        rank = full.int("query")
        return block.replace(
            heads=heads,
            head_dim=narrowed,
            nope_dim=max(1, round(full.int("nope_dim") * narrowed / size)),
            rope_dim=2 * max(1, round(full.int("rope_dim") * narrowed / size / 2)),
            latent=max(1, round(full.int("latent") * to / d_model)),
            query=max(1, round(rank * to / d_model)) if rank else 0,
        )

    def scale(self, block: Block, d_model: int, to: int, caches: Caches) -> Block:
        """Heads keep their size, so that their number changes; the latent stays where caches do, else it scales."""
        full = block.resolve(d_model)

        def scaled(rank: int) -> int:
            return max(1, round(rank * to / d_model / QUANTISED)) * QUANTISED if rank else 0

        sizes = {name: full.int(name) for name in ("head_dim", "nope_dim", "rope_dim")}
        latent = full.int("latent") if caches == "heads" else scaled(full.int("latent"))
        heads = max(1, round(full.int("heads") * to / d_model))
        return block.replace(heads=heads, latent=latent, query=scaled(full.int("query")), **sizes)

    def strain(self, block: Block, scaled: Block, caches: Caches) -> float:
        return 0.0


MLA = MultiHeadLatentAttention()
