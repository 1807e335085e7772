"""Tokenizers of models that others trained, as files of transformers and GGUF.

All files of the tokenizer are carried as they are. GGUF files can hold SentencePiece's BPE with byte fallback (Gemma,
Llama 2, Mistral 7B), as scores in the order of its merges; and byte-level BPE, of which they name the way in which text
is split, one of those below: `LLAMA_VOCAB_PRE_TYPE_*` of llama.cpp's src/llama-vocab.cpp. With another tokenizer, a
model has no GGUF files.

    llama-bpe   Llama 3, SmolLM3, LFM2: numbers of up to three digits; whole words first (ignore_merges)
    dbrx        Granite 4: the same, without whole words first
    qwen2       Qwen2 and Qwen3: single digits
    qwen35      Qwen3.5: the same, with marks as parts of words
    tekken      Mistral Nemo, Ministral: words by upper and lower case; whole words first
    gpt-4o      Phi-4-mini: the same, with contractions, and numbers of up to three digits
    smollm      SmolLM2, Granite 3: single digits, then GPT-2's expression
    gpt-2       GPT-2's expression
    deepseek-v3 DeepSeek V3, Hunyuan: numbers of up to three digits, then Chinese and Japanese, then the rest
    default     where a file names nothing: punctuation, then GPT-2's expression, then numbers of three digits
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, TypeGuard

from tokenizers import Tokenizer

from nas.core.canonical import content_hash
from nas.core.downloads import download_problem
from nas.core.errors import InvalidInput, Unsupported
from nas.measure.runtimes.base import Pieces, Purpose, Vocabulary
from nas.model.text.bpe import BYTES
from nas.train.release.templates import DEFAULT, TURN, rendered
from nas.train.release.tokenizer import (
    Marks,
    MemberTokenizer,
    bytes_problem,
    json_bytes,
    kind_problem,
    merges_of,
    own_problem,
    read_content,
    read_tokenizer,
)

CONFIG = "tokenizer_config.json"
SPECIAL_MAP = "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"
MODEL = "config.json"
GENERATION = "generation_config.json"
_SETTINGS = (CONFIG, SPECIAL_MAP, MODEL, GENERATION)
_TEMPLATES = "additional_chat_templates/*.jinja"
_BYTES = 1 << 22
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""Usual names of the token behind a document. A model that answers in turns names another one as its end."""

_CONTRACTIONS = ("(?i:'s|'t|'re|'ve|'m|'ll|'d)", "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])")
BLANK = "\u2581"
"""Mark of a blank in the tokens of SentencePiece."""
MOST_CHARACTERS = 1 << 10
"""Of a token of SentencePiece that is read: the work grows with the square."""
_BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(BYTES))
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


_Json = dict[str, Any]


def _byte_level(use_regex: bool) -> _Json:
    return {"type": "ByteLevel", "add_prefix_space": False, "use_regex": use_regex}


def _in_turn(*parts: _Json) -> _Json:
    return {"type": "Sequence", "pretokenizers": list(parts)}


def _split_by(*expressions: str) -> _Json:
    """Returns the pre-tokenizer that splits by each expression in turn."""
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    return _in_turn(*(split | {"pattern": {"Regex": expression}} for expression in expressions), _byte_level(False))


def _words_and(numbers: str) -> list[_Json]:
    """Returns the pre-tokenizers of one expression, which is written in two ways."""
    return [_split_by(f"{contractions}|{_WORDS}|{numbers}|{_REST}") for contractions in _CONTRACTIONS]


def _by_case(contractions: str, numbers: str) -> list[_Json]:
    upper, lower = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
    words = (rf"[^\r\n\p{{L}}\p{{N}}]?[{upper}]{a}[{lower}]{b}{contractions}" for a, b in ("*+", "+*"))
    return [_split_by("|".join((*words, numbers, _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1))))]


