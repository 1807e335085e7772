"""Using a member's files: chat with one of them, and exact answers of PyTorch, GGUF files and .pte compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from pydantic import TypeAdapter, ValidationError

from nas.core.errors import CandidateFailed, InfrastructureFailed, InvalidInput, UnknownName
from nas.core.family import (
    EVALUATION,
    PYTORCH,
    TRAINING,
    Evaluation,
    MemberEvaluation,
    MemberFile,
    MemberFiles,
    MemberTraining,
    TaskScore,
    read_record,
    write_record,
)
from nas.core.layout import Layout
from nas.core.progress import Log
from nas.measure.runtimes import RUNTIMES
from nas.measure.runtimes.dialogue import Dialogue, Talker
from nas.measure.runtimes.executorch import stock
from nas.measure.runtimes.llama_cpp import binding
from nas.measure.runtimes.llama_cpp.patches import patch_files
from nas.measure.runtimes.llama_cpp.source import COMMIT
from nas.measure.runtimes.llama_cpp.support import PATCHED
from nas.model.nn.weights import load_model
from nas.train.posttrain.conversations import (
    ChatTokenizer,
    Conversation,
    Message,
    Tool,
    problem_of,
    problem_of_tools,
    read_lines,
)
from nas.train.posttrain.generation import Answerer, Judgements, answerer, counts, exact_answers, grouped
from nas.train.posttrain.model_source import TorchTalker, open_model
from nas.train.pretrain.member_training import MemberToTrain
from nas.train.release.files import files_of, find_member, rewrite_card, tokenizer_of
from nas.train.release.options import QUANTISATIONS
from nas.train.release.templates import DATE
from nas.train.release.tokenizer import SPECIAL

_DIALOGUES = {"gguf": binding.dialogue, "pte": stock.dialogue}
_RUNTIME_OF = dict.fromkeys(QUANTISATIONS, "llama.cpp") | dict.fromkeys(
    RUNTIMES["executorch"].quantisations, "executorch"
)


def open_dialogue(member: Path, quantisation: str, context: int) -> Dialogue:
    """Returns a dialogue of at most `context` tokens with a file of a member: a GGUF file, or a .pte.

    Raises:
        InvalidInput: no files were written yet.
        UnknownName: there is none of this quantisation.
        InfrastructureFailed: no available build of the runtime runs it.
    """
    files, file = _file(member, quantisation, tuple(_DIALOGUES))
    if file.kind == "pte" and files.pte_context is not None:
        context = min(context, files.pte_context)
    return _DIALOGUES[file.kind](member / file.path, context)


def _file(member: Path, quantisation: str, kinds: Sequence[str]) -> tuple[MemberFiles, MemberFile]:
    files = files_of(member)
    if files is None:
        raise InvalidInput(f"{member.name} has no files yet")
    by_quantisation = {file.quantisation.lower(): file for file in files.files if file.kind in kinds}
    file = by_quantisation.get(quantisation.lower())
    if file is None:
        raise UnknownName("file", quantisation, by_quantisation, where="--quantisation")
    return files, file


def server_command(
    member: Path, quantisation: str, context: int, host: str, port: int, server: str, log: Log
) -> list[str]:
    """Returns the command line that serves a GGUF file of a member with llama.cpp's server, and its OpenAI API.

    `log` takes one line where an ordinary server does not load this file.

    Raises:
        InvalidInput: no files were written yet.
        UnknownName: there is no GGUF file of this quantisation.
    """
    files, file = _file(member, quantisation, ("gguf",))
    if files.loads["llama.cpp"].startswith(PATCHED):
        patches = ", ".join(map(str, patch_files()))
        log(f"no ordinary server loads this file, {files.loads['llama.cpp']}; build one of {COMMIT} with {patches}")
    path = str(member / file.path)
    options = ["--model", path, "--alias", Path(path).stem, "--ctx-size", str(context), "--host", host]
    return [server, *options, "--port", str(port), "--jinja"]


def chat_tokenizer(member: Path, date: str = DATE) -> ChatTokenizer:
    """Returns the tokenizer of the member in folder `member`, with the date of its chat template.

    Raises:
        InvalidInput: no files were written yet, or its vocabulary is too small for special tokens.
    """
    return ChatTokenizer.read(tokenizer_of(member), date)


@contextmanager
def file_answerer(member: Path, quantisation: str, context: int) -> Iterator[Answerer]:
    """Yields a member's file, to be asked; see `open_dialogue` and `Dialogue` for what is raised."""
    ends = chat_tokenizer(member).ends
    with open_dialogue(member, quantisation, context) as dialogue:
        yield _answerer_of(dialogue, ends)


def _answerer_of(dialogue: Dialogue, ends: Sequence[int]) -> Answerer:
    def respond(questions: Sequence[Sequence[int]], most: int) -> list[list[int]]:
        return [list(dialogue.answer(question, most, ends)) for question in questions]

    return Answerer(respond, dialogue.scores)


