"""PyTorch's side of the equivalence gate: a checkpoint as its GGUF file stores it, activations exact or rounded."""

from __future__ import annotations

import contextlib

import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray

from nas.core.layout import Layout
from nas.nn.model import Model
from nas.runtimes.base import Checkpoint
from nas.runtimes.checkpoint_file import CheckpointFile
from nas.runtimes.llama_cpp.checkpoint import CheckpointTensors, state_dict_name
from nas.runtimes.llama_cpp.experts import Choices
from nas.runtimes.llama_cpp.following import FollowedExperts
from nas.runtimes.llama_cpp.gate import Computed
from nas.runtimes.llama_cpp.rounding import RoundedActivations
from nas.runtimes.llama_cpp.support import Quantisation, architecture
from nas.runtimes.llama_cpp.tensors import storage_type, tensors


class Oracle:
    """A layout with a checkpoint's weights, dequantised.

    It rounds the checkpoint anew and reads nothing of the GGUF file, so a file with tensors in wrong places differs.

    Args:
        layout: what to compute.
        quantisation: of the file it stands beside.
        checkpoint: the trained weights.
        half_sums: whether the processor adds up products of F16 numbers in float16.

    Raises:
        InvalidInput: the checkpoint does not fit the layout.
        Unsupported: neither build carries the layout.
    """

    def __init__(
        self, layout: Layout, quantisation: Quantisation, checkpoint: Checkpoint, *, half_sums: bool = False
    ) -> None:
        self._half_sums = half_sums
        listed = list(tensors(layout, architecture(layout)))
        self._model = Model(layout, seed=None)
        state = self._model.state_dict()
        self._types: dict[int, GGMLQuantizationType] = {}
        with CheckpointFile(checkpoint.path) as file:
            contents = CheckpointTensors(file)
            contents.check(listed)
            for tensor in listed:
                storage = storage_type(tensor, layout, quantisation)
                target = state[state_dict_name(tensor)]
                values = quants.dequantize(contents.data(tensor, storage), storage)
                if tensor.role == "decay":
                    values = np.log(-values)
                target.copy_(torch.from_numpy(values.reshape(target.shape)))
                self._types[target.untyped_storage().data_ptr()] = storage

    @torch.no_grad()
    def exact(self, ids: NDArray[np.int64], experts: Choices | None = None) -> Computed:
        """What float32 computes for ids [T].

        Args:
            ids: tokens.
            experts: the choices that its mixtures follow; None: they choose for themselves, and tell no scores.
        """
        followed = FollowedExperts([torch.from_numpy(chosen) for _, chosen in sorted((experts or {}).items())])
        with followed if experts else contextlib.nullcontext():
            logits = self._model.eval()(torch.from_numpy(ids)[None])[0]
        return Computed(logits.numpy(), tuple(scores.numpy() for scores in followed.scores))

    def rounded(self, ids: NDArray[np.int64], experts: Choices | None = None) -> Computed:
        """The same with activations rounded where llama.cpp rounds them."""
        with RoundedActivations(self._types, half_sums=self._half_sums):
            return self.exact(ids, experts)
