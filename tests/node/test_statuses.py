from __future__ import annotations

from cascadia_p2p.cli.status import _refused_words
from cascadia_p2p.node.statuses import FRESH_A_SECOND, StatusDesk


def test_a_status_is_fresh_unless_many_ask_within_a_second() -> None:
    made = 0
    now = 0.0

    def make() -> dict[str, object]:
        nonlocal made
        made += 1
        return {"made": made}

    desk = StatusDesk(make, lambda: now)  # type: ignore[arg-type]
    assert [desk.get()["made"] for _ in range(FRESH_A_SECOND)] == list(range(1, FRESH_A_SECOND + 1))
    assert {desk.get()["made"] for _ in range(1000)} == {FRESH_A_SECOND}
    now = 1.0
    assert desk.get()["made"] == FRESH_A_SECOND + 1


def test_status_says_what_was_not_taken_and_nothing_where_that_is_nothing() -> None:
    assert _refused_words({"dropped": {"log_lines": 0}, "ports": {"data": {"overfull": 0}}, "mdns": {}}) == []
    body = {
        "dropped": {"undecodable_messages": 3, "ignored_messages": 0, "log_lines": 7},
        "data_thread": {"dropped": {"epoch": 2}, "failed": {"non_finite": 1}},
        "door": {"closed": True, "turned_away": 4, "clients": 9},
        "ports": {
            "control": {"handshake_key": 4, "overfull": 1},
            "metrics": {"surplus": 5},
            "dialled": {"overfull": 2},
        },
        "mdns": {"malformed": 6},
    }
    assert _refused_words(body) == [  # type: ignore[arg-type]
        "not taken, control messages and log: undecodable messages 3, log lines 7",
        "not taken, frames: epoch 2",
        "not taken, segments: non finite 1",
        "not taken, door: turned away 4",
        "not taken, control port: handshake key 4, overfull 1",
        "not taken, metrics port: surplus 5",
        "not taken, dialled nodes: overfull 2",
        "not taken, mDNS: malformed 6",
    ]
