"""Upstream's converter of models to GGUF, from the pinned source: `convert_hf_to_gguf.py` in processes of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Self

from nas.measure.runtimes.llama_cpp import source

_ROOT = f"llama_cpp_python-{source.VERSION}/vendor/llama.cpp/"
_PARTS = ("convert_hf_to_gguf.py", "conversion/", "gguf-py/gguf/")
_DRIVER = """
import json, os, signal, sys
sys.path[:0] = [sys.argv[1] + "/gguf-py", sys.argv[1]]
from conversion.base import TextModel
import convert_hf_to_gguf
from transformers import AutoConfig, AutoTokenizer
for line in sys.stdin:
    pre, log, arguments = json.loads(line)
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    signal.alarm(240)
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    # The converter knows tokenizers by the ids of one text; those of tests are trained on the spot.
    if pre:
        TextModel.get_vocab_base_pre = lambda self, tokenizer: pre
    sys.argv[1:] = arguments
    convert_hf_to_gguf.main()
    sys.exit()
"""


class Converter:
    """A process that has imported the converter, which takes seconds, and forks for each model.

    Args:
        folder: new; the converter is unpacked there.
    """

    def __init__(self, folder: Path) -> None:
        sdist = source.fetch(print)
        with tarfile.open(sdist) as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)
            members = [member for member in archive if member.name.removeprefix(_ROOT).startswith(_PARTS)]
            archive.extractall(folder, members=members)
        argv = [sys.executable, "-c", _DRIVER, str(folder / _ROOT)]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=300)

    def convert(self, model: Path, output: Path, kind: str = "f32", pre: str = "", mmproj: bool = False) -> None:
        """Converts a folder of transformers.

        Args:
            model: the folder.
            output: GGUF file.
            kind: of its tensors.
            pre: llama.cpp's name of how the tokenizer splits text; empty: the converter finds it out.
            mmproj: whether the encoder is converted, not the language model.
        """
        arguments = [str(model), "--outfile", str(output), "--outtype", kind, *["--mmproj"] * mmproj]
        config = json.loads((model / "config.json").read_text())
        arguments += ["--no-mtp"] * (config["model_type"] == "qwen3_5_text" and not config.get("mtp_num_hidden_layers"))
        log = output.with_suffix(".log")
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([pre, str(log), arguments]), file=self._process.stdin, flush=True)
        code = self._process.stdout.readline().strip()
        assert code == "0", f"exit code {code}: {log.read_text()[-3000:] if log.exists() else ''}"