_DIGITS = {"type": "Digits", "individual_digits": True}
_MARKED = rf"{_CONTRACTIONS[0]}|{_WORDS}|\p{{N}}|{_REST}".replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(
    r" ?[^\s\p{L}\p{N}]", r" ?[^\s\p{L}\p{M}\p{N}]"
)
_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_PRE_TOKENIZERS: list[tuple[list[_Json], Mapping[bool, str]]] = [
    (_words_and(r"\p{N}{1,3}"), {True: "llama-bpe", False: "dbrx"}),
    (_words_and(r"\p{N}"), {False: "qwen2"}),
    ([_split_by(_MARKED)], {False: "qwen35"}),
    (_by_case("", r"\p{N}"), {True: "tekken"}),
    (_by_case(rf"{_CONTRACTIONS[0]}?", r"\p{N}{1,3}"), {False: "gpt-4o"}),
    ([_in_turn(_DIGITS, _byte_level(True))], {False: "smollm"}),
    ([_byte_level(True)], {False: "gpt-2"}),
    ([_split_by(*_DEEPSEEK)], {False: "deepseek-v3"}),
    ([_split_by(r"[\p{P}\$\+<=>\^~\|]+", _GPT_2, r"\p{N}+", "[0-9][0-9][0-9]")], {False: "default"}),
]
"""Pre-tokenizers of tokenizer.json, and ignore_merges -> llama.cpp's name."""
_ALIKE = {
    **dict.fromkeys(("llama3", "llama-v3", "lfm2", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "glm4"), "llama-bpe"),
    **dict.fromkeys(("smaug-bpe", "chatglm-bpe"), "dbrx"),
    **dict.fromkeys(("deepseek-r1-qwen", "kormo", "stablelm2", "hunyuan", "megrez"), "qwen2"),
    **dict.fromkeys(("starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"), "smollm"),
    **dict.fromkeys(("phi-2", "mpt", "olmo", "jais", "mellum", "trillion", "granite-docling", "exaone4"), "gpt-2"),
    **dict.fromkeys(("llama4", "kanana2", "minimax-m2"), "gpt-4o"),
    **dict.fromkeys(("hunyuan-dense", "joyai-llm"), "deepseek-v3"),
}
"""llama.cpp's other names -> one for the same."""


def pre_tokenizer_of(name: str) -> tuple[_Json, bool] | None:
    """Returns the pre-tokenizer that llama.cpp calls so, and ignore_merges; None: it is not known here."""
    same = _ALIKE.get(name, name)
    entries = (
        (forms[-1], ignore) for forms, names in _PRE_TOKENIZERS for ignore, called in names.items() if called == same
    )
    return next(entries, None)


