"""Messages to token ids in the form that the model was trained on, as the files beside its tokenizer say."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from cascadia_p2p.errors import ErrorCode, RequestError, ShardError
from cascadia_p2p.text.framing import EFFORTS, Effort, InklingFraming
from cascadia_p2p.text.reply import CLOSE_TAG, OPEN_TAG, PlainSplitter, Splitter, TaggedSplitter
from cascadia_p2p.text.template import ChatTemplate, JsonObject
from cascadia_p2p.text.tokenizer import Tokenizer

__all__ = ["Chat", "ChatPrompt"]

TEMPLATE_FILE: Final = "chat_template.jinja"
CONFIG_FILE: Final = "tokenizer_config.json"
NAMES_FILE: Final = "special_tokens_map.json"

_MOST_BYTES: Final = 64 << 20
_SEAM: Final = "\ufdd0"
"""Stands in a user's text where it would spell a special token; Unicode keeps it for such use."""

_PROBE: Final = "zq"
"""An answer that no template changes."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as the model takes it.

    Args:
        ids: the prompt.
        opened: it ends within the model's reasoning.
        framed: the answer comes in Inkling's framing.
    """

    ids: tuple[int, ...]
    opened: bool = False
    framed: bool = False


class Chat:
    """How this model chats: by its own template, else by Inkling's framing, else not at all.

    Args:
        tokenizer: the model's.
        template: its chat template, if it has one.
        eos: the spelling of the end-of-sequence token in the tokenizer's own files.
        fault: why there is no template although there is a file.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None = None,
        *,
        eos: str | None = None,
        fault: str | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        try:
            self._framing: InklingFraming | None = InklingFraming(tokenizer)
        except ShardError:
            self._framing = None
        self.fault = fault
        """What is wrong with the model's own template, in a sentence; None when nothing is."""
        self.eos_ids = frozenset(id_ for name, id_ in tokenizer.added.items() if name == eos)
        """What the tokenizer's own files name as the end of a sequence."""
        specials = [re.escape(name) for name, id_ in tokenizer.added.items() if id_ in tokenizer.special_ids]
        longest = sorted((name for name in specials if len(name) > 1), key=len, reverse=True)
        self._special = re.compile("|".join(longest)) if longest else None
        self._tagged = template is not None and CLOSE_TAG in template.source
        self.end_ids = self.eos_ids | self._turn_ends()
        """The ids that end the model's turn."""

    @classmethod
    def load(cls, directory: Path, tokenizer: Tokenizer) -> Self:
        """Read the files beside a tokenizer; those that are missing or damaged only narrow what is served."""
        config: dict[str, object] = {}
        try:
            config = _read_json(directory / NAMES_FILE) | _read_json(directory / CONFIG_FILE)
            source = _template_source(directory, config)
            template = None if source is None else ChatTemplate(source, _named_tokens(config))
        except ShardError as error:
            return cls(tokenizer, eos=_spelling(config.get("eos_token")), fault=str(error))
        return cls(tokenizer, template, eos=_spelling(config.get("eos_token")))

    @property
    def serves(self) -> bool:
        """Whether messages can be taken."""
        return self.fault is None and (self._template is not None or self._framing is not None)

    @property
    def templated(self) -> bool:
        """Whether the model's own template is run for messages."""
        return self._template is not None

    def prompt(
        self,
        messages: Sequence[JsonObject],
        *,
        tools: Sequence[JsonObject] | None = None,
        effort: Effort | None = None,
    ) -> ChatPrompt:
        """The prompt that makes the model answer these messages.

        Args:
            messages: objects with `role` (system, developer, user, assistant, tool) and `content` (text).
            tools: descriptions of functions that the model may call.
            effort: how much to reason, where the model can be told.

        Raises:
            RequestError: BAD_REQUEST when this model can not take messages, or not these.
        """
        if self._template is not None:
            return self._by_template(self._template, messages, tools, effort)
        if self._framing is not None and self.fault is None:
            return ChatPrompt(tuple(self._framing.render(messages, tools=tools, effort=effort)), framed=True)
        reason = self.fault or "this model came without a chat template"
        raise RequestError(
            ErrorCode.BAD_REQUEST, f"{reason}: send 'prompt' or 'token_ids' instead of 'messages'"
        )

    def splitter(self, prompt: ChatPrompt, hidden: Collection[int] = ()) -> Splitter:
        """What tells reasoning and answer apart in the reply to a prompt."""
        hidden = self.end_ids | frozenset(hidden)
        if prompt.framed and self._framing is not None:
            return self._framing.splitter(hidden)
        if self._tagged or prompt.opened:
            return TaggedSplitter(self._tokenizer, hidden, opened=prompt.opened)
        return PlainSplitter(self._tokenizer, hidden)

    def _by_template(
        self,
        template: ChatTemplate,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject] | None,
        effort: Effort | None,
    ) -> ChatPrompt:
        seamed = [self._seamed(_known_role(message, template)) for message in messages]
        text = template.render(
            [message for message in seamed if isinstance(message, dict)],
            tools=None
            if tools is None
            else [tool for tool in map(self._seamed, tools) if isinstance(tool, dict)],
            options=_effort_options(effort),
        )
        ids: list[int] = []
        for piece in text.split(_SEAM):
            ids += self._tokenizer.encode(piece, affixes=False)
        framed = self._framing is not None and ids[-1:] == [self._framing.opening]
        return ChatPrompt(tuple(ids), opened=text.rstrip().endswith(OPEN_TAG), framed=framed)

    def _seamed(self, value: object) -> object:
        """The same with every special token that is spelled in its texts cut apart."""
        if isinstance(value, str):
            if self._special is None:
                return value
            return self._special.sub(lambda found: found[0][0] + _SEAM + found[0][1:], value)
        if isinstance(value, Mapping):
            return {key: self._seamed(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._seamed(item) for item in value]
        return value

    def _turn_ends(self) -> frozenset[int]:
        """What closes an assistant's message in the model's own template, or in the framing."""
        ends: frozenset[int] = frozenset()
        if self._framing is not None:
            ends |= self._framing.end_ids
        if self._template is None:
            return ends
        spoken = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}]
        try:
            text = self._template.render(spoken, generation=False)
        except RequestError:
            return ends
        behind = text.rpartition(_PROBE)[2].lstrip()
        names = [name for name in self._tokenizer.added if behind.startswith(name)]
        return ends | {self._tokenizer.added[name] for name in sorted(names, key=len)[-1:]}


