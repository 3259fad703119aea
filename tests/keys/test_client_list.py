from __future__ import annotations

import errno
import os
from pathlib import Path

import orjson
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from cascadia_p2p.errors import CascadiaError, UsageError, WireError
from cascadia_p2p.keys.clients import MAX_CLIENTS, ClientEntry, ClientList, load_clients, save_clients
from cascadia_p2p.keys.files import KeyFile
from cascadia_p2p.node.client_book import ClientBook
from cascadia_p2p.transport.curve import Domain, KeyPair
from cascadia_p2p.types import Instance, NodeId
from cascadia_p2p.wire.messages import Clients, decode_control, encode

FLEET = KeyPair.new()
POOL = [KeyPair.new().public for _ in range(6)]


@st.composite
def lists(draw: st.DrawFn) -> ClientList:
    made = ClientList()
    for index, key in enumerate(POOL):
        state = draw(st.sampled_from(["none", "issued", "revoked"]))
        if state != "none":
            made = made.issue(f"client-{index}", key)
        if state == "revoked":
            made = made.revoke(f"client-{index}")
    return made


@settings(max_examples=60)
@given(lists(), lists(), lists())
def test_lists_join_to_the_same_whatever_the_order(
    one: ClientList, two: ClientList, three: ClientList
) -> None:
    assert one.join(two).digest == two.join(one).digest
    assert one.join(two).join(three).digest == one.join(two.join(three)).digest
    assert one.join(one) is one
    both = one.join(two)
    assert both.version >= max(one.version, two.version)
    if both.digest != one.digest:
        assert both.version > one.version
    revoked = {key for each in (one, two) for key, entry in each.entries.items() if entry.revoked}
    assert not both.admitted & revoked, "a withdrawn key never comes back"
    assert both.admitted == (one.admitted | two.admitted) - revoked


@settings(max_examples=40)
@given(lists())
def test_a_sealed_list_opens_with_the_fleets_key_only(clients: ClientList) -> None:
    sealed = clients.seal(FLEET)
    assert ClientList.open(sealed, FLEET).entries == clients.entries
    assert FLEET.secret not in sealed
    with pytest.raises(WireError, match="not made with this fleet's key"):
        ClientList.open(sealed, KeyPair.new())


@settings(max_examples=200)
@given(st.binary(max_size=300))
def test_any_bytes_are_no_list(data: bytes) -> None:
    with pytest.raises(WireError):
        ClientList.open(data, FLEET)


@settings(max_examples=150)
@given(st.data())
def test_no_changed_byte_goes_unnoticed(data: st.DataObject) -> None:
    clients = ClientList().issue("alice", POOL[0]).issue("bob", POOL[1]).revoke("bob")
    sealed = bytearray(clients.seal(FLEET))
    at = data.draw(st.integers(0, len(sealed) - 1))
    sealed[at] ^= data.draw(st.integers(1, 255))
    try:
        opened = ClientList.open(bytes(sealed), FLEET)
    except WireError:
        return
    assert opened.entries == clients.entries, "JSON has several spellings of one thing"


@pytest.mark.parametrize(
    "rows",
    [
        {},
        [["alice"]],
        [["alice", POOL[0].decode(), 1]],
        [["al/ice", POOL[0].decode(), False]],
        [["alice", "short", False]],
        [["alice", "é" * 40, False]],
        [["alice", POOL[0].decode(), False]] * (MAX_CLIENTS + 1),
    ],
    ids=["no list", "short row", "number", "name", "short key", "letters", "too many"],
)
def test_malformed_lists_are_refused(rows: object) -> None:
    with pytest.raises(WireError):
        ClientList.open(orjson.dumps({"clients": rows, "mac": "0" * 64}), FLEET)


def test_names_are_issued_once_and_can_be_issued_again_after_withdrawal() -> None:
    clients = ClientList().issue("alice", POOL[0])
    with pytest.raises(UsageError, match="has a key already"):
        clients.issue("alice", POOL[1])
    with pytest.raises(UsageError, match="no name"):
        clients.issue("../alice", POOL[1])
    with pytest.raises(UsageError, match="the list has alice"):
        clients.revoke("bob")
    again = clients.revoke("alice").issue("alice", POOL[1])
    assert again.admitted == {POOL[1]}
    assert again.version == 3
    with pytest.raises(UsageError, match=r"the list has alice$"):
        again.revoke("bob")
    with pytest.raises(UsageError, match=r"the list has eve, alice \(withdrawn\)$"):
        again.revoke("alice").issue("eve", POOL[2]).revoke("bob")
    with pytest.raises(UsageError, match="the list has nobody"):
        ClientList().revoke("bob")


