"""From a client's request to a stream of token ids, and from the stream's tokens to pieces and the reply."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn, Self, cast

from pydantic import JsonValue

from cascadia_p2p.errors import ErrorCode, RequestError
from cascadia_p2p.ring.scheduler import Score, Stream, StreamRequest
from cascadia_p2p.text.chat import Chat
from cascadia_p2p.text.reply import Piece, PlainSplitter, ReplyReader, Splitter
from cascadia_p2p.text.tokenizer import Tokenizer
from cascadia_p2p.types import GREEDY, Sampling, StreamId
from cascadia_p2p.wire.messages import (
    ChatMessage,
    FinishReason,
    GenerateReply,
    GenerateRequest,
    ScoredToken,
    StreamPiece,
    Timings,
    TokenScore,
    ToolCall,
    Usage,
)

LONG_TEXT: Final = 20_000
"""Bytes of a request with text from which turning that into ids would hold up an event loop."""

LONG_ANSWER: Final = 4000
"""Ids of an answer, held or known, from which turning them into text would do so."""

LONG_TALK: Final = 100
"""Messages from which framing them would do so, however short they are."""

ID_BYTES: Final = 40
"""A token id's memory, in a tuple."""

SEED_BITS: Final = 53
"""Of the seeds that are drawn here: as many as the numbers of any JSON reader keep."""

_LOWEST: Final = -3.4e38

_READ: Final = {"prompt": None, "token_ids": None, "messages": None, "tools": None, "held": ()}
"""What is left of a request's fields once it has become ids."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the head must know of the model to judge a request.

    Args:
        vocab: valid token ids are 0 to vocab - 1.
        eos_ids: the ids that end an answer; may be empty.
        context: positions that it was made for; no ring has room for more of a stream.
    """

    vocab: int
    eos_ids: frozenset[int]
    context: int = 2**63 - 1


