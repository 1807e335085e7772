"""Using a member's files: chat with one of them, and exact answers of PyTorch, GGUF files and .pte compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from nas.core.errors import InvalidInput, UnknownName
from nas.core.family import EVALUATION, TRAINING, MemberEvaluation, MemberTraining, read_record, write_record
from nas.core.layout import Layout
from nas.nn.model import Model
from nas.nn.weights import load_weights
from nas.posttrain.conversations import ChatTokenizer, Conversation, Message, problem_of, read_lines
from nas.posttrain.generation import Respond, exact_matches, responder
from nas.pretrain.member_training import MemberToTrain
from nas.release.files import files_of, find_member, sha256_of, tokenizer_of
from nas.runtimes.dialogue import Dialogue
from nas.runtimes.executorch import stock
from nas.runtimes.llama_cpp import binding

PYTORCH = "pytorch"
_DIALOGUES = {"gguf": binding.dialogue, "pte": stock.dialogue}


def open_dialogue(member: Path, quantisation: str, context: int) -> Dialogue:
    """Returns a dialogue with a file of a member: llama.cpp's with a GGUF file, ExecuTorch's with a .pte.

    Args:
        member: folder of the member.
        quantisation: of the file, such as q4_0 or 8da4w.
        context: most tokens of a question with its answer; of a .pte no more than it was made for.

    Raises:
        InvalidInput: no files were written yet.
        UnknownName: there is none of this quantisation.
        InfrastructureFailed: no available build of the runtime runs it.
    """
    files = files_of(member)
    if files is None:
        raise InvalidInput(f"{member.name} has no files yet")
    found = {file.quantisation.lower(): file for file in files.files if file.kind in _DIALOGUES}
    file = found.get(quantisation.lower())
    if file is None:
        raise UnknownName("file", quantisation, found, where="--quantisation")
    if file.kind == "pte" and files.pte_context is not None:
        context = min(context, files.pte_context)
    return _DIALOGUES[file.kind](member / file.path, context)


def chat_tokenizer(member: Path) -> ChatTokenizer:
    """Returns the tokenizer of the member in folder `member`.

    Raises:
        InvalidInput: no files were written yet, or its vocabulary is too small for special tokens.
    """
    return ChatTokenizer.read(tokenizer_of(member))


@contextmanager
def file_responder(member: Path, quantisation: str, context: int) -> Iterator[Respond]:
    """Yields greedy answers of a member's file; see `open_dialogue` and `Dialogue` for what is raised."""
    ends = chat_tokenizer(member).ends
    with open_dialogue(member, quantisation, context) as dialogue:

        def respond(questions: Sequence[Sequence[int]], most: int) -> list[list[int]]:
            return [list(dialogue.answer(question, most, ends)) for question in questions]

        yield respond


def evaluate_member(
    family: str, size: str, tasks: Path, quantisations: Sequence[str], context: int
) -> MemberEvaluation:
    """Counts exact answers of a member in PyTorch and in files of the same weights, and keeps the record.

    Args:
        family: name of the family.
        size: of the member.
        tasks: file of conversations, each with the expected answer at its end.
        quantisations: of the files.
        context: most tokens of a question with its answer.

    Raises:
        UnknownName: no such family, size or file.
        InvalidInput: the member was not trained, or a question does not fit the context.
        CandidateFailed: a runtime died on the file (crash).
    """
    conversations = read_lines(tasks, Conversation)
    folder, _, member = find_member(family, size)
    training, layout = read_record(folder / TRAINING, MemberTraining), Layout.parse(member.layout)
    tokenizer = tokenizer_of(folder)
    trained = MemberToTrain(folder, layout, tokenizer, () if training is None else training.history)
    chat = chat_tokenizer(folder)
    model = Model(layout, None)
    weights = trained.weights()
    load_weights(model, weights)
    found = {PYTORCH: exact_matches(conversations, chat, responder(model.eval(), chat))}
    for quantisation in quantisations:
        with file_responder(folder, quantisation, context) as respond:
            found[quantisation] = exact_matches(conversations, chat, respond)
    evaluation = MemberEvaluation(weights=f"checkpoint:{sha256_of(weights)}", tasks=tasks.name, scores=found)
    write_record(folder / EVALUATION, evaluation)
    return evaluation


class Chat:
    """A conversation with a model file.

    Args:
        dialogue: of the file.
        chat: tokenizer of the member.
        system: first message; empty: none.
    """

    def __init__(self, dialogue: Dialogue, chat: ChatTokenizer, system: str = "") -> None:
        self._dialogue, self._chat = dialogue, chat
        self.messages: list[Message] = [Message(role="system", content=system)] if system else []

    def say(self, text: str, *, most: int, temperature: float, seed: int) -> Iterator[str]:
        """Yields the answer to `text` in pieces, as they are computed.

        Args:
            text: of the user.
            most: tokens of the answer.
            temperature: of sampling; 0: the likeliest token each time.
            seed: of sampling.

        Raises:
            InvalidInput: the text is empty, contains a special token, or does not fit the context.
            CandidateFailed: the runtime died on the file (crash).
        """
        asked = [*self.messages, Message(role="user", content=text)]
        if problem := problem_of(asked[-1:], "user"):
            raise InvalidInput(problem)
        ids: list[int] = []
        shown = ""
        question = self._chat.question(asked)
        for token in self._dialogue.answer(question, most, self._chat.ends, temperature=temperature, seed=seed):
            ids.append(token)
            answer = self._chat.answer_of(ids)
            if not answer.endswith("\N{REPLACEMENT CHARACTER}"):  # which stands for an incomplete character
                yield answer[len(shown) :]
                shown = answer
        self.messages = [*asked, Message(role="assistant", content=self._chat.answer_of(ids))]
