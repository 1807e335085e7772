"""Records of public data sets as ours: {"messages": [{"role": ..., "content": ...}, ...], "tools": [...]}.

    OpenAI             {"messages": [...], "tools": [...]}: with tool calls, names, weights, contents in parts
    ShareGPT           {"conversations": [{"from": "human", "value": ...}, ...]}, or with role and content
    Alpaca             {"instruction": ..., "input": ..., "output": ...}, also with "system" and "history"
    prompt, answer     {"prompt": ..., "completion": ...}: text or messages; also "response", "system"
    preferences        {"prompt": ..., "chosen": ..., "rejected": ...}: text or messages, or whole talks; also "system"

What is read of a record depends on its keys alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

Record = dict[str, Any]

_SPEAKERS = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "function": "tool",
}
"""Roles of ShareGPT and of OpenAI's first function calls that have other names here."""
_SYSTEM = ("system", "developer")


def converted(record: Record) -> Record:
    """Returns a record with `messages`, and `chosen` and `rejected` as text where it is a preference.

    Raises:
        ValueError: it has none of the forms, and the message lists its keys; or answers to different questions.
    """
    record = {name: value for name, value in record.items() if value is not None}
    if isinstance(record.get("tools"), str):
        record["tools"] = _json_of(record["tools"].strip() or "[]")
    if isinstance(record.get("tools"), Mapping):
        record["tools"] = [record["tools"]]
    messages = _messages(record)
    if "chosen" in record and "rejected" in record:
        messages, record = _preference(messages, record)
    if messages is None:
        keys = ", ".join(map(repr, list(record)[:8])) or "none"
        raise ValueError(
            f"no conversation: its keys are {keys}; it needs `messages`, a list of role and content, or the keys of"
            " ShareGPT (conversations), Alpaca (instruction, output), or prompt and completion"
        )
    if isinstance(messages, list):
        messages = [_message(message) if isinstance(message, dict) else message for message in messages]
        messages = [message for message in messages if not _is_empty_system(message)]
    return record | {"messages": messages}


def _messages(record: Record) -> Any:
    """Returns the messages of a record as they are; None: it has none."""
    if "messages" in record:
        return record["messages"]
    if isinstance(turns := record.get("conversations", record.get("conversation")), list):
        messages = [_turn(turn) if isinstance(turn, dict) else turn for turn in turns]
        return _system(record) + messages
    if "instruction" in record and "output" in record:
        text = "\n".join(filter(None, (_text(record["instruction"]), _text(record.get("input", "")))))
        history = record.get("history")
        turns = [*(history if isinstance(history, list) else []), [text, record["output"]]]
        pairs = [turn if isinstance(turn, list) and len(turn) == 2 else [turn, ""] for turn in turns]
        return _system(record) + [message for turn in pairs for message in _pair(*turn)]
    prompt: Any = record.get("prompt")
    answer: Any = record.get("completion", record.get("response"))
    if prompt is not None and (answer is not None or "chosen" in record):
        question = _with_system(record, prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}])
        if answer is None:
            return question
        return question + (answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}])
    return None


def _preference(messages: Any, record: Record) -> tuple[Any, Record]:
    """Returns question and record of a preference whose answers may be lists of messages."""
    sides = {side: record[side] for side in ("chosen", "rejected")}
    if not all(isinstance(side, list) and side for side in sides.values()):
        return messages, record
    before, other = ([_compared(message) for message in side[:-1]] for side in sides.values())
    if before != other:
        raise ValueError("chosen and rejected differ before their last messages")
    if "messages" not in record and (before or not messages):
        talk = sides["chosen"][:-1]
        # Else both are whole conversations.
        continues = messages and (_role(talk[0]) in ("assistant", "tool") or _role(messages[-1]) in _SYSTEM)
        messages = messages + talk if continues else _with_system(record, talk)
    last = {name: side[-1] for name, side in sides.items()}
    texts = {name: one.get("content") if isinstance(one, dict) else one for name, one in last.items()}
    return messages, record | texts


def _compared(message: Any) -> Any:
    """Returns what two talks have in common where they are the same."""
    if not isinstance(message, dict):
        return message
    message = _message(message)
    return [message.get(name) for name in ("role", "content", "tool_calls")]


def _role(message: Any) -> Any:
    return _message(message).get("role") if isinstance(message, dict) else None


def _is_empty_system(message: Any) -> bool:
    """Returns whether a message is of a system that says nothing: templates would say "None"."""
    return _role(message) in _SYSTEM and message.get("content") is None


def _turn(turn: Record) -> Record:
    if "from" not in turn:
        return turn
    more = {name: value for name, value in turn.items() if name not in ("from", "value")}
    if turn["from"] == "function_call":
        calls = _json_of(_text(turn.get("value")))
        functions = calls if isinstance(calls, list) else [calls]
        calls = [{"type": "function", "function": function} for function in functions]
        return {"role": "assistant", "content": "", "tool_calls": calls, **more}
    return {"role": turn["from"], "content": turn.get("value"), **more}


def _pair(question: Any, answer: Any) -> list[Record]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _system(record: Record) -> list[Record]:
    system = record.get("system")
    return [{"role": "system", "content": system}] if system else []


def _with_system(record: Record, messages: list[Any]) -> list[Any]:
    """Returns messages with the system prompt of the record in front, unless they have one."""
    has_one = bool(messages) and _role(messages[0]) in _SYSTEM
    return messages if has_one or not isinstance(record.get("system"), str) else _system(record) + messages


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _message(message: Record) -> Record:
    """Returns a message as transformers' templates expect it."""
    # Columns of tables are null where a message lacks them; a content that is null says that there is none.
    message = {name: value for name, value in message.items() if value is not None or name == "content"}
    if isinstance(role := message.get("role"), str):
        message["role"] = _SPEAKERS.get(role.lower(), role.lower())
    if isinstance(call := message.pop("function_call", None), dict):
        message["tool_calls"] = [{"type": "function", "function": call}]
    if isinstance(parts := message.get("content"), list):
        message["content"] = "\n".join(map(_part, parts))
    elif isinstance(parts, dict) and message.get("role") == "tool":
        message["content"] = json.dumps(parts, ensure_ascii=False)
    elif parts is None and message.get("role") == "tool":
        message["content"] = ""
    if isinstance(calls := message.get("tool_calls"), str):
        message["tool_calls"] = _json_of(calls or "[]")
    if isinstance(calls := message.get("tool_calls"), list):
        message["tool_calls"] = [_call(call) for call in calls]
        if not calls:
            del message["tool_calls"]
    return message


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise ValueError(f"content has a part of type {kind!r}: models here read text alone")


def _call(call: Any) -> Any:
    """Returns a tool call with arguments as an object, where they are its JSON."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("a tool call has no function with a name")
    if isinstance(arguments := function.get("arguments", {}), str):
        arguments = _json_of(arguments or "{}")
    function = function | {"arguments": arguments}
    return call | {"function": function} if "function" in call else function


def _json_of(text: str) -> Any:
    """Returns the object or list that a text is as JSON; else the text."""
    try:
        value = from_json(text)
    except ValueError:
        return text
    return value if isinstance(value, dict | list) else text
