"""Curriculum of a fine-tuning: from questions that most models answer to those that few do (LFM2 report, 4.2.1).

The share of models that answer a question right is given in its line (`solved`), found by asking an ensemble, or
predicted from the words of the question. Answers are greedy, and kept by content, so that an interrupted stage
continues:

    $NAS_CACHE/answers/KEY.json   answers of one model to a chunk of questions
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.core.progress import Log
from nas.core.stored import stored
from nas.core.strict import StrictKeys
from nas.measure.devices.host_lock import HostLock, host_lock_folder
from nas.measure.runtimes.base import Checkpoint
from nas.model.nn.model import Model
from nas.model.nn.weights import checkpoint_layout, load_model
from nas.train.posttrain.conversations import ChatTokenizer, Conversation
from nas.train.posttrain.filters import question_text
from nas.train.posttrain.generation import generate
from nas.train.posttrain.judges import RULES, Sample
from nas.train.posttrain.merging import named_weights
from nas.train.pretrain.member_training import MemberToTrain
from nas.train.release.model_tokenizer import read_member_tokenizer
from nas.train.release.tokenizer import require_fit

CURRICULUM = "curriculum"
"""Key of the settings, for messages."""
CURRICULUM_VERSION = 2
"""Part of keys: increase it with every change after which the same inputs give other answers or shares."""

_QUESTIONS_AT_ONCE = 64
_BUCKETS = 512
_RIDGE = 1.0
_ROWS_AT_ONCE = 4096


class CurriculumSettings(StrictKeys):
    """How hard a conversation is; those that more models answer right are read first in each epoch."""

    models: tuple[str, ...] = Field(
        (), description="earlier stages by name or kind, or files of weights, that are asked"
    )
    judge: Literal["exact", "contains"] = Field("exact", description="rule by which an answer is right")
    answer_tokens: int = Field(256, ge=1, description="most tokens of an answer")
    questions: int | None = Field(None, ge=1, description="most questions to ask; shares of the others are predicted")


class Solver(NamedTuple):
    """A model of the ensemble."""

    weights: Checkpoint
    layout: Layout


def solvers(settings: CurriculumSettings, member: MemberToTrain) -> list[Solver]:
    """Returns the models of the ensemble, whose layouts may differ.

    Raises:
        InvalidInput: a name is neither a file nor an earlier stage, or the tokenizer does not fit a layout.
    """
    ensemble, tokenizer = [], read_member_tokenizer(member.tokenizer)
    for name in settings.models:
        weights = named_weights(member, name, where=f"{CURRICULUM}.models")
        solver = Solver(weights, checkpoint_layout(weights.path))
        require_fit(tokenizer, solver.layout, f"{CURRICULUM}.models: {name}")
        ensemble.append(solver)
    return ensemble


def curriculum_inputs(settings: CurriculumSettings, ensemble: Sequence[Solver]) -> dict[str, Any]:
    """Returns the part of the cache key that comes from the settings and the models."""
    fields = settings.model_dump(mode="json", exclude={"models"})
    return {"curriculum": CURRICULUM_VERSION, "models": [solver.weights.sha256 for solver in ensemble], **fields}


def solved_shares(
    settings: CurriculumSettings,
    ensemble: Sequence[Solver],
    conversations: Sequence[Conversation],
    chat: ChatTokenizer,
    log: Log,
) -> NDArray[np.float32]:
    """Returns the share of models that answer each conversation's question right, p_i in the report.

    Raises:
        InvalidInput: no share is known, by which others could be predicted.
    """
    shares = np.asarray(
        [np.nan if conversation.solved is None else conversation.solved for conversation in conversations], np.float32
    )
    unsolved = np.flatnonzero(np.isnan(shares))
    recorded = len(shares) - len(unsolved)
    if settings.questions is not None:
        unsolved = np.sort(np.random.default_rng(0).permutation(unsolved)[: settings.questions])
    if ensemble and len(unsolved):
        questions = [conversations[int(index)] for index in unsolved]
        shares[unsolved] = np.mean([_right(settings, solver, questions, chat, log) for solver in ensemble], axis=0)
    unknown = np.isnan(shares)
    if unknown.all():
        raise InvalidInput("no conversation has a share `solved`, and no models are named to find it", where=CURRICULUM)
    if unknown.any():
        texts = np.asarray([question_text(conversation) for conversation in conversations], object)
        shares[unknown] = predicted(texts[~unknown].tolist(), shares[~unknown], texts[unknown].tolist())
    answered = len(shares) - recorded - int(unknown.sum())
    log(
        f"curriculum: {shares.mean():.0%} solved on average; {recorded:,} given, {answered:,}"
        f" by {len(ensemble)} models, {unknown.sum():,} predicted"
    )
    return shares


def _right(
    settings: CurriculumSettings, solver: Solver, conversations: Sequence[Conversation], chat: ChatTokenizer, log: Log
) -> list[bool]:
    """Returns whether a model answers each question right; chunks that were answered before are read."""
    right: list[bool] = []
    conversations = [chat.plain(conversation) for conversation in conversations]
    model: Model | None = None
    for start in range(0, len(conversations), _QUESTIONS_AT_ONCE):
        chunk = conversations[start : start + _QUESTIONS_AT_ONCE]
        questions = [chat.question(conversation.question, conversation.tools) for conversation in chunk]
        inputs = [solver.weights.sha256, chat.content, chat.identity, settings.answer_tokens, questions]

        def answer(questions: list[list[int]] = questions, end: int = start + len(chunk)) -> bytes:
            nonlocal model
            model = model or load_model(solver.weights.path, solver.layout)
            with HostLock(host_lock_folder()).shared() as hold:
                replies = generate(model, questions, settings.answer_tokens, chat.ends, yield_hook=hold.yield_if_wanted)
            log(f"{solver.weights.path}: answered {end:,} of {len(conversations):,} questions")
            return json.dumps([chat.answer_of(ids) for ids in replies]).encode()

        answers = json.loads(stored("answers", CURRICULUM_VERSION, inputs, answer, suffix=".json").read_bytes())
        samples = [Sample(conversation, answer, "") for conversation, answer in zip(chunk, answers, strict=True)]
        right += [score > 0 for score in RULES[settings.judge](samples)]
    return right


def predicted(examples: Sequence[str], shares: NDArray[np.float32], texts: Sequence[str]) -> NDArray[np.float32]:
    """Returns shares for `texts`, in [0, 1], by ridge regression on features of `examples`, whose shares are given."""
    size, mean = _BUCKETS + 1, shares.mean(dtype=np.float64)
    total, square, cross = np.zeros(size), _RIDGE * np.eye(size), np.zeros(size)
    for start in range(0, len(examples), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        x = _features(examples[rows])
        total += x.sum(0)
        square += x.T @ x
        cross += x.T @ (shares[rows] - mean)
    centre = total / len(examples)
    weights = np.linalg.solve(square - len(examples) * np.outer(centre, centre), cross)
    predictions = [
        mean + (_features(texts[start : start + _ROWS_AT_ONCE]) - centre) @ weights
        for start in range(0, len(texts), _ROWS_AT_ONCE)
    ]
    return np.asarray(np.clip(np.concatenate(predictions), 0, 1), np.float32)


def _features(texts: Sequence[str]) -> NDArray[np.float64]:
    """Returns which words and pairs of words a text has, hashed and scaled to length 1, and the log of its length.

    Digits are alike, so that numbers count by how many digits they have.
    """
    rows = np.zeros((len(texts), _BUCKETS + 1))
    for row, text in zip(rows, texts, strict=True):
        words = re.sub(r"\d", "0", text).split()
        for gram in (*words, *map(" ".join, pairwise(words))):
            row[zlib.crc32(gram.encode()) % _BUCKETS] = 1
        row /= max(1.0, float(np.linalg.norm(row)))
        row[_BUCKETS] = np.log1p(len(words))
    return rows
