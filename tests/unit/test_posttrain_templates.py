"""Chat templates and conversations in the wild: rendered as transformers renders them, within limits."""

from __future__ import annotations

import gzip
import json
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizer_lab import ASK, CHATML, FORMS, Form, with_template, write_model_tokenizer, write_sentencepiece_form
from transformers import AutoTokenizer

from nas.core.errors import InvalidInput
from nas.train.posttrain.conversations import (
    ChatTokenizer,
    Conversation,
    Message,
    Preference,
    check_files,
    read_lines,
    read_placed_lines,
)
from nas.train.posttrain.filters import Filters
from nas.train.posttrain.sft import select
from nas.train.release import templates
from nas.train.release.model_tokenizer import read_model_tokenizer
from nas.train.release.templates import rendered
from nas.train.release.tokenizer import byte_tokenizer

TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "größer <b>", "parameters": {}}}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
PLAIN = [{"role": "user", "content": "What is 2 + 3?"}, {"role": "assistant", "content": "5"}]
CALLING = [
    {"role": "user", "content": "Weather in Paris?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "name": "get_weather", "content": '{"t": 21}'},
    {"role": "assistant", "content": "21 degrees."},
]

LLAMA3 = (
    "{{ bos_token }}{%- if tools is not none %}{{ 'Environment: ipython\n' }}{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% endif %}"
    "<|im_end|>\n{% endfor %}" + ASK
)
MISTRAL = (
    "{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- if tools is not none and m == users[-1] %}[TOOLS] {{ tools | tojson }}[/TOOLS]{% endif %}"
    "[INST] {{ m.content }}[/INST]"
    "{%- elif m.tool_calls is defined and m.tool_calls is not none %}[CALLS] {{ m.tool_calls | tojson }}<|im_end|>"
    "{%- else %}{{ ' ' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
)
GLM = (
    "{% if tools %}{% for t in tools %}{{ t | tojson(ensure_ascii=False) }}|{{ t | tojson(separators=(',', ':')) }}|"
    "{{ t | tojson(sort_keys=true, indent=2) }}{% endfor %}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}"
    "<|im_end|>\n{% endfor %}" + ASK
)
NAMES = (
    "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ pad_token }}|{{ image_token }}|{{ documents is none }}"
    "{% set ns = namespace(n=0) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ dict(a=1).a }}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>\n{% endfor %}" + ASK
)
TEMPLATES = {"llama3": LLAMA3, "mistral": MISTRAL, "glm": GLM, "names": NAMES}


def chat_of(folder: Path, form: Form, **beside: dict[str, Any]) -> ChatTokenizer:
    path = write_model_tokenizer(folder, form)
    for name, content in beside.items():
        file = path.with_name(f"{name}.json")
        old = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps(old | content))
    return ChatTokenizer.read(path)


def expected_text(folder: Path, messages: list[dict[str, Any]], tools: Any, *, ask: bool) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    text: str = tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=ask, tokenize=False, enable_thinking=False
    )
    return text


def test_a_template_that_opens_the_reasoning_of_every_answer_is_of_use_for_questions(tmp_path: Path) -> None:
    path = write_model_tokenizer(tmp_path, with_template(CHATML + ASK.replace("assistant\n", "assistant\n<think>\n")))
    with pytest.raises(InvalidInput, match="does not continue a question with the answer"):
        ChatTokenizer.read(path)
    chat = ChatTokenizer(read_model_tokenizer(path), "model", trains=False)
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    text = chat.decode(chat.question([Message.model_validate(message) for message in messages]))
    assert text == expected_text(tmp_path, messages, None, ask=True) and text.endswith("<think>\n")


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("messages", [PLAIN, CALLING], ids=["plain", "calling"])
def test_templates_are_rendered_as_by_transformers(
    name: str, tools: Any, messages: list[dict[str, Any]], tmp_path: Path
) -> None:
    settings = {"unk_token": "<|endoftext|>", "image_token": "<think>"}
    chat = chat_of(tmp_path, with_template(TEMPLATES[name]), tokenizer_config=settings, config={"bos_token_id": 1})
    (line,) = written(tmp_path, {"messages": messages, "tools": tools})
    for ask in (False, True):
        turns = line.messages[:-1] if ask else line.messages
        expected = expected_text(tmp_path, messages[:-1] if ask else messages, tools, ask=ask)
        assert chat.render(turns, line.tools, ask=ask) == expected
    ids, answers = chat.conversation(line)
    assert chat.decode(ids.tolist()) == expected_text(tmp_path, messages, tools, ask=False).removesuffix("\n")
    assert messages[-1]["content"] in chat.decode(ids[answers].tolist())


