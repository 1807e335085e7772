"""Reward models as judges: sequence classifiers of transformers with one output, from a local folder.

Nothing is downloaded, no code of the folder runs, and weights are read from safetensors alone. Needs the extra `judge`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nas.core.canonical import content_hash, sha256_of
from nas.core.errors import InvalidInput
from nas.train.posttrain.judges import Sample
from nas.train.release.shards import ADAPTER, ADAPTER_PROBLEM, Shards

_LOCAL = {"local_files_only": True, "trust_remote_code": False}


class SequenceClassifier(NamedTuple):
    """A sequence classifier of transformers with one output.

    Args:
        tokenizer: of the folder.
        model: on the CPU, in the type of its weights.
        most: tokens that it reads.
    """

    tokenizer: Any
    model: Any
    most: float

    @staticmethod
    def read(folder: Path, where: str, extra: str) -> SequenceClassifier:
        """Reads a folder of `save_pretrained`, without running its code.

        Args:
            folder: with the tokenizer.
            where: of the folder, for messages.
            extra: that has transformers.

        Raises:
            InvalidInput: the folder is none of a model with one output and safetensors, or transformers is not
                installed.
        """
        try:
            import transformers
        except ImportError as error:
            raise InvalidInput(f"needs transformers, of the extra '{extra}'", where=where) from error
        if not folder.is_dir():
            raise InvalidInput("no such folder", where=where)
        if (folder / ADAPTER).exists():
            raise InvalidInput(ADAPTER_PROBLEM, where=where)
        Shards(folder)  # an index of shards names no file outside of the folder
        transformers.utils.logging.disable_progress_bar()
        try:
            config: Any = transformers.AutoConfig.from_pretrained(folder, **_LOCAL)
            tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, **_LOCAL)
            if config.num_labels != 1:
                raise InvalidInput(f"has {config.num_labels} outputs; a reward model has one")
            model: Any
            model, loaded = transformers.AutoModelForSequenceClassification.from_pretrained(
                folder,
                config=config,
                use_safetensors=True,
                attn_implementation="eager",  # the one that every class has
                output_loading_info=True,
                **_LOCAL,
            )
        except InvalidInput as error:
            raise InvalidInput(error.message, where=where) from error
        except Exception as error:  # whatever its files make transformers raise
            reason = (str(error).splitlines() or [""])[0]
            raise InvalidInput(f"transformers cannot load it: {reason}", where=where) from error
        if missing := sorted(loaded["missing_keys"]):
            raise InvalidInput(f"holds no weights of {', '.join(missing[:3])}", where=where)
        most = min(tokenizer.model_max_length, getattr(config, "max_position_embeddings", None) or math.inf)
        return SequenceClassifier(tokenizer, model.eval().requires_grad_(False), most)


class RewardModel:
    """A judge whose score is the model's logit for the conversation that ends with the answer.

    Conversations are rendered by the chat template of the folder's tokenizer. Control tokens that a message spells
    are read as text, so that an answer cannot end its own turn. Each conversation is computed alone, without padding,
    on the CPU and in the type of the weights.

    Args:
        folder: as `save_pretrained` writes it, with the tokenizer.

    Raises:
        InvalidInput: the folder is none of a model with one output, safetensors and a chat template, or transformers
            is not installed; when called: the template refuses a conversation, it is too long for the model, or a score
            is not finite. The message names the question.
    """

    def __init__(self, folder: Path) -> None:
        self._where = f"judge_model: {folder}"
        classifier = SequenceClassifier.read(folder, self._where, "judge")
        if not classifier.tokenizer.chat_template:
            raise InvalidInput("its tokenizer has no chat template", where=self._where)
        self._tokenizer, self._model, self._most = classifier

    @torch.inference_mode()
    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """Returns the score of each sample."""
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> float:
        conversation = sample.conversation
        messages = [message.variables() for message in conversation.question]
        messages.append({"role": "assistant", "content": sample.answer})
        try:
            tools = [json.loads(tool) if isinstance(tool, str) else tool for tool in conversation.tools] or None
            encoded = self._tokenizer.apply_chat_template(
                messages, tools=tools, sanitize_control_tokens=True, return_tensors="pt"
            )
        except Exception as error:  # a template may raise anything
            raise InvalidInput(f"{self._where}: its chat template fails: {error}", where=sample.place) from error
        if (length := encoded["input_ids"].shape[1]) > self._most:
            raise InvalidInput(f"{self._where}: {length:,} tokens, of at most {self._most:,}", where=sample.place)
        score = float(self._model(**encoded).logits[0, 0])
        if not math.isfinite(score):
            raise InvalidInput(f"{self._where}: the score is {score}", where=sample.place)
        return score


def folder_sha256(folder: Path) -> str:
    """Returns a SHA-256 of names and contents of all files in a folder; hidden ones do not count."""
    names = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    visible = [name for name in names if not any(part.startswith(".") for part in name.parts)]
    return content_hash({str(name): sha256_of(folder / name) for name in visible})
