"""A user of transformers: loads folders, and nothing of hilnas. Reads JSON, prints JSON with an answer for each folder.

    python stock_transformers.py LOGITS.npz FOLDER... < {"ids": [[...]], "texts": [...], "tokens": N, "chat": {...}}

Logits are of `ids` [B, T]; what follows is greedy, with the cache and without it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, pipeline

PADDED = ["Once upon a time", "a", "The quick brown fox jumps over", "yes, no"]
"""Texts of different lengths, which a batch pads."""


def main() -> None:
    out, *folders = sys.argv[1:]
    request = json.load(sys.stdin)
    logits, answers = zip(*(ask(folder, request) for folder in folders), strict=True)
    np.savez(out, *logits)
    json.dump(answers, sys.stdout)


@torch.no_grad()
def ask(folder: str, request: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    saved = AutoConfig.from_pretrained(folder, trust_remote_code=True).dtype
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=True)
    ids, count = torch.tensor(request["ids"]), request["tokens"]
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    logits = model(ids).logits.numpy()
    model.generation_config.eos_token_id = None
    followed, uncached = (
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, use_cache=cached
        )
        for cached in (True, False)
    )
    beams = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, num_beams=3, use_cache=True
    )
    slow = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, num_beams=3, use_cache=False
    )
    pipe: Any = pipeline("text-generation", model=model, tokenizer=tokenizer)
    batched, single = (
        pipe(PADDED, batch_size=size, max_new_tokens=8, do_sample=False, return_full_text=False) for size in (4, 1)
    )
    answer = {
        "batches_agree": batched == single,
        "class": type(model).__name__,
        "dtype": str(saved),
        "followed": followed[:, ids.shape[1] :].tolist(),
        "uncached": uncached[:, ids.shape[1] :].tolist(),
        "beams_agree": torch.equal(beams, slow),
        "ids": [tokenizer(text).input_ids for text in request["texts"]],
        "chat": tokenizer.apply_chat_template(**request["chat"], tokenize=False) if tokenizer.chat_template else None,
        "vocab": len(tokenizer),
    }
    return logits, answer


if __name__ == "__main__":
    main()