def written(folder: Path, *records: Any, kind: type = Conversation, **more: Any) -> list[Any]:
    path = folder / "lines.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_lines(path, kind, **more)


def test_named_templates_are_those_of_transformers(tmp_path: Path) -> None:
    named = [{"name": "default", "template": CHATML + ASK}, {"name": "tool_use", "template": "TOOLS" + CHATML + ASK}]
    chat = chat_of(tmp_path / "list", with_template(None), tokenizer_config={"chat_template": named})
    path = write_model_tokenizer(tmp_path / "files", replace(with_template(None), template=CHATML + ASK))
    (path.parent / "additional_chat_templates").mkdir()
    (path.parent / "additional_chat_templates/tool_use.jinja").write_text("TOOLS" + CHATML + ASK)
    for folder, tokenizer in ((tmp_path / "list", chat), (tmp_path / "files", ChatTokenizer.read(path))):
        for tools in (None, TOOLS):
            (line,) = written(tmp_path, {"messages": PLAIN, "tools": tools})
            assert tokenizer.render(line.messages, line.tools) == expected_text(folder, PLAIN, tools, ask=False)
    assert "additional_chat_templates/tool_use.jinja" in dict(read_model_tokenizer(path).files(512))
    with pytest.raises(InvalidInput, match="has no chat template: its named ones are rag"):
        chat_of(tmp_path / "rag", with_template(None), tokenizer_config={"chat_template": [named[0] | {"name": "rag"}]})


def test_answers_end_with_what_the_template_puts_behind_them(tmp_path: Path) -> None:
    """Base models name the end of a document as theirs, and have a template that ends turns by another token."""
    chat = chat_of(
        tmp_path, with_template(CHATML + ASK), generation_config={"eos_token_id": 305},
        tokenizer_config={"eos_token": "<|endoftext|>"}, special_tokens_map={"bos_token": None},
    )  # fmt: skip
    tokenizer = read_model_tokenizer(tmp_path / "tokenizer.json")
    names = [tokenizer.tokenizer.id_to_token(token) for token in tokenizer.ends]
    assert names[-1] == "<|im_end|>" and chat.ends == tokenizer.ends
    (line,) = written(tmp_path, {"messages": PLAIN})
    ids, answers = chat.conversation(line)
    assert chat.decode(ids[answers].tolist()) == "5<|im_end|>"


def test_answers_may_begin_with_a_blank(tmp_path: Path) -> None:
    chat = chat_of(tmp_path, with_template(MISTRAL))
    other = [{"role": "user", "content": "And 3 + 4?"}, {"role": "assistant", "content": "7"}]
    for tools, trained in ((None, " 5<|im_end|> 7<|im_end|>"), (TOOLS, " 7<|im_end|>")):
        (line,) = written(tmp_path, {"messages": PLAIN + other, "tools": tools})
        ids, answers = chat.conversation(line)
        assert chat.decode(ids[answers].tolist()) == trained, "tools move to the last question"
        assert chat.decode(ids.tolist()) == expected_text(tmp_path, PLAIN + other, tools, ask=False)
        question = chat.question(line.question, line.tools)
        assert ids[: len(question)].tolist() == question


