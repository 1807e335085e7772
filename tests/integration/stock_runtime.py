"""An app: ExecuTorch as installed, one .pte, and nothing of hilnas. Logits of a prompt and of the steps behind it.

python stock_runtime.py MODEL.pte IDS.npy PROMPT CHUNK LOGITS.npy
"""

from __future__ import annotations

import sys

import executorch.extension.llm.custom_ops.custom_ops  # noqa: F401 - attention
import executorch.kernels.quantized  # noqa: F401 - the 8-bit embedding
import numpy as np
import torch
from executorch.runtime import Runtime


def main() -> None:
    model, ids, prompt, chunk, out = sys.argv[1:]
    program = Runtime.get().load_program(model)
    forward, longest = program.load_method("forward"), program.load_method("get_max_seq_len")
    assert forward is not None and longest is not None
    assert int(chunk) <= longest.execute([])[0]

    def feed(tokens: torch.Tensor, position: int) -> torch.Tensor:
        (logits,) = forward.execute((tokens[None], torch.tensor([position])))
        return logits.clone()

    def text(tokens: torch.Tensor) -> torch.Tensor:
        chunks = tokens[: int(prompt)].split(int(chunk))
        positions = [0, *np.cumsum([len(one) for one in chunks]).tolist()]
        read = [feed(one, position) for one, position in zip(chunks, positions, strict=False)]
        steps = [feed(tokens[at : at + 1], at) for at in range(int(prompt), len(tokens))]
        return torch.cat([read[-1], *steps])

    tokens = torch.from_numpy(np.load(ids))
    text(tokens.flip(0))  # a text that the next one must not remember
    np.save(out, text(tokens).numpy())


if __name__ == "__main__":
    main()
