"""Which ids a request becomes, and which ids end its answer."""

from __future__ import annotations

import json

import pytest
import tokenizers

from cascadia_p2p.errors import ErrorCode, RequestError
from cascadia_p2p.node.answers import LONG_ANSWER, LONG_TEXT, Answer, AnswerDesk, ModelFacts
from cascadia_p2p.ring.scheduler import Score, Stream, StreamRequest
from cascadia_p2p.sample.tokenizer import tokenizer_json
from cascadia_p2p.text.chat import Chat
from cascadia_p2p.text.template import ChatTemplate
from cascadia_p2p.text.tokenizer import Tokenizer
from cascadia_p2p.types import GREEDY, Sampling, StreamId
from cascadia_p2p.wire.client import (
    MAX_REQUEST_BYTES,
    MAX_SCORES,
    ChatMessage,
    FinishReason,
    GenerateReply,
    GenerateRequest,
    decode_request,
)
from cascadia_p2p.wire.frames import MAX_ALTERNATIVES
from cascadia_p2p.wire.model import encode

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


def is_long(desk: AnswerDesk, **fields: object) -> bool:
    data = json.dumps(fields).encode()
    request = decode_request(data)
    assert isinstance(request, GenerateRequest)
    return desk.is_long(request, len(data))


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "a" * LONG_TEXT},
        {"messages": [{"role": "user", "content": "a" * (LONG_TEXT // 2)}] * 2},
        {"messages": [{"role": "user", "content": "a"}] * 200},
        {"messages": [{"role": "assistant", "content": "a", "reasoning": "a" * LONG_TEXT}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a" * LONG_TEXT}}]}]},
        {"messages": [{"role": "user", "content": "a"}], "tools": [{"function": "a" * LONG_TEXT}]},
        {"token_ids": [1], "held": [2] * (LONG_ANSWER + 1), "max_tokens": 2 * LONG_ANSWER, "stream": True},
    ],
    ids=["prompt", "contents", "messages", "reasoning", "tool_calls", "tools", "held"],
)
def test_what_takes_long_to_be_read_is_known_beforehand(fields: dict[str, object]) -> None:
    desk = AnswerDesk(ModelFacts(280, frozenset()), TOKENIZER, Chat(TOKENIZER))
    assert is_long(desk, **fields)


def test_short_requests_and_ids_are_read_at_once() -> None:
    desk = AnswerDesk(ModelFacts(280, frozenset()), TOKENIZER, Chat(TOKENIZER))
    assert not is_long(desk, prompt="a")
    assert not is_long(desk, messages=[{"role": "user", "content": "a"}])
    assert not is_long(desk, token_ids=[1] * (2 * LONG_TEXT))
    assert not is_long(desk, prompt="a", held=[1, 2])


def test_a_models_own_template_is_run_apart_however_short_the_messages() -> None:
    templated = AnswerDesk(
        ModelFacts(280, frozenset()), TOKENIZER, Chat(TOKENIZER, ChatTemplate("{{ messages[0].content }}"))
    )
    assert is_long(templated, messages=[{"role": "user", "content": "a"}])
    assert not is_long(templated, prompt="a")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"token_ids": (1,) * 65}, "the prompt is 65 tokens, and this model was made for 64"),
        ({"prompt": "a" * 65}, "the prompt is 65 tokens, and this model was made for 64"),
        ({"token_ids": (1,), "held": (2,) * 65}, "field 'held' holds 65 ids, and this model was made for 64"),
    ],
)
def test_what_no_ring_of_this_model_could_hold_is_refused(fields: dict[str, object], words: str) -> None:
    desk = AnswerDesk(ModelFacts(280, frozenset(), 64), TOKENIZER)
    with pytest.raises(RequestError, match=words) as refused:
        desk.accept(GenerateRequest.model_validate(fields | {"id": "x"}), StreamId(1))
    assert (refused.value.code, refused.value.request_id) == (ErrorCode.CONTEXT_OVERFLOW, "x")


def test_ids_held_beyond_the_limit_are_refused_before_the_prompt_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: pytest.fail("the prompt was read"))
    desk = AnswerDesk(ModelFacts(280, frozenset()), TOKENIZER)
    with pytest.raises(RequestError, match="'max_tokens' allows 2"):
        desk.accept(GenerateRequest(prompt="a", held=(1, 2, 3), max_tokens=2), StreamId(1))


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


# --- drawn tokens and scores ------------------------------------------------------------------------------


def accept(tokenizer: Tokenizer | None = TOKENIZER, **fields: object) -> tuple[StreamRequest, Answer]:
    desk = AnswerDesk(ModelFacts(280, frozenset()), tokenizer, None)
    return desk.accept(GenerateRequest.model_validate({"token_ids": (97,), **fields}), StreamId(1))


def reply_of(accepted: StreamRequest, answer: Answer) -> GenerateReply:
    answer.finish()
    return answer.reply(Stream(accepted, [*accepted.prompt], 0.0), FinishReason.LENGTH)