def test_a_tokenizer_that_begins_texts_with_a_blank_adds_none_in_the_midst(tmp_path: Path) -> None:
    path = write_sentencepiece_form(tmp_path)
    about = json.loads(path.read_text())
    about["normalizer"] = {"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
    ]}  # fmt: skip
    about["pre_tokenizer"] = None
    path.write_text(json.dumps(about))
    expression = "'[Q] ' + m.content + ' [A]' if m.role == 'user' else ' ' + m.content + '<eos>'"
    template = "{% for m in messages %}{{ " + expression + " }}{% endfor %}"
    (path.parent / "chat_template.jinja").write_text(template)
    chat = ChatTokenizer.read(path)
    (line,) = written(tmp_path, {"messages": PLAIN})
    ids, _ = chat.conversation(line)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert ids.tolist() == tokenizer(chat.render(line.messages), add_special_tokens=False).input_ids


@pytest.mark.parametrize("template", [GLM, "{% set day = strftime_now('%d %B %Y') %}{{ day }}\n" + CHATML + ASK])
def test_the_date_is_the_same_every_day(template: str, tmp_path: Path) -> None:
    path = write_model_tokenizer(tmp_path, with_template(template))
    first, other = ChatTokenizer.read(path), ChatTokenizer.read(path, "2026-02-03")
    assert first.dated is ("strftime" in template) is (first.identity != other.identity)
    (line,) = written(tmp_path, {"messages": PLAIN})
    if first.dated:
        assert first.render(line.messages).startswith("01 January 2025\n")
        assert other.render(line.messages).startswith("03 February 2026\n")


def test_reasoning_is_trained_on_where_a_line_has_it(tmp_path: Path) -> None:
    template = CHATML.replace(
        "{{ m.content }}",
        "{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}",
    ) + ASK.replace("{% endif %}", "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}")
    chat = chat_of(tmp_path, with_template(template))
    for name in ("reasoning_content", "thinking", "reasoning"):
        (line,) = written(tmp_path, {"messages": [PLAIN[0], PLAIN[1] | {name: "two, three", "weight": 1}]})
        ids, answers = chat.conversation(line)
        assert chat.decode(ids[answers].tolist()) == "<think>\ntwo, three\n</think>\n\n5<|im_end|>"


def test_an_answer_of_weight_0_is_not_trained_on(tmp_path: Path) -> None:
    chat = chat_of(tmp_path, with_template(CHATML + ASK))
    (line,) = written(tmp_path, {"messages": [PLAIN[0], PLAIN[1] | {"weight": 0}, *PLAIN]})
    ids, answers = chat.conversation(line)
    assert chat.decode(ids[answers].tolist()) == "5<|im_end|>" and answers[-2:].all()
    assert "weight" not in line.messages[1].variables()


def test_a_family_says_tool_calls_and_one_that_cannot_is_refused(tmp_path: Path) -> None:
    chat = ChatTokenizer(byte_tokenizer(512), "bytes")
    (line,) = written(tmp_path, {"messages": CALLING[:2], "tools": TOOLS})
    ids, answers = chat.conversation(line)
    call = '<|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>'
    assert chat.decode(ids[answers].tolist()) == f"{call}<|im_end|>"
    assert chat.plain(line).answer == call
    silent = chat_of(tmp_path, with_template(CHATML + ASK))
    with pytest.raises(InvalidInput, match="leaves out the tool calls of the answer"):
        silent.conversation(line)


