"""The client protocol: requests to the head node and its replies, each one JSON object."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal, NoReturn, TypeAlias

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PlainValidator,
    Strict,
    TypeAdapter,
    ValidationError,
)

from cascadia_p2p.errors import ErrorCode, RequestError, WireError
from cascadia_p2p.types import MAX_TEMPERATURE
from cascadia_p2p.wire.frames import MAX_ALTERNATIVES
from cascadia_p2p.wire.model import (
    MAX_COUNT,
    Count,
    JsonObject,
    Message,
    count_openings,
    count_values,
    explain,
    json_type,
    parse_object,
)

MAX_REQUEST_BYTES: Final = 1 << 23
"""Bytes of a request or of a reply, at most."""

MAX_IDS: Final = 1 << 20
"""Token ids in a request or a reply, at most."""

MAX_ID_LENGTH: Final = 128
MAX_STOP_IDS: Final = 64
MAX_STOPS: Final = 16
MAX_STOP_LENGTH: Final = 256
MAX_MESSAGES: Final = 4096
MAX_TOOLS: Final = 1024
MAX_VALUES: Final = 1 << 16
"""JSON values in a request besides its token ids, at most: each takes as long to read as a line of text."""

MAX_SCORES: Final = 60_000
"""Tokens and alternatives together whose logprobs one reply has room for."""

EFFORT_WORDS: Final = ("none", "minimal", "low", "medium", "high", "max")

RequestId = Annotated[str, Field(max_length=MAX_ID_LENGTH)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[tuple[TokenId, ...], Strict(False), Field(max_length=MAX_IDS, fail_fast=True)]
RequestKey = Annotated[str, Field(pattern=r"^[0-9a-f]{32,128}$")]
StopIds = Annotated[tuple[TokenId, ...], Strict(False), Field(max_length=MAX_STOP_IDS, fail_fast=True)]


def _checked_stop(value: str) -> str:
    if not 1 <= len(value) <= MAX_STOP_LENGTH:
        raise ValueError(f"expected 1 to {MAX_STOP_LENGTH} characters, and there are {len(value)}")
    return value


def _checked_effort(value: object) -> float | str:
    if isinstance(value, str) and value in EFFORT_WORDS:
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and 0.0 <= value <= 0.99:
        return float(value)
    raise ValueError(f"expected a number from 0.0 to 0.99, or one of {', '.join(EFFORT_WORDS)}")


def _checked_logprobs(value: object) -> int | None:
    if isinstance(value, bool) or value is None:
        return 0 if value else None
    if isinstance(value, int) and 0 <= value <= MAX_ALTERNATIVES:
        return value
    raise ValueError(f"expected true, false, or a number of alternatives from 0 to {MAX_ALTERNATIVES}")


Stop = Annotated[str, AfterValidator(_checked_stop)]
Stops = Annotated[tuple[Stop, ...], Strict(False), Field(max_length=MAX_STOPS, fail_fast=True)]
JsonObjects = Annotated[tuple[JsonObject, ...], Strict(False), Field(max_length=MAX_TOOLS, fail_fast=True)]
Effort = Annotated[float | str, PlainValidator(_checked_effort)]
Temperature = Annotated[float, Field(ge=0.0, le=MAX_TEMPERATURE)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]
Seed = Annotated[int, Field(ge=0, lt=2**64)]
Alternatives = Annotated[int | None, PlainValidator(_checked_logprobs)]


def _joined(value: object) -> object:
    """Text that comes as a list of parts, as some programs send it."""
    if not isinstance(value, list):
        return value
    texts: list[str] = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                'only text is taken, as a string or as parts like {"type": "text", "text": "..."}'
            )
        texts.append(part["text"])
    return "".join(texts)


class ChatMessage(Message):
    """One message of a conversation.

    Args:
        role: whose; `developer` counts as `system` where the model does not tell them apart.
        content: its text; may be left out beside `tool_calls`.
        name: the author's, or of the tool that answers.
        reasoning: what the assistant thought, for models that want to see it again.
        tool_calls: functions that the assistant called, each `{"function": {"name": ..., "arguments": ...}}`.
        tool_call_id: which call a tool's message answers.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_joined)] = None
    name: Annotated[str, Field(max_length=MAX_ID_LENGTH)] | None = None
    reasoning: str | None = None
    tool_calls: JsonObjects | None = None
    tool_call_id: Annotated[str, Field(max_length=MAX_ID_LENGTH)] | None = None


ChatMessages = Annotated[
    tuple[ChatMessage, ...], Strict(False), Field(max_length=MAX_MESSAGES, fail_fast=True)
]


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"


