"""The tokenizer that belongs to a model's weights: where it is found, and how it is kept beside a checkpoint.

`nas import MODEL -o NAME.safetensors` keeps the model's tokenizer in the folder NAME.tokenizer, from which `nas export`
takes it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nas.core.errors import InvalidInput, Unsupported
from nas.measure.runtimes.llama_cpp.gguf_file import GgufFile, is_gguf
from nas.train.release.gguf_tokenizer import tokenizer_of_gguf
from nas.train.release.model_tokenizer import CONFIG, MODEL, ModelTokenizer, read_model_tokenizer
from nas.train.release.options import DEFAULT_CONTEXT
from nas.train.release.tokenizer import MemberTokenizer

_TOKENIZER = "tokenizer.json"
_MOST_CONTEXT = 1 << 24
"""Larger numbers of tokens, as transformers writes them, say that there is no limit."""


@dataclass(frozen=True)
class FoundTokenizer:
    """A model's tokenizer.

    Args:
        tokenizer: as it was read.
        source: the file or folder that holds it.
    """

    tokenizer: MemberTokenizer
    source: Path

    @property
    def context(self) -> int:
        """Tokens that the model is meant for."""
        if isinstance(self.tokenizer, ModelTokenizer):
            model, config = (self.tokenizer.settings[file] for file in (MODEL, CONFIG))
            text = model.get("text_config")  # of a model with a tower
            values = [one.get("max_position_embeddings") for one in (model, text) if isinstance(one, Mapping)]
            for value in (*values, config.get("model_max_length")):
                if isinstance(value, int) and 0 < value < _MOST_CONTEXT:
                    return value
        return DEFAULT_CONTEXT

    def describe(self) -> str:
        """Returns which tokenizer and chat template are used, and where from."""
        names = list(self.tokenizer.chat_templates)
        template = f"chat template {', '.join(names)}" if names else "no chat template"
        return f"tokenizer of {self.tokenizer.size:,} tokens and {template}, of {self.source}"


def found_tokenizer(source: Path) -> FoundTokenizer:
    """Returns the tokenizer in a GGUF file, in a folder, or a tokenizer.json with the files beside it.

    Raises:
        InvalidInput: there is none, or it cannot be read.
        Unsupported: it is of a kind that is not read.
    """
    if is_gguf(source):
        return FoundTokenizer(tokenizer_of_gguf(GgufFile.read(source)), source)
    path = source / _TOKENIZER if source.is_dir() else source
    if not path.is_file():
        raise InvalidInput("there is no tokenizer.json", where=str(source))
    return FoundTokenizer(read_model_tokenizer(path), source)


def beside(checkpoint: Path) -> Path:
    """Returns the folder that keeps the tokenizer of a checkpoint."""
    return checkpoint.with_suffix(".tokenizer")


def tokenizer_to_keep(source: Path) -> FoundTokenizer | str:
    """Returns the tokenizer of a model that is imported, or why there is none."""
    try:
        return found_tokenizer(source)
    except Unsupported as error:
        return error.message
    except InvalidInput as error:
        if not is_gguf(source) and not (source / _TOKENIZER).is_file():
            return error.message
        raise


def keep(carried: FoundTokenizer, checkpoint: Path) -> Path:
    """Writes a tokenizer into the folder beside a checkpoint, in place of what it holds, and returns the folder."""
    folder, tokenizer = beside(checkpoint), carried.tokenizer
    files = dict(tokenizer.files(carried.context))
    if isinstance(tokenizer, ModelTokenizer):
        files |= {name: content for name, content in tokenizer.beside.items() if name != CONFIG}
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
        written = Path(scratch) / folder.name
        for name, content in files.items():
            path = written / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        if folder.is_dir():
            if unknown := {path.name for path in folder.iterdir()} - {*_NAMES}:
                raise InvalidInput(f"holds {sorted(unknown)[0]}, which no import wrote", where=str(folder))
            shutil.rmtree(folder)
        written.rename(folder)
    return folder


_NAMES = (
    _TOKENIZER,
    CONFIG,
    MODEL,
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "additional_chat_templates",
)