def _known_role(message: JsonObject, template: ChatTemplate) -> JsonObject:
    """The message with the role that the template knows: few tell developers and system apart."""
    if message["role"] == "developer" and "developer" not in template.source:
        return {**message, "role": "system"}
    return message


def _effort_options(effort: Effort | None) -> dict[str, object]:
    """The variables by which templates that can be told hear of it."""
    if effort is None:
        return {}
    if isinstance(effort, str) and effort not in EFFORTS:
        text = f"the reasoning effort is {effort!r}: expected 0.0 to 0.99, or one of {', '.join(EFFORTS)}"
        raise RequestError(ErrorCode.BAD_REQUEST, text)
    return {"reasoning_effort": effort, "enable_thinking": effort not in ("none", 0.0)}


def _template_source(directory: Path, config: JsonObject) -> str | None:
    """The template: a file of its own counts before the one in the config, which may be a list of several."""
    path = directory / TEMPLATE_FILE
    if path.is_file():
        try:
            return _read(path).decode()
        except UnicodeDecodeError:
            raise ShardError(f"{TEMPLATE_FILE} is not text in UTF-8") from None
    given = config.get("chat_template")
    if isinstance(given, list):
        named = {str(each.get("name")): each.get("template") for each in given if isinstance(each, Mapping)}
        given = named.get("default")
    if given is None or isinstance(given, str):
        return given
    raise ShardError(f"{CONFIG_FILE} has a 'chat_template' that is no text")


def _named_tokens(config: JsonObject) -> dict[str, str]:
    """The variables `bos_token`, `eos_token` and their like."""
    named = {key: _spelling(value) for key, value in config.items() if key.endswith("_token")}
    return {key: value for key, value in named.items() if value is not None}


def _spelling(token: object) -> str | None:
    """A token's text, which may stand in an object with its properties."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _read_json(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read(path))
    except (ValueError, RecursionError):
        raise ShardError(f"{path.name} is not JSON") from None
    if not isinstance(value, dict):
        raise ShardError(f"{path.name} is not a JSON object")
    return value


def _read(path: Path) -> bytes:
    try:
        if (size := path.stat().st_size) > _MOST_BYTES:
            raise ShardError(f"{path.name} has {size} bytes: at most {_MOST_BYTES} are read")
        return path.read_bytes()
    except OSError as error:
        raise ShardError(f"{path.name} can not be read: {error.strerror}") from error
