"""Supervised fine-tuning of members on conversations (LFM2 report, section 4.2).

Conversations of a step are packed, see `nas.model.nn.model.PackedRows`: mixers get each as a row of its own, padded at
its end, so that none can read another, whatever the kind of block, and all else computes their tokens alone.

Conversations are filtered and tokenised once, and read from the cache folder:

    $NAS_CACHE/conversations/KEY.safetensors   ids and answers of all conversations, where each begins, its source
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from safetensors.numpy import load_file
from torch import Tensor, nn

from nas.core import paths
from nas.core.canonical import content_hash, in_share, sha256_of
from nas.core.errors import InvalidInput
from nas.core.progress import Log
from nas.core.strict import StrictKeys
from nas.core.task import IGNORE
from nas.measure.runtimes.base import Checkpoint
from nas.model.nn.fit import TrainingPhase, Worker, save_tensors
from nas.model.nn.model import Model
from nas.model.nn.optimisers import Optimiser
from nas.train.posttrain.conversations import (
    AnyChatLine,
    ChatTokenizer,
    Conversation,
    check_files,
    read_lines,
    read_placed_lines,
)
from nas.train.posttrain.curriculum import CURRICULUM, CurriculumSettings, curriculum_inputs, solved_shares, solvers
from nas.train.posttrain.filters import (
    Filters,
    in_languages,
    overlap_text,
    question_text,
    without_duplicates,
    without_near_duplicates,
    without_overlap,
)
from nas.train.posttrain.generation import evaluated
from nas.train.posttrain.languages import check_languages, detector_version
from nas.train.posttrain.merging import check_names
from nas.train.posttrain.objective import answer_nats, dropped_embeddings
from nas.train.pretrain.member_training import MemberToTrain, TrainingPlan, TrainingRequest
from nas.train.pretrain.recipe import Betas, Schedule

CONVERSATIONS_VERSION = 5
"""Part of keys: increase it with every change after which the same files give other ids or another selection."""
PASSES_VERSION = 3
"""Part of keys: increase it when steps are split into other passes, which round and drop other values."""
HELD_OUT = "loss on held-out answers"

TOKENS_AT_ONCE = (4096, 32768)
"""Most tokens of a pass, on the CPU and on a GPU."""

_MOST_WARMUP = 0.1


class DataSource(StrictKeys):
    """A file of conversations in the mixture."""

    path: str
    share: float | None = Field(None, gt=0, description="of the conversations of an epoch; none: by their number")


class TrainingSettings(StrictKeys):
    """Optimiser and schedule of a stage; defaults are the LFM2 report's for fine-tuning (4.2.2)."""

    epochs: float = Field(3, gt=0)
    batch: int = Field(32, ge=1, description="conversations per step; the report does not publish its number")
    lr: float = Field(3e-5, gt=0)
    final: float = Field(1 / 300, ge=0, le=1, description="last rate as a share of `lr`, after a cosine decay")
    warmup: float = Field(500, ge=0, description="steps, at most a tenth of all; below 1: share of the steps")
    weight_decay: float = Field(0.1, ge=0)
    betas: Betas = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    clip: float = Field(1.0, gt=0)
    balance_rate: float = Field(0.0, ge=0, description="step of the experts' bias")
    held_out: float = Field(0.02, ge=0, lt=0.5, description="share of the data that is only scored")
    seed: int = Field(0, ge=0)

    def optimiser(self) -> Optimiser:
        """Returns the settings of the optimiser."""
        return Optimiser(self.weight_decay, self.clip, self.balance_rate, self.betas, self.eps)

    def steps(self, conversations: int) -> int:
        """Returns the number of steps for epochs of so many conversations."""
        return max(1, round(self.epochs * conversations / self.batch))

    def rate(self, step: int, steps: int) -> float:
        """Returns the learning rate of a step, from 0."""
        warmup = self.warmup if self.warmup < 1 else min(self.warmup / steps, _MOST_WARMUP)
        schedule = Schedule(warmup=warmup, decay=1 - warmup, final=self.final, shape="cosine")
        return self.lr * schedule.factor(step, steps)