def test_a_request_without_a_temperature_is_greedy_and_has_no_seed() -> None:
    for fields in (
        {},
        {"temperature": 0},
        {"temperature": 0.0, "top_k": 3, "top_p": 0.5, "seed": 4},
        {"seed": 4},
    ):
        accepted, answer = accept(**fields)
        assert (accepted.sampling, accepted.alternatives) == (GREEDY, 0)
        reply = reply_of(accepted, answer)
        assert (reply.seed, reply.logprobs) == (None, None)


def test_options_reach_the_stream_and_the_seed_the_reply() -> None:
    accepted, answer = accept(temperature=0.7, top_k=5, top_p=0.25, seed=2**64 - 1, logprobs=3)
    assert accepted.sampling == Sampling(0.7, 5, 0.25, 2**64 - 1)
    assert accepted.alternatives == 3
    assert reply_of(accepted, answer).seed == 2**64 - 1


def test_a_missing_seed_is_drawn_once_and_told() -> None:
    seeds = set()
    for _ in range(20):
        accepted, answer = accept(temperature=1)
        assert accepted.sampling == Sampling(1.0, 0, 1.0, accepted.sampling.seed)
        assert reply_of(accepted, answer).seed == accepted.sampling.seed
        assert 0 <= accepted.sampling.seed < 2**53
        seeds.add(accepted.sampling.seed)
    assert len(seeds) == 20


def test_pieces_and_reply_hold_the_scores_of_their_tokens() -> None:
    accepted, answer = accept(logprobs=2, stream=True)
    answer.take(b"a", (Score(-0.123456789, ((97, -0.123456789), (0xC3, -2.5))),))
    first = answer.piece()
    assert first is not None
    assert first.logprobs is not None
    (score,) = first.logprobs
    assert (score.token_id, score.token, score.logprob) == (97, "a", -0.123457)
    assert score.top_logprobs is not None
    assert [(each.token_id, each.token, each.logprob) for each in score.top_logprobs] == [
        (97, "a", -0.123457),
        # Half a character by itself.
        (0xC3, "\ufffd", -2.5),
    ]
    answer.take([0xC3, 0xBC, SAMPLING], (Score(-1.0), Score(-2.0), Score(float("-inf"))))
    second = answer.finish()
    assert second is not None
    assert second.logprobs is not None
    assert [each.token for each in second.logprobs] == ["\ufffd", "\ufffd", "<|content_model_end_sampling|>"]
    assert second.logprobs[-1].logprob < -1e38
    reply = answer.reply(Stream(accepted, [*accepted.prompt], 0.0), FinishReason.LENGTH)
    assert reply.logprobs == first.logprobs + second.logprobs
    encode(reply)


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_behind_a_stop_string_have_no_score(stream: bool) -> None:
    accepted, answer = accept(logprobs=True, stop=("b\n",), stream=stream)
    answer.take(b"ab\nxyz", [Score(-float(place)) for place in range(6)])
    answer.take(b"q", (Score(-9.0),))
    reply = reply_of(accepted, answer)
    assert (reply.text, reply.token_ids) == ("a", tuple(b"ab\n"))
    assert reply.logprobs is not None
    assert [(each.token, each.logprob, each.top_logprobs) for each in reply.logprobs] == [
        ("a", 0.0, None),
        ("b", -1.0, None),
        ("\n", -2.0, None),
    ]


def test_scores_have_ids_only_where_there_is_no_tokenizer_and_are_left_out_where_not_asked_for() -> None:
    accepted, answer = accept(None, logprobs=1)
    answer.take([5], (Score(-1.0, ((6, -0.5),)),))
    reply = reply_of(accepted, answer)
    assert reply.logprobs is not None
    assert (
        b'"logprobs":[{"token_id":5,"logprob":-1.0,"top_logprobs":[{"token_id":6,"logprob":-0.5}]}]'
        in encode(reply)
    )
    accepted, answer = accept(logprobs=False)
    answer.take(b"a", (Score(-1.0),))
    assert b"logprob" not in encode(reply_of(accepted, answer))


def test_a_reply_with_the_most_scores_can_be_sent() -> None:
    """The longest ids and numbers, and longer texts than all but a few tokens have."""
    count = MAX_SCORES // (1 + MAX_ALTERNATIVES)
    answer = Answer(GenerateRequest(token_ids=(1,), max_tokens=count, logprobs=MAX_ALTERNATIVES), None)
    score = Score(-12.345678, ((2**31 - 1, -12.345678),) * MAX_ALTERNATIVES)
    answer.take([2**31 - 1] * count, [score] * count)
    answer.finish()
    size = len(encode(answer.reply(Stream(accept()[0], [97], 0.0), FinishReason.LENGTH)))
    assert size + MAX_SCORES * len(
        ',"token":"sixty characters in a token are more than nearly all of them have"'
    ) < (MAX_REQUEST_BYTES)
