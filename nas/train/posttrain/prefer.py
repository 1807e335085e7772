"""Preference alignment of members: length-normalised direct objectives (LFM2 report, section 4.3, equations 3 to 5).

Preferences are read from files, or made on policy: the member answers questions several times, a judge scores the
answers and the data's own, and the best and the worst become a pair. Sampled and judged chunks are cached, so that an
interrupted stage continues:

    $NAS_CACHE/preferences/KEY/00000.jsonl ...   preferences of a chunk of questions; some may yield none
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from nas.core import paths
from nas.core.canonical import content_hash, sha256_of
from nas.core.durable import write_durably
from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.core.progress import Log
from nas.core.task import IGNORE
from nas.measure.devices.host_lock import HostLock, host_lock_folder
from nas.model.nn.fit import TrainingPhase, Worker
from nas.model.nn.model import Model
from nas.model.nn.weights import load_model
from nas.train.posttrain.conversations import (
    ChatTokenizer,
    Conversation,
    Preference,
    check_files,
    read_placed_lines,
)
from nas.train.posttrain.filters import overlap_text, without_overlap
from nas.train.posttrain.generation import evaluated, generate
from nas.train.posttrain.judges import RULES, Judge, Sample, command_judge, preference_of
from nas.train.posttrain.objective import answer_nats
from nas.train.posttrain.reward_model import RewardModel, folder_sha256
from nas.train.posttrain.sft import (
    TOKENS_AT_ONCE,
    ConversationPlan,
    ConversationSettings,
    TokenisedConversations,
    chat_of,
    evaluation_questions,
    held_out_by_question,
    padded,
    passes_of,
    read_sayable,
    tokens_path,
)
from nas.train.pretrain.member_training import MemberToTrain, TrainingRequest

PREFERENCES_VERSION = 4
"""Part of keys: increase it with every change after which the same inputs give other preferences."""
ACCURACY = "held-out preferences kept"

_QUESTIONS_AT_ONCE = 64


class PreferSettings(ConversationSettings):
    """Settings of a preference alignment; defaults are the LFM2 report's (table 5) where it has them."""

    epochs: float = Field(2, gt=0)
    batch: int = Field(64, ge=1, description="preferences per step; the report's is 2,048")
    lr: float = Field(8e-7, gt=0)
    final: float = Field(0.1, ge=0, le=1)
    warmup: float = Field(0.01, ge=0)

    beta: float = Field(5.0, ge=0, description="coefficient of the implicit reward")
    margin: float = Field(0.1, description="m, of the relative term")
    relative: float = Field(1.0, ge=0, description="omega, weight of log sigmoid(Delta - m)")
    absolute: float = Field(0.2, ge=0, description="lambda, weight of delta")

    pairs: tuple[str, ...] = Field((), description="files of preferences")
    questions: tuple[str, ...] = Field((), description="files of conversations to answer on policy")
    samples: int = Field(5, ge=1, description="answers per question")
    temperature: float = Field(1.0, gt=0)
    answer_tokens: int = Field(256, ge=1, description="most tokens of a sampled answer")
    judge: Literal["exact", "contains"] | None = Field(None, description="rule that scores the samples")
    judge_command: tuple[str, ...] = Field((), description="program and arguments that score the samples instead")
    judge_model: str | None = Field(None, description="folder of a reward model that scores the samples instead")
    length: int = Field(1024, ge=2, description="most tokens; longer preferences are dropped, never cut")
    ngram: int = Field(
        13, ge=1, exclude_if=lambda words: words == 13, description="words that a question may not share; see sft"
    )

    @model_validator(mode="after")
    def _sources(self) -> PreferSettings:
        if not self.pairs and not self.questions:
            raise InvalidInput("name files of preferences, or of questions to answer", where="pairs")
        if self.questions and sum(map(bool, (self.judge, self.judge_command, self.judge_model))) != 1:
            raise InvalidInput("answers need one of judge, judge_command and judge_model", where="questions")
        return self

    def judged_by(self) -> Judge:
        """Returns the judge of sampled answers."""
        if self.judge_model:
            return RewardModel(Path(self.judge_model))
        return RULES[self.judge] if self.judge else command_judge(self.judge_command)