def test_a_full_list_takes_no_more_and_still_fits_a_message() -> None:
    key = POOL[0].decode()
    made = {
        (spelled := (f"{index:040d}").encode()): ClientEntry("n" * 63, spelled, True)
        for index in range(MAX_CLIENTS)
    }
    full = ClientList(made)
    with pytest.raises(UsageError, match="takes no more"):
        full.issue("one-more", POOL[0])
    with pytest.raises(WireError, match="more than"):
        full.join(ClientList().issue("one-more", POOL[0]))
    sealed = full.seal(FLEET).decode()
    assert isinstance(decode_control(encode(Clients(digest=full.digest, sealed=sealed))), Clients)
    assert key not in sealed


# --- at a node ----------------------------------------------------------------------------------------------


def book(root: Path, name: str, pair: KeyPair = FLEET, issued: Path | None = None) -> ClientBook:
    key = KeyFile(root / "fleet.key", "garage", pair, pair.public)
    return ClientBook(key, root / f"{name}.json", issued or root / "nothing.json")


def says(made: ClientBook, *, whole: bool) -> Clients:
    return made.message(NodeId("0" * 16), Instance("1" * 16), whole=whole)


def test_nodes_that_were_told_different_things_agree(tmp_path: Path) -> None:
    one, two = book(tmp_path, "one"), book(tmp_path, "two")
    assert not one.hear(says(two, whole=False)), "nothing to say where nothing differs"
    alice = ClientList().issue("alice", POOL[0])
    one.hear(Clients(digest="0" * 32, sealed=alice.seal(FLEET).decode()))
    two.hear(
        Clients(digest="0" * 32, sealed=alice.revoke("alice").issue("bob", POOL[1]).seal(FLEET).decode())
    )
    assert one.admits(Domain.CLIENTS, POOL[0])
    assert two.hear(says(one, whole=False))
    assert not one.hear(says(two, whole=True))
    assert one.clients.digest == two.clients.digest
    assert not one.admits(Domain.CLIENTS, POOL[0])
    assert one.admits(Domain.CLIENTS, POOL[1])
    assert not one.admits(Domain.NODES, POOL[1]), "a client is no node"
    assert one.admits(Domain.NODES, FLEET.public)
    assert not one.admits(Domain.CLIENTS, POOL[2])
    again = book(tmp_path, "one")
    assert again.clients.digest == one.clients.digest, "kept over a restart"


def test_a_forged_list_changes_nothing(tmp_path: Path) -> None:
    made = book(tmp_path, "one")
    changes: list[int] = []
    made.changed = lambda: changes.append(1)
    forged = ClientList().issue("mallory", POOL[3]).seal(KeyPair.new()).decode()
    assert not made.hear(Clients(digest="0" * 32, sealed=forged))
    assert not made.admits(Domain.CLIENTS, POOL[3])
    assert made.rejected == 1
    assert not changes


def test_rpc_03_a_list_that_can_not_be_kept_counts_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    made = book(tmp_path / "file", "one", issued=tmp_path / "issued.json")
    sealed = ClientList().issue("alice", POOL[0]).seal(FLEET).decode()
    with structlog.testing.capture_logs() as logs:
        made.hear(Clients(digest="0" * 32, sealed=sealed))
    assert made.admits(Domain.CLIENTS, POOL[0])
    (said,) = [entry for entry in logs if entry["event"] == "client_list_not_kept"]
    assert "after a restart it is learnt anew" in said["message"]


def test_what_is_issued_on_the_same_pc_is_read_when_it_changes(tmp_path: Path) -> None:
    issued = tmp_path / "garage.clients.json"
    made = book(tmp_path, "one", issued=issued)
    made.look()
    save_clients(issued, ClientList().issue("alice", POOL[0]), FLEET)
    made.look()
    assert made.admits(Domain.CLIENTS, POOL[0])
    save_clients(issued, load_clients(issued, FLEET).revoke("alice"), FLEET)
    made.look()
    assert not made.admits(Domain.CLIENTS, POOL[0])
    issued.write_bytes(b"{}")
    made.look()
    assert made.clients.version == 2, "a damaged file changes nothing"
    with pytest.raises(CascadiaError, match="move the list away"):
        load_clients(issued, FLEET)