J5 = {"role": "assistant", "content": "5"}
FORMS_OF: dict[str, tuple[Any, list[tuple[str, str | None]]]] = {
    "sharegpt": ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
                 [("user", "Hi"), ("assistant", "Hello")]),
    "sharegpt in capitals": (
        {"conversations": [{"from": "USER", "value": "Hi"}, {"from": "ChatGPT", "value": "Hello"}]},
        [("user", "Hi"), ("assistant", "Hello")]),
    "calls as text": (
        {"messages": [CALLING[0], {"role": "assistant", "content": None, "tool_calls": json.dumps([CALL])},
                      {"role": "tool", "content": {"t": 21}}, CALLING[3] | {"tool_calls": ""}]},
        [("user", "Weather in Paris?"), ("assistant", None), ("tool", '{"t": 21}'), ("assistant", "21 degrees.")]),
    "sharegpt with a system": (
        {"system": "Be brief", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        [("system", "Be brief"), ("user", "Hi"), ("assistant", "Hello")]),
    "sharegpt with roles": ({"conversations": PLAIN}, [("user", "What is 2 + 3?"), ("assistant", "5")]),
    "sharegpt calls": (
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "function_call", "value": '{"name": "f"}'},
                           {"from": "observation", "value": "1"}, {"from": "gpt", "value": "one"}]},
        [("user", "Hi"), ("assistant", ""), ("tool", "1"), ("assistant", "one")]),
    "alpaca": ({"instruction": "Add", "input": "2 3", "output": "5"}, [("user", "Add\n2 3"), ("assistant", "5")]),
    "alpaca without input": ({"instruction": "Add", "input": "", "output": "5", "history": [["a", "b"]]},
                             [("user", "a"), ("assistant", "b"), ("user", "Add"), ("assistant", "5")]),
    "prompt": ({"prompt": "2 + 3?", "completion": "5"}, [("user", "2 + 3?"), ("assistant", "5")]),
    "prompt of messages": ({"prompt": PLAIN[:1], "completion": PLAIN[1:]},
                           [("user", "What is 2 + 3?"), ("assistant", "5")]),
    "response": ({"prompt": "2 + 3?", "response": "5"}, [("user", "2 + 3?"), ("assistant", "5")]),
    "parts": ({"messages": [{"role": "user", "content": [{"type": "text", "text": text} for text in "ab"]}, J5]},
              [("user", "a\nb"), ("assistant", "5")]),
    "developer": ({"messages": [{"role": "developer", "content": "Be brief"}, *PLAIN]},
                  [("developer", "Be brief"), ("user", "What is 2 + 3?"), ("assistant", "5")]),
    "empty system": ({"messages": [{"role": "system", "content": ""}, *PLAIN]},
                     [("system", ""), ("user", "What is 2 + 3?"), ("assistant", "5")]),
    "null system": ({"messages": [{"role": "system", "content": None}, *PLAIN]},
                    [("user", "What is 2 + 3?"), ("assistant", "5")]),
    "call with a null result": (
        {"messages": [CALLING[0], {"role": "assistant", "content": None, "tool_calls": [CALL]},
                      {"role": "tool", "content": None}, CALLING[3]]},
        [("user", "Weather in Paris?"), ("assistant", None), ("tool", ""), ("assistant", "21 degrees.")]),
    "prompt with a system": ({"system": "Be brief", "prompt": "2 + 3?", "completion": "5"},
                             [("system", "Be brief"), ("user", "2 + 3?"), ("assistant", "5")]),
    "prompt of messages with a system": (
        {"system": "other", "prompt": [{"role": "system", "content": "Be brief"}, PLAIN[0]], "completion": "5"},
        [("system", "Be brief"), ("user", "What is 2 + 3?"), ("assistant", "5")]),
    "empty tools": ({"conversations": PLAIN, "tools": " "}, [("user", "What is 2 + 3?"), ("assistant", "5")]),
    "null columns": ({"messages": [message | {"tool_calls": None, "name": None} for message in PLAIN], "tools": None,
                      "task": None}, [("user", "What is 2 + 3?"), ("assistant", "5")]),
    "openai calls": (
        {"messages": [CALLING[0], {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}]},
            *CALLING[2:]], "tools": json.dumps(TOOLS), "parallel_tool_calls": False},
        [("user", "Weather in Paris?"), ("assistant", None), ("tool", '{"t": 21}'), ("assistant", "21 degrees.")]),
    "function call": (
        {"messages": [PLAIN[0], {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
                      {"role": "function", "name": "f", "content": "1"}, J5]},
        [("user", "What is 2 + 3?"), ("assistant", None), ("tool", "1"), ("assistant", "5")]),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS_OF)
