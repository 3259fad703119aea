"""The strict base of every JSON message: how one becomes bytes, and what a refusal of one says."""

from __future__ import annotations

from typing import Annotated, Final

import numpy as np
import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError

from cascadia_p2p.errors import WireError
from cascadia_p2p.types import Endpoint, Epoch, Instance, NodeId

MAX_COUNT: Final = 2**63 - 1

Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
"""A counter that fits a signed 64-bit number."""

Line = Annotated[str, Field(max_length=256, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
"""One short line of text, safe to print: no control characters."""

Sentence = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00-\x08\x0b-\x1f\x7f-\x9f]*$")]
"""Text for a person, safe to print."""

Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")]
"""A name that a person chose."""

Node = Annotated[NodeId, Field(pattern=r"^[0-9a-f]{16}$")]
Run = Annotated[Instance, Field(pattern=r"^[0-9a-f]{16}$")]
Fingerprint = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def _checked_endpoint(endpoint: Endpoint) -> Endpoint:
    # A name would be looked up by ZeroMQ's only thread, at every attempt to connect.
    if not (1 <= endpoint.port <= 65535 and len(endpoint.host) <= 255 and endpoint.numeric):
        raise ValueError("an endpoint needs an IP address, not a name, and a port of 1 to 65535")
    return endpoint


def _checked_epoch(epoch: Epoch) -> Epoch:
    if (
        not 0 <= epoch.counter <= MAX_COUNT
        or len(epoch.head) != 16
        or set(epoch.head) - set("0123456789abcdef")
    ):
        raise ValueError("an epoch needs a counter of 0 or more and a head of 16 hex digits")
    return epoch


def _writable(value: dict[str, JsonValue]) -> dict[str, JsonValue]:
    waiting: list[JsonValue] = [value]
    while waiting:
        match waiting.pop():
            case dict() as inner:
                waiting += inner.values()
            case list() as inner:
                waiting += inner
            case int() as number if not -MAX_COUNT - 1 <= number < 2 * (MAX_COUNT + 1):
                raise ValueError("a whole number needs 64 bits or fewer")
    return value


JsonObject = Annotated[dict[str, JsonValue], AfterValidator(_writable)]
"""Any JSON object that can be written again."""

Address = Annotated[Endpoint, AfterValidator(_checked_endpoint)]
"""Where a node can be reached, as it has bound it: sockets connect to it as it stands."""

Formation = Annotated[Epoch, AfterValidator(_checked_epoch)]


class Message(BaseModel):
    """A JSON object of exactly these fields, immutable; nothing is converted from another type."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True
    )


class ControlBase(Message):
    """What every control message carries: the sender."""

    node: Node
    instance: Run


def encode(message: Message) -> bytes:
    """The message as JSON; a field without a value is left out."""
    return orjson.dumps(message.model_dump(mode="json", exclude_none=True))


def encode_flat(message: Message) -> bytes:
    """What `encode` gives, in less time, where the fields hold JSON's own types, or messages."""
    fields = {name: value for name, value in message.__dict__.items() if value is not None}
    return orjson.dumps(fields, default=_plain)


def _plain(value: object) -> object:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_none=True)
    raise TypeError(f"a {type(value).__name__} has no place in a message")


def parse_object(data: bytes, limit: int, what: str) -> dict[str, JsonValue]:
    """The JSON object in `data`.

    Args:
        data: what was received.
        limit: bytes that are taken at most.
        what: the thing's name with its article, for the error.

    Raises:
        WireError: too long, not JSON, or not an object.
    """
    if len(data) > limit:
        raise WireError(f"{what} of {len(data)} bytes is too long: at most {limit} bytes are taken")
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise WireError(f"{what} must be JSON in UTF-8: {error.msg} at position {error.pos}") from None
    if not isinstance(value, dict):
        raise WireError(f"{what} must be a JSON object, {{...}}, not {json_type(value)}")
    return value


def count_openings(data: bytes) -> int:
    """How many lists and objects the JSON in `data` begins, told in milliseconds a megabyte.

    Making them would take a hundred times as long. Of what is not JSON it counts up to the fault rightly.
    """
    bare = data.replace(rb"\\", b"").replace(rb"\"", b"")
    letters = np.frombuffer(bare, np.uint8)
    quoted = np.logical_xor.accumulate(letters == ord('"'))
    # One bit tells "[" from "{", and these two share it with nothing else.
    return int(np.count_nonzero((letters | 0x20 == ord("{")) & ~quoted))


def count_values(value: JsonValue, most: int) -> int:
    """How many values one consists of, at any depth; of more than `most` it looks at no more."""
    waiting, count = [value], 1
    while waiting and count <= most:
        match waiting.pop():
            case dict() | list() as inner:
                count += len(inner)
                if count <= most:
                    waiting += inner.values() if isinstance(inner, dict) else inner
    return count


def json_type(value: object) -> str:
    """What JSON calls the type of a decoded value, with its article."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    for kinds, name in _JSON_TYPES:
        if isinstance(value, kinds):
            return name
    return "a value"


_JSON_TYPES: Final[tuple[tuple[type | tuple[type, ...], str], ...]] = (
    (str, "a string"),
    ((int, float), "a number"),
    ((list, tuple), "a list"),
    (dict, "an object"),
)


def explain(error: ValidationError, known: tuple[str, ...] = ()) -> str:
    """One sentence for the first fault of a validation: the field, what was expected, what was found.

    Args:
        error: what pydantic found.
        known: the fields to offer when one is unknown.
    """
    first = error.errors(include_url=False)[0]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    place = place[:120]
    match first["type"]:
        case "extra_forbidden":
            offer = f"; the known fields are {', '.join(known)}" if known else ""
            return f"field '{place}' is unknown{offer}"
        case "missing":
            return f"field '{place}' is missing"
        case "value_error":
            return f"field '{place}': {first['msg'].removeprefix('Value error, ')}"
        case "string_pattern_mismatch":
            # What was found may be long, or a secret.
            return f"field '{place}' should match {first['ctx']['pattern']}, and does not"
        case "too_long" | "string_too_long":
            what = "characters" if isinstance(first["input"], str) else "items"
            return (
                f"field '{place}' holds {len(first['input'])} {what}: "
                f"at most {first.get('ctx', {}).get('max_length')} are taken"
            )
    expected = first["msg"].removeprefix("Input should be ").removeprefix("Input should ")
    if not place:
        return f"not valid: {first['msg']}"
    found = str(first["input"])
    if first["type"] not in _JUDGES_THE_NUMBER or len(found) > 24:
        found = json_type(first["input"])
    return f"field '{place}' should be {expected}, and is {found}"


_JUDGES_THE_NUMBER: Final = frozenset(
    {"greater_than", "greater_than_equal", "less_than", "less_than_equal", "int_from_float"}
)
"""Faults of a number's value, which is then worth showing."""