@dataclass(frozen=True)
class ModelTokenizer(MemberTokenizer):
    """A trained model's tokenizer.json with the other tokenizer files of the model's folder.

    Args:
        content: the bytes of its tokenizer.json.
        beside: name -> content of the tokenizer's other files, and of the model's configuration.
    """

    beside: Mapping[str, bytes] = field(default_factory=dict)

    @cached_property
    def settings(self) -> Mapping[str, Mapping[str, Any]]:
        """Name -> JSON of the files beside it."""
        return {name: json.loads(self.beside.get(name, b"{}")) for name in _SETTINGS}

    @property
    def marks(self) -> Marks:
        """Tokens in front of a document and behind it.

        A text begins with what the tokenizer itself puts in front; where it puts nothing there, with the token behind
        the document before.

        Raises:
            InvalidInput: no file names the token behind a document.
        """
        special = {token.content: i for i, token in self.tokenizer.get_added_tokens_decoder().items() if token.special}
        end = next((special[name] for name in _ENDS if name in special), self.ids().get("eos"))
        if end is None:
            raise InvalidInput(f"no token ends a text: {CONFIG} beside it names none as eos_token", where="--tokenizer")
        before, _ = self._around
        return Marks(before[0] if before else end, end)

    @cached_property
    def chat_templates(self) -> Mapping[str, str]:
        """The model's chat templates: files of their own, or in the tokenizer's settings."""
        files = {
            (DEFAULT if name == TEMPLATE else Path(name).stem): content.decode("utf-8")
            for name, content in self.beside.items()
            if name.endswith(".jinja")
        }
        if files:
            return files
        setting = self.settings[CONFIG].get("chat_template")
        if isinstance(setting, list):  # of objects with name and template
            setting = {one.get("name"): one.get("template") for one in setting if isinstance(one, dict)}
        templates = setting if isinstance(setting, dict) else {DEFAULT: setting}
        return {str(name): text for name, text in templates.items() if isinstance(text, str) and text}

    @cached_property
    def named(self) -> Mapping[str, str]:
        """Name -> token, as the tokenizer's settings have them."""
        files = [CONFIG] if "added_tokens_decoder" in self.settings[CONFIG] else [CONFIG, SPECIAL_MAP]
        settings = {name: value for file in files for name, value in self.settings[file].items()}
        more = settings.get("extra_special_tokens")
        settings |= more if isinstance(more, dict) else {}
        texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in settings.items()}
        return {name: text for name, text in texts.items() if name.endswith("_token") and isinstance(text, str)}

    def fits(self, rows: int) -> bool:
        return self.size <= rows  # rows of the embedding may be without a token

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end an answer: those of the model's settings, and what its chat templates put behind answers."""
        tokens: list[int] = []
        for name in (GENERATION, MODEL):
            setting = self.settings[name].get("eos_token_id")
            values = setting if isinstance(setting, list) else [setting]
            tokens = tokens or [value for value in values if self._is_token(value)]
        if not tokens and (token := self._named("eos_token")) is not None:
            tokens = [token]
        return tuple(dict.fromkeys((*tokens, *self._ends_of_turns())))

    def _ends_of_turns(self) -> Iterator[int]:
        for template in self.chat_templates.values():
            try:
                text = rendered(template, {**TURN, **self.named}, "")
            except InvalidInput:  # said where conversations are rendered
                continue
            _, answer, behind = text.rpartition(TURN["messages"][-1]["content"])
            added = self.tokenizer.get_added_tokens_decoder().items()
            ends = [(len(token.content), i) for i, token in added if behind.lstrip().startswith(token.content)]
            if answer and ends:
                yield max(ends)[1]

    def ids(self) -> dict[Purpose, int]:
        """Returns purpose -> id of a special token, as the tokenizer's files and then the model's have them."""
        ids: dict[Purpose, int] = {}
        purposes: tuple[Purpose, ...] = ("bos", "eos", "pad")
        for purpose in purposes:
            values: list[Any] = [self._named(f"{purpose}_token")]
            values += [self.settings[name].get(f"{purpose}_token_id") for name in (GENERATION, MODEL)]
            firsts = (value[0] if isinstance(value, list) and value else value for value in values)
            if tokens := [value for value in firsts if self._is_token(value)]:
                ids[purpose] = tokens[0]
        if before := self._around[0]:
            ids["bos"] = before[0]
        return ids

    def vocabulary(self, rows: int) -> Vocabulary:
        """Returns the vocabulary as GGUF files store it; rows without a token are unused.

        Raises:
            Unsupported: GGUF files cannot hold it.
        """
        about = json.loads(self.tokenizer.to_str())  # with all defaults
        if problem := self._gguf_problem(about):
            raise Unsupported(f"GGUF files cannot hold the tokenizer: {problem}")
        texts = {i: text for text, i in self.tokenizer.get_vocab(with_added_tokens=True).items()}
        decoder = self.tokenizer.get_added_tokens_decoder()
        added = frozenset(i for i, token in decoder.items() if not token.special)
        pieces = self._pieces(about, rows) if _of_pieces(about) else None
        if pieces is not None:  # these are found in the text as it is, and blanks are marked afterwards
            texts |= {i: texts[i].replace(BLANK, " ") for i in added}
        return Vocabulary(
            tokens=tuple(texts.get(i, f"[PAD{i}]") for i in range(rows)),
            special=frozenset(i for i, token in decoder.items() if token.special),
            unused=frozenset(range(rows)) - texts.keys(),
            merges=() if pieces else merges_of(about),
            ids=self.ids(),
            chat_template=self.chat_template,
            pre_tokenizer=(_pre_tokenizer(about) or "") if pieces is None else "default",
            starts_texts=bool(self._around[0]),
            added=added,
            pieces=pieces,
        )

    def _pieces(self, about: Mapping[str, Any], rows: int) -> Pieces:
        scores, ids = _scores(about), about["model"]["vocab"]
        assert scores is not None, "there is no problem"
        by_id = {ids[token]: score for token, score in scores.items()}
        return Pieces(
            scores=tuple(by_id.get(i, float(-len(scores) - i)) for i in range(rows)),
            bytes=frozenset(ids[token] for token in _BYTE_TOKENS),
            unknown=ids.get(about["model"].get("unk_token")),
            prefix=bool(_prefix(about)),
        )

    def files(self, context: int) -> Iterator[tuple[str, bytes]]:
        """Yields the tokenizer's files as they are; settings that would run code of the folder are left out."""
        yield "tokenizer.json", self.content
        config = {name: value for name, value in self.settings[CONFIG].items() if name != "auto_map"}
        yield CONFIG, json_bytes(config or {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context})
        carried = (name for name in self.beside if name == SPECIAL_MAP or name.endswith(".jinja"))
        yield from ((name, self.beside[name]) for name in carried)

    def describe(self) -> str:
        """Returns the hash of its content, for result keys."""
        files = {name: content.decode("utf-8") for name, content in self.beside.items()}
        return content_hash([json.loads(self.content), files])

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """Tokens that the tokenizer puts in front of a text and behind it."""
        text: list[int] = self.tokenizer.encode("a", add_special_tokens=False).ids
        whole: list[int] = self.tokenizer.encode("a").ids
        at = next((i for i in range(len(whole)) if whole[i : i + len(text)] == text), 0)
        return whole[:at], whole[at + len(text) :]

    def _named(self, name: str) -> int | None:
        """Returns the token that the tokenizer's settings name."""
        token = self.tokenizer.token_to_id(self.named.get(name, ""))
        return None if token is None else int(token)

    def _is_token(self, value: object) -> TypeGuard[int]:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 32:
            return False
        return self.tokenizer.id_to_token(value) is not None

    def _gguf_problem(self, about: Mapping[str, Any]) -> str | None:
        """Returns why llama.cpp would give other tokens; None: it gives the same."""
        if problem := _pieces_problem(about) if _of_pieces(about) else self._byte_level_problem(about):
            return problem
        before, behind = self._around
        if len(before) > 1 or behind:
            return "a text gets a token behind it" if behind else "a text gets more than one token in front"
        stripped = [
            token.content
            for token in self.tokenizer.get_added_tokens_decoder().values()
            if token.lstrip or token.rstrip or token.single_word
        ]
        return f"tokens that take blanks beside them ({', '.join(stripped[:3])})" if stripped else None

    def _byte_level_problem(self, about: Mapping[str, Any]) -> str | None:
        if problem := kind_problem(about):
            return problem
        if about["model"].get("unk_token") is not None and bytes_problem(self.tokenizer, about):
            return "bytes without a token become its token for what is unknown"
        if about.get("normalizer") not in (None, {"type": "NFC"}):
            return f"text is changed before it is split ({about['normalizer'].get('type')})"
        if _pre_tokenizer(about) is None:
            return "none of llama.cpp's pre-tokenizers that are known here splits text in this way"
        return None


