from __future__ import annotations

import contextlib
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cascadia_p2p.discovery.txt import Announcement, OtherVersionError, decode_txt, encode_txt
from cascadia_p2p.errors import WireError
from cascadia_p2p.types import Instance, NodeId
from cascadia_p2p.wire import PROTOCOL

NAMES = ["v", "fleet", "node", "boot", "model", "shard", "shards", "control", "data", "client", "more"]
IDS = st.text("0123456789abcdef", min_size=16, max_size=16)
PORTS = st.integers(1, 65535)
ANNOUNCEMENTS = st.builds(
    Announcement,
    protocol=st.just(PROTOCOL),
    fleet=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True),
    node_id=IDS.map(NodeId),
    instance=IDS.map(Instance),
    model=st.from_regex(r"[0-9a-f]{8,64}", fullmatch=True),
    shard=st.none(),
    shards=st.integers(1, 4096),
    control=PORTS,
    data=PORTS,
    client=st.none() | PORTS,
).flatmap(
    lambda each: (st.none() | st.integers(0, each.shards - 1)).map(
        lambda shard: dataclasses.replace(each, shard=shard)
    )
)


def as_bytes(announcement: Announcement) -> dict[bytes, bytes | None]:
    return {key.encode(): value.encode() for key, value in encode_txt(announcement).items()}


@given(ANNOUNCEMENTS)
def test_announcement_comes_back_and_is_small(announcement: Announcement) -> None:
    properties = as_bytes(announcement)
    assert decode_txt(properties, PROTOCOL) == announcement
    sizes = [len(key) + 1 + len(value or b"") for key, value in properties.items()]
    assert max(sizes) <= 255
    assert sum(sizes) + len(sizes) < 1200


@given(
    st.dictionaries(
        st.sampled_from(NAMES).map(str.encode) | st.binary(max_size=9), st.none() | st.binary(max_size=99)
    )
)
def test_exo_19_any_bytes_give_an_announcement_or_a_clear_error(
    properties: dict[bytes, bytes | None],
) -> None:
    try:
        announcement = decode_txt(properties, PROTOCOL)
    except WireError:
        return
    assert decode_txt(as_bytes(announcement), PROTOCOL) == announcement


@given(ANNOUNCEMENTS, st.sampled_from(NAMES[:-1]), st.none() | st.binary(max_size=20))
def test_exo_19_one_wrong_value_never_escapes_as_another_error(
    announcement: Announcement, key: str, value: bytes | None
) -> None:
    properties = {**as_bytes(announcement), key.encode(): value}
    with contextlib.suppress(WireError):
        decode_txt(properties, PROTOCOL)


@pytest.mark.parametrize("version", ["0", str(PROTOCOL + 1), "99999"])
def test_exo_19_other_versions_are_told_apart_without_reading_more(version: str) -> None:
    with pytest.raises(OtherVersionError) as caught:
        decode_txt({b"v": version.encode(), b"fleet": b"\xff"}, PROTOCOL)
    assert caught.value.version == version


def test_too_long_values_are_refused() -> None:
    announcement = Announcement(PROTOCOL, "f", NodeId("0" * 16), Instance("0" * 16), "m" * 300, None, 1, 1, 1)
    with pytest.raises(WireError, match="'model' takes 306 bytes"):
        encode_txt(announcement)