class ConversationSettings(TrainingSettings):
    """Settings of a stage of a member that trains on conversations."""

    evaluate: tuple[str, ...] = Field(
        (),
        description="files of conversations: training data may not overlap, and answers are compared at the end",
    )
    benchmarks: str | None = Field(
        None,
        exclude_if=lambda folder: folder is None,
        description="folder of data sets as of `nas family evaluate --benchmarks`: training data may not overlap",
    )
    bad_lines: Literal["refuse", "skip"] = Field(
        "refuse",
        exclude_if=lambda what: what == "refuse",
        description="of files to train on, or to answer: what is done with those that cannot be used",
    )


class SftSettings(ConversationSettings):
    """Settings of a supervised fine-tuning."""

    data: tuple[DataSource, ...] = Field(min_length=1)
    filters: Filters = Filters()
    curriculum: CurriculumSettings | None = Field(
        None, exclude_if=lambda one: one is None, description="order of an epoch, from easy to hard; none: at random"
    )
    dropout: float = Field(0.1, ge=0, lt=1, description="of token embeddings")

    @model_validator(mode="after")
    def _shares(self) -> SftSettings:
        shares = [source.share for source in self.data if source.share is not None]
        if shares and len(shares) < len(self.data):
            raise InvalidInput("give a share to each source or to none", where="data")
        return self


class Selected(NamedTuple):
    """Conversations that training reads.

    Args:
        conversations: of all sources.
        sources: the number of the source of each.
        dropped: filter -> conversations that it dropped.
    """

    conversations: list[Conversation]
    sources: list[int]
    dropped: dict[str, int]


def evaluation_questions(files: Iterable[str], benchmarks: str | None) -> list[str]:
    """Returns the questions of files of conversations, and of public benchmarks in a folder.

    Raises:
        InvalidInput: a file has problems, or the folder has no data of any benchmark.
    """
    texts = [overlap_text(conversation) for path in files for conversation in read_lines(Path(path), Conversation)]
    if benchmarks is not None:
        from nas.train.posttrain.harness import questions  # its libraries are an extra

        texts += questions(Path(benchmarks))
    return texts


def chat_of(request: TrainingRequest, member: MemberToTrain, log: Log) -> ChatTokenizer:
    """Returns the tokenizer of a training; `log` takes a line where its chat template names the date."""
    chat = ChatTokenizer.read(member.tokenizer, request.date)
    if chat.dated:
        log(f"the chat template names the date, which is {request.date} for it; `date` of the recipe sets another")
    return chat


def read_sayable(
    files: Iterable[Path], kind: type[AnyChatLine], chat: ChatTokenizer, bad_lines: Literal["refuse", "skip"]
) -> tuple[list[list[AnyChatLine]], int]:
    """Returns the lines of each file that can be trained on, and the number of bad ones that were skipped.

    Raises:
        InvalidInput: a file has problems that are not skipped, named by line.
    """
    bad: list[str] | None = [] if bad_lines == "skip" else None
    placed = [chat.placed(read_placed_lines(path, kind, chat.special, bad), bad) for path in files]
    return [[line for _, line in lines] for lines in placed], len(bad or ())


