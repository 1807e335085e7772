"""The commands of docs/tutorial/model-file.md work, in their order, on a file as they ask for one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
from pathlib import Path
from unittest import mock

import pytest
from cli_runner import Outcome, nas
from tokenizer_lab import QWEN3, TEXT, write_model_tokenizer

from nas.core.layout import Layout
from nas.measure.runtimes.llama_cpp.runtime import LLAMA_CPP
from nas.measure.runtimes.llama_cpp.variants import Build
from nas.train.release.model_tokenizer import read_model_tokenizer
from tests.support.short_training import learned_checkpoint

pytestmark = pytest.mark.usefixtures("short_reference_runs", "one_thread", "fast_binding")

PAGE = (Path(__file__).resolve().parents[2] / "docs/tutorial/model-file.md").read_text(encoding="utf-8")
PUBLISHED = "d576 v49152 ffn=swiglu:1536 [A9/3(qk_norm=0,rope_theta=100000)*30]"
LAYOUT = Layout.parse("d64 v420 ffn=swiglu:96 [A4/2(qk_norm=0,rope_theta=100000)*2]")


def give(command: str, folder: Path, stdin: str = "") -> Outcome:
    program, *arguments = shlex.split(command.replace(PUBLISHED, LAYOUT.format()))
    assert program == "nas"
    with contextlib.chdir(folder), mock.patch.dict(os.environ, {"NAS_HOME": str(folder / "home")}):
        done = nas(*arguments, stdin=stdin)
    assert done.code == 0, f"{command}: {done.err[-2000:]}"
    return done


def test_a_file_that_people_have(llama_build: Build, tmp_path: Path) -> None:
    (fence,) = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    chat, importing, export, compare, again = fence.splitlines()
    tokenizer = read_model_tokenizer(write_model_tokenizer(tmp_path / "in", QWEN3, TEXT, 400))
    checkpoint = learned_checkpoint(LAYOUT, "\n".join(TEXT * 40).encode(), tmp_path / "w.safetensors")
    file = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    LLAMA_CPP.export_trained(LAYOUT, "f16", checkpoint, file, "m", tokenizer.vocabulary(LAYOUT.vocab), 4096)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("\n".join(TEXT * 400))

    first = give(f"{chat} --tokens 8", tmp_path, "hello\n")
    assert "chat template default, of SmolLM2-135M-Instruct.Q4_1.gguf" in first.err
    imported = give(importing, tmp_path)
    assert LAYOUT.format() in imported.out and "smollm2.tokenizer" in imported.out
    assert "of smollm2.tokenizer" in give(export, tmp_path).err
    compared = give(f"{compare} -p 32 -n 8 --reps 2 --bytes 2048", tmp_path)
    assert "keeps peak_rss <= 700 MB" in compared.out and compared.out.count(".gguf, ") == 4
    assert "bits/byte" in compared.out or "bits per byte" in compared.out
    second = give(f"{again} --tokens 8", tmp_path, "hello\n")
    assert "of smollm2-Q8_0.gguf" in second.err
    talk = {
        "messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the cat"}],
        "task": "cats",
    }
    (tmp_path / "questions.jsonl").write_text(json.dumps(talk))
    evaluated = give(f"nas evaluate {file.name} smollm2-Q8_0.gguf --tasks questions.jsonl --json", tmp_path)
    scores = json.loads(evaluated.out)["scores"]
    assert list(scores) == [file.name, "smollm2-Q8_0.gguf"]
    assert scores[file.name]["cats"]["questions"] == 1 and scores[file.name]["cats"]["lost"] is None
    assert scores["smollm2-Q8_0.gguf"]["cats"]["lost"] == 0
