from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import tokenizers
from chats import tokenizer as tagged_tokenizer
from chats import tokenizer_content
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cascadia_p2p.errors import RequestError, ShardError
from cascadia_p2p.sample.tokenizer import tokenizer_json
from cascadia_p2p.text.framing import EFFORTS, InklingFraming
from cascadia_p2p.text.reply import Piece, PlainSplitter, ReplyReader, Splitter, TaggedSplitter, ToolCall
from cascadia_p2p.text.tokenizer import Tokenizer
from cascadia_p2p.wire.client import EFFORT_WORDS

FRAMED = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(280))))
FRAMING = InklingFraming(FRAMED)
TAGGED = tagged_tokenizer()


def words(text: str) -> list[int]:
    return FRAMED.encode(text, specials=False)


def mark(name: str) -> int:
    return FRAMED.special_id(f"<|{name}|>")


def read(splitter: Splitter, ids: Sequence[int], stops: Sequence[str] = ()) -> tuple[Piece, list[Piece]]:
    """What is seen in the end, and token by token."""
    reader = ReplyReader(splitter, stops)
    pieces = []
    for id_ in ids:
        reader.add(id_)
        pieces.append(reader.take())
    reader.finish()
    pieces.append(reader.take())
    whole = Piece("".join(p.text for p in pieces), "".join(p.reasoning for p in pieces))
    return whole, pieces


# --- think tags ---------------------------------------------------------------------------------------------


def expected_of(text: str, opened: bool) -> Piece:
    """An answer whose tags stand where they should."""
    begun = text.lstrip()
    if not opened:
        if not begun.startswith("<think>"):
            return Piece(text)
        text = begun.removeprefix("<think>")
    reasoning, closed, rest = text.partition("</think>")
    return Piece(rest.lstrip() if closed else "", reasoning.strip())


FRAGMENTS = st.sampled_from(
    ["<think>", "</think>", "<thi", "nk>", "</", "think>", "hm", "\n", " ", "ü🙂", "<", "2"]
)


@given(st.lists(FRAGMENTS, max_size=10), st.booleans())
@settings(max_examples=200, deadline=None)
@example(["\n", "<think>", "\n", "hm", "\n", "</think>", "\n", "\n", "2"], False)
@example(["<think>", "</think>", "2"], False)
@example(["<thi"], False)
def test_any_answer_with_tags_is_split_like_the_whole(fragments: list[str], opened: bool) -> None:
    text = "".join(fragments)
    expected = expected_of(text, opened)
    # As plain bytes, and as the tokens that the vocabulary has for tags.
    for ids in (list(text.encode()), TAGGED.encode(text, affixes=False)):
        whole, pieces = read(TaggedSplitter(TAGGED, opened=opened), ids)
        assert whole == expected
        seen = Piece()
        for piece in pieces:
            # Reasoning is over when the answer begins.
            assert not (piece.reasoning and seen.text)
            seen = Piece(seen.text + piece.text, seen.reasoning + piece.reasoning)
        splitter = ReplyReader(TaggedSplitter(TAGGED, opened=opened))
        splitter.extend(ids)
        splitter.finish()
        assert splitter.take() == expected


def test_nothing_but_a_possible_tag_is_held_back() -> None:
    ids = list(b"<think>a </b> c</think> d </think>")
    _, pieces = read(TaggedSplitter(TAGGED), ids)
    seen = Piece()
    text = bytearray()
    for id_, piece in zip(ids, pieces, strict=False):
        text.append(id_)
        seen = Piece(seen.text + piece.text, seen.reasoning + piece.reasoning)
        if text == b"<think>a </":
            assert seen.reasoning == "a"
        if text == b"<think>a </b":
            assert seen.reasoning == "a </b"
    assert seen == Piece("d </think>", "a </b> c")


def test_tags_that_are_special_tokens_are_seen_too() -> None:
    content = tokenizer_content()
    for token in content["added_tokens"]:
        token["special"] = True
    special = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(content)))
    ids = special.encode("<think>hm</think>so<|im_end|>", affixes=False)
    assert len(ids) == 2 + 2 + 2 + 1
    assert read(TaggedSplitter(special), ids)[0] == Piece("so", "hm")
    assert read(TaggedSplitter(special, opened=True), ids[1:])[0] == Piece("so", "hm")
    assert read(PlainSplitter(special), ids)[0] == Piece("hmso")