def select(
    files: Sequence[Path],
    evaluations: Sequence[str],
    filters: Filters,
    chat: ChatTokenizer,
    bad_lines: Literal["refuse", "skip"] = "refuse",
) -> Selected:
    """Reads conversations and drops those that the filters exclude.

    Args:
        files: of conversations.
        evaluations: questions that training data may not overlap.
        filters: to apply.
        chat: tokenizer of the member.
        bad_lines: see `ConversationSettings`.

    Raises:
        InvalidInput: a file has problems, named by line, or every conversation was dropped.
    """
    read, bad = read_sayable(files, Conversation, chat, bad_lines)
    conversations = [conversation for lines in read for conversation in lines]
    sources = [number for number, lines in enumerate(read) for _ in lines]
    selected = list(range(len(conversations)))
    dropped = {"bad lines": bad} if bad_lines == "skip" else {}

    def keep(name: str, indices: Sequence[int]) -> None:
        nonlocal selected
        dropped[name] = len(selected) - len(indices)
        selected = [selected[index] for index in indices]

    def remaining() -> list[Conversation]:
        return [conversations[index] for index in selected]

    if filters.duplicates:
        keep("duplicates", without_duplicates(remaining()))
    if filters.languages:
        keep("languages", in_languages(remaining(), filters.languages))
    if filters.near_duplicates is not None:
        keep("near duplicates", without_near_duplicates(remaining(), filters.near_duplicates))
    if evaluations:
        texts = [overlap_text(conversation) for conversation in remaining()]
        keep("overlap with evaluations", without_overlap(texts, evaluations, filters.ngram))
    keep(
        "length",
        [i for i, conversation in enumerate(remaining()) if len(chat.conversation(conversation)[0]) <= filters.length],
    )
    if not selected:
        reasons = ", ".join(f"{name} {count:,}" for name, count in dropped.items())
        raise InvalidInput(f"the filters dropped every conversation: {reasons}", where=", ".join(map(str, files)))
    return Selected(remaining(), [sources[index] for index in selected], dropped)


