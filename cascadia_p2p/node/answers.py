"""From a client's request to a stream of token ids, and from a finished stream to the reply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from cascadia_p2p.errors import ErrorCode, RequestError
from cascadia_p2p.ring.scheduler import Stream, StreamRequest
from cascadia_p2p.text.tokenizer import Tokenizer
from cascadia_p2p.types import StreamId
from cascadia_p2p.wire.messages import FinishReason, GenerateReply, GenerateRequest, Timings, Usage


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the head must know of the model to judge a request.

    Args:
        vocab: valid token ids are 0 to vocab - 1.
        eos_ids: the ids that end an answer; may be empty.
    """

    vocab: int
    eos_ids: frozenset[int]


class AnswerDesk:
    """Judges requests before any frame is sent, and words the replies.

    Args:
        facts: of the model.
        tokenizer: None when the model came without one; then only `token_ids` are taken.
    """

    def __init__(self, facts: ModelFacts, tokenizer: Tokenizer | None) -> None:
        self._facts = facts
        self._tokenizer = tokenizer

    def accept(self, request: GenerateRequest, stream: StreamId) -> StreamRequest:
        """The stream that answers `request`.

        Raises:
            RequestError: `bad_request` for a prompt that this model can not take; carries the request's id.
        """
        if request.stream:
            self._refuse(request, "field 'stream': streaming comes later: leave it out or send false")
        ids = self._ids(request)
        wrong = next((token for token in (*ids, *request.stop_token_ids) if token >= self._facts.vocab), None)
        if wrong is not None:
            field = "token_ids" if wrong in ids else "stop_token_ids"
            text = f"field '{field}' holds {wrong}: this model's ids are 0 to {self._facts.vocab - 1}"
            self._refuse(request, text)
        stops = frozenset(request.stop_token_ids)
        if not request.ignore_eos:
            stops |= self._facts.eos_ids
        return StreamRequest(stream, ids, request.max_tokens, stops)

    def reply(self, request: GenerateRequest, stream: Stream, finish: FinishReason) -> GenerateReply:
        """The answer of a stream that ended well; a stop id is the last of `token_ids` and not in `text`."""
        generated = stream.ids[len(stream.request.prompt) :]
        shown = generated[:-1] if finish is FinishReason.STOP else generated
        return GenerateReply(
            id=request.id,
            text=self._tokenizer.decode(shown) if self._tokenizer is not None else None,
            token_ids=tuple(generated),
            finish_reason=finish,
            usage=Usage(prompt_tokens=len(stream.request.prompt), completion_tokens=len(generated)),
            timings=_timings(stream),
        )

    def _ids(self, request: GenerateRequest) -> tuple[int, ...]:
        if request.token_ids is not None:
            return request.token_ids
        if self._tokenizer is None:
            self._refuse(request, "this model came without a tokenizer: send 'token_ids' instead of 'prompt'")
        ids = tuple(self._tokenizer.encode(request.prompt or ""))
        if not ids:
            self._refuse(request, "field 'prompt' gives no token: send some text")
        return ids

    def _refuse(self, request: GenerateRequest, message: str) -> NoReturn:
        raise RequestError(ErrorCode.BAD_REQUEST, message, request_id=request.id)


def _timings(stream: Stream) -> Timings:
    started = stream.submitted_at if stream.started_at is None else stream.started_at
    first = started if stream.first_token_at is None else stream.first_token_at
    last = first if stream.last_token_at is None else stream.last_token_at
    rate = (stream.generated - 1) / (last - first) if stream.generated > 1 and last > first else None
    return Timings(
        queue_s=round(started - stream.submitted_at, 6),
        ttft_s=round(first - stream.submitted_at, 6),
        decode_tok_s=None if rate is None else round(rate, 3),
    )