def test_stop_strings_end_the_text_behind_the_reasoning() -> None:
    ids = TAGGED.encode("<think>a\nb</think>c\nd", specials=False)
    reader = ReplyReader(TaggedSplitter(TAGGED), ["\n"])
    used = 0
    for used, id_ in enumerate(ids, 1):  # noqa: B007 - the number is what counts
        reader.add(id_)
        if reader.stopped:
            break
    assert used == len(ids) - 1
    reader.add(ids[-1])
    reader.finish()
    assert reader.take() == Piece("c", "a\nb")


# --- Inkling's framing --------------------------------------------------------------------------------------


def test_reasoning_answers_and_calls_are_told_apart() -> None:
    ids = [
        *(mark("content_thinking"), *words("hm\n"), mark("end_message"), mark("message_model")),
        *(mark("content_text"), *words("Sie ist 🙂"), mark("end_message"), mark("message_model")),
        *(*words("weather"), mark("content_invoke_tool_json"), *words('{"name":"w","args":{"x":[1]}}')),
        *(mark("end_message"), mark("message_model"), mark("content_thinking"), *words("more")),
        *(mark("end_message"), mark("message_model"), mark("content_text"), *words("Ende")),
        *(
            mark("end_message"),
            mark("message_model"),
            mark("content_xml"),
            *words("<x/>"),
            mark("end_message"),
        ),
        mark("content_model_end_sampling"),
    ]
    splitter = FRAMING.splitter()
    whole, _ = read(splitter, ids)
    assert whole == Piece("Sie ist 🙂\n\nEnde", "hm\n\n\nmore")
    assert splitter.calls == (ToolCall("w", {"x": [1]}),)
    batch = ReplyReader(FRAMING.splitter())
    batch.extend(ids)
    batch.finish()
    assert batch.take() == whole
    assert batch.calls == splitter.calls


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ('{"args":{"x":1}}', ToolCall("author", {"x": 1})),
        ('{"name":3,"args":1}', ToolCall("author", {"name": 3, "args": 1})),
        ("[1]", ToolCall("author", [1])),
        ("no json", ToolCall("author", "no json")),
        ('{"name":"f","ar', ToolCall("author", '{"name":"f","ar')),
    ],
)
def test_calls_that_are_not_as_they_should_be(text: str, call: ToolCall) -> None:
    splitter = FRAMING.splitter()
    whole, _ = read(splitter, [*words("author"), mark("content_invoke_tool_text"), *words(text)])
    assert (whole, splitter.calls) == (Piece(), (call,))


@pytest.mark.parametrize("text", ["no marker", "two\nlines", "long " * 30, ""])
def test_an_answer_without_any_marker_is_shown(text: str) -> None:
    for end in ([], [mark("end_message"), mark("content_model_end_sampling")]):
        assert read(FRAMING.splitter(), [*words(text), *end])[0] == Piece(text)


def test_an_authors_name_is_not_shown() -> None:
    ids = [
        *words("me"),
        mark("content_text"),
        *words("x"),
        mark("end_message"),
        mark("message_model"),
        *words("me"),
    ]
    assert read(FRAMING.splitter(), ids)[0] == Piece("x")


def test_half_a_character_does_not_leak_into_the_next_part() -> None:
    ids = [mark("content_thinking"), *words("🙂")[:2], mark("content_text"), *words("🙂")[2:], *words("ü")]
    assert read(FRAMING.splitter(), ids)[0] == Piece("\ufffd\ufffdü")