def test_a_withdrawal_that_could_not_be_read_is_read_at_a_later_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has not changed since: that it could not be read is said once, and once for each file."""
    issued = tmp_path / "garage.clients.json"
    made = book(tmp_path, "one", issued=issued)
    clients = ClientList().issue("alice", POOL[0])
    save_clients(issued, clients, FLEET)
    made.look()
    save_clients(issued, clients.revoke("alice"), FLEET)

    def fail(*_: object) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files")

    with structlog.testing.capture_logs() as said:
        with monkeypatch.context() as patched:
            patched.setattr("cascadia_p2p.keys.clients.read_file", fail)
            for _ in range(3):
                made.look()
            assert made.admits(Domain.CLIENTS, POOL[0])
            save_clients(issued, clients.revoke("alice").issue("bob", POOL[1]), FLEET)
            for _ in range(3):
                made.look()
        made.look()
    assert not made.admits(Domain.CLIENTS, POOL[0])
    assert made.admits(Domain.CLIENTS, POOL[1])
    assert [each["event"] for each in said] == ["client_list_rejected"] * 2 + ["client_list"]


def test_a_list_that_can_not_be_read_opens_to_nobody(tmp_path: Path) -> None:
    issued = tmp_path / "garage.clients.json"
    made = book(tmp_path, "one", issued=issued)
    clients = ClientList().issue("alice", POOL[0]).issue("bob", POOL[1]).revoke("bob")
    made.hear(Clients(digest="0" * 32, sealed=clients.seal(FLEET).decode()))
    # Written over by another fleet's, cut short, and no file at all.
    for damage in (ClientList().issue("bob", POOL[1]).seal(KeyPair.new()), clients.seal(FLEET)[:-9], None):
        issued.unlink(missing_ok=True)
        (tmp_path / "one.json").unlink(missing_ok=True)
        if damage is None:
            issued.mkdir()
            (tmp_path / "one.json").mkdir()
        else:
            issued.write_bytes(damage)
            (tmp_path / "one.json").write_bytes(damage)
        made.look()
        assert [made.admits(Domain.CLIENTS, key) for key in POOL[:2]] == [True, False], (
            "it knows what it knew"
        )
        with structlog.testing.capture_logs() as said:
            again = book(tmp_path, "one", issued=issued)
        assert [each["event"] for each in said] == ["client_list_rejected"] * 2
        assert not any(again.admits(Domain.CLIENTS, key) for key in POOL[:2])
        assert not any(again.admits(Domain.NODES, key) for key in POOL[:2])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names")
def test_a_list_that_would_never_end_is_no_list(tmp_path: Path) -> None:
    issued = tmp_path / "garage.clients.json"
    os.mkfifo(issued)
    with pytest.raises(CascadiaError, match=r"can not be read \(it is no file\)"):
        load_clients(issued, FLEET)


def test_that_the_list_can_not_be_looked_for_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "keys").symlink_to("keys")
    with structlog.testing.capture_logs() as said:
        made = book(tmp_path, "one", issued=tmp_path / "keys" / "garage.clients.json")
        for _ in range(3):
            made.look()
    assert [each["event"] for each in said] == ["client_list_rejected"]
    (tmp_path / "keys").unlink()
    save_clients(tmp_path / "keys" / "garage.clients.json", ClientList().issue("alice", POOL[0]), FLEET)
    made.look()
    assert made.admits(Domain.CLIENTS, POOL[0])


def test_a_list_on_the_disk_that_would_be_too_many_is_not_taken(tmp_path: Path) -> None:
    issued = tmp_path / "garage.clients.json"
    made = book(tmp_path, "one", issued=issued)
    made.hear(Clients(digest="0" * 32, sealed=ClientList().issue("alice", POOL[0]).seal(FLEET).decode()))
    spelled = [f"{index:040d}".encode() for index in range(MAX_CLIENTS)]
    issued.write_bytes(ClientList({key: ClientEntry("n", key) for key in spelled}).seal(FLEET))
    with structlog.testing.capture_logs() as said:
        made.look()
    assert [each["event"] for each in said] == ["client_list_rejected"]
    assert made.clients.admitted == {POOL[0]}


def test_letters_that_no_seal_has_are_a_wrong_seal() -> None:
    with pytest.raises(WireError, match="not made with this fleet's key"):
        ClientList.open('{"clients":[],"mac":"\u00e9"}'.encode(), FLEET)
