"""Upstream's converter of models to GGUF, from the pinned source: `convert_hf_to_gguf.py` in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

from nas.measure.runtimes.llama_cpp import source

_ROOT = f"llama_cpp_python-{source.VERSION}/vendor/llama.cpp/"
_PARTS = ("convert_hf_to_gguf.py", "conversion/", "gguf-py/gguf/")
_DRIVER = """
import sys
sys.path[:0] = [sys.argv[1] + "/gguf-py", sys.argv[1]]
from conversion.base import TextModel
# The converter knows tokenizers by the ids of one text; those of tests are trained on the spot.
if pre := sys.argv[2]:
    TextModel.get_vocab_base_pre = lambda self, tokenizer: pre
sys.argv[1:] = sys.argv[3:]
import convert_hf_to_gguf
convert_hf_to_gguf.main()
"""


def unpack_converter(folder: Path) -> Path:
    """Unpacks the converter below `folder` and returns its own folder."""
    sdist = source.fetch(print)
    with tarfile.open(sdist) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        wanted = [member for member in archive if member.name.removeprefix(_ROOT).startswith(_PARTS)]
        archive.extractall(folder, members=wanted)
    return folder / _ROOT


def convert(converter: Path, model: Path, output: Path, kind: str = "f32", pre: str = "", mmproj: bool = False) -> None:
    """Converts a folder of transformers.

    Args:
        converter: of `unpack_converter`.
        model: the folder.
        output: GGUF file.
        kind: of its tensors.
        pre: llama.cpp's name of how the tokenizer splits text; empty: the converter finds it out.
        mmproj: whether the encoder is converted, not the language model.
    """
    argv = [sys.executable, "-c", _DRIVER, str(converter), pre, str(model), "--outfile", str(output), "--outtype", kind]
    argv += ["--mmproj"] * mmproj
    config = json.loads((model / "config.json").read_text())
    argv += ["--no-mtp"] * (config["model_type"] == "qwen3_5_text" and not config.get("mtp_num_hidden_layers"))
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
