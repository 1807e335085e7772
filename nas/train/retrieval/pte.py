"""Late-interaction models as .pte files of ExecuTorch: token ids [1, T] in, vectors of norm 1 [1, T, width] out.

The whole model in float32, with XNNPACK where it has an operator, for texts of 2 tokens up to a document's length. The
file names `get_vector_width`, `get_query_length` and `get_document_length`; markers and their tokens are in the
folder's tokenizer.json.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nas.core.errors import CandidateFailed
from nas.measure.runtimes.executorch.lowering import quiet
from nas.measure.runtimes.executorch.templates import tool_versions
from nas.train.retrieval.release import open_retriever
from nas.train.retrieval.retriever import Retriever


class TextEncoder(nn.Module):
    """A model as it is exported: one text, without padding."""

    def __init__(self, retriever: Retriever) -> None:
        super().__init__()
        self.retriever = retriever

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps ids [1, T] -> [1, T, width]."""
        return F.normalize(self.retriever.projection(self.retriever.model.features(tokens)), dim=-1)


def write_pte_retriever(folder: Path, output: Path) -> int:
    """Writes a late-interaction model as a .pte file; returns its bytes.

    Args:
        folder: of the model.
        output: the file.

    Raises:
        InvalidInput: the folder is no late-interaction model, or damaged.
        Unsupported: no layout says the model.
        CandidateFailed: ExecuTorch cannot lower it (export).
        InfrastructureFailed: the extra `executorch` is not installed.
    """
    tool_versions()  # raises where one is not installed
    retriever, tokens = open_retriever(folder)
    query, document = tokens.lengths
    facts = {"width": retriever.projection.out_features, "query": query, "document": document}
    content = _lowered(TextEncoder(retriever).eval(), facts)
    output.write_bytes(content)
    return len(content)


def _lowered(model: TextEncoder, facts: dict[str, int]) -> bytes:
    with quiet():
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower

        length = torch.export.Dim("T", min=2, max=max(facts["query"], facts["document"]))
        try:
            with torch.no_grad():
                inputs = (torch.zeros(1, 8, dtype=torch.long),)
                exported = torch.export.export(model, inputs, dynamic_shapes=({1: length},))
                edge = to_edge_transform_and_lower(
                    exported,
                    partitioner=[XnnpackPartitioner()],
                    constant_methods={
                        "get_vector_width": facts["width"],
                        "get_query_length": facts["query"],
                        "get_document_length": facts["document"],
                    },
                )
                return bytes(edge.to_executorch().buffer)
        except (RuntimeError, ValueError, AssertionError, TypeError, KeyError, NotImplementedError) as error:
            raise CandidateFailed("export", f"ExecuTorch cannot lower the model: {error}") from error
