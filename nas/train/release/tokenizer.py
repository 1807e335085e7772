"""Tokenizers of members: byte-level BPE for which stock llama.cpp and stock transformers give the same tokens.

Text is split by the regular expression that llama.cpp calls `lfm2` (Llama 3's, with contractions in both cases),
encoded as bytes, and merged (Sennrich et al. 2016). Special tokens are those of the LFM2 report, section 2.2: ChatML,
tool use and fill-in-the-middle (Bavarian et al. 2022), under the names of the published models.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer, models, processors

from nas.core.canonical import content_hash
from nas.core.downloads import download_problem
from nas.core.errors import InvalidInput
from nas.core.layout import Layout
from nas.measure.runtimes.base import Purpose, Vocabulary
from nas.model.text.bpe import BYTES, assembled, byte_letters
from nas.train.release.templates import DEFAULT

PAD = "<|pad|>"
BOS = "<|startoftext|>"
END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"
FIM_PREFIX = "<|fim_pre|>"
FIM_SUFFIX = "<|fim_suf|>"
FIM_MIDDLE = "<|fim_mid|>"
SPECIAL = (
    PAD,
    BOS,
    END_OF_TEXT,
    FIM_PREFIX,
    FIM_MIDDLE,
    FIM_SUFFIX,
    "<|im_start|>",
    END_OF_TURN,
    "<|tool_list_start|>",
    "<|tool_list_end|>",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "<|tool_response_start|>",
    "<|tool_response_end|>",
)
PRE_TOKENIZER = "lfm2"
"""llama.cpp's name of how text is split, and of asking the vocabulary for whole words first."""
LEAST = BYTES + len(SPECIAL)

_RESERVED = "<|reserved_"
_PURPOSES: Mapping[Purpose, str] = {
    "bos": BOS,
    "eos": END_OF_TURN,
    "eot": END_OF_TURN,
    "pad": PAD,
    "fim_pre": FIM_PREFIX,
    "fim_suf": FIM_SUFFIX,
    "fim_mid": FIM_MIDDLE,
}


class Marks(NamedTuple):
    """Tokens in front of a document and behind it; equal ones are one token between two documents."""

    start: int
    end: int


