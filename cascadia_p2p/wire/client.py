"""The client protocol: requests to the head node and its replies, each one JSON object."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal, NoReturn, TypeAlias

from pydantic import ConfigDict, Field, JsonValue, Strict, TypeAdapter, ValidationError

from cascadia_p2p.errors import ErrorCode, RequestError, WireError
from cascadia_p2p.wire.model import Message, explain, json_type, parse_object

MAX_REQUEST_BYTES: Final = 1 << 23
"""Bytes of a request or of a reply, at most."""

MAX_IDS: Final = 1 << 20
MAX_ID_LENGTH: Final = 128
MAX_STOP_IDS: Final = 64

RequestId = Annotated[str, Field(max_length=MAX_ID_LENGTH)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[tuple[TokenId, ...], Strict(False), Field(max_length=MAX_IDS, fail_fast=True)]
StopIds = Annotated[tuple[TokenId, ...], Strict(False), Field(max_length=MAX_STOP_IDS, fail_fast=True)]


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"


class GenerateRequest(Message):
    """Asks for the continuation of a prompt; holds exactly one of `prompt` and `token_ids`.

    Args:
        id: echoed in the reply; means something only within its connection.
        prompt: text for the model's tokenizer.
        token_ids: the prompt as token ids.
        max_tokens: new tokens at most.
        stop_token_ids: ids that end the answer besides the model's own.
        ignore_eos: go on behind an end-of-sequence token.
        stream: send the answer in pieces.
    """

    op: Literal["generate"] = "generate"
    id: RequestId | None = None
    prompt: str | None = None
    token_ids: TokenIds | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] = 128
    stop_token_ids: StopIds = ()
    ignore_eos: bool = False
    stream: bool = False


class CancelRequest(Message):
    """Asks to end the request with this id, sent over the same connection."""

    op: Literal["cancel"] = "cancel"
    id: RequestId


class StatusRequest(Message):
    """Asks what the head knows of the ring."""

    op: Literal["status"] = "status"
    id: RequestId | None = None


ClientRequest: TypeAlias = GenerateRequest | CancelRequest | StatusRequest


class Reply(Message):
    """The base of all replies; fields that a newer head adds are passed over."""

    model_config = ConfigDict(extra="ignore")

    id: RequestId | None = None


class Usage(Message):
    """Token counts of one request."""

    model_config = ConfigDict(extra="ignore")

    prompt_tokens: Annotated[int, Field(ge=0)]
    completion_tokens: Annotated[int, Field(ge=0)]


class Timings(Message):
    """Waiting in the queue and time to the first token in seconds; tokens a second after the first."""

    model_config = ConfigDict(extra="ignore")

    queue_s: float
    ttft_s: float
    decode_tok_s: float | None = None


class GenerateReply(Reply):
    """The finished answer; `text` is left out when the model has no tokenizer."""

    text: str | None = None
    token_ids: TokenIds
    finish_reason: FinishReason
    usage: Usage
    timings: Timings


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

    status: dict[str, JsonValue]


ClientReply: TypeAlias = GenerateReply | ErrorReply | CancelReply | StatusReply

_REQUESTS: Final[dict[str, TypeAdapter[ClientRequest]]] = {
    "generate": TypeAdapter(GenerateRequest),
    "cancel": TypeAdapter(CancelRequest),
    "status": TypeAdapter(StatusRequest),
}
_FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "generate": tuple(GenerateRequest.model_fields),
    "cancel": tuple(CancelRequest.model_fields),
    "status": tuple(StatusRequest.model_fields),
}
_LATER: Final = {
    "messages": "messages need a chat template, which comes later: send 'prompt' or 'token_ids'",
    "stop": "stop strings come later: send 'stop_token_ids'",
}
_REPLIES: Final[tuple[tuple[str, TypeAdapter[ClientReply]], ...]] = (
    ("error", TypeAdapter(ErrorReply)),
    ("cancelled", TypeAdapter(CancelReply)),
    ("status", TypeAdapter(StatusReply)),
    ("token_ids", TypeAdapter(GenerateReply)),
)


def decode_request(data: bytes) -> ClientRequest:
    """The request in `data`.

    Raises:
        RequestError: BAD_REQUEST with a sentence that names the field and what is expected; carries the id
            to echo whenever one can be read.
    """
    try:
        raw = parse_object(data, MAX_REQUEST_BYTES, "a request")
    except WireError as error:
        raise RequestError(ErrorCode.BAD_REQUEST, str(error)) from None
    given = raw.get("id")
    request_id = given if isinstance(given, str) and len(given) <= MAX_ID_LENGTH else None
    op = raw.get("op", "generate")
    if not isinstance(op, str) or op not in _REQUESTS:
        shown = f"'{op[:32]}'" if isinstance(op, str) else json_type(op)
        _refuse(f"field 'op' should be one of {', '.join(_REQUESTS)}, and is {shown}", request_id)
    _check_fields(raw, op, request_id)
    try:
        request = _REQUESTS[op].validate_json(data)
    except ValidationError as error:
        _refuse(explain(error), request_id)
    if isinstance(request, GenerateRequest):
        _check_prompt(request)
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


def _check_fields(raw: dict[str, JsonValue], op: str, request_id: str | None) -> None:
    """Refuse unknown fields, naming the first, and those that only a later release serves."""
    known = _FIELDS[op]
    for field in raw:
        if field in known:
            continue
        if op == "generate" and field in _LATER:
            if raw[field] is None or raw[field] == []:
                _refuse(f"field '{field}' is empty: leave it out", request_id)
            _refuse(_LATER[field], request_id)
        _refuse(f"field '{field[:64]}' is unknown; {op} takes {', '.join(known)}", request_id)


def _check_prompt(request: GenerateRequest) -> None:
    """Refuse a request that holds no prompt, an empty one, or two."""
    if request.prompt is not None and request.token_ids is not None:
        _refuse("the request holds both 'prompt' and 'token_ids': send one of them", request.id)
    if request.prompt is None and request.token_ids is None:
        _refuse(
            "the request holds no prompt: send 'prompt' (text) or 'token_ids' (a list of token ids)",
            request.id,
        )
    if request.prompt == "":
        _refuse("field 'prompt' is empty: send at least one character", request.id)
    if request.token_ids == ():
        _refuse("field 'token_ids' is empty: send at least one token id", request.id)


def _refuse(message: str, request_id: str | None) -> NoReturn:
    raise RequestError(ErrorCode.BAD_REQUEST, message, request_id=request_id)
