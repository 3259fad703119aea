"""Inkling's chat framing: every part of a message stands behind a special token that no text can spell."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum, auto
from typing import Final, NoReturn, TypeAlias

import orjson

from cascadia_p2p.errors import ErrorCode, RequestError, ShardError
from cascadia_p2p.text.detokenizer import Detokenizer
from cascadia_p2p.text.reply import Part, ToolCall
from cascadia_p2p.text.tokenizer import Tokenizer

__all__ = ["EFFORTS", "Effort", "FramedSplitter", "InklingFraming"]

Effort: TypeAlias = float | str
"""How much to reason: 0.0 to 0.99, or one of the words of `EFFORTS`."""

EFFORTS: Final = {"none": 0.0, "minimal": 0.1, "low": 0.25, "medium": 0.5, "high": 0.75, "max": 0.99}

_ROLES: Final = {
    "system": "message_system",
    "developer": "message_system",
    "user": "message_user",
    "assistant": "message_model",
    "tool": "message_tool",
}
_NEEDED: Final = (
    "message_user",
    "message_model",
    "message_system",
    "content_text",
    "content_thinking",
    "end_message",
    "content_model_end_sampling",
)
_OPTIONAL: Final = (
    "endoftext",
    "message_tool",
    "content_image",
    "content_audio_input",
    "content_tool_error",
    "content_xml",
    "content_invoke_tool_json",
    "content_invoke_tool_text",
)
_OTHER_SPELLINGS: Final = {"content_xml": "unused_200024"}
_LONGEST_AUTHOR: Final = 64
_DEEPEST: Final = 64


class InklingFraming:
    """Renders messages to token ids, and reads what the model answers to them.

    Args:
        tokenizer: has the framing's special tokens.

    Raises:
        ShardError: it lacks one that is always needed.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added, special = tokenizer.added, tokenizer.special_ids
        self._ids: dict[str, int] = {}
        for name in (*_NEEDED, *_OPTIONAL):
            found = added.get(f"<|{name}|>", added.get(f"<|{_OTHER_SPELLINGS.get(name, name)}|>"))
            # What is not special could be spelled in a user's text.
            if found is not None and found in special:
                self._ids[name] = found
            elif name in _NEEDED:
                raise ShardError(f"the tokenizer has no special token '<|{name}|>'")

    @property
    def end_ids(self) -> frozenset[int]:
        """The ids that end the model's turn."""
        ends = ("content_model_end_sampling", "endoftext")
        return frozenset(self._ids[name] for name in ends if name in self._ids)

    @property
    def opening(self) -> int:
        """The id that a prompt ends with for the model to answer."""
        return self._ids["message_model"]

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        effort: Effort | None = None,
    ) -> list[int]:
        """The token ids of a conversation, up to where the model goes on.

        Args:
            messages: objects with `role` and `content` (text), and perhaps `name`, `reasoning_content`,
                `tool_calls`.
            tools: descriptions of functions.
            effort: how much to reason.

        Raises:
            RequestError: BAD_REQUEST for what this framing, or this tokenizer, has no form for.
        """
        ids: list[int] = []
        if tools:
            declared = json.dumps(list(tools), ensure_ascii=False, sort_keys=True, separators=(",", ":"))
            ids += self._message("message_system", "tool_declare", "content_xml", declared)
        leading = _leading_systems(messages)
        for message in messages[:leading]:
            ids += self._turn(message)
        if effort is not None:
            words = f"Thinking effort level: {_effort_value(effort)}"
            ids += self._message("message_system", "", "content_text", words)
        for place, message in enumerate(messages[leading:], leading + 1):
            ids += self._turn(message)
            ends = place == len(messages) or messages[place]["role"] != "assistant"
            if message["role"] == "assistant" and ends:
                ids.append(self._ids["content_model_end_sampling"])
        return [*ids, self.opening]

    def splitter(self, hidden: Collection[int] = ()) -> FramedSplitter:
        """What reads the model's answer to a rendered conversation."""
        return FramedSplitter(self._tokenizer, self._ids, hidden)

    def _turn(self, message: Mapping[str, object]) -> list[int]:
        role = _ROLES[str(message["role"])]
        author = str(message.get("name") or "")
        ids: list[int] = []
        if reasoning := message.get("reasoning_content"):
            ids += self._message(role, author, "content_thinking", str(reasoning))
        calls = message.get("tool_calls")
        content = message.get("content")
        if content or not (ids or calls):
            ids += self._message(role, author, "content_text", str(content or ""))
        for call in calls if isinstance(calls, Sequence) else ():
            name, arguments = _call_of(call)
            text = json.dumps({"name": name, "args": arguments}, ensure_ascii=False, separators=(",", ":"))
            ids += self._message(role, name, "content_invoke_tool_json", text)
        return ids

    def _message(self, role: str, author: str, marker: str, text: str) -> list[int]:
        plain = self._tokenizer.encode
        return [
            self._id(role),
            *(plain(author, specials=False) if author else ()),
            self._id(marker),
            *plain(text, specials=False),
            self._id("end_message"),
        ]

    def _id(self, name: str) -> int:
        if name not in self._ids:
            _refuse(f"this model's tokenizer has no '<|{name}|>', which these messages need")
        return self._ids[name]


class _Kind(Enum):
    """What a message's content is."""

    HEADER = auto()
    TEXT = auto()
    REASONING = auto()
    CALL = auto()
    OTHER = auto()