@dataclass(frozen=True)
class MemberTokenizer:
    """A tokenizer.json that `byte_tokenizer` or a training made.

    Args:
        content: the bytes of its tokenizer.json.
    """

    content: bytes

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The loaded tokenizer, which neither cuts texts nor fills them up."""
        tokenizer = Tokenizer.from_buffer(self.content)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @cached_property
    def tokens(self) -> tuple[str, ...]:
        """Tokens by id."""
        ids = self.tokenizer.get_vocab(with_added_tokens=True)
        return tuple(sorted(ids, key=ids.__getitem__))

    @cached_property
    def special(self) -> Mapping[str, int]:
        """Special token -> id; empty if the vocabulary is too small for them."""
        added = self.tokenizer.get_added_tokens_decoder()
        return {token.content: i for i, token in added.items() if token.special}

    def ids(self) -> dict[Purpose, int]:
        """Returns purpose -> id of a special token."""
        return {purpose: self.special[name] for purpose, name in _PURPOSES.items() if name in self.special}

    @property
    def size(self) -> int:
        """Fewest rows of an embedding that has one for each token."""
        return 1 + max(self.tokenizer.get_vocab(with_added_tokens=True).values())

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        return tuple(self.special[name] for name in (END_OF_TURN, END_OF_TEXT) if name in self.special)

    @property
    def marks(self) -> Marks | None:
        """Tokens around a document; None: BOS and END_OF_TEXT."""
        return None

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """Name -> chat template, in Jinja; empty: there is none. See `nas.train.release.templates`."""
        return {DEFAULT: chat_template()} if self.special else {}

    @property
    def chat_template(self) -> str | None:
        """The chat template for all conversations; None: there is none."""
        return self.chat_templates.get(DEFAULT)

    @property
    def named(self) -> Mapping[str, str]:
        """Name -> token, of those that chat templates get by name."""
        return {"bos_token": BOS, "eos_token": END_OF_TURN, "pad_token": PAD} if self.special else {}

    def fits(self, rows: int) -> bool:
        """Returns whether an embedding of so many rows is one for these tokens."""
        return len(self.tokens) == rows

    def vocabulary(self, rows: int) -> Vocabulary:
        """Returns the vocabulary as GGUF files store it.

        Args:
            rows: of the embedding; those without a token are unused.

        Raises:
            Unsupported: GGUF files cannot hold it.
        """
        tokens = self.tokens + tuple(f"[PAD{i}]" for i in range(len(self.tokens), rows))
        return Vocabulary(
            tokens=tokens,
            special=frozenset(self.special.values()),
            unused=frozenset(
                i for i, token in enumerate(tokens) if i >= len(self.tokens) or token.startswith(_RESERVED)
            ),
            merges=merges_of(json.loads(self.content)),
            ids=self.ids(),
            chat_template=self.chat_template,
            pre_tokenizer=PRE_TOKENIZER,
            starts_texts=BOS in self.special,
        )

    def files(self, context: int) -> Iterator[tuple[str, bytes]]:
        """Yields names and contents of the files of transformers.

        Args:
            context: tokens that the model is meant for.
        """
        yield "tokenizer.json", self.content
        yield (
            "tokenizer_config.json",
            json_bytes(
                {
                    "tokenizer_class": "PreTrainedTokenizerFast",
                    "clean_up_tokenization_spaces": False,
                    "model_max_length": context,
                    # transformers 4 adds token types otherwise, which `generate` refuses.
                    "model_input_names": ["input_ids", "attention_mask"],
                    **self.named,
                }
            ),
        )
        yield "special_tokens_map.json", json_bytes(self.named)
        if self.chat_template is not None:
            yield "chat_template.jinja", self.chat_template.encode()

    def describe(self) -> str:
        """Returns the hash of its content, for result keys."""
        return content_hash(json.loads(self.content))


def merges_of(about: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the merges of a tokenizer.json, "LEFT RIGHT", first to last."""
    return tuple(merge if isinstance(merge, str) else " ".join(merge) for merge in about["model"]["merges"])


