"""Whole nodes with a fleet's key: who is let in, who is told what, and what becomes of a door that fails."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import pytest
import structlog
import zmq
from cluster.conftest import Shards
from cluster.fleet import ask, fleet
from fixtures.reference import load_case

from cascadia_p2p.config import Config
from cascadia_p2p.errors import CascadiaError, NotAdmittedError, UsageError
from cascadia_p2p.keys.clients import ClientList
from cascadia_p2p.keys.files import KeyFile
from cascadia_p2p.keys.places import FLEET_KEY, make_fleet_key
from cascadia_p2p.node.places import Places
from cascadia_p2p.node.query import ask_node, measure_node, share_clients
from cascadia_p2p.transport.curve import Authenticator, Domain, KeyPair, Keys
from cascadia_p2p.transport.network import Network, connect

CASE = load_case("tiny12")
PROMPT = CASE.prompts[1]
AT_ONCE_S = 20.0


@pytest.fixture
def key(tmp_path: Path) -> KeyFile:
    return make_fleet_key("test", tmp_path / "keys" / "fleet.key")


def keys_of(key: KeyFile) -> Keys:
    return Keys(key.pair, key.server)


def test_a_closed_fleet_answers_and_tells_nobody_else_anything(
    shards: Shards, tmp_path: Path, key: KeyFile
) -> None:
    model, other = shards(CASE, (6, 6)), make_fleet_key("test", tmp_path / "other.key")

    async def scenario() -> None:
        async with fleet(tmp_path) as made:
            first = await made.start(model, shard=0, key=key.path)
            await made.start(model, shard=1, key=key.path)
            head = await made.open()
            assert (await ask(head, PROMPT.ids, max_tokens=24)).token_ids == PROMPT.generated
            body = await ask_node(first.control, 30.0, keys_of(key))
            assert body["door"] == {
                "closed": True,
                "fingerprint": key.print,
                "clients": 0,
                "client_list": 0,
                "rejected_lists": 0,
                "turned_away": 0,
            }
            for keys in (None, keys_of(other), Keys(other.pair, key.server)):
                with pytest.raises(NotAdmittedError):
                    await ask_node(first.control, 30.0, keys)
            with pytest.raises(NotAdmittedError, match="takes only"):
                await measure_node(first.control, 30.0)
            assert first.node.status()["door"]["turned_away"] >= 3  # type: ignore[index, call-overload, operator]
            said = json.dumps(made.said, default=str) + json.dumps(body)
            for secret in (key.pair.secret, other.pair.secret):
                assert secret.decode() not in said
            assert key.pair.public.decode() not in said

    asyncio.run(scenario())


def test_both_consoles_say_that_a_key_differs_and_which_file_to_copy(
    shards: Shards, tmp_path: Path, key: KeyFile
) -> None:
    model, other = shards(CASE, (6, 6)), make_fleet_key("test", tmp_path / "other.key")

    async def scenario() -> None:
        async with fleet(tmp_path) as made:
            keyed = await made.start(model, shard=0, key=key.path)
            await made.start(model, shard=1, key=other.path)
            await made.start(model, shard=1, peers=(keyed.control,))

            def said(*words: str) -> bool:
                return any(all(word in line for word in words) for line in made.sentences("other_key"))

            # The first node was dialled by two others, and has dialled neither.
            await made.until(
                lambda: said("turned away", "another key", str(key.path)), "the dialled one says so"
            )
            await made.until(lambda: said("turned away", "no key", str(key.path)), "and of the one without")
            await made.until(
                lambda: said(str(keyed.control), "has another key or none", str(other.path)),
                "the dialling one",
            )
            await made.until(
                lambda: said(str(keyed.control), "takes only nodes with the fleet's key", FLEET_KEY),
                "the one without",
            )
            assert all(member.state != "open" for member in made.members)
            await asyncio.sleep(1.0)
            assert len(made.sentences("other_key")) < 10, "a stranger must not fill the log"

    asyncio.run(scenario())


def test_what_one_node_hears_of_clients_all_know_at_once(
    shards: Shards, tmp_path: Path, key: KeyFile
) -> None:
    model, alice = shards(CASE, (4, 4, 4)), KeyPair.new()

    async def scenario() -> None:
        async with fleet(tmp_path) as made:
            for shard in range(3):
                await made.start(model, shard=shard, key=key.path)
            await made.open()

            def admitted() -> list[bool]:
                books = [member.places.door.book for member in made.members]
                return [book is not None and book.admits(Domain.CLIENTS, alice.public) for book in books]

            clients = ClientList().issue("alice", alice.public)
            there = made.members[2].control
            assert (await share_clients(there, keys_of(key), clients, 5.0)).digest == clients.digest
            await made.until(lambda: all(admitted()), "all admit her", AT_ONCE_S)
            # Who joins later learns it too.
            late = await made.start(model, shard=2, key=key.path)
            await made.until(lambda: all(admitted()), "the late one, too")
            assert (
                await share_clients(late.control, keys_of(key), clients.revoke("alice"), 5.0)
            ).version == 2
            await made.until(lambda: not any(admitted()), "nobody admits her", AT_ONCE_S)
            with pytest.raises(NotAdmittedError):
                await share_clients(there, Keys(alice, key.server), clients, 5.0)

    asyncio.run(scenario())


def test_a_node_whose_authenticator_has_died_ends_in_words(
    shards: Shards, tmp_path: Path, key: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shards(CASE, (12,))

    async def scenario() -> None:
        async with fleet(tmp_path) as made:
            alone = await made.start(model, key=key.path)
            await made.open()
            monkeypatch.setattr(
                Authenticator, "_answer", lambda _self, _question: (_ for _ in ()).throw(MemoryError())
            )
            with pytest.raises(CascadiaError):
                await ask_node(alone.control, 1.0, keys_of(key))
            with pytest.raises(CascadiaError, match="authenticator has ended"):
                await asyncio.wait_for(alone.task, 30.0)

    asyncio.run(scenario())


def test_wrong_keys_in_a_loop_and_a_key_file_that_is_replaced_change_nothing(
    shards: Shards, tmp_path: Path, key: KeyFile
) -> None:
    model, other = shards(CASE, (6, 6)), make_fleet_key("test", tmp_path / "other.key")

    async def scenario() -> None:
        async with fleet(tmp_path) as made:
            for shard in range(2):
                await made.start(model, shard=shard, key=key.path)
            head = await made.open()
            said = len(made.said)
            with Network(keys_of(other)) as network:
                for _ in range(40):
                    for at, kind in ((head.control, zmq.DEALER), (head.data, zmq.PUSH)):
                        knocker = network.socket(kind, linger_ms=0, max_part=1 << 16)
                        network.present(knocker)
                        connect(knocker, at)
                    await asyncio.sleep(0.01)

                def counted() -> bool:
                    ports = cast(dict[str, dict[str, int]], head.node.status()["ports"])
                    return all(ports[port]["handshake_key"] >= 40 for port in ("control", "data"))

                await made.until(counted, "every attempt is counted, by port and reason")
            assert (await ask(head, PROMPT.ids, max_tokens=24)).token_ids == PROMPT.generated
            assert len(made.said) - said < 5, "a stranger must not fill the log"
            # What lies in the file counts from the next start on.
            key.path.write_bytes(other.path.read_bytes())
            key.path.chmod(0o644)
            with pytest.raises(NotAdmittedError):
                await ask_node(head.control, 30.0, keys_of(other))
            assert (await ask_node(head.control, 30.0, keys_of(key)))["state"] == "open"

    asyncio.run(scenario())


def places(model: Path, tmp_path: Path, **settings: Any) -> dict[str, Any]:
    """What a node that binds this machine's network address would say of its door."""

    async def scenario() -> dict[str, Any]:
        config = Config(
            model=model, port=0, client_port=0, fleet="nobodys", state_dir=tmp_path / "state", **settings
        )
        with structlog.testing.capture_logs(), Places.open(config) as opened:
            return opened.door.report() | {"warning": opened.door.warning}

    return asyncio.run(scenario())


def test_without_a_key_only_this_pc_is_served_unless_insecure_is_said(
    shards: Shards, tmp_path: Path, key: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shards(CASE, (12,))
    assert places(model, tmp_path, bind="127.0.0.1") == {"closed": False, "warning": ""}
    # The address itself stays this machine's own: only what is thought of it changes.
    monkeypatch.setattr("cascadia_p2p.discovery.interfaces.Address.loopback", property(lambda _self: False))
    with pytest.raises(UsageError, match="no key") as caught:
        places(model, tmp_path, bind="127.0.0.1")
    for words in (str(model / FLEET_KEY), "keygen --fleet nobodys", "--bind 127.0.0.1", "--insecure"):
        assert words in str(caught.value)
    insecure = places(model, tmp_path, bind="127.0.0.1", insecure=True)
    assert not insecure["closed"]
    assert "nothing is encrypted" in insecure["warning"]
    both = places(model, tmp_path, bind="127.0.0.1", insecure=True, key=key.path)
    assert both["closed"]
    assert "no effect" in both["warning"]
    key.path.chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        places(model, tmp_path, bind="127.0.0.1", insecure=True, key=key.path)