def preference_loss(
    policy: Tensor, reference: Tensor, lengths: Tensor, *, beta: float, margin: float, relative: float, absolute: float
) -> Tensor:
    """Returns the loss of each preference, [B]: equations 3 to 5 with f(x) = log sigmoid(x) and g(x) = x.

    relative 1, absolute 0 and margin 0 are length-normalised DPO; relative 0 and absolute 1 APO-zero.

    Args:
        policy: log-probabilities of the chosen and rejected answers by the model, [B, 2].
        reference: the same by the model at the start, [B, 2].
        lengths: tokens of the answers, [B, 2].
        beta: coefficient of the implicit reward.
        margin: m.
        relative: omega.
        absolute: lambda.
    """
    rewards = beta * (policy - reference) / lengths
    chosen, rejected = rewards.unbind(-1)
    return -(relative * F.logsigmoid(chosen - rejected - margin) + absolute * (chosen.sigmoid() - rejected.sigmoid()))


def answer_log_probabilities(model: Model, inputs: Tensor, labels: Tensor) -> Tensor:
    """Returns the log-probability of each row's answer, [B]; see `answer_nats`."""
    nats, rows = answer_nats(model, inputs, labels)
    return torch.zeros(len(inputs), device=nats.device).index_add(0, rows, -nats)


@dataclass(frozen=True, kw_only=True)
class PreferRequest(TrainingRequest):
    """A requested preference alignment.

    Args:
        settings: its paths are relative to the working folder.
    """

    kind: ClassVar[str] = "prefer"

    settings: PreferSettings

    def check(self, stages: Collection[str]) -> None:
        super().check(stages)
        settings = self.settings
        check_files(
            [
                *((path, Preference) for path in settings.pairs),
                *((path, Conversation) for path in (*settings.questions, *settings.evaluate)),
            ],
            self.tokenizer,
            self.date,
            skip=(*settings.pairs, *settings.questions) if settings.bad_lines == "skip" else (),
        )
        evaluation_questions((), settings.benchmarks)
        if settings.judge_command and shutil.which(settings.judge_command[0]) is None:
            raise InvalidInput(f"no such program: {settings.judge_command[0]}", where="judge_command")
        if settings.questions and settings.judge_model:
            settings.judged_by()

    def plan(self, member: MemberToTrain, log: Log) -> Prefer:
        weights, settings, chat = member.weights(), self.settings, chat_of(self, member, log)
        pair_hashes, question_hashes = (
            [sha256_of(Path(path)) for path in files] for files in (settings.pairs, settings.questions)
        )
        sampled = bool(settings.questions)
        evaluations = evaluation_questions(settings.evaluate, settings.benchmarks)
        fields = {"length", "held_out", "ngram"} | (_SAMPLING if sampled else set())
        key = content_hash(
            [
                PREFERENCES_VERSION,
                sha256_of(member.tokenizer),
                chat.identity,
                settings.model_dump(mode="json", include=fields),
                pair_hashes,
                question_hashes,
                evaluations,
                member.origin.checkpoint if sampled else None,
                folder_sha256(Path(settings.judge_model)) if sampled and settings.judge_model else None,
                # Scripts of a judge and what they read are files that words of the command name.
                {word: sha256_of(Path(word)) for word in settings.judge_command if _is_file(word)} if sampled else None,
                settings.bad_lines,
            ]
        )
        path = tokens_path(key)
        if not path.is_file():
            read, bad = read_sayable(map(Path, settings.pairs), Preference, chat, settings.bad_lines)
            if bad:
                log(f"{bad:,} bad lines of pairs were skipped")
            pairs = [line for lines in read for line in lines]
            texts = [overlap_text(pair.conversation(pair.chosen)) for pair in pairs]
            pairs = [pairs[index] for index in _apart(texts, evaluations, settings, log)]
            if settings.questions:
                model = load_model(weights.path, member.layout)
                pairs += _on_policy(settings, member, model, chat, key, evaluations, log)
            _write_pairs(path, pairs, chat, settings, log)
        return Prefer.from_weights(member, weights, settings, key, chat, self.date)


_PATHS = {"pairs", "questions", "evaluate", "benchmarks", "judge_model"}
_SAMPLING = {"samples", "temperature", "answer_tokens", "judge", "judge_command", "seed"}


def _is_file(word: str) -> bool:
    """Returns whether a word of a command is a file's name: a script in the command may be longer than names are."""
    try:
        return Path(word).is_file()
    except OSError:
        return False


def _apart(texts: Sequence[str], evaluations: Sequence[str], settings: PreferSettings, log: Log) -> list[int]:
    """Returns the indices of questions that do not overlap those of evaluations."""
    indices = without_overlap(texts, evaluations, settings.ngram)
    if len(indices) < len(texts):
        log(f"{len(texts) - len(indices):,} of {len(texts):,} questions overlap those of evaluations and were dropped")
    return indices


