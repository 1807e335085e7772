"""Tokenizers of other families in stock llama.cpp: the same tokens as in stock transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import unicodedata
from pathlib import Path

from test_release_stock import tricky_texts
from tokenizer_lab import FORMS, write_model_tokenizer, write_sentencepiece_form
from transformers import AutoTokenizer

from nas.core.layout import Layout
from nas.measure.runtimes.base import RandomWeights
from nas.measure.runtimes.llama_cpp.variants import Build
from nas.train.release.files import write_files
from nas.train.release.model_tokenizer import read_model_tokenizer
from nas.train.release.options import FileOptions

LAYOUT = Layout.parse("d64 v420 ffn=swiglu:96 [A4/2*2]")


def test_llama_cpp_gives_the_tokens_of_transformers(llama_build: Build, tmp_path: Path) -> None:
    texts = [unicodedata.normalize("NFC", text) for text in tricky_texts()] + ["<think> a </think>", "12345 1 22 333"]
    paths = {name: write_model_tokenizer(tmp_path / "in" / name, form, texts, 400) for name, form in FORMS.items()}
    for name, prefix in (("gemma", False), ("llama-2", True)):
        paths[name] = write_sentencepiece_form(tmp_path / "in" / name, prefix)
    for name, path in paths.items():
        tokenizer = read_model_tokenizer(path)
        options = FileOptions(name=name, tokenizer=tokenizer, gguf=("f16",))
        record = write_files(tmp_path / name, LAYOUT, RandomWeights(1), options, print)
        assert record.loads["llama.cpp"] == "qwen3"
    files = [str(tmp_path / name / f"gguf/{name}-F16.gguf") for name in paths]
    argv = [sys.executable, str(Path(__file__).with_name("llama_cpp_text.py")), *files]
    question = json.dumps({"texts": texts, "prompt": [1, 2, 3], "tokens": 2})
    environment = os.environ | {"LLAMA_CPP_LIB_PATH": str(llama_build.folder)}
    done = subprocess.run(argv, input=question, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    for (name, path), answer in zip(paths.items(), json.loads(done.stdout), strict=True):
        upstream = AutoTokenizer.from_pretrained(tmp_path / name / "transformers", local_files_only=True)
        for text, ids in zip(texts, answer["ids"], strict=True):
            assert ids == upstream(text).input_ids, (name, text)
        if name in FORMS:
            assert answer["back"] == texts
        else:  # its mark of a blank in a text becomes one, and a blank in front stays
            blank = " " * (name == "llama-2")
            assert answer["back"] == [f"{blank}{text}".replace("▁", " ") if text else "" for text in texts]
        reference = read_model_tokenizer(path)
        assert answer["eos"] == reference.ids()["eos"] and answer["eos"] in answer["end"]
        assert answer["template"] == upstream.chat_template