class GenerateRequest(Message):
    """Asks for the continuation of a prompt; holds exactly one of `prompt`, `token_ids` and `messages`.

    Args:
        id: echoed in the reply; means something only within its connection.
        prompt: text for the model's tokenizer.
        token_ids: the prompt as token ids.
        messages: a conversation for the model to answer.
        tools: descriptions of functions that the model may call; only with `messages`.
        reasoning_effort: how much to reason, for models that can be told; only with `messages`.
        max_tokens: new tokens at most.
        stop: strings that end the answer; they are not part of its text.
        stop_token_ids: ids that end the answer besides the model's own.
        ignore_eos: go on behind an end-of-sequence token.
        temperature: what logits are divided by before a token is drawn; 0 or None takes the likeliest token.
        top_k: of how many likeliest tokens one is drawn; 0 or None for all. Needs a temperature.
        top_p: the share of their probability that is kept, the likeliest first. Needs a temperature.
        seed: what the draws depend on, beside the position; drawn by the head and told in the reply if None.
        logprobs: how many likeliest tokens to tell at each position, beside the token's own logprob; True
            for 0, False or None for no logprobs.
        stream: send the answer in pieces.
        acks: the client tells which pieces it has read (`AckRequest`); goes with `stream`.
        key: names the request beyond its connection, at least 128 random bits: asked for again with it, it
            replaces what still runs of it, and an answer that is complete is not computed again.
        held: ids of the answer that the client has already, from an earlier connection: the answer goes on
            behind them. They count as generated.
    """

    op: Literal["generate"] = "generate"
    id: RequestId | None = None
    prompt: str | None = None
    token_ids: TokenIds | None = None
    messages: ChatMessages | None = None
    tools: JsonObjects | None = None
    reasoning_effort: Effort | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] = 128
    stop: Stops | None = None
    stop_token_ids: StopIds = ()
    ignore_eos: bool = False
    temperature: Temperature | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    top_p: Share | None = None
    seed: Seed | None = None
    logprobs: Alternatives = None
    stream: bool = False
    acks: bool = False
    key: RequestKey | None = None
    held: TokenIds = ()


class AckRequest(Message):
    """Tells that the pieces of an answer up to `seq` were read; nothing is sent back for it."""

    op: Literal["ack"] = "ack"
    id: RequestId
    seq: Annotated[int, Field(ge=1, lt=2**63)]


class CancelRequest(Message):
    """Asks to end the request with this id, sent over the same connection."""

    op: Literal["cancel"] = "cancel"
    id: RequestId


class StatusRequest(Message):
    """Asks what the head knows of the ring."""

    op: Literal["status"] = "status"
    id: RequestId | None = None


ClientRequest: TypeAlias = GenerateRequest | AckRequest | CancelRequest | StatusRequest


class Reply(Message):
    """The base of all replies; fields that a newer head adds are passed over."""

    model_config = ConfigDict(extra="ignore")

    id: RequestId | None = None


class Usage(Message):
    """Token counts of one request; of the prompt's, `cached_tokens` were known from an earlier one."""

    model_config = ConfigDict(extra="ignore")

    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count = 0


class Timings(Message):
    """Waiting in the queue and time to the first token in seconds; tokens a second after the first."""

    model_config = ConfigDict(extra="ignore")

    queue_s: float
    ttft_s: float
    decode_tok_s: float | None = None