class Answer:
    """One answer as it grows.

    Args:
        request: what it answers.
        reader: turns its tokens into text; None for a model without a tokenizer.
        tokenizer: names the tokens whose logprobs are asked for.
        seed: what its tokens are drawn with; None when none is drawn.
    """

    def __init__(
        self,
        request: GenerateRequest,
        reader: ReplyReader | None,
        tokenizer: Tokenizer | None = None,
        seed: int | None = None,
    ) -> None:
        self.request = request
        """What it answers."""
        self._reader = reader
        self._tokenizer = tokenizer
        self.seed = seed
        self.ids: list[int] = []
        """All that count so far."""
        self.scores: list[Score] = []
        """Of the ids, as many, if logprobs were asked for."""
        self._scores: list[TokenScore] = []
        self._told = 0
        self._seq = 0
        self._shown: list[Piece] = []
        # A whole answer is turned into text at once; only who must know it earlier pays for each token.
        self._eager = request.stream or bool(request.stop)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended it."""
        return self._reader is not None and self._reader.stopped

    def take(self, tokens: Iterable[int], scores: Iterable[Score] = ()) -> None:
        """Add tokens, and what they scored, as they come; those behind a stop string do not count."""
        known = len(self.ids)
        self._add(tokens)
        if self.request.logprobs is not None:
            self._score(self.ids[known:], scores)

    def _score(self, ids: Iterable[int], scores: Iterable[Score]) -> None:
        for token, score in zip(ids, scores, strict=False):
            self.scores.append(score)
            self._scores.append(self._scored(token, score))

    def _add(self, tokens: Iterable[int]) -> None:
        if not self._eager:
            self.ids += tokens
            return
        for token in tokens:
            if self.stopped:
                return
            self.ids.append(token)
            if self._reader is not None:
                self._reader.add(token)

    def hold(self, ids: Iterable[int]) -> None:
        """Begin with ids that the client has already, and with the text that they make visible."""
        self._add(ids)
        self._take()
        self._told = len(self.ids)

    def replay(self, ids: Sequence[int], scores: Sequence[Score], held: int) -> Self:
        """Bring it, which has the first `held` of these ids, to all of them, and to what they scored."""
        if self.request.logprobs is not None:
            scored = len(self.scores)
            self._score(self.ids[scored:], scores[scored:held])
        self.take(ids[held:], scores[held:])
        return self

    def piece(self) -> StreamPiece | None:
        """What has become visible since the last piece, or None."""
        shown = self._take()
        if self._reader is None:
            return self._make_piece(None) if self._told < len(self.ids) else None
        return self._make_piece(shown) if shown else None

    def notice(self, sentence: str) -> StreamPiece:
        """A piece that says something about the answer, with what has become visible meanwhile."""
        shown = self._take()
        return self._make_piece(None if self._reader is None else shown, sentence)

    def finish(self) -> StreamPiece | None:
        """No token comes any more: the last piece, with all that was held back, or None."""
        if self._reader is not None:
            if not self._eager:
                self._reader.extend(self.ids)
            self._reader.finish()
        shown = self._take()
        if not shown and self._told == len(self.ids):
            return None
        return self._make_piece(None if self._reader is None else shown)

    def reply(self, stream: Stream, finish: FinishReason) -> GenerateReply:
        """The reply, behind `finish`; an id that ended the answer is the last of `token_ids`, not text."""
        calls = self._reader.calls if self._reader is not None else ()
        return GenerateReply(
            id=self.request.id,
            text=None if self._reader is None else "".join(piece.text for piece in self._shown),
            reasoning="".join(piece.reasoning for piece in self._shown) or None,
            tool_calls=tuple(
                ToolCall(function={"name": call.name, "arguments": cast(JsonValue, call.arguments)})
                for call in calls
            )
            or None,
            token_ids=tuple(self.ids),
            logprobs=self._scores_from(0),
            seed=self.seed,
            finish_reason=finish,
            usage=Usage(
                prompt_tokens=len(stream.request.prompt),
                completion_tokens=len(self.ids),
                cached_tokens=stream.reused,
            ),
            timings=_timings(stream, len(self.ids)),
            seq=self._seq + 1 if self.request.stream else None,
            final=True if self.request.stream else None,
        )

    def _take(self) -> Piece:
        piece = Piece() if self._reader is None else self._reader.take()
        if piece:
            self._shown.append(piece)
        return piece

    def _make_piece(self, shown: Piece | None, notice: str | None = None) -> StreamPiece:
        self._seq += 1
        scores = self._scores_from(self._told)
        ids, self._told = tuple(self.ids[self._told :]), len(self.ids)
        return StreamPiece(
            id=self.request.id,
            seq=self._seq,
            text=None if shown is None else shown.text,
            reasoning=None if shown is None else shown.reasoning or None,
            token_ids=ids,
            notice=notice,
            logprobs=scores,
        )

    def _scores_from(self, place: int) -> tuple[TokenScore, ...] | None:
        return None if self.request.logprobs is None else tuple(self._scores[place:])

    def _scored(self, token: int, score: Score) -> TokenScore:
        named = tuple(
            ScoredToken(token_id=each, token=self._spelled(each), logprob=_rounded(logprob))
            for each, logprob in score.alternatives
        )
        logprob = _rounded(score.logprob)
        text = self._spelled(token)
        return TokenScore(token_id=token, token=text, logprob=logprob, top_logprobs=named or None)

    def _spelled(self, token: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.spelling(token)


class AnswerDesk:
    """Judges requests before any frame is sent; safe to use from several threads.

    Args:
        facts: of the model.
        tokenizer: None when the model came without one; then only `token_ids` are taken.
        chat: how the model chats.
    """

    def __init__(self, facts: ModelFacts, tokenizer: Tokenizer | None, chat: Chat | None = None) -> None:
        self._facts = facts
        self._tokenizer = tokenizer
        self._chat = chat

    def is_long(self, request: GenerateRequest, size: int) -> bool:
        """Whether `accept` may take long for a request that came in `size` bytes."""
        if request.messages is not None and self._chat is not None and self._chat.templated:
            # What a model's own template does is not known beforehand.
            return True
        if len(request.messages or ()) > LONG_TALK or len(request.held) > LONG_ANSWER:
            return True
        return request.token_ids is None and size > LONG_TEXT

    def accept(self, request: GenerateRequest, stream: StreamId) -> tuple[StreamRequest, Answer]:
        """The stream that answers `request`, and what its answer is read with.

        Raises:
            RequestError: `bad_request` for a prompt that this model can not take, `context_overflow` for one
                that is too long for it; carries the request's id.
        """
        self._judge(request)
        try:
            ids, ends, splitter = self._read(request)
        except RequestError as error:
            raise RequestError(error.code, error.message, request_id=request.id) from None
        if len(ids) > self._facts.context:
            self._refuse_length(request, f"the prompt is {len(ids)} tokens")
        top = self._facts.vocab - 1
        if max(ids) > top:
            text = "field 'token_ids' holds" if request.token_ids is not None else "the tokenizer gives"
            self._refuse(request, f"{text} {max(ids)}: this model's ids are 0 to {top}")
        stops = frozenset(request.stop_token_ids)
        if not request.ignore_eos:
            stops |= ends
        reader = None if splitter is None else ReplyReader(splitter, request.stop or ())
        sampling = _sampling(request)
        seed = None if sampling is GREEDY else sampling.seed
        asked = StreamRequest(
            stream, ids, request.max_tokens, stops, sampling, request.logprobs or 0, request.held
        )
        # What it was read from may be megabytes, and nobody needs that again.
        rest = request.model_copy(update=_READ)
        answer = Answer(rest, reader, self._tokenizer, seed)
        answer.hold(request.held)
        return asked, answer

    def _judge(self, request: GenerateRequest) -> None:
        """Refuse what can be told without reading the prompt."""
        top, held = self._facts.vocab - 1, len(request.held)
        if held > request.max_tokens:
            text = f"field 'held' holds {held} ids, and 'max_tokens' allows {request.max_tokens}"
            self._refuse(request, f"{text}: send what came of this answer, with the 'max_tokens' it had")
        if held > self._facts.context:
            self._refuse_length(request, f"field 'held' holds {held} ids")
        if max(request.stop_token_ids, default=0) > top:
            text = f"field 'stop_token_ids' holds {max(request.stop_token_ids)}"
            self._refuse(request, f"{text}: this model's ids are 0 to {top}")
        if max(request.held, default=0) > top:
            self._refuse(request, f"field 'held' holds {max(request.held)}: this model's ids are 0 to {top}")
        if request.stop and self._tokenizer is None:
            self._refuse(
                request, "this model came without a tokenizer: send 'stop_token_ids' instead of 'stop'"
            )

    def _read(self, request: GenerateRequest) -> tuple[tuple[int, ...], frozenset[int], Splitter | None]:
        """The prompt's ids, the ids that end an answer to it, and what splits that into its parts."""
        if request.messages is not None:
            return self._read_messages(request, request.messages)
        ends = self._facts.eos_ids or (self._chat.eos_ids if self._chat is not None else frozenset())
        splitter = None
        if self._tokenizer is not None:
            splitter = PlainSplitter(self._tokenizer, ends | frozenset(request.stop_token_ids))
        if request.token_ids is not None:
            return request.token_ids, ends, splitter
        if self._tokenizer is None:
            self._refuse(request, "this model came without a tokenizer: send 'token_ids' instead of 'prompt'")
        ids = tuple(self._tokenizer.encode(request.prompt or ""))
        if not ids:
            self._refuse(request, "field 'prompt' gives no token: send some text")
        return ids, ends, splitter

    def _read_messages(
        self, request: GenerateRequest, messages: tuple[ChatMessage, ...]
    ) -> tuple[tuple[int, ...], frozenset[int], Splitter | None]:
        if self._chat is None:
            self._refuse(
                request, "this model came without a tokenizer: send 'token_ids' instead of 'messages'"
            )
        prompt = self._chat.prompt(
            [_plain(message) for message in messages], tools=request.tools, effort=request.reasoning_effort
        )
        if not prompt.ids:
            self._refuse(request, "field 'messages' gives no token: the model's chat template writes nothing")
        ends = self._facts.eos_ids | self._chat.end_ids
        splitter = self._chat.splitter(prompt, ends | frozenset(request.stop_token_ids))
        return prompt.ids, ends, splitter

    def _refuse(self, request: GenerateRequest, message: str) -> NoReturn:
        raise RequestError(ErrorCode.BAD_REQUEST, message, request_id=request.id)

    def _refuse_length(self, request: GenerateRequest, what: str) -> NoReturn:
        text = f"{what}, and this model was made for {self._facts.context}: shorten it"
        raise RequestError(ErrorCode.CONTEXT_OVERFLOW, text, request_id=request.id)


