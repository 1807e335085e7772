"""A program of llama.cpp's users: texts to tokens and back, and what follows a prompt.

Reads JSON, prints JSON with an answer for each model:

    python llama_cpp_text.py MODEL.gguf... < {"texts": [...], "prompt": [ids], "tokens": N}
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import llama_cpp

_KEEP: Any = llama_cpp.llama_log_callback(lambda level, text, data: None)


def main() -> None:
    request = json.load(sys.stdin)
    llama_cpp.llama_log_set(_KEEP, ctypes.c_void_p())
    json.dump([ask(path, request) for path in sys.argv[1:]], sys.stdout)


def ask(path: str, request: dict[str, Any]) -> dict[str, Any]:
    prompt, count = request["prompt"], request["tokens"]
    model = llama_cpp.Llama(path, n_ctx=256, n_threads=1, verbose=False)
    vocab = llama_cpp.llama_model_get_vocab(model.model)
    followed = []
    for token in model.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0):
        followed.append(token)
        if len(followed) == count:
            break
    ids = [model.tokenize(text.encode(), add_bos=True, special=True) for text in request["texts"]]
    front = len(model.tokenize(b"", add_bos=True))
    return {
        "ids": ids,
        "back": [model.detokenize(one[front:], special=True).decode() for one in ids],
        "followed": followed,
        "eos": model.token_eos(),
        "bos": model.token_bos(),
        "template": model.metadata.get("tokenizer.chat_template"),
        "end": [token for token in range(model.n_vocab()) if llama_cpp.llama_vocab_is_eog(vocab, token)],
    }


if __name__ == "__main__":
    main()