@given(st.lists(st.one_of(st.sampled_from([*range(256, 280)]), st.integers(0, 255)), max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_ids_are_read_alike_one_by_one_and_together(ids: list[int]) -> None:
    whole, _ = read(FRAMING.splitter(), ids)
    reader = ReplyReader(FRAMING.splitter())
    reader.extend(ids)
    reader.finish()
    assert reader.take() == whole
    assert "<|" not in whole.text or b"<|" in bytes(id_ for id_ in ids if id_ < 256)


def spelled(ids: Sequence[int]) -> str:
    return FRAMED.decode(ids, specials=True)


def test_the_frame_of_a_whole_conversation() -> None:
    call = {"function": {"name": "w", "arguments": '{"ort": "Zürich"}'}}
    ids = FRAMING.render(
        [
            {"role": "system", "content": "Be kind."},
            {"role": "developer", "content": "Ü"},
            {"role": "user", "name": "Ann", "content": "Hi"},
            {"role": "assistant", "reasoning_content": "hm", "content": "", "tool_calls": [call]},
            {"role": "assistant", "content": "wait"},
            {"role": "tool", "name": "w", "content": "21"},
            {"role": "system", "content": "late"},
        ],
        tools=[{"name": "w", "a": {"z": 1, "b": "ü"}}],
        effort=0.7,
    )
    assert spelled(ids) == (
        '<|message_system|>tool_declare<|content_xml|>[{"a":{"b":"ü","z":1},"name":"w"}]<|end_message|>'
        "<|message_system|><|content_text|>Be kind.<|end_message|>"
        "<|message_system|><|content_text|>Ü<|end_message|>"
        "<|message_system|><|content_text|>Thinking effort level: 0.7<|end_message|>"
        "<|message_user|>Ann<|content_text|>Hi<|end_message|>"
        "<|message_model|><|content_thinking|>hm<|end_message|>"
        '<|message_model|>w<|content_invoke_tool_json|>{"name":"w","args":{"ort":"Zürich"}}<|end_message|>'
        "<|message_model|><|content_text|>wait<|end_message|><|content_model_end_sampling|>"
        "<|message_tool|>w<|content_text|>21<|end_message|>"
        "<|message_system|><|content_text|>late<|end_message|>"
        "<|message_model|>"
    )


def _with(message: dict[str, Any], text: str) -> dict[str, Any]:
    """The same message with other texts in it."""
    call = {"function": {"name": text, "arguments": {text: text}}}
    fields = {"name": text, "content": text, "reasoning_content": text, "tool_calls": [call]}
    return {key: fields.get(key, value) for key, value in message.items()}


@given(st.lists(st.sampled_from([*FRAMED.added, "a", "ü", "<|", "|>"]), max_size=6).map("".join))
def test_no_text_can_forge_a_part(text: str) -> None:
    call = {"function": {"name": text, "arguments": {text: text}}}
    for message in (
        {"role": "user", "name": text, "content": text},
        {"role": "system", "content": text},
        {"role": "assistant", "content": text, "reasoning_content": text or "-", "tool_calls": [call]},
        {"role": "tool", "name": text, "content": text},
    ):
        tools = [{"name": text}]
        forged = FRAMING.render([message], tools=tools)
        innocent = FRAMING.render([_with(message, "-")], tools=[{"name": "-"}])
        if text:
            assert [id_ for id_ in forged if id_ > 255] == [id_ for id_ in innocent if id_ > 255]


@pytest.mark.parametrize(("effort", "words_"), [(0, "0.0"), (0.99, "0.99"), (0.123, "0.12"), ("none", "0.0")])
def test_cas_20_effort_is_a_number_or_a_word(effort: float | str, words_: str) -> None:
    ids = FRAMING.render([{"role": "user", "content": "a"}], effort=effort)
    assert spelled(ids).startswith(
        f"<|message_system|><|content_text|>Thinking effort level: {words_}<|end_message|><|message_user|>"
    )


def test_cas_20_the_words_are_those_of_the_protocol() -> None:
    assert tuple(EFFORTS) == EFFORT_WORDS
    assert sorted(EFFORTS.values()) == list(EFFORTS.values())
    for wrong in ("wild", 1.0, -0.1):
        with pytest.raises(RequestError, match=r"expected 0\.0 to 0\.99, or one of none, minimal"):
            FRAMING.render([{"role": "user", "content": "a"}], effort=wrong)


def test_frames_need_their_tokens() -> None:
    content: dict[str, object] = dict(tokenizer_json(280))
    added = content["added_tokens"]
    assert isinstance(added, list)

    def without(*names: str, plain: str = "") -> Tokenizer:
        kept = [
            {**token, "special": token["content"] != plain}
            for token in added
            if token["content"] not in names
        ]
        return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps({**content, "added_tokens": kept})))

    for broken in (without("<|message_user|>"), without(plain="<|message_user|>")):
        with pytest.raises(ShardError, match=r"no special token '<\|message_user\|>'"):
            InklingFraming(broken)
    framing = InklingFraming(without("<|message_tool|>", "<|content_xml|>"))
    assert framing.render([{"role": "user", "content": "a"}])
    with pytest.raises(RequestError, match=r"no '<\|message_tool\|>'"):
        framing.render([{"role": "tool", "content": "a"}])
    with pytest.raises(RequestError, match=r"no '<\|content_xml\|>'"):
        framing.render([{"role": "user", "content": "a"}], tools=[{}])
    with pytest.raises(RequestError, match="names no function"):
        framing.render([{"role": "assistant", "content": "a", "tool_calls": [{}]}])
    # Some tokenizers keep the name of an unused token for it.
    renamed = [
        {**token, "content": token["content"].replace("content_xml", "unused_200024")} for token in added
    ]
    other = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps({**content, "added_tokens": renamed})))
    assert InklingFraming(other).render([{"role": "user", "content": "a"}], tools=[{}])