def _of_pieces(about: Mapping[str, Any]) -> bool:
    """Returns whether a tokenizer.json is of BPE of characters, with bytes for those without a token."""
    return bool(about["model"].get("type") == "BPE" and about["model"].get("byte_fallback"))


def _pieces_problem(about: Mapping[str, Any]) -> str | None:
    model = about["model"]
    if missing := [token for token in _BYTE_TOKENS if token not in model["vocab"]]:
        return f"{len(missing)} of {BYTES} bytes have no token"
    if max(map(len, model["vocab"])) > MOST_CHARACTERS:
        return f"a token has more than {MOST_CHARACTERS:,} characters"
    if _prefix(about) is None:
        return "text is changed or split before BPE in another way than by SentencePiece"
    if model.get("ignore_merges") or _scores(about) is None:
        return "no scores of tokens give the order in which its BPE joins them"
    return None


def _prefix(about: Mapping[str, Any]) -> bool | None:
    """Returns whether a blank is put in front of a text, and all are marked; None: it is prepared in another way."""
    normalizer, splitting = about.get("normalizer"), about.get("pre_tokenizer")
    changes = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    if splitting is not None and splitting["type"] == "Metaspace":
        marks = not changes and splitting["replacement"] == BLANK and not splitting.get("split", True)
        return splitting.get("prepend_scheme") != "never" if marks else None
    if splitting is not None and (splitting["type"], splitting.get("pattern")) != ("Split", {"String": " "}):
        return None  # a split at blanks has none left to split at
    marked = {"type": "Replace", "pattern": {"String": " "}, "content": BLANK}
    forms = {True: [{"type": "Prepend", "prepend": BLANK}, marked], False: [marked]}
    return next((prefix for prefix, form in forms.items() if changes == form), None)