def _on_policy(
    settings: PreferSettings,
    member: MemberToTrain,
    model: Model,
    chat: ChatTokenizer,
    key: str,
    evaluations: Sequence[str],
    log: Log,
) -> Iterator[Preference]:
    """Yields preferences from sampled answers, chunk by chunk; chunks that were judged before are read."""
    folder = paths.cache() / "preferences" / key
    folder.mkdir(parents=True, exist_ok=True)
    bad: list[str] | None = [] if settings.bad_lines == "skip" else None
    questions = [
        (chat.plain(conversation), place)
        for path in settings.questions
        for place, conversation in chat.placed(read_placed_lines(Path(path), Conversation, chat.special, bad), bad)
    ]
    if bad:
        log(f"{len(bad):,} bad lines of questions were skipped")
    texts = [overlap_text(conversation) for conversation, _ in questions]
    questions = [questions[index] for index in _apart(texts, evaluations, settings, log)]
    judge = settings.judged_by()
    for start in range(0, len(questions), _QUESTIONS_AT_ONCE):
        path = folder / f"{start // _QUESTIONS_AT_ONCE:05}.jsonl"
        if not path.is_file():
            chunk = questions[start : start + _QUESTIONS_AT_ONCE]
            preferences, cut = _judged(settings, member, model, chat, judge, chunk, start)
            lines = (preference.model_dump_json(exclude_unset=True) + "\n" for preference in preferences)
            write_durably(path, "".join(lines).encode())
            log(
                f"answered {start + len(chunk):,} of {len(questions):,} questions: {len(preferences)} preferences;"
                f" {cut} answers of more than {settings.answer_tokens} tokens dropped"
            )
        for line in path.read_bytes().splitlines():  # of text, splitlines() takes U+2028 for an end of line
            yield Preference.model_validate_json(line)


def _judged(
    settings: PreferSettings,
    member: MemberToTrain,
    model: Model,
    chat: ChatTokenizer,
    judge: Judge,
    numbered: Sequence[tuple[Conversation, str]],
    first: int,
) -> tuple[list[Preference], int]:
    """Returns preferences, and the number of sampled answers without an end, which are neither judged nor chosen."""
    questions = [chat.question(conversation.question, conversation.tools) for conversation, _ in numbered]
    repeated = [question for question in questions for _ in range(settings.samples)]
    seeds = [[settings.seed, first + i, j] for i in range(len(numbered)) for j in range(settings.samples)]
    with member.timed("sample"), HostLock(host_lock_folder()).shared() as hold:
        answers = generate(
            model,
            repeated,
            settings.answer_tokens,
            chat.ends,
            temperature=settings.temperature,
            seeds=seeds,
            yield_hook=hold.yield_if_wanted,
        )
    sampled = [
        [
            Sample(conversation, chat.answer_of(ids), place)
            for ids in answers[i * settings.samples : (i + 1) * settings.samples]
            if ids[-1] in chat.ends
        ]
        for i, (conversation, place) in enumerate(numbered)
    ]
    references = [Sample(conversation, conversation.answer, place) for conversation, place in numbered]
    with member.timed("judge"):
        scores = iter(judge([*(sample for samples in sampled for sample in samples), *references]))
    by_question = [[next(scores) for _ in samples] for samples in sampled]
    preferences = [
        preference_of(reference, samples, sample_scores, score, chat.special)
        for reference, samples, sample_scores, score in zip(references, sampled, by_question, scores, strict=True)
    ]
    cut = len(answers) - sum(map(len, sampled))
    return [preference for preference in preferences if preference is not None], cut


def _write_pairs(
    path: Path, pairs: Sequence[Preference], chat: ChatTokenizer, settings: PreferSettings, log: Log
) -> None:
    """Writes chosen and rejected answers in turn, those of a pair next to each other."""
    encoded, conversations, changed = [], [], 0
    for pair in pairs:
        try:
            both = [chat.conversation(pair.conversation(answer), last=True) for answer in (pair.chosen, pair.rejected)]
        except InvalidInput:  # of a sampled answer, such as one with reasoning; those of files were checked
            changed += 1
            continue
        if all(len(ids) <= settings.length for ids, _ in both):
            encoded.append(both)
            conversations.append(pair.conversation(pair.chosen))
    longer = len(pairs) - len(encoded) - changed
    log(f"{len(encoded):,} preferences; {longer:,} longer than {settings.length:,} tokens dropped")
    if changed:
        log(f"{changed:,} preferences with an answer that the chat template changes were dropped")
    if not encoded:
        raise InvalidInput(
            "no preference is left to train on: all answers to a question have one score, or are too long",
            where=", ".join((*settings.pairs, *settings.questions)),
        )
    held_out = held_out_by_question(conversations, settings.held_out)
    rows = [row for both in encoded for row in both]
    flags = [out for out in held_out for _ in range(2)]
    TokenisedConversations.write(path, rows, [0] * len(rows), flags, {"pairs": len(encoded)})


