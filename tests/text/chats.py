"""Conversations and templates of our own that use what published chat templates use."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from cascadia_p2p.sample.tokenizer import tokenizer_json
from cascadia_p2p.text.tokenizer import Tokenizer

HERE = Path(__file__).resolve().parent
GOLDEN = HERE / "golden_chats.json"
TEMPLATES = {
    path.stem: path.read_text(encoding="utf-8") for path in sorted((HERE / "templates").glob("*.jinja"))
}
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Wetter für <Ort> & 'Tag' 🌦",
        "parameters": {"type": "object", "properties": {"ort": {"type": "string"}}, "required": ["ort"]},
    },
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"ort": "Zürich", "days": 2}}}


@dataclass(frozen=True)
class Talk:
    """What a template is given."""

    name: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    generation: bool = True


def said(*pairs: tuple[str, str], **more: Any) -> list[dict[str, Any]]:
    return [{"role": role, "content": content, **more} for role, content in pairs]


TALKS = [
    Talk("one", said(("user", "Hello"))),
    Talk("system", said(("system", "  Be brief.\n"), ("user", "  Grüß Gott & <b>hi</b>  "))),
    Talk("turns", said(("user", "a"), ("assistant", "  b\n"), ("user", "漢字 🙂"))),
    Talk("over", said(("user", "a"), ("assistant", "b")), generation=False),
    Talk("twice", said(("user", "a"), ("user", "b"))),
    Talk("developer", said(("developer", "Rules."), ("user", "a"))),
    Talk("tools", said(("user", "Wetter?")), tools=[TOOL]),
    Talk(
        "called",
        [
            *said(("system", "S"), ("user", "Wetter?")),
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "name": "weather", "content": '{"c": 21}', "tool_call_id": None},
            {"role": "tool", "name": "weather", "content": "sunny"},
            *said(("assistant", "Schön."), ("user", "Danke")),
        ],
        tools=[TOOL],
    ),
    Talk("thought", said(("user", "1+1?"), ("assistant", "<think>\nhm\n</think>\n\n2"), ("user", "sure?"))),
    Talk(
        "reasoned",
        [*said(("user", "1+1?")), {"role": "assistant", "content": "2", "reasoning_content": "\nhm\n"}],
        generation=False,
    ),
    Talk("quick", said(("user", "a")), options={"enable_thinking": False, "reasoning_effort": "low"}),
    Talk("wild", said(("user", "a")), options={"reasoning_effort": "wild"}),
    Talk("code", said(("user", "```py\ndef f():\n\treturn '{{ x }}' # {% if %}\n```"))),
]

SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|header|>", "<|/header|>")


def tokenizer_content() -> dict[str, Any]:
    """One token a byte, the markers of the templates, and tags for reasoning that are not special."""
    content: dict[str, Any] = dict(tokenizer_json(256))
    content["added_tokens"] = [
        {
            "id": 256 + place,
            "content": name,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": name in SPECIALS,
        }
        for place, name in enumerate((*SPECIALS, "<think>", "</think>"))
    ]
    return content


def tokenizer() -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(tokenizer_content())))