def test_public_forms_of_conversations_are_read(name: str, tmp_path: Path) -> None:
    record, expected = FORMS_OF[name]
    (line,) = written(tmp_path, record)
    assert [(message.role, message.content) for message in line.messages] == expected
    assert all("null" not in json.dumps(message.variables()) or not message.text for message in line.messages)
    calls = [call for message in line.messages for call in message.tool_calls]
    assert [type(call["function"]["arguments"]) for call in calls] == [dict] * ("call" in name)
    ChatTokenizer(byte_tokenizer(512), "bytes").conversation(line)
    assert type(line).model_validate_json(line.model_dump_json(exclude_unset=True)) == line


def test_public_forms_of_preferences_are_read(tmp_path: Path) -> None:
    no = {"role": "assistant", "content": "no"}
    for record in (
        {"prompt": "What is 2 + 3?", "chosen": "5", "rejected": "no"},
        {"prompt": PLAIN[:1], "chosen": [J5], "rejected": [no]},
        {"chosen": PLAIN, "rejected": [PLAIN[0], no]},
        {"messages": PLAIN[:1], "chosen": "5", "rejected": "no"},
        {"prompt": "What is 2 + 3?", "messages": PLAIN, "chosen": PLAIN, "rejected": [PLAIN[0], no]},
    ):
        (line,) = written(tmp_path, record, kind=Preference)
        assert line.messages == (Message(role="user", content="What is 2 + 3?"),)
        assert (line.chosen, line.rejected) == ("5", "no")


def test_preferences_have_all_that_is_before_their_answers(tmp_path: Path) -> None:
    system, no = {"role": "system", "content": "Be brief"}, {"role": "assistant", "content": "no"}
    more = [{"role": "assistant", "content": "Why?"}, {"role": "user", "content": "Tell me."}]
    for record, roles in (
        ({"system": "Be brief", "prompt": "What is 2 + 3?", "chosen": "5", "rejected": "no"}, "su"),
        ({"system": "Be brief", "chosen": PLAIN, "rejected": [PLAIN[0], no]}, "su"),
        ({"prompt": [system], "chosen": PLAIN, "rejected": [PLAIN[0], no]}, "su"),
        ({"prompt": "2 + 3?", "chosen": [system, *PLAIN], "rejected": [system, PLAIN[0], no]}, "su"),
        ({"prompt": PLAIN[:1], "chosen": [*more, J5], "rejected": [*more, no]}, "uau"),
        ({"prompt": "x", "chosen": [PLAIN[0], *more, J5], "rejected": [PLAIN[0], *more, no]}, "uau"),
    ):
        (line,) = written(tmp_path, record, kind=Preference)
        assert "".join(message.role[0] for message in line.messages) == roles
        assert (line.chosen, line.rejected) == ("5", "no")
    other = {"chosen": PLAIN, "rejected": [{"role": "user", "content": "What is 3 + 3?"}, no]}
    with pytest.raises(InvalidInput, match=r"lines\.jsonl:1: chosen and rejected differ before their last messages"):
        written(tmp_path, other, kind=Preference)


