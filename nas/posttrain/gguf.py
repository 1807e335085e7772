"""Using a member's files: chat with its GGUF file, and exact answers of PyTorch and GGUF files compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from nas.core.errors import InvalidInput, UnknownName
from nas.core.family import TRAINING, MemberTraining, read_record
from nas.core.layout import Layout
from nas.nn.model import Model
from nas.nn.weights import load_weights
from nas.posttrain.conversations import ChatTokenizer, Conversation, Message, problem_of
from nas.posttrain.generation import Respond, exact_matches, responder
from nas.pretrain.member_training import MemberToTrain
from nas.release.files import files_of, find_member, tokenizer_of
from nas.runtimes.llama_cpp.binding import Dialogue

PYTORCH = "pytorch"


def gguf_file(member: Path, quantisation: str) -> Path:
    """Returns the GGUF file of the member in folder `member`.

    Raises:
        InvalidInput: no files were written yet.
        UnknownName: there is none of this quantisation.
    """
    files = files_of(member)
    if files is None:
        raise InvalidInput(f"{member.name} has no files yet")
    found = {file.quantisation.lower(): member / file.path for file in files.files if file.kind == "gguf"}
    if quantisation.lower() not in found:
        raise UnknownName("GGUF file", quantisation, found, where="--quantisation")
    return found[quantisation.lower()]


def chat_tokenizer(member: Path) -> ChatTokenizer:
    """Returns the tokenizer of the member in folder `member`.

    Raises:
        InvalidInput: no files were written yet, or its vocabulary is too small for special tokens.
    """
    return ChatTokenizer.read(tokenizer_of(member))


@contextmanager
def gguf_responder(file: Path, chat: ChatTokenizer, context: int) -> Iterator[Respond]:
    """Yields greedy answers of a GGUF file; see `Dialogue` for what is raised."""
    with Dialogue(file, context) as dialogue:

        def respond(questions: Sequence[Sequence[int]], most: int) -> list[list[int]]:
            return [list(dialogue.answer(question, most, chat.ends)) for question in questions]

        yield respond


def evaluate_member(
    family: str, size: str, conversations: Sequence[Conversation], quantisations: Sequence[str], context: int
) -> dict[str, Mapping[str, tuple[int, int]]]:
    """Returns "pytorch" and each quantisation -> task -> (exact answers, questions), for the same weights.

    Raises:
        UnknownName: no such family, size or GGUF file.
        InvalidInput: the member was not trained, or a question does not fit the context.
        CandidateFailed: llama.cpp died on the file (crash).
    """
    folder, _, member = find_member(family, size)
    training, layout = read_record(folder / TRAINING, MemberTraining), Layout.parse(member.layout)
    tokenizer = tokenizer_of(folder)
    trained = MemberToTrain(folder, layout, tokenizer, () if training is None else training.history)
    chat = chat_tokenizer(folder)
    files = {quantisation: gguf_file(folder, quantisation) for quantisation in quantisations}
    model = Model(layout, None)
    load_weights(model, trained.weights())
    found = {PYTORCH: exact_matches(conversations, chat, responder(model.eval(), chat))}
    for quantisation, file in files.items():
        with gguf_responder(file, chat, context) as respond:
            found[quantisation] = exact_matches(conversations, chat, respond)
    return found


class Chat:
    """A conversation with a GGUF file.

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
            CandidateFailed: llama.cpp died on the file (crash).
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