class TokenisedConversations:
    """Token ids of conversations: `conversation(i)` -> inputs [T] and labels [T].

    Args:
        path: of the file that `write` made.
    """

    def __init__(self, path: Path) -> None:
        tensors = load_file(path)
        self._ids, self._answers, self._starts = tensors["ids"], tensors["answers"], tensors["starts"]
        self.sources: NDArray[np.int64] = tensors["sources"]
        self.held_out: NDArray[np.bool_] = tensors["held_out"].astype(bool)
        self.solved: NDArray[np.float32] | None = tensors.get("solved")
        self.lengths: NDArray[np.int64] = np.diff(self._starts) - 1
        """Inputs of each."""

    @staticmethod
    def write(
        path: Path,
        rows: Sequence[tuple[NDArray[np.int32], NDArray[np.bool_]]],
        sources: Sequence[int],
        held_out: Sequence[bool],
        about: Mapping[str, int],
        solved: NDArray[np.float32] | None = None,
    ) -> None:
        """Writes the file atomically.

        Args:
            path: of the file.
            rows: ids of each conversation, and which are answers; see `ChatTokenizer.conversation`.
            sources: number of the source of each.
            held_out: whether each is only scored.
            about: counts for the file's header.
            solved: share of models that answer each right, for a curriculum.
        """
        starts = np.cumsum([0, *(len(ids) for ids, _ in rows)])
        tensors = {
            "ids": np.concatenate([ids for ids, _ in rows]),
            "answers": np.concatenate([answers for _, answers in rows]).astype(np.uint8),
            "starts": starts.astype(np.int64),
            "sources": np.asarray(sources, np.int64),
            "held_out": np.asarray(held_out, np.uint8),
        }
        if solved is not None:
            tensors["solved"] = solved
        save_tensors({name: torch.from_numpy(values) for name, values in tensors.items()}, path, dict(about))

    def conversation(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns inputs and labels, with `IGNORE` where the next token is not an answer's."""
        span = slice(self._starts[index], self._starts[index + 1])
        ids, answers = self._ids[span].astype(np.int64), self._answers[span].astype(bool)
        return ids[:-1], np.where(answers[1:], ids[1:], IGNORE)

    def answer_tokens(self, index: int) -> int:
        """Returns the number of labels that are no `IGNORE`."""
        return int(self._answers[self._starts[index] + 1 : self._starts[index + 1]].sum())


def held_out_by_question(conversations: Sequence[Conversation], share: float) -> list[bool]:
    """Returns which conversations are among the share that is held out: all of a question, or none.

    Raises:
        InvalidInput: all of them are.
    """
    keys = [content_hash(question_text(conversation)) for conversation in conversations]
    held_out = [in_share(key, share) for key in keys]
    if all(held_out):
        raise InvalidInput(f"all {len(held_out)} conversations are of questions that are held out", where="held_out")
    return held_out


class Mixture:
    """Which conversations are read, in their order: each epoch draws from all sources in a new order.

    With a curriculum, what an epoch draws is sorted by the shares that are solved, the greatest first.

    Without shares an epoch reads every conversation once. With shares it has as many conversations, of which each
    source has its share; a source continues in the next epoch where it stopped.

    Args:
        sources: number of the source of each conversation that is trained on; negative: it is not.
        shares: of each source; None: by their numbers.
        seed: of the order.
        solved: share of models that answer each conversation right; None: no curriculum.
    """

    def __init__(
        self,
        sources: NDArray[np.int64],
        shares: Sequence[float] | None,
        seed: int,
        solved: NDArray[np.float32] | None = None,
    ) -> None:
        self._solved = solved
        count = int(sources.max()) + 1 if shares is None else len(shares)
        self._members = [np.flatnonzero(sources == number) for number in range(count)]
        sizes = [len(members) for members in self._members]
        if shares is None:
            self._draws = sizes
        else:
            total = sum(shares)
            self._draws = [max(1, round(sum(sizes) * share / total)) for share in shares]
            if 0 in sizes:
                raise InvalidInput("a source of the mixture has no conversation left to train on", where="data")
        self.epoch = sum(self._draws)
        """Conversations of an epoch."""
        self._seed = seed
        self._cached: tuple[int, NDArray[np.int64]] = (-1, np.zeros(0, np.int64))

    def __getitem__(self, number: int) -> int:
        """Returns the index of the conversation that is read as number `number`, from 0."""
        epoch, place = divmod(number, self.epoch)
        if self._cached[0] != epoch:
            self._cached = epoch, self._order(epoch)
        return int(self._cached[1][place])

    def _order(self, epoch: int) -> NDArray[np.int64]:
        drawn = [self._drawn(source, epoch) for source in range(len(self._members))]
        order = np.random.default_rng([self._seed, epoch]).permutation(np.concatenate(drawn))
        return order if self._solved is None else order[np.argsort(-self._solved[order], kind="stable")]

    def _drawn(self, source: int, epoch: int) -> NDArray[np.int64]:
        members, draws = self._members[source], self._draws[source]
        if not draws:
            return members
        first, rounds = epoch * draws, []
        for turn in range(first // len(members), (first + draws - 1) // len(members) + 1):
            rounds.append(np.random.default_rng([self._seed, source, turn]).permutation(members))
        begin = first % len(members)
        return np.concatenate(rounds)[begin : begin + draws]


def passes_of(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Splits sequences, sorted by length, into as few passes as hold `most` tokens each, padding included.

    Returns:
        The places of the sequences of each pass; a sequence that is too long has a pass of its own.
    """
    passes: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if passes and lengths[passes[-1][0]] * (len(passes[-1]) + 1) <= most:
            passes[-1].append(place)
        else:
            passes.append([place])
    return passes


def padded(sequences: Sequence[NDArray[np.int64]], value: int) -> Tensor:
    """Returns sequences as one tensor [B, T], with `value` after their ends."""
    length = max(map(len, sequences))
    rows = [np.pad(sequence, (0, length - len(sequence)), constant_values=value) for sequence in sequences]
    return torch.from_numpy(np.stack(rows))


@dataclass(frozen=True, kw_only=True)
class SftRequest(TrainingRequest):
    """A requested fine-tuning.

    Args:
        settings: its paths are relative to the working folder.
    """

    kind: ClassVar[str] = "sft"

    settings: SftSettings

    def check(self, stages: Collection[str]) -> None:
        super().check(stages)
        data = [source.path for source in self.settings.data]
        files = ((path, Conversation) for path in (*data, *self.settings.evaluate))
        check_files(files, self.tokenizer, self.date, skip=data if self.settings.bad_lines == "skip" else ())
        evaluation_questions((), self.settings.benchmarks)
        if self.settings.filters.languages:
            check_languages(self.settings.filters.languages)
        if self.settings.curriculum is not None:
            self._check_curriculum(self.settings.curriculum, stages)

    def _check_curriculum(self, settings: CurriculumSettings, stages: Collection[str]) -> None:
        where = f"{CURRICULUM}.models"
        check_names(settings.models, stages, where)
        for name in settings.models:
            if name not in stages and Path(name).is_dir():
                raise InvalidInput(f"{name} is a folder; models that are asked are files of weights", where=where)
        paths = (Path(source.path) for source in self.settings.data)
        lines = (line for path in paths for _, line in read_placed_lines(path, Conversation, bad=[]))
        if not settings.models and all(line.solved is None for line in lines):
            raise InvalidInput("name models, or give conversations a share `solved`", where=CURRICULUM)

    def plan(self, member: MemberToTrain, log: Log) -> Sft:
        weights, settings, chat = member.weights(), self.settings, chat_of(self, member, log)
        tokenizer = sha256_of(member.tokenizer)
        files = [Path(source.path) for source in settings.data]
        evaluations = evaluation_questions(settings.evaluate, settings.benchmarks)
        curriculum = settings.curriculum
        ensemble = solvers(curriculum, member) if curriculum else []
        key = content_hash(
            [
                CONVERSATIONS_VERSION,
                tokenizer,
                chat.identity,
                settings.filters.model_dump(mode="json"),
                settings.held_out,
                settings.bad_lines,
                [sha256_of(path) for path in files],
                evaluations,
                detector_version() if settings.filters.languages else None,
                curriculum_inputs(curriculum, ensemble) if curriculum else None,
            ]
        )
        path = tokens_path(key)
        if not path.is_file():
            selected = select(files, evaluations, settings.filters, chat, settings.bad_lines)
            rows = [chat.conversation(conversation) for conversation in selected.conversations]
            held_out = held_out_by_question(selected.conversations, settings.held_out)
            solved = None
            if curriculum:
                solved = solved_shares(curriculum, ensemble, selected.conversations, chat, log)
            TokenisedConversations.write(path, rows, selected.sources, held_out, selected.dropped, solved)
            dropped = ", ".join(f"{name} {count:,}" for name, count in selected.dropped.items() if count)
            log(f"{len(selected.conversations):,} conversations; dropped: {dropped or 'none'}")
        return Sft.from_weights(member, weights, settings, key, chat, self.date)


def tokens_path(key: str) -> Path:
    """Returns the file of tokenised conversations."""
    return paths.cache() / "conversations" / f"{key}.safetensors"


class ConversationPlan(TrainingPlan):
    """Plan of a training on conversations that continues weights of the member.

    Args:
        settings: of the training.
        tokens: key of the tokenised conversations.
        weights: to continue.
        pad: id behind the end of a conversation.
        date: of chat templates.
        evaluations: hashes of the files that are answered for the record.
    """

    settings: ConversationSettings
    tokens: str
    weights: Checkpoint
    pad: int
    date: str
    evaluations: list[str]

    @classmethod
    def from_weights(
        cls,
        member: MemberToTrain,
        weights: Checkpoint,
        settings: ConversationSettings,
        tokens: str,
        chat: ChatTokenizer,
        date: str,
    ) -> Self:
        """Returns the plan of a member's training."""
        return cls.of(
            member,
            settings.seed,
            settings=settings,
            tokens=tokens,
            weights=weights,
            pad=chat.pad,
            date=date,
            evaluations=[sha256_of(Path(path)) for path in settings.evaluate],
        )

    def common_inputs(self) -> dict[str, Any]:
        """Returns the inputs of the key that every training on conversations has besides settings and data."""
        return {"evaluations": self.evaluations, "start": self.weights.sha256, "passes": PASSES_VERSION}

    @property
    def conversations(self) -> TokenisedConversations:
        """The conversations, from the cache."""
        return TokenisedConversations(tokens_path(self.tokens))

    @property
    def most_workers(self) -> int:
        return self.settings.batch

    def start(self, folder: Path, log: Log) -> tuple[Path | None, str]:
        return self.weights.path, self.weights.describe()

    def optimiser(self) -> Optimiser:
        return self.settings.optimiser()


class Sft(ConversationPlan):
    """Plan of a fine-tuning."""

    settings: SftSettings

    def key_inputs(self) -> dict[str, Any]:
        # Without paths: the conversations are in `tokens`.
        apart: dict[str, Any] = dict.fromkeys(("evaluate", "benchmarks", "curriculum", "bad_lines"), True)
        settings = self.settings.model_dump(mode="json", exclude=apart | {"data": {"__all__": {"path"}}})
        return {"sft": settings, "conversations": self.tokens, **self.common_inputs()}

    def config(self) -> dict[str, Any]:
        data = self.conversations
        return {
            "settings": self.settings.model_dump(mode="json"),
            "tokenizer": self.tokenizer_sha256,
            "conversations": len(data.lengths),
            "counts": {HELD_OUT: int(data.held_out.sum())},
        }

    def phases(self, worker: Worker) -> list[TrainingPhase]:
        settings, data = self.settings, self.conversations
        shares = [float(source.share) for source in settings.data if source.share] or None
        mixture = Mixture(np.where(data.held_out, -1, data.sources), shares, settings.seed, data.solved)
        steps, most = settings.steps(mixture.epoch), worker.most_tokens(*TOKENS_AT_ONCE)

        def passes(step: int) -> list[tuple[Tensor, ...]]:
            numbers = range(step * settings.batch, (step + 1) * settings.batch)
            drawn = [mixture[number] for number in numbers]
            counted = sum(map(data.answer_tokens, drawn))
            conversations = [data.conversation(index) for index in drawn[worker.rank :: worker.world]]
            sequences = (np.random.SeedSequence([settings.seed, n]) for n in numbers[worker.rank :: worker.world])
            seeds = [int(sequence.generate_state(1)[0]) for sequence in sequences]
            batches: list[tuple[Tensor, ...]] = []
            for places in passes_of([len(inputs) for inputs, _ in conversations], most):
                inputs = padded([conversations[place][0] for place in places], self.pad)
                labels = padded([conversations[place][1] for place in places], IGNORE)
                batches.append(
                    (inputs, labels, torch.tensor([seeds[place] for place in places]), torch.tensor(counted))
                )
            return batches

        def loss(model: Any, inputs: Tensor, labels: Tensor, seeds: Tensor, counted: Tensor) -> Tensor:
            with dropped_embeddings(model, settings.dropout, labels, seeds):
                nats, _ = answer_nats(model, inputs, labels)
            return nats.sum() / counted

        tokens = round(float(data.lengths[~data.held_out].mean()) * settings.batch)
        return [TrainingPhase("sft", steps, tokens, passes, loss, lambda step: settings.rate(step, steps))]

    def scores(self, model: nn.Module, worker: Worker) -> dict[str, float]:
        """Returns the loss on held-out conversations, in nats per answer token, and the share of exact answers."""
        assert isinstance(model, Model)
        data = self.conversations
        total, count = 0.0, 0
        for index in np.flatnonzero(data.held_out):
            worker.yield_hook()
            inputs, labels = (
                torch.from_numpy(values)[None].to(worker.device) for values in data.conversation(int(index))
            )
            nats, _ = answer_nats(model, inputs, labels)
            total, count = total + float(nats.double().sum()), count + len(nats)
        metrics = {HELD_OUT: total / count} if count else {}
        return metrics | evaluated(model, self.settings.evaluate, self.tokenizer, self.date, worker.yield_hook)