GOOD = json.dumps({"messages": PLAIN})
CONTENTS: dict[str, tuple[bytes, int | str]] = {
    "byte order mark": (b"\xef\xbb\xbf" + GOOD.encode() + b"\n" + GOOD.encode(), 2),
    "list": (json.dumps([{"messages": PLAIN}] * 3, indent=2).encode(), 3),
    "list in a line": (json.dumps([{"messages": PLAIN}] * 2).encode(), 2),
    "windows lines": ((GOOD + "\r\n").encode() * 2, 2),
    "utf-16": (GOOD.encode("utf-16"), "is UTF-16: save it as UTF-8"),
    "git-lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n", "git lfs pull"),
    "web page": (b"<!DOCTYPE html><html></html>", "a web page"),
    "parquet": (b"PAR1" + bytes(20), "is Parquet: write it as JSON lines"),
    "nothing": (b"\n\n", "holds no line"),
    "unknown": (b'{"question": "a", "answer": "b"}', "its keys are 'question', 'answer'; it needs `messages`"),
    "picture": (json.dumps({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, J5]}).encode(),
                "content has a part of type 'image_url'"),
    "call without name": (json.dumps({"messages": [PLAIN[0], {"role": "assistant", "tool_calls": [{}]}]}).encode(),
                          "a tool call has no function with a name"),
    "no weight": (json.dumps({"messages": [PLAIN[0], J5 | {"weight": 0}]}).encode(), "every answer has weight 0"),
    "odd weight": (json.dumps({"messages": [PLAIN[0], J5 | {"weight": 0.5}]}).encode(),
                   "weight: Input should be 0 or 1"),
    "token in a tool": (json.dumps({"messages": PLAIN, "tools": ["x<|im_end|>"]}).encode(),
                        "a tool contains the special token <|im_end|>"),
    "token in the key of a tool": (json.dumps({"messages": PLAIN, "tools": [{"a": {"<|im_end|>": 1}}]}).encode(),
                                   "a tool contains the special token <|im_end|>"),
    "token in a call": (
        json.dumps({"messages": [PLAIN[0], {"role": "assistant", "tool_calls": [
            {"function": {"name": "f", "arguments": {"a": "<|im_end|>"}}}]}]}).encode(),
        "the special token <|im_end|>"),
    "token in reasoning": (json.dumps({"messages": [PLAIN[0], J5 | {"reasoning_content": "<|im_end|>"}]}).encode(),
                           "the special token <|im_end|>"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTENTS)
def test_files_of_conversations_in_the_wild(name: str, tmp_path: Path) -> None:
    content, expected = CONTENTS[name]
    path = tmp_path / "lines.jsonl"
    path.write_bytes(content)
    compressed = tmp_path / "lines.jsonl.gz"
    compressed.write_bytes(gzip.compress(content))
    if isinstance(expected, int):
        assert len(read_lines(path, Conversation)) == len(read_lines(compressed, Conversation)) == expected
        return
    with pytest.raises(InvalidInput) as caught:
        read_lines(path, Conversation)
    assert expected in str(caught.value) and str(path) in str(caught.value)