class Prefer(ConversationPlan):
    """Plan of a preference alignment; `tokens` are those of both answers of each preference."""

    settings: PreferSettings

    def key_inputs(self) -> dict[str, Any]:
        # Without paths: the contents of files and folders are in `tokens`.
        settings = self.settings.model_dump(mode="json", exclude={*_PATHS, "bad_lines"})
        return {"prefer": settings, "preferences": self.tokens, **self.common_inputs()}

    def config(self) -> dict[str, Any]:
        data = self.conversations
        return {
            "settings": self.settings.model_dump(mode="json"),
            "tokenizer": self.tokenizer_sha256,
            "preferences": len(data.lengths) // 2,
            "counts": {ACCURACY: int(data.held_out[::2].sum())},
        }

    def phases(self, worker: Worker) -> list[TrainingPhase]:
        settings, data = self.settings, self.conversations
        pairs = np.flatnonzero(~data.held_out[::2])
        reference = load_model(self.weights.path, Layout.from_json(self.layout)).to(worker.device)
        steps, most = settings.steps(len(pairs)), worker.most_tokens(*TOKENS_AT_ONCE) // 2

        def drawn(step: int) -> list[int]:
            numbers = range(step * settings.batch, (step + 1) * settings.batch)
            order = [divmod(number, len(pairs)) for number in numbers]
            orders = {e: np.random.default_rng([settings.seed, e]).permutation(pairs) for e, _ in order}
            return [int(orders[epoch][place]) for epoch, place in order]

        def passes(step: int) -> list[tuple[Tensor, ...]]:
            pairs = drawn(step)[worker.rank :: worker.world]
            lengths = [int(data.lengths[2 * pair : 2 * pair + 2].max()) for pair in pairs]
            return [self._batch(data, [pairs[place] for place in places]) for places in passes_of(lengths, most)]

        def loss(model: Any, inputs: Tensor, labels: Tensor) -> Tensor:
            with torch.no_grad():
                before = answer_log_probabilities(reference, inputs, labels)
            return self._losses(answer_log_probabilities(model, inputs, labels), before, labels).sum() / settings.batch

        tokens = round(float(data.lengths.mean()) * 2 * settings.batch)
        return [TrainingPhase("prefer", steps, tokens, passes, loss, lambda step: settings.rate(step, steps))]

    def scores(self, model: nn.Module, worker: Worker) -> dict[str, float]:
        """Returns the share of held-out preferences with a greater reward for the chosen answer, and exact matches."""
        assert isinstance(model, Model)
        data = self.conversations
        reference = load_model(self.weights.path, Layout.from_json(self.layout)).to(worker.device)
        agreed, pairs = 0, np.flatnonzero(data.held_out[::2])
        for pair in pairs:
            worker.yield_hook()
            inputs, labels = (values.to(worker.device) for values in self._batch(data, [int(pair)]))
            before = answer_log_probabilities(reference, inputs, labels)
            rewards = answer_log_probabilities(model, inputs, labels) - before
            chosen, rejected = (rewards / (labels != IGNORE).sum(-1)).tolist()
            agreed += chosen > rejected
        metrics = {ACCURACY: agreed / len(pairs)} if len(pairs) else {}
        return metrics | evaluated(model, self.settings.evaluate, self.tokenizer, self.date, worker.yield_hook)

    def _batch(self, data: TokenisedConversations, pairs: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Returns inputs and labels of both answers of each pair, [2 B, T]."""
        rows = [data.conversation(2 * pair + i) for pair in pairs for i in range(2)]
        return padded([inputs for inputs, _ in rows], self.pad), padded([labels for _, labels in rows], IGNORE)

    def _losses(self, policy: Tensor, reference: Tensor, labels: Tensor) -> Tensor:
        settings, lengths = self.settings, (labels != IGNORE).sum(-1)
        return preference_loss(
            policy.view(-1, 2),
            reference.view(-1, 2),
            lengths.view(-1, 2),
            beta=settings.beta,
            margin=settings.margin,
            relative=settings.relative,
            absolute=settings.absolute,
        )