class Questions(Protocol):
    """What a member is asked."""

    name: str
    """For the record."""
    record: str
    """File of the member that keeps the result."""
    groups: dict[str, dict[str, tuple[str, ...]]]
    versions: dict[str, int]

    def judge(self, answerer: Answerer, chat: ChatTokenizer) -> Judgements:
        """Asks all questions and returns whether the answers are right; each model has the same tasks and questions."""
        ...


class Conversations:
    """Conversations, each with the expected answer at its end, as `Questions`.

    Args:
        path: file of conversations.
    """

    record = EVALUATION

    def __init__(self, path: Path) -> None:
        self._conversations, self.name = read_lines(path, Conversation), path.name
        self.groups: dict[str, dict[str, tuple[str, ...]]] = {}
        self.versions: dict[str, int] = {}

    def judge(self, answerer: Answerer, chat: ChatTokenizer) -> Judgements:
        return grouped(self._conversations, exact_answers(self._conversations, chat, answerer.respond))


def evaluate_member(
    family: str,
    size: str,
    questions: Questions,
    quantisations: Sequence[str],
    context: int,
    log: Log,
    date: str = DATE,
) -> MemberEvaluation:
    """Counts right answers of a member in PyTorch and in files of the same weights, for its record and its card.

    Args:
        family: name of the family.
        size: of the member.
        questions: what is asked.
        quantisations: of the files; where one is missing or its runtime cannot run it, the record has the reason.
        context: most tokens of a question with its answer.
        log: takes one line at a time.
        date: of today, for a chat template that names it.

    Raises:
        UnknownName: no such family, size or quantisation.
        InvalidInput: the member was not trained, or its files hold other weights.
    """
    for quantisation in quantisations:
        if quantisation not in _RUNTIME_OF:
            raise UnknownName("quantisation", quantisation, _RUNTIME_OF, where="--quantisation")
    folder, owner, member = find_member(family, size)
    training, layout = read_record(folder / TRAINING, MemberTraining), Layout.parse(member.layout)
    trained = MemberToTrain(folder, layout, tokenizer_of(folder), () if training is None else training.history)
    chat, weights, files = chat_tokenizer(folder, date), trained.weights(), files_of(folder)
    if files is None or files.weights != weights.describe():
        problem = f"the files of {size} do not hold {weights.describe()}: repeat the last training"
        raise InvalidInput(problem, where="--size")
    right = questions.judge(answerer(load_model(weights.path, layout), chat), chat)
    scores = {PYTORCH: counts(right)}
    missing: dict[str, str] = {}
    written = {file.quantisation.lower() for file in files.files if file.kind in _DIALOGUES}
    for quantisation in quantisations:
        if quantisation not in written:
            loads = files.loads.get(_RUNTIME_OF[quantisation], "")
            missing[quantisation] = loads.removeprefix("none: ") if loads.startswith("none") else "no file was written"
            continue
        try:
            with file_answerer(folder, quantisation, context) as file_answers:
                judgements = questions.judge(file_answers, chat)
        except (InvalidInput, InfrastructureFailed, CandidateFailed) as error:
            missing[quantisation] = str(error)
        else:
            scores[quantisation] = counts(judgements, right)
    evaluation = MemberEvaluation(
        weights=weights.describe(),
        tasks=questions.name,
        scores=scores,
        missing=missing,
        groups=questions.groups,
        versions=questions.versions,
    )
    write_record(folder / questions.record, evaluation)
    rewrite_card(folder, owner, member, log)
    return evaluation


def questions_of(
    tasks: Path | None, data: Path | None, benchmarks: Sequence[str], context: int, limit: int | None, log: Log
) -> Questions:
    """Returns the conversations of a file, or public benchmarks of a folder of data sets.

    Raises:
        InvalidInput: both are given, or none; or one cannot be read.
    """
    if tasks is not None and data is None:
        return Conversations(tasks)
    if data is None or tasks is not None:
        raise InvalidInput("give either --tasks or --benchmarks")
    if not data.is_dir():
        raise InvalidInput(f"there is no folder {data}", where="--benchmarks")
    from nas.train.posttrain.harness import Benchmarks

    return Benchmarks(data, benchmarks, context, limit, log)


def evaluate_models(
    sources: Sequence[Path], questions: Questions, context: int, log: Log, date: str = DATE
) -> Evaluation:
    """Counts right answers of models, each a GGUF file or a folder of transformers, with their own tokenizers.

    Args:
        sources: the models; changes are from the first.
        questions: what is asked.
        context: most tokens of a question with its answer.
        log: takes one line at a time.
        date: of today, for a chat template that names it.

    Raises:
        InvalidInput: a model has no chat template, or see `open_model`.
    """
    alike = len({source.name for source in sources}) < len(sources)
    names = {str(source) if alike else source.name: source for source in sources}
    if len(names) < len(sources):
        raise InvalidInput("models must differ")
    scores: dict[str, dict[str, TaskScore]] = {}
    first: Judgements | None = None
    for name, source in names.items():
        with open_model(source, context) as opened:
            log(f"{name}: {opened.tokenizer.describe()}")
            chat = ChatTokenizer(opened.tokenizer.tokenizer, str(source), date, trains=False)
            talker = opened.talker
            if isinstance(talker, TorchTalker):
                model = answerer(talker.model, chat)
            else:
                assert isinstance(talker, Dialogue), "a file or a folder"
                model = _answerer_of(talker, chat.ends)
            right = questions.judge(model, chat)
        scores[name] = counts(right, first)
        first = right if first is None else first
    return Evaluation(tasks=questions.name, scores=scores, groups=questions.groups, versions=questions.versions)


