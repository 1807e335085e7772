"""Conversations that a chat model writes itself, for an adaptation without the data that it was trained on.

After its chat template's text in front of a user's message, a chat model writes a message, and then its answer (Xu et
al. 2024, "Magpie", arXiv 2406.08464, section 2). Conversations are written in batches, whose rows are decoded together;
each batch is kept in the cache under the hash of all that it depends on, so that a killed process continues.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from nas.core.canonical import content_hash
from nas.core.errors import InvalidInput
from nas.core.progress import Progress
from nas.core.stored import stored
from nas.model.nn.fit import Precision, Worker, precision_of
from nas.model.nn.model import Model
from nas.train.adapt.library import TrainedTeacher
from nas.train.pretrain.data import MIN_HELD_OUT, Ids, Tokens, Vocabulary, store_tokens
from nas.train.release.templates import DEFAULT, TURN, rendered
from nas.train.release.tokenizer import MemberTokenizer

SOURCE = "own text"
"""Name of the source."""
_VERSION = 1
"""Part of keys: increase it with every change after which a model writes other text."""
_MESSAGE, _ANSWER = 128, 384
"""Most tokens of a message and of an answer; rows with longer messages are dropped, longer answers are cut."""
_TEMPERATURE = 0.8
_CPU_ROWS, _ACCELERATOR_ROWS = 32, 256
"""Conversations of a batch."""
_EMPTY_BATCHES = 3
"""Batches without a new conversation in a row after which the model is said to write none."""
_PROBE = "nasprobe"


class Turn(NamedTuple):
    """A chat template around a user's message.

    Args:
        before: ids in front of the message.
        between: ids from its end to the answer.
        ends: ids that end an answer.
    """

    before: Sequence[int]
    between: Sequence[int]
    ends: Sequence[int]

    @staticmethod
    def of(tokenizer: MemberTokenizer, where: str) -> Turn:
        """Returns that of a tokenizer.

        Args:
            tokenizer: with its chat templates.
            where: its file, for messages.

        Raises:
            InvalidInput: it has no chat template for a message, or none that shows where the message ends.
        """
        template = tokenizer.chat_templates.get(DEFAULT)
        if template is None or not tokenizer.ends:
            raise InvalidInput("own text needs a chat model: its tokenizer has no chat template", where=where)
        message = {"role": "user", "content": _PROBE}
        variables = {**TURN, **tokenizer.named, "messages": [message], "add_generation_prompt": True}
        before, probe, between = rendered(template, variables, where).partition(_PROBE)
        if not (probe and before and between):
            raise InvalidInput("its chat template has no text before or behind a user's message", where=where)
        encode = tokenizer.tokenizer.encode
        return Turn(
            encode(before, add_special_tokens=False).ids, encode(between, add_special_tokens=False).ids, tokenizer.ends
        )


def written_by(
    teacher: TrainedTeacher,
    turn: Turn,
    vocabulary: Vocabulary,
    tokens: int,
    held_out: float,
    worker: Worker,
    precision: Precision,
    seed: int,
) -> Tokens:
    """Returns conversations of a model as a source of text, from the cache as far as they are there.

    Args:
        teacher: the model, in evaluation mode on the worker's device.
        turn: its chat template.
        vocabulary: its tokenizer.
        tokens: of all conversations, at least.
        held_out: share of them that is not trained on.
        worker: this process.
        precision: of matrix products.
        seed: of the sampling.

    Raises:
        InvalidInput: the model writes no messages that end, or too few tokens are wanted to hold some out.
    """
    rows = worker.most_tokens(_CPU_ROWS, _ACCELERATOR_ROWS)
    inputs = [teacher.sha256, *turn, rows, precision, seed, _MESSAGE, _ANSWER, _TEMPERATURE]
    conversations: dict[tuple[int, ...], None] = {}
    size = number = empty = 0
    while size < tokens:
        worker.log(Progress("tokens of conversations that the model writes", size, tokens))

        def batch(number: int = number) -> bytes:
            generator = torch.Generator(worker.device).manual_seed(seed + number)
            with precision_of(worker.device, precision):
                return json.dumps(list(_conversations(teacher.model, turn, rows, generator, worker))).encode()

        path = stored("own-text", _VERSION, [*inputs, number], batch, suffix=".json")
        read = map(tuple, json.loads(path.read_bytes()))
        news = dict.fromkeys(ids for ids in read if ids not in conversations)
        conversations |= news
        size, number, empty = size + sum(map(len, news)), number + 1, 0 if news else empty + 1
        if empty == _EMPTY_BATCHES:
            raise InvalidInput(
                f"the model writes no further messages that end within {_MESSAGE} tokens: it is no chat model, or"
                " --tokenizer has another one's chat template",
                where="--own-text",
            )
    worker.log(Progress("tokens of conversations that the model writes", size, size))
    documents: list[Ids] = [np.asarray(ids, np.int64) for ids in conversations]
    trained = max(1, round(len(documents) * (1 - held_out)))
    scored = vocabulary.bytes_of(np.concatenate([np.zeros(0, np.uint32), *documents[trained:]]))
    if scored < MIN_HELD_OUT:
        raise InvalidInput(
            f"{scored:,} bytes of {size:,} tokens would be held out; at least {MIN_HELD_OUT:,} are needed to score a"
            " model",
            where="--own-text",
        )
    key = content_hash([[*ids] for ids in conversations])
    return store_tokens(SOURCE, [key, held_out], vocabulary, documents[:trained], documents[trained:], scored)


@torch.no_grad()
def _conversations(
    model: Model, turn: Turn, rows: int, generator: torch.Generator, worker: Worker
) -> Iterator[list[int]]:
    """Yields the ids of each conversation whose message ended."""
    device = generator.device
    ids = [list(turn.before) for _ in range(rows)]
    forced: list[deque[int]] = [deque() for _ in range(rows)]  # of the template, which come next
    answer_starts = [0] * rows
    writing = set(range(rows))
    features, state = model.read(torch.tensor(ids, device=device))
    logits = model.logits(features[:, -1])
    while True:
        worker.yield_hook()
        likelihoods = torch.softmax(logits.float() / _TEMPERATURE, -1)
        sampled = torch.multinomial(likelihoods, 1, generator=generator)[:, 0].tolist()
        for row in sorted(writing):
            token = sampled[row]
            if forced[row]:
                token = forced[row].popleft()
            elif answer_starts[row]:
                if token in turn.ends or len(ids[row]) + 1 == answer_starts[row] + _ANSWER:
                    writing.discard(row)
            elif token == turn.between[0] or token in turn.ends:
                if len(ids[row]) == len(turn.before):  # an empty message
                    writing.discard(row)
                forced[row].extend(turn.between[1:])
                token = turn.between[0]
                answer_starts[row] = len(ids[row]) + len(turn.between)
            elif len(ids[row]) + 1 == len(turn.before) + _MESSAGE:
                writing.discard(row)
            ids[row].append(token)
        if not writing:
            break
        logits, state = model.step(torch.tensor([row_ids[-1] for row_ids in ids], device=device), state)
    yield from (row_ids for row_ids, start in zip(ids, answer_starts, strict=True) if start and len(row_ids) > start)
