"""Which ids a request becomes, and which ids end its answer."""

from __future__ import annotations

import json

import pytest
import tokenizers

from cascadia_p2p.errors import ErrorCode, RequestError
from cascadia_p2p.node.answers import LONG_TEXT, AnswerDesk, ModelFacts
from cascadia_p2p.ring.scheduler import Stream
from cascadia_p2p.sample.tokenizer import tokenizer_json
from cascadia_p2p.text.chat import Chat
from cascadia_p2p.text.template import ChatTemplate
from cascadia_p2p.text.tokenizer import Tokenizer
from cascadia_p2p.types import StreamId
from cascadia_p2p.wire.client import ChatMessage, FinishReason, GenerateRequest

TOKENIZER = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(280))))
PROMPT = GenerateRequest(prompt="a")
CHAT = GenerateRequest(messages=(ChatMessage(role="user", content="a"),))
TURN, SAMPLING = TOKENIZER.special_id("<|audio_end|>"), TOKENIZER.special_id("<|content_model_end_sampling|>")
TEXT_END, UNUSED = TOKENIZER.special_id("<|endoftext|>"), TOKENIZER.special_id("<|unused_275|>")


def ends(request: GenerateRequest, config: set[int], chat: Chat) -> frozenset[int]:
    desk = AnswerDesk(ModelFacts(280, frozenset(config)), TOKENIZER, chat)
    return desk.accept(request, StreamId(1))[0].stop_ids


def test_dll_06_exo_18_end_ids_come_from_all_of_the_models_files() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}<|audio_end|>\n{% endfor %}")
    chat = Chat(TOKENIZER, template, eos="<|unused_275|>")
    # A prompt ends where transformers' `generate` would end it: by the config's ids, all of them.
    assert ends(PROMPT, {7, 9}, chat) == {7, 9}
    # Where the config names none, by the tokenizer's own; before no end at all.
    assert ends(PROMPT, set(), chat) == {UNUSED}
    assert ends(PROMPT, set(), Chat(TOKENIZER)) == set()
    # A conversation ends by the template's end of turn too, or by the framing's.
    assert ends(CHAT, {7, 9}, chat) == {7, 9, UNUSED, TURN, SAMPLING, TEXT_END}
    assert ends(CHAT, {7}, Chat(TOKENIZER)) == {7, SAMPLING, TEXT_END}
    more = CHAT.model_copy(update={"stop_token_ids": (3,), "ignore_eos": True})
    assert ends(more, {7}, chat) == {3}


@pytest.mark.parametrize("request_", [PROMPT, CHAT, PROMPT.model_copy(update={"ignore_eos": True})])
def test_exo_18_end_ids_are_never_shown_even_when_they_do_not_end(request_: GenerateRequest) -> None:
    desk = AnswerDesk(ModelFacts(280, frozenset({ord("#")})), TOKENIZER, Chat(TOKENIZER))
    for stream in (False, True):
        _, answer = desk.accept(request_.model_copy(update={"stream": stream}), StreamId(1))
        answer.take([*b"ab#c\n\n", SAMPLING, *b"d#"])
        piece = answer.finish()
        assert piece is not None
        assert piece.text == "abc\n\nd"


def test_dll_08_a_tokenizer_of_another_model_is_noticed() -> None:
    desk = AnswerDesk(ModelFacts(100, frozenset()), TOKENIZER, Chat(TOKENIZER))
    assert desk.accept(PROMPT, StreamId(1))[0].prompt == (97,)
    for request, words in (
        (GenerateRequest(prompt="ü", id="x"), "the tokenizer gives 195: this model's ids are 0 to 99"),
        (GenerateRequest(token_ids=(5, 100), id="x"), "field 'token_ids' holds 100"),
        (GenerateRequest(prompt="a", stop_token_ids=(100,), id="x"), "field 'stop_token_ids' holds 100"),
    ):
        with pytest.raises(RequestError, match=words) as refused:
            desk.accept(request, StreamId(1))
        assert (refused.value.code, refused.value.request_id) == (ErrorCode.BAD_REQUEST, "x")


def test_an_empty_conversation_is_refused() -> None:
    desk = AnswerDesk(ModelFacts(280, frozenset()), TOKENIZER, Chat(TOKENIZER, ChatTemplate("{# nothing #}")))
    with pytest.raises(RequestError, match="the model's chat template writes nothing"):
        desk.accept(CHAT, StreamId(1))


def test_long_prompts_are_known_by_their_text() -> None:
    desk = AnswerDesk(ModelFacts(280, frozenset()), TOKENIZER)
    assert not desk.is_long(PROMPT)
    assert not desk.is_long(GenerateRequest(token_ids=(1,) * (2 * LONG_TEXT)))
    assert desk.is_long(GenerateRequest(prompt="a" * (LONG_TEXT + 1)))
    half = ChatMessage(role="user", content="a" * (LONG_TEXT // 2 + 1))
    assert desk.is_long(GenerateRequest(messages=(half, half)))
    assert desk.is_long(GenerateRequest(messages=(ChatMessage(role="user", content="a"),) * 200))


def test_a_models_own_template_is_run_apart_however_short_the_messages() -> None:
    templated = Chat(TOKENIZER, ChatTemplate("{{ messages[0].content }}"))
    assert AnswerDesk(ModelFacts(280, frozenset()), TOKENIZER, templated).is_long(CHAT)
    assert not AnswerDesk(ModelFacts(280, frozenset()), TOKENIZER, templated).is_long(PROMPT)
    assert not AnswerDesk(ModelFacts(280, frozenset()), TOKENIZER, Chat(TOKENIZER)).is_long(CHAT)


def test_what_an_answer_is_read_with_says_how_it_ended() -> None:
    desk = AnswerDesk(ModelFacts(280, frozenset({SAMPLING})), TOKENIZER, Chat(TOKENIZER))
    accepted, answer = desk.accept(
        GenerateRequest(prompt="a", stop=("b\n",), stream=True, id="i"), StreamId(1)
    )
    answer.take(b"ab")
    first = answer.piece()
    assert first is not None
    assert (first.seq, first.text, first.token_ids) == (1, "a", tuple(b"ab"))
    answer.take(b"\nxyz")
    assert answer.stopped
    last = answer.finish()
    assert last is not None
    assert (last.seq, last.text, last.token_ids) == (2, "", tuple(b"\n"))
    reply = answer.reply(Stream(accepted, [*accepted.prompt, *b"ab\nxyz"], 0.0), FinishReason.STOP)
    assert (reply.id, reply.seq, reply.final, reply.text, reply.token_ids) == (
        "i",
        3,
        True,
        "a",
        tuple(b"ab\n"),
    )
    assert reply.usage.completion_tokens == 3
