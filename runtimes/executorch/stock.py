"""A standard .pte in ExecuTorch as installed: answers in a dialogue, in a process that runs this module."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nas.measure.runtimes.dialogue import Dialogue, serve


def dialogue(model: Path, context: int) -> Dialogue:
    """Returns a dialogue with the model in `model`, of at most `context` tokens, which its program must carry."""
    return Dialogue("ExecuTorch", model, [sys.executable, "-m", __name__, str(model)], context)


class _Session:
    """One text at a time: a position of 0 begins another (docs/how-to/releasing-a-model.md)."""

    def __init__(self, model: str) -> None:
        import executorch.extension.llm.custom_ops.custom_ops  # noqa: F401 - attention
        import executorch.kernels.quantized  # noqa: F401 - the 8-bit embedding
        import torch
        from executorch.runtime import Runtime

        self._tensor = torch.tensor
        program = Runtime.get().load_program(model)
        self._forward = program.load_method("forward")
        self.chunk = int(program.load_method("get_max_seq_len").execute([])[0])
        self._position = 0

    def feed(self, ids: Sequence[int]) -> NDArray[np.float32]:
        (logits,) = self._forward.execute((self._tensor([list(ids)]), self._tensor([self._position])))
        self._position += len(ids)
        last: NDArray[np.float32] = logits.numpy().copy()
        return last

    def begin(self, ids: Sequence[int]) -> int:
        self._position = 0
        return 0


if __name__ == "__main__":
    session = _Session(sys.argv[1])
    serve(session, session.chunk)