class Chat:
    """A conversation with a model.

    Args:
        dialogue: of the model.
        chat: its tokenizer.
        system: first message; empty: none.
        tools: that the model may call.
        log: takes a line where turns are forgotten.
        opening: tokens in front of the user's first message, as text, such as those of images.
    """

    def __init__(
        self,
        dialogue: Talker,
        chat: ChatTokenizer,
        system: str = "",
        tools: Sequence[Tool] = (),
        log: Log = lambda line: None,
        opening: str = "",
    ) -> None:
        self._dialogue, self._chat, self._tools, self._log = dialogue, chat, tuple(tools), log
        self._opening = opening
        self.messages: list[Message] = [Message(role="system", content=system)] if system else []

    def answers(self, lines: Iterable[str], *, most: int, temperature: float, seed: int) -> Iterator[str]:
        """Yields the answers to the messages in `lines` in pieces, each with a new line behind it; see `say`.

        A message that cannot be asked is told to the log.
        """
        for line in filter(None, map(str.strip, lines)):
            try:
                yield from self.say(line, most=most, temperature=temperature, seed=seed)
            except InvalidInput as error:
                self._log(str(error))
            yield "\n"

    def say(self, text: str, *, most: int, temperature: float, seed: int) -> Iterator[str]:
        """Yields the answer to `text` in pieces, as they are computed.

        Where the context has no room for the conversation with half an answer, its oldest turns are forgotten.

        Args:
            text: of the user.
            most: tokens of the answer.
            temperature: of sampling; 0: the likeliest token each time.
            seed: of sampling.

        Raises:
            InvalidInput: the text is empty, no Unicode, contains a special token, or does not fit the context.
            CandidateFailed: the runtime died on the file (crash).
        """
        if any("\ud800" <= character <= "\udfff" for character in text):  # bytes that Python could not decode
            raise InvalidInput("the message is not text in the encoding of the locale")
        if problem := problem_of([Message(role="user", content=text)], "user", self._chat.special):
            raise InvalidInput(problem)
        first = all(message.role != "user" for message in self.messages)
        messages = [*self.messages, Message(role="user", content=self._opening * first + text)]
        messages = self._shortened(messages, self._dialogue.context - min(most // 2, self._dialogue.context // 2))
        ids: list[int] = []
        prefix = ""
        question = self._chat.question(messages, self._tools)
        for token in self._dialogue.answer(question, most, self._chat.ends, temperature=temperature, seed=seed):
            ids.append(token)
            answer = self._chat.answer_of(ids)
            if not answer.endswith("\N{REPLACEMENT CHARACTER}"):  # which stands for an incomplete character
                yield answer[len(prefix) :]
                prefix = answer
        self.messages = [*messages, Message(role="assistant", content=self._chat.answer_of(ids))]

    def _shortened(self, messages: list[Message], room: int) -> list[Message]:
        """Returns the conversation without as many of its oldest turns as leave no more than `room` tokens."""
        first = 1 if messages[0].role == "system" else 0
        starts = [place for place, message in enumerate(messages) if message.role == "user"]
        shorter = ([*messages[:first], *messages[place:]] for place in starts)
        shortened = next(
            (candidate for candidate in shorter if len(self._chat.question(candidate, self._tools)) <= room), None
        )
        if shortened is None:
            shortened = [*messages[:first], *messages[starts[-1] :]]
        if dropped := (len(messages) - len(shortened)) // 2:
            self._log(f"forgot the oldest {dropped} of {len(starts) - 1} turns: the context is full")
        return shortened


def read_tools(path: Path, special: Sequence[str] = SPECIAL) -> list[Tool]:
    """Reads a JSON list of tools, each an object or text, as lines of conversations have them.

    Raises:
        InvalidInput: the file is no such list, or a tool contains a special token.
    """
    try:
        tools: list[Tool] = TypeAdapter(list[Tool]).validate_json(path.read_bytes().removeprefix(b"\xef\xbb\xbf"))
    except (OSError, ValidationError) as error:
        problem = error.strerror if isinstance(error, OSError) else error.errors()[0]["msg"]
        raise InvalidInput(f"no JSON list of tools: {problem}", where=str(path)) from error
    if problem := problem_of_tools(tools, special):
        raise InvalidInput(problem, where=str(path))
    return tools