_CONTENTS: Final = {
    "content_text": _Kind.TEXT,
    "content_thinking": _Kind.REASONING,
    "content_invoke_tool_json": _Kind.CALL,
    "content_invoke_tool_text": _Kind.CALL,
    "content_image": _Kind.OTHER,
    "content_audio_input": _Kind.OTHER,
    "content_tool_error": _Kind.OTHER,
    "content_xml": _Kind.OTHER,
}
_HEADERS: Final = ("message_user", "message_model", "message_system", "message_tool", "end_message")
_PARTS: Final = {_Kind.TEXT: Part.TEXT, _Kind.REASONING: Part.REASONING}


class FramedSplitter:
    """Tells the parts of an answer apart by the framing's tokens.

    Text before any content marker is an author's name. Where it is too long for one, or no marker follows at
    all, it is the answer.

    Args:
        tokenizer: the model's.
        ids: of the framing's tokens, by name.
        hidden: ids that show nothing, beside the special ones.
    """

    def __init__(self, tokenizer: Tokenizer, ids: Mapping[str, int], hidden: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._marks = {ids[name]: kind for name, kind in _CONTENTS.items() if name in ids}
        self._marks |= {ids[name]: _Kind.HEADER for name in _HEADERS if name in ids}
        self._kind = _Kind.HEADER
        self._marked = False
        self._author = ""
        self._call = ""
        self._begun: set[Part] = set()
        self._gaps: set[Part] = set()
        self._detokenizer = Detokenizer(tokenizer, hidden)
        self.calls: tuple[ToolCall, ...] = ()

    def add(self, token_id: int) -> list[tuple[Part, str]]:
        """See `Splitter`."""
        kind = self._marks.get(token_id)
        if kind is not None:
            return self._begin(kind)
        return self._show(self._detokenizer.add(token_id))

    def extend(self, token_ids: Iterable[int]) -> list[tuple[Part, str]]:
        """See `Splitter`."""
        return [piece for token_id in token_ids for piece in self.add(token_id)]

    def finish(self) -> list[tuple[Part, str]]:
        """See `Splitter`."""
        return self._begin(_Kind.HEADER)

    def _begin(self, kind: _Kind) -> list[tuple[Part, str]]:
        """What stood open is over."""
        shown: list[tuple[Part, str]] = []
        if self._kind is _Kind.CALL:
            self.calls = (*self.calls, _read_call(self._author, self._call))
            self._call = ""
        elif self._kind is _Kind.HEADER and kind is _Kind.HEADER and not self._marked and self._author:
            shown = [(Part.TEXT, self._author)]
        if kind is _Kind.HEADER:
            self._author = ""
        else:
            self._marked = True
        self._kind = kind
        self._gaps |= self._begun
        self._detokenizer = Detokenizer(self._tokenizer, self._hidden)
        return shown

    def _show(self, text: str) -> list[tuple[Part, str]]:
        match self._kind:
            case _Kind.HEADER:
                self._author += text
                if len(self._author) <= _LONGEST_AUTHOR and "\n" not in self._author:
                    return []
                self._kind, text = _Kind.TEXT, self._author
            case _Kind.CALL:
                self._call += text
                return []
            case _Kind.OTHER:
                return []
        part = _PARTS[self._kind]
        if not text:
            return []
        if part in self._gaps:
            text = "\n\n" + text
        self._gaps.discard(part)
        self._begun.add(part)
        return [(part, text)]


def _leading_systems(messages: Sequence[Mapping[str, object]]) -> int:
    """How many messages of the system stand in front."""
    others = (place for place, each in enumerate(messages) if each["role"] not in ("system", "developer"))
    return next(others, len(messages))


def _effort_value(effort: Effort) -> float:
    value = EFFORTS.get(effort) if isinstance(effort, str) else float(effort)
    if value is None or not 0.0 <= value <= 0.99:
        _refuse(f"the reasoning effort is {effort!r}: expected 0.0 to 0.99, or one of {', '.join(EFFORTS)}")
    return round(value, 2)


def _call_of(call: object) -> tuple[str, object]:
    """Name and arguments of a call in a request's messages."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        _refuse(
            "a call in 'tool_calls' names no function: expected {'function': {'name': ..., 'arguments': ...}}"
        )
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = _parsed(arguments)
        except ValueError:
            # As it came: the model may have written it so.
            return str(function["name"]), arguments
    return str(function["name"]), arguments


def _parsed(text: str) -> object:
    """The JSON value in a text.

    Raises:
        ValueError: it is none, or none that every reader of a reply takes: infinities, halves of
            characters, or lists within lists without end.
    """
    value: object = orjson.loads(text)
    level = [value]
    for _ in range(_DEEPEST):
        level = [inner for each in level if isinstance(each, dict | list) for inner in _inside(each)]
        if not level:
            return value
    raise ValueError(f"lists and objects stand in one another more than {_DEEPEST} deep")


def _inside(value: dict[str, object] | list[object]) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value


def _read_call(author: str, text: str) -> ToolCall:
    """A call as the model wrote it."""
    try:
        value = _parsed(text)
    except ValueError:
        return ToolCall(author, text)
    if isinstance(value, dict) and isinstance(value.get("name", author), str):
        return ToolCall(value.get("name", author), value.get("args", {}))
    return ToolCall(author, value)


def _refuse(message: str) -> NoReturn:
    raise RequestError(ErrorCode.BAD_REQUEST, message)
