"""What a node says of itself in its mDNS TXT record."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from cascadia_p2p.errors import WireError
from cascadia_p2p.types import Instance, NodeId

__all__ = ["SERVICE_TYPE", "Announcement", "OtherVersionError", "decode_txt", "encode_txt"]

SERVICE_TYPE = "_cascadia-p2p._tcp.local."

_MAX_PAIR = 255
_MAX_TOTAL = 1200
_HEX = re.compile(r"[0-9a-f]{16}")
_FLEET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_MODEL = re.compile(r"[0-9A-Za-z:]{1,128}")
_NUMBER = re.compile(r"[0-9]{1,5}")


@dataclass(frozen=True, slots=True)
class Announcement:
    """A node's own words; a hint only: what counts is the greeting.

    Args:
        protocol: the protocol's version.
        fleet: name of the fleet.
        node_id: lasting id.
        instance: this start of the process.
        model: the model's fingerprint.
        shard: index of the shard it claims, if any.
        shards: shards of the model.
        control: port for nodes.
        data: port for frames.
        client: port for clients; only the serving head has one.
        closed: it takes only peers with the fleet's key.
    """

    protocol: int
    fleet: str
    node_id: NodeId
    instance: Instance
    model: str
    shard: int | None
    shards: int
    control: int
    data: int
    client: int | None = None
    closed: bool = False


class OtherVersionError(WireError):
    """The record is of another protocol version, so nothing else in it is read.

    Args:
        version: as the record spells it.
    """

    def __init__(self, version: str) -> None:
        super().__init__(f"the announcement is of protocol version {version}")
        self.version = version


def encode_txt(announcement: Announcement) -> dict[str, str]:
    """The key=value pairs of the TXT record, each at most 255 bytes, together at most 1200.

    Raises:
        WireError: a value is too long.
    """
    values: dict[str, str | int | None] = {
        "v": announcement.protocol,
        "fleet": announcement.fleet,
        "node": announcement.node_id,
        "boot": announcement.instance,
        "model": announcement.model,
        "shard": announcement.shard,
        "shards": announcement.shards,
        "control": announcement.control,
        "data": announcement.data,
        "client": announcement.client,
        "closed": 1 if announcement.closed else None,
    }
    pairs = {key: str(value) for key, value in values.items() if value is not None}
    sizes = {key: len(f"{key}={value}".encode()) + 1 for key, value in pairs.items()}
    for key, size in sizes.items():
        if size > _MAX_PAIR + 1:
            raise WireError(
                f"'{key}' takes {size - 1} bytes in the mDNS record: expected at most {_MAX_PAIR}"
            )
    if sum(sizes.values()) > _MAX_TOTAL:
        raise WireError(f"the mDNS record takes {sum(sizes.values())} bytes: expected at most {_MAX_TOTAL}")
    return pairs


def decode_txt(properties: Mapping[bytes, bytes | None], protocol: int) -> Announcement:
    """Read a TXT record; unknown keys are ignored.

    Args:
        properties: as received: any bytes.
        protocol: the version that is understood.

    Raises:
        OtherVersionError: the record says another version.
        WireError: it has no version, or a value is missing or malformed.
    """
    version = _text(properties, "v")
    if not _NUMBER.fullmatch(version):
        raise WireError("the announcement has no protocol version")
    if int(version) != protocol:
        raise OtherVersionError(version)
    shards = _number(properties, "shards", 1, 4096)
    return Announcement(
        protocol=protocol,
        fleet=_matching(properties, "fleet", _FLEET),
        node_id=NodeId(_matching(properties, "node", _HEX)),
        instance=Instance(_matching(properties, "boot", _HEX)),
        model=_matching(properties, "model", _MODEL),
        shard=_number(properties, "shard", 0, shards - 1) if b"shard" in properties else None,
        shards=shards,
        control=_number(properties, "control", 1, 65535),
        data=_number(properties, "data", 1, 65535),
        client=_number(properties, "client", 1, 65535) if b"client" in properties else None,
        closed=b"closed" in properties,
    )


def _text(properties: Mapping[bytes, bytes | None], key: str) -> str:
    return (properties.get(key.encode()) or b"").decode("utf-8", "replace")


def _matching(properties: Mapping[bytes, bytes | None], key: str, form: re.Pattern[str]) -> str:
    text = _text(properties, key)
    if not form.fullmatch(text):
        raise WireError(f"the announcement's '{key}' is missing or malformed")
    return text


def _number(properties: Mapping[bytes, bytes | None], key: str, least: int, most: int) -> int:
    number = int(_matching(properties, key, _NUMBER))
    if not least <= number <= most:
        raise WireError(f"the announcement's '{key}' is {number}: expected {least} to {most}")
    return number