class ToolCall(Message):
    """A function that the model asks to be called."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["function"] = "function"
    function: JsonObject


class ScoredToken(Message):
    """A token and the natural logarithm of its probability at temperature 1, before any cut.

    Args:
        token_id: its id.
        token: its text by itself, with U+FFFD for bytes that are only part of a character; left out when
            the model has no tokenizer.
        logprob: at most 0, up to rounding.
    """

    model_config = ConfigDict(extra="ignore")

    token_id: TokenId
    token: str | None = None
    logprob: float


ScoredTokens = Annotated[
    tuple[ScoredToken, ...], Strict(False), Field(max_length=MAX_ALTERNATIVES, fail_fast=True)
]


class TokenScore(ScoredToken):
    """A token of an answer.

    Args:
        top_logprobs: the likeliest tokens at its position, the likeliest first; left out when none were
            asked for.
    """

    top_logprobs: ScoredTokens | None = None


TokenScores = Annotated[tuple[TokenScore, ...], Strict(False), Field(max_length=MAX_IDS, fail_fast=True)]


class StreamPiece(Reply):
    """What came since the last piece of an answer in pieces.

    Args:
        seq: 1, 2, 3, ... within one request.
        text: what has become visible of the answer; left out when the model has no tokenizer.
        reasoning: the same of the model's reasoning; left out when there is nothing.
        token_ids: the ids that came.
        notice: a sentence about the answer, for people, as when a lost node makes it pause; such a piece may
            hold nothing else.
        logprobs: of these ids, if they were asked for.
    """

    seq: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    text: str | None = None
    reasoning: str | None = None
    token_ids: TokenIds
    notice: str | None = None
    logprobs: TokenScores | None = None


class QueueNotice(Reply):
    """Tells a client that reads its answer in pieces that the request still waits for a slot.

    Args:
        queued: its place in the queue; 1 is next.
    """

    queued: Annotated[int, Field(ge=1, le=MAX_COUNT)]


class GenerateReply(Reply):
    """The finished answer.

    Args:
        text: the answer, left out when the model has no tokenizer.
        reasoning: what the model thought before; left out when it told nothing.
        tool_calls: functions that it asks to be called; left out when it asks for none.
        token_ids: all generated ids, the one that ended the answer among them.
        logprobs: of all these ids, if they were asked for.
        seed: what the tokens were drawn with; left out when none was drawn.
        seq: of an answer in pieces, the number after the last piece's.
        final: true behind the pieces of an answer.
    """

    text: str | None = None
    reasoning: str | None = None
    tool_calls: Annotated[tuple[ToolCall, ...], Strict(False), Field(fail_fast=True)] | None = None
    token_ids: TokenIds
    logprobs: TokenScores | None = None
    seed: Seed | None = None
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    seq: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    final: Literal[True] | None = None


class ErrorBody(Message):
    """Why there is no answer."""

    model_config = ConfigDict(extra="ignore")

    code: ErrorCode
    message: str
    retry_after_s: float | None = None


class ErrorReply(Reply):
    """The answer to a request that failed."""

    error: ErrorBody

    @classmethod
    def of(cls, error: RequestError) -> ErrorReply:
        """The reply that carries this error to the client."""
        body = ErrorBody(code=error.code, message=error.message, retry_after_s=error.retry_after_s)
        return cls(id=error.request_id, error=body)

    def to_error(self) -> RequestError:
        """The error as the client library raises it."""
        body = self.error
        return RequestError(body.code, body.message, request_id=self.id, retry_after_s=body.retry_after_s)


class CancelReply(Reply):
    """The answer to a cancel request: whether there was something to cancel."""

    cancelled: bool


class StatusReply(Reply):
    """The answer to a status request."""

    status: JsonObject


ClientReply: TypeAlias = GenerateReply | StreamPiece | QueueNotice | ErrorReply | CancelReply | StatusReply

_REQUESTS: Final[dict[str, TypeAdapter[ClientRequest]]] = {
    "generate": TypeAdapter(GenerateRequest),
    "ack": TypeAdapter(AckRequest),
    "cancel": TypeAdapter(CancelRequest),
    "status": TypeAdapter(StatusRequest),
}
_FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "generate": tuple(GenerateRequest.model_fields),
    "ack": tuple(AckRequest.model_fields),
    "cancel": tuple(CancelRequest.model_fields),
    "status": tuple(StatusRequest.model_fields),
}
_REPLIES: Final[tuple[tuple[str, TypeAdapter[ClientReply]], ...]] = (
    ("error", TypeAdapter(ErrorReply)),
    ("cancelled", TypeAdapter(CancelReply)),
    ("status", TypeAdapter(StatusReply)),
    ("queued", TypeAdapter(QueueNotice)),
    ("finish_reason", TypeAdapter(GenerateReply)),
    ("seq", TypeAdapter(StreamPiece)),
    ("token_ids", TypeAdapter(GenerateReply)),
)
_IDS: Final = ("token_ids", "held")
"""Fields that hold many values, of which each takes little time."""

_PROMPTS: Final = {
    "prompt": "text",
    "token_ids": "a list of token ids",
    "messages": "a list of messages",
}


def decode_request(data: bytes) -> ClientRequest:
    """The request in `data`.

    Raises:
        RequestError: BAD_REQUEST with a sentence that names the field and what is expected; carries the id
            to echo whenever one can be read.
    """
    try:
        raw = _parse_request(data)
    except WireError as error:
        raise RequestError(ErrorCode.BAD_REQUEST, str(error)) from None
    given = raw.get("id")
    request_id = given if isinstance(given, str) and len(given) <= MAX_ID_LENGTH else None
    op = raw.get("op", "generate")
    if not isinstance(op, str) or op not in _REQUESTS:
        shown = f"'{op[:32]}'" if isinstance(op, str) else json_type(op)
        _refuse(f"field 'op' should be one of {', '.join(_REQUESTS)}, and is {shown}", request_id)
    _check_fields(raw, op, request_id)
    _check_amount(raw, request_id)
    try:
        request = _REQUESTS[op].validate_json(data)
    except ValidationError as error:
        _refuse(explain(error), request_id)
    if isinstance(request, GenerateRequest):
        _check_prompt(request)
        _check_sampling(request)
    return request


def decode_reply(data: bytes) -> ClientReply:
    """The reply in `data`.

    Raises:
        WireError: it is no reply; the sentence names the field and what was expected.
    """
    raw = parse_object(data, MAX_REQUEST_BYTES, "a reply")
    for mark, adapter in _REPLIES:
        if mark in raw:
            try:
                return adapter.validate_json(data)
            except ValidationError as error:
                raise WireError(f"the reply is not valid: {explain(error)}") from None
    raise WireError("the reply is not valid: it has none of error, cancelled, status, token_ids")


def _parse_request(data: bytes) -> dict[str, JsonValue]:
    """The JSON object that a request is.

    Raises:
        WireError: it is none, or so many lists and objects that making them would take long.
    """
    # Few texts hold so many brackets, even inside of strings.
    if data.count(b"[") + data.count(b"{") > MAX_VALUES and (found := count_openings(data)) > MAX_VALUES:
        raise WireError(
            f"a request holds at most {MAX_VALUES} JSON values besides token ids, and this one holds "
            f"{found} lists and objects"
        )
    return parse_object(data, MAX_REQUEST_BYTES, "a request")


def _check_amount(raw: dict[str, JsonValue], request_id: str | None) -> None:
    """Refuse what would take long to validate, naming the field."""
    ids, others = 0, 0
    for field, value in raw.items():
        if field in _IDS and isinstance(value, list):
            ids += len(value)
            if ids > MAX_IDS:
                _refuse(
                    f"field '{field}' holds {len(value)} ids, which makes {ids}: at most {MAX_IDS} are taken "
                    "in a request",
                    request_id,
                )
            continue
        others += count_values(value, MAX_VALUES - others)
        if others > MAX_VALUES:
            _refuse(
                f"field '{field}' makes this more than {MAX_VALUES} JSON values besides token ids, the most "
                "that are taken in a request",
                request_id,
            )


def _check_fields(raw: dict[str, JsonValue], op: str, request_id: str | None) -> None:
    """Refuse unknown fields, naming the first."""
    known = _FIELDS[op]
    for field in raw:
        if field in known:
            continue
        _refuse(f"field '{field[:64]}' is unknown; {op} takes {', '.join(known)}", request_id)


def _check_prompt(request: GenerateRequest) -> None:
    """Refuse a request that holds no prompt, an empty one, or two, and fields that need `messages`."""
    given = [name for name in _PROMPTS if getattr(request, name) is not None]
    if len(given) > 1:
        _refuse(f"the request holds both '{given[0]}' and '{given[1]}': send one of them", request.id)
    if not given:
        kinds = ", ".join(f"'{name}' ({what})" for name, what in _PROMPTS.items())
        _refuse(f"the request holds no prompt: send one of {kinds}", request.id)
    if not getattr(request, given[0]):
        kind = {"prompt": "character", "token_ids": "token id", "messages": "message"}[given[0]]
        _refuse(f"field '{given[0]}' is empty: send at least one {kind}", request.id)
    for place, message in enumerate(request.messages or ()):
        if message.content is None and not (message.role == "assistant" and message.tool_calls):
            _refuse(f"field 'messages[{place}].content' is missing", request.id)
    for name in ("tools", "reasoning_effort"):
        if request.messages is None and getattr(request, name) is not None:
            _refuse(f"field '{name}' goes with 'messages' only", request.id)
    if request.acks and not (request.stream and request.id is not None):
        _refuse("field 'acks' goes with 'stream': true and an 'id' only", request.id)


def _check_sampling(request: GenerateRequest) -> None:
    """Refuse cuts that would do nothing, and more logprobs than a reply can carry."""
    for name in ("top_k", "top_p"):
        if request.temperature is None and getattr(request, name) is not None:
            _refuse(
                f"field '{name}' goes with 'temperature' only: without one the likeliest token is taken",
                request.id,
            )
    if request.logprobs is not None and request.max_tokens * (1 + request.logprobs) > MAX_SCORES:
        most = MAX_SCORES // (1 + request.logprobs)
        _refuse(
            f"field 'logprobs': a reply has room for those of {most} tokens with {request.logprobs} "
            f"alternatives each, and 'max_tokens' is {request.max_tokens}: lower one of the two",
            request.id,
        )


def _refuse(message: str, request_id: str | None) -> NoReturn:
    raise RequestError(ErrorCode.BAD_REQUEST, message, request_id=request_id)