def _scores(about: Mapping[str, Any]) -> dict[str, float] | None:
    """Returns token -> score of what merges join, greatest first; None: no scores give their order.

    SentencePiece joins any two tokens that are one together, the one of the greatest score first. So all pairs of a
    token must be merges, one after another.
    """
    added = {token["content"] for token in about["added_tokens"]}
    pairs = [tuple(merge.split(" ")) for merge in merges_of(about)]
    joined = [token for token in map("".join, pairs) if token not in added]
    scores = {token: float(-place) for place, token in enumerate(dict.fromkeys(joined))}
    if len([*groupby(joined)]) > len(scores):
        return None
    normal, merges = about["model"]["vocab"].keys() - added - set(_BYTE_TOKENS), set(pairs)
    splits = ((token[:at], token[at:]) for token in normal for at in range(1, len(token)))
    if any(first in normal and second in normal and (first, second) not in merges for first, second in splits):
        return None
    return scores


def _pre_tokenizer(about: Mapping[str, Any]) -> str | None:
    """Returns llama.cpp's name of how text is split; None: it has none."""
    parts = _without_offsets(about.get("pre_tokenizer"))
    names: Mapping[bool, str] = next((names for forms, names in _PRE_TOKENIZERS if parts in forms), {})
    return names.get(bool(about["model"].get("ignore_merges")))


def _without_offsets(described: Any) -> Any:
    """Returns a pre-tokenizer without what concerns the places of tokens in the text alone."""
    if isinstance(described, list):
        return [_without_offsets(part) for part in described]
    if isinstance(described, dict):
        return {key: _without_offsets(value) for key, value in described.items() if key != "trim_offsets"}
    return described


def read_model_tokenizer(path: Path) -> MemberTokenizer:
    """Reads a trained model's tokenizer.json, and the files of transformers beside it.

    Raises:
        InvalidInput: one of them cannot be read.
    """
    content, about = read_content(path)
    folder = path.parent
    if not (folder / CONFIG).is_file() and own_problem(Tokenizer.from_buffer(content), about) is None:
        return MemberTokenizer(content)
    files = [*(folder / name for name in (*_SETTINGS, TEMPLATE)), *sorted(folder.glob(_TEMPLATES))]
    return ModelTokenizer(content, {str(file.relative_to(folder)): _checked(file) for file in files if file.is_file()})


def read_member_tokenizer(path: Path) -> MemberTokenizer:
    """Reads a member's tokenizer.json: a family's own, or that of the trained model that the member started from.

    Raises:
        InvalidInput: it cannot be read, or llama.cpp would split text in another way and no file beside it says how the
            model is used.
    """
    content, about = read_content(path)
    if path.with_name(CONFIG).is_file() and own_problem(Tokenizer.from_buffer(content), about) is not None:
        return read_model_tokenizer(path)
    return read_tokenizer(path)


def _checked(path: Path) -> bytes:
    if path.stat().st_size > _BYTES:
        raise InvalidInput(f"larger than {_BYTES:,} bytes", where=str(path))
    content = path.read_bytes()
    try:
        content.decode("utf-8")
        if path.suffix != ".jinja":
            if not isinstance(about := json.loads(content), dict):
                raise InvalidInput("no JSON object", where=str(path))
            json.dumps(about, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        if isinstance(error, InvalidInput):
            raise
        kind, problem = "text" if path.suffix == ".jinja" else "JSON", download_problem(path, str(error))
        raise InvalidInput(f"no {kind}: {problem}", where=str(path)) from error
    return content