def memory_of(request: GenerateRequest) -> int:
    """Bytes of memory that a request takes until it has become ids, nearly: many times what came of it."""
    messages = [message.__dict__ for message in request.messages or ()]
    waiting: list[object] = [request.prompt, request.tools, *messages]
    size = ID_BYTES * (len(request.token_ids or ()) + len(request.held))
    while waiting:
        value = waiting.pop()
        size += sys.getsizeof(value)
        if isinstance(value, dict):
            waiting += value
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
    return size


def _sampling(request: GenerateRequest) -> Sampling:
    """How the tokens are chosen; a missing seed is drawn here, once for the whole answer."""
    if not request.temperature:
        return GREEDY
    top_p = 1.0 if request.top_p is None else request.top_p
    seed = secrets.randbits(SEED_BITS) if request.seed is None else request.seed
    return Sampling(request.temperature, request.top_k or 0, top_p, seed)


def _rounded(logprob: float) -> float:
    """As many digits as a float32 is good for; JSON has no infinity."""
    return round(max(logprob, _LOWEST), 6)


def _plain(message: ChatMessage) -> dict[str, object]:
    """A message as chat templates know it."""
    plain: dict[str, object] = message.model_dump(mode="json", exclude_none=True)
    if (reasoning := plain.pop("reasoning", None)) is not None:
        plain["reasoning_content"] = plain["thinking"] = reasoning
    return plain


def _timings(stream: Stream, count: int) -> Timings:
    started = stream.submitted_at if stream.started_at is None else stream.started_at
    first = started if stream.first_token_at is None else stream.first_token_at
    last = first if stream.last_token_at is None else stream.last_token_at
    rate = (count - 1) / (last - first) if count > 1 and last > first else None
    return Timings(
        queue_s=round(started - stream.submitted_at, 6),
        ttft_s=round(first - stream.submitted_at, 6),
        decode_tok_s=None if rate is None else round(rate, 3),
    )