def json_bytes(value: object) -> bytes:
    """Returns JSON as the files of transformers have it."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def chat_template() -> str:
    """Returns the chat template, ChatML with tools, in Jinja."""
    return Path(__file__).with_name("chat_template.jinja").read_text("utf-8").strip()


def byte_tokenizer(vocab: int) -> MemberTokenizer:
    """Builds a tokenizer whose tokens 0 to 255 are the bytes; special tokens follow if they fit, then reserved ones.

    Raises:
        InvalidInput: it is below 256.
    """
    if vocab < BYTES:
        raise InvalidInput(f"a vocabulary of {vocab} has no token for every byte: {BYTES} is the least")
    alphabet = byte_letters()
    ids = {letter: byte for byte, letter in enumerate(alphabet)}
    special = SPECIAL if vocab >= LEAST else ()
    ids |= {token: BYTES + i for i, token in enumerate(special)}
    tokenizer = assembled(models.BPE(filled_up(ids, vocab), [], ignore_merges=True))
    tokenizer.add_special_tokens(list(special))
    return MemberTokenizer(finished(tokenizer, ids if special else {}))


def finished(tokenizer: Tokenizer, ids: Mapping[str, int]) -> bytes:
    """Returns the tokenizer.json; every text begins with the beginning-of-sequence token if there is one."""
    if BOS in ids:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B:1", special_tokens=[(BOS, ids[BOS])]
        )
    return tokenizer.to_str(pretty=False).encode()


def filled_up(ids: Mapping[str, int], vocab: int) -> dict[str, int]:
    """Adds reserved tokens up to `vocab`; no merge produces them, so no text does."""
    return dict(ids) | {f"{_RESERVED}{i}|>": i for i in range(len(ids), vocab)}


def read_tokenizer(path: Path) -> MemberTokenizer:
    """Reads a tokenizer.json of a family's members.

    Raises:
        InvalidInput: it cannot be read, or llama.cpp would split text in another way.
    """
    content, about = read_content(path)
    if problem := own_problem(Tokenizer.from_buffer(content), about):
        raise InvalidInput(f"{problem}; train one with `nas family tokenizer`", where=str(path))
    return MemberTokenizer(content)


def read_content(path: Path) -> tuple[bytes, dict[str, Any]]:
    """Reads a tokenizer.json that `tokenizers` can load, as bytes and as JSON.

    Raises:
        InvalidInput: it cannot be read, or gives an added token another id than `tokenizers` does, which does not read
            these ids, but counts.
    """
    try:
        content = path.read_bytes()
        tokenizer = Tokenizer.from_buffer(content)
        about: dict[str, Any] = json.loads(content)
    except OSError as error:
        raise InvalidInput(f"cannot read it: {error.strerror}", where=str(path)) from error
    except Exception as error:  # `tokenizers` raises nothing narrower for a file that it cannot parse
        raise InvalidInput(f"no tokenizer.json: {download_problem(path, str(error))}", where=str(path)) from error
    for token in about.get("added_tokens") or ():
        if (loaded := tokenizer.token_to_id(token["content"])) != token["id"]:
            raise InvalidInput(
                f"added_tokens: {token['content']!r} has id {token['id']} there, but is {loaded} when it is loaded, by "
                "transformers too: the model would get another token",
                where=str(path),
            )
    return content, about


def require_fit(tokenizer: MemberTokenizer, layout: Layout, where: str) -> None:
    """Checks that a tokenizer has as many tokens as the layout has embedding rows; a trained model's may have fewer.

    Raises:
        InvalidInput: it has more, or fewer.
    """
    if not tokenizer.fits(layout.vocab):
        count = len(tokenizer.tokens)
        raise InvalidInput(
            f"{count:,} tokens, but the layout's vocabulary is v{layout.vocab}: train one with"
            f" `nas family tokenizer --vocab {layout.vocab}`, or take a layout of v{count}",
            where=where,
        )


def own_problem(tokenizer: Tokenizer, about: Mapping[str, Any]) -> str | None:
    """Returns why a tokenizer is not of the kind that `nas family tokenizer` writes; None: it is."""
    model, expected = about["model"], json.loads(assembled(models.BPE()).to_str())
    if problem := bytes_problem(tokenizer, about):
        return problem
    ids = tokenizer.get_vocab(with_added_tokens=True)
    if about.get("normalizer") is not None or about.get("pre_tokenizer") != expected["pre_tokenizer"]:
        return "it splits text in another way than llama.cpp's pre-tokenizer `lfm2`"
    if not model.get("ignore_merges"):
        return "ignore_merges is off, which llama.cpp's pre-tokenizer `lfm2` has on"
    if sorted(ids.values()) != list(range(len(ids))):
        return "its ids have gaps"
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    missing = [token for token in SPECIAL if token not in special]
    if missing and len(ids) >= LEAST:
        return f"it lacks the special tokens {', '.join(missing)}"
    return None


def kind_problem(about: Mapping[str, Any]) -> str | None:
    """Returns why a tokenizer.json is of no byte-level BPE; None: it may be."""
    model = about["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        return f"no byte-level BPE, but {model.get('type')}{' of characters' if model.get('byte_fallback') else ''}"
    return None


def bytes_problem(tokenizer: Tokenizer, about: Mapping[str, Any]) -> str | None:
    """Returns why a tokenizer is no byte-level BPE with a token for every byte; None: it is one.

    Tokenizers of others may lack bytes that no text has, such as those that never occur in UTF-8: they are left out of
    a text, by transformers and by llama.cpp.
    """
    if problem := kind_problem(about):
        return problem
    ids = tokenizer.get_vocab(with_added_tokens=True)
    if missing := [letter for letter in byte_letters() if letter not in ids]:
        return f"no byte-level BPE: {len(missing)} of {BYTES} bytes have no token"
    return None
