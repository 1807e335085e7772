"""MaxSim, the score of late interaction (ColBERT: Khattab and Zaharia 2020; LFM2 report, equation 7)."""

from __future__ import annotations

import torch
from torch import Tensor


def maxsim(queries: Tensor, documents: Tensor, text: Tensor) -> Tensor:
    """Returns the scores of documents for queries, [B, N]: sum over i of max over j of q_i d_j.

    Args:
        queries: vectors [B, Q, width]; zeros add nothing to a score.
        documents: vectors [B, N, T, width], or [N, T, width], the same documents for all queries.
        text: [B, N, T] or [N, T], false at padding; each document has a token.
    """
    of_query = "b" if documents.dim() == 4 else ""
    similarities = torch.einsum(f"bqw,{of_query}ntw->bnqt", queries, documents)
    return similarities.masked_fill(~text[..., None, :], -torch.inf).amax(-1).sum(-1)
