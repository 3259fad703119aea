"""What the doctor says of the fleet's key, and of a peer with another one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cascadia_p2p.config import Config
from cascadia_p2p.discovery.interfaces import Address
from cascadia_p2p.doctor import examine
from cascadia_p2p.doctor.examine import _holders
from cascadia_p2p.doctor.finding import Level
from cascadia_p2p.doctor.key import check_key
from cascadia_p2p.doctor.network import PortHolder
from cascadia_p2p.doctor.peers import check_peer
from cascadia_p2p.keys.places import make_fleet_key
from cascadia_p2p.transport.control import ControlServer
from cascadia_p2p.transport.curve import KeyPair, Keys
from cascadia_p2p.transport.network import Network

LAN, LOOPBACK = Address("192.0.2.7", "eth0"), Address("127.0.0.1", "lo")


def config(tmp_path: Path, **settings: object) -> Config:
    return Config.model_validate({"fleet": "nobodys", "model": tmp_path, **settings})


def test_a_key_is_looked_for_and_judged(tmp_path: Path) -> None:
    finding, keys = check_key(config(tmp_path), LAN)
    assert (finding.level, keys) == (Level.FAIL, None)
    assert "192.0.2.7" in finding.message
    assert "keygen" in finding.advice
    assert check_key(config(tmp_path), LOOPBACK)[0].level is Level.OK
    assert check_key(config(tmp_path, insecure=True), LAN)[0].level is Level.WARN
    made = make_fleet_key("nobodys", tmp_path / "a.key")
    finding, keys = check_key(config(tmp_path, key=made.path), LAN)
    assert finding.level is Level.OK
    assert made.print in finding.message
    assert keys is not None
    assert keys.pair == made.pair
    assert made.pair.secret.decode() not in str(finding.as_json())
    made.path.chmod(0o640)
    finding, keys = check_key(config(tmp_path, key=made.path), LAN)
    assert (finding.level, keys) == (Level.FAIL, None)
    assert "chmod 600" in finding.message + finding.advice


FLEET, OTHER = KeyPair.new(), KeyPair.new()


def test_a_node_whose_door_is_closed_holds_its_ports_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examine, "_ASK_S", 30.0)

    async def scenario() -> dict[int, PortHolder]:
        with Network(Keys(FLEET, FLEET.public, lambda _domain, key: key == FLEET.public)) as network:
            server = ControlServer(network, "127.0.0.1", 0)
            reading = asyncio.create_task(server.receive())
            here = config(tmp_path, port=server.endpoint.port, client_port=0)
            found = await _holders(here, LOOPBACK, None)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            server.close()
        return {port - here.port: holder for port, holder in found.items()}

    found = asyncio.run(scenario())
    assert "door is closed" in found[0].words
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("theirs", "ours", "words"),
    [
        (FLEET, OTHER, "has another key"),
        (FLEET, None, "On a PC of the fleet that is fleet.key beside its shards"),
        (None, FLEET, "has no key, and this PC has one|has another key"),
    ],
)
def test_a_peer_with_another_key_is_a_failure_in_words(
    theirs: KeyPair | None, ours: KeyPair | None, words: str
) -> None:
    def keys(pair: KeyPair | None) -> Keys | None:
        return None if pair is None else Keys(pair, pair.public, lambda _domain, key: key == pair.public)

    async def scenario() -> None:
        with Network(keys(theirs)) as network:
            server = ControlServer(network, "127.0.0.1", 0)
            reading = asyncio.create_task(server.receive())
            findings, met = await check_peer(server.endpoint, "nobodys", [], 30.0, keys(ours))
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            server.close()
        [finding] = findings
        assert (finding.level, met) == (Level.FAIL, [])
        assert any(each in f"{finding.message}: {finding.advice}" for each in words.split("|"))
        assert finding.advice

    asyncio.run(scenario())