def test_bad_lines_are_skipped_and_counted_where_this_is_said(tmp_path: Path) -> None:
    system = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    tokenizer = write_model_tokenizer(tmp_path, with_template(system + CHATML + ASK))
    path, messages = tmp_path / "lines.jsonl", [{"role": "system", "content": "a"}, *PLAIN]
    path.write_text("\n".join([GOOD, "{", json.dumps({"messages": messages}), '{"messages": []}', GOOD]))
    bad: list[str] = []
    places = [place for place, _ in read_placed_lines(path, Conversation, bad=bad)]
    assert places == [f"{path}:1", f"{path}:3", f"{path}:5"] and len(bad) == 2
    with pytest.raises(InvalidInput, match=r"lines\.jsonl:2: Invalid JSON.*\n.*:4: messages"):
        check_files([(str(path), Conversation)], tokenizer)
    check_files([(str(path), Conversation)], tokenizer, skip=[str(path)])
    chat = ChatTokenizer.read(tokenizer)
    selected = select([path], [], Filters(duplicates=False), chat, "skip")
    assert len(selected.conversations) == 2 and selected.dropped["bad lines"] == 3
    path.write_text('{\n{"messages": []}')
    with pytest.raises(InvalidInput, match=r":1: Invalid JSON.*\n.*:2: messages"):
        check_files([(str(path), Conversation)], tokenizer, skip=[str(path)])


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    templates._close()
    monkeypatch.setattr(templates, "SECONDS", 1.0)
    yield
    templates._close()


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ messages + 1 }}", "TypeError"),
        ("{{ messages[0].nothing.there }}", "no attribute 'nothing'"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ raise_exception({'a': 1}) }}", "{'a': 1}"),
        ("{{ raise_exception('x' * 100000) }}", "x" * 400),
        ("{{ 'a' * 3000000000 }}", "more than 1,024 MiB"),
        ("{{ 'a' * 30000000 }}", "more than 16,777,216 characters"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "more than 1 s"),
        ("{{ 9 ** (9 ** 9) }}", "more than 1 s"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ {} | tojson(indent=[]) }}", "TypeError"),
    ],
)
def test_templates_that_fail_or_never_end_are_refused(hurried: None, template: str, problem: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        rendered(template, {"messages": PLAIN}, "t.json")
    assert str(caught.value).startswith("t.json: its chat template refuses a conversation: ")
    assert problem in str(caught.value) and len(str(caught.value)) < 600
    assert rendered("{{ messages[1].content }}", {"messages": PLAIN}, "t.json") == "5"


PIECES = (
    "{% for m in messages %}",
    "{% endfor %}",
    "{% if tools %}",
    "{% else %}",
    "{% endif %}",
    "{{ m.content }}",
    "{{ m.role }}",
    "<|im_end|>",
    "<|im_start|>",
    "{{ bos_token }}",
    "{{ tools | tojson }}",
    "{{ 1 // (loop.index0) }}",
    "{{ m[0] }}",
    "{{ 'a' * 9 }}",
    "{% set x = namespace(a=[]) %}",
    "{{ x.a + [1] }}",
    "{% if add_generation_prompt %}",
    "{{ m.content.split('x')[3] }}",
    "{% break %}",
    "{{ strftime_now('%Y') }}",
    "{{ raise_exception('no') }}",
    "{% macro f(a) %}",
    "{% endmacro %}",
    "{{ f(f) }}",
    "{{ messages[7].a.b }}",
    "{{ range(10**9) }}",
    "{{ m | items }}",
    "{{ m.tool_calls[0].function.name }}",
    "{%",
    "}}",
    "{#",
    "\n",
    " ",
    "\u0000",
    "\ud83d\ude00",
    "{% generation %}",
    "{% endgeneration %}",
    "{{ m.content | map('upper') | join }}",
    "{{ {} | tojson(indent=-1) }}",
    "{{ lipsum(9) }}",
)


@pytest.mark.parametrize("count", [pytest.param(4000, marks=pytest.mark.exhaustive), 150], ids=["all", "some"])
def test_odd_templates_are_used_or_refused(count: int, tmp_path: Path) -> None:
    path = write_model_tokenizer(tmp_path, FORMS["qwen3"])
    tokenizer, draw = read_model_tokenizer(path), random.Random(0)
    (line,) = written(tmp_path, {"messages": CALLING, "tools": TOOLS})
    begin = time.monotonic()
    for _ in range(count):
        template = "".join(draw.choices(PIECES, k=draw.randint(1, 12)))
        if draw.random() < 0.5:
            template = CHATML + template + ASK
        one = replace(tokenizer, beside={"tokenizer_config.json": json.dumps({
            "eos_token": "<|im_end|>", "chat_template": template}).encode()})  # fmt: skip
        try:
            ChatTokenizer(one, "odd").conversation(line)
        except InvalidInput as error:
            assert 0 < len(str(error)) < 1000, template
        except Exception as error:
            raise AssertionError(template) from error
    assert time.monotonic() - begin < 1 + count / 10
