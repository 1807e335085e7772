"""A program of llama.cpp's users: what libmtmd and the language model make of pictures and sounds.

    python llama_cpp_media.py MODEL.gguf MMPROJ.gguf OUTPUT.npz FEWEST MOST FILE.npy...

Files hold pixels, uint8 [H, W, 3], or samples, float32 [T]. OUTPUT gets for the file of number N `tokensN`, ids of the
file and the text behind it with -1 for embeddings, `rowsN`, these embeddings, and `logitsN` of what follows.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import mtmd_cpp as mtmd

TEXT = mtmd.mtmd_default_marker() + b"What?"


def main() -> None:
    model_path, projector, output, fewest, most, *files = sys.argv[1:]
    model = llama_cpp.llama_model_load_from_file(model_path.encode(), llama_cpp.llama_model_default_params())
    settings = mtmd.mtmd_context_params_default()
    settings.use_gpu, settings.warmup, settings.n_threads = False, False, 2
    settings.image_min_tokens, settings.image_max_tokens = int(fewest), int(most)
    media = mtmd.mtmd_init_from_file(projector.encode(), model, settings)
    sizes = llama_cpp.llama_context_default_params()
    sizes.n_ctx, sizes.n_batch = 1024, 1024
    results: dict[str, Any] = {}
    for number, path in enumerate(files):
        chunks = tokenised(media, np.load(path))
        width, places = llama_cpp.llama_model_n_embd(model), range(mtmd.mtmd_input_chunks_size(chunks))
        parts = [chunk_of(media, mtmd.mtmd_input_chunks_get(chunks, place), width) for place in places]
        results[f"tokens{number}"] = np.concatenate([tokens for tokens, _ in parts])
        results[f"rows{number}"] = np.concatenate([rows for _, rows in parts])
        context = llama_cpp.llama_init_from_model(model, sizes)
        past = llama_cpp.llama_pos()
        done = mtmd.mtmd_helper_eval_chunks(media, context, chunks, 0, 0, 1024, True, ctypes.byref(past))
        assert done == 0 and past.value == len(results[f"tokens{number}"])
        vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        results[f"logits{number}"] = np.array(llama_cpp.llama_get_logits_ith(context, -1)[:vocabulary])
        llama_cpp.llama_free(context)
    np.savez(output, **results)


def tokenised(media: Any, values: Any) -> Any:
    """Returns the chunks of a picture or sound and the text."""
    flat = np.ascontiguousarray(values).ravel()
    if values.ndim == 1:
        data = flat.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        bitmap = mtmd.mtmd_bitmap_init_from_audio(len(flat), data)
    else:
        data = flat.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        bitmap = mtmd.mtmd_bitmap_init(values.shape[1], values.shape[0], data)
    chunks = mtmd.mtmd_input_chunks_init()
    request = mtmd.mtmd_input_text(text=TEXT, text_len=len(TEXT), add_special=True, parse_special=True)
    assert mtmd.mtmd_tokenize(media, chunks, ctypes.byref(request), (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap), 1) == 0
    return chunks


def chunk_of(media: Any, chunk: Any, width: int) -> tuple[Any, Any]:
    """Returns the ids of a chunk, and its embeddings."""
    size = mtmd.mtmd_input_chunk_get_n_tokens(chunk)
    if mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
        tokens = mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(ctypes.c_size_t()))[:size]
        return np.array(tokens), np.zeros((0, width), np.float32)
    assert mtmd.mtmd_encode_chunk(media, chunk) == 0
    return np.full(size, -1), np.array(mtmd.mtmd_get_output_embd(media)[: size * width]).reshape(size, width)


if __name__ == "__main__":
    main()
