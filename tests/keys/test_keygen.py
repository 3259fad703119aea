"""The commands that make, lay, issue and withdraw keys."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from fixtures.reference import load_case

from cascadia_p2p.cli import main
from cascadia_p2p.errors import CascadiaError
from cascadia_p2p.keys.clients import ClientList, load_clients
from cascadia_p2p.keys.files import read_key
from cascadia_p2p.keys.places import FLEET_KEY, client_list_path, fleet_key_path, make_fleet_key
from cascadia_p2p.transport.curve import raw_key

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user who has no key yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def keygen(*words: object) -> int:
    return main(["keygen", "--fleet", "garage", "--no-mdns", *map(str, words)])


def no_secret(capture: Capture, *paths: Path) -> tuple[str, str]:
    """What was printed; no key's secret is in it."""
    out, err = capture.readouterr()
    for path in paths:
        secret = read_key(path).pair.secret
        assert secret.decode() not in out + err
        assert raw_key(secret).hex() not in out + err
    return out, err


def test_the_fleets_key_is_made_once(home: Path, capsys: Capture) -> None:
    assert keygen() == 0
    path = fleet_key_path("garage")
    assert path.is_relative_to(home)
    before = path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    out, err = no_secret(capsys, path)
    assert out == f"{path}\n"
    assert "made the key" in err
    assert keygen() == 0
    out, err = no_secret(capsys, path)
    assert out == f"{path}\n"
    assert "has a key already" in err
    assert read_key(path).print in err
    assert path.read_bytes() == before
    path.chmod(0o644)
    assert keygen() == 2
    assert "chmod 600" in capsys.readouterr().err


def test_a_withdrawal_that_can_not_be_kept_is_told_all_the_same(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    keygen()
    keygen("--client", "alice")
    lists = []

    async def share(node: object, keys: object, clients: ClientList, timeout_s: float) -> ClientList:
        lists.append(clients)
        return clients

    def full(*_: object) -> None:
        raise CascadiaError("the list can not be written: No space left on device")

    monkeypatch.setattr("cascadia_p2p.cli.keygen.save_clients", full)
    capsys.readouterr()
    assert keygen("--revoke", "alice") == 1
    assert "withdrawn" not in capsys.readouterr().err, "nobody knows"
    monkeypatch.setattr("cascadia_p2p.cli.keygen.share_clients", share)
    assert keygen("--revoke", "alice", "--peer", "127.0.0.1:7600") == 1
    assert not lists[-1].admitted
    assert "the fleet knows the change all the same" in capsys.readouterr().err


def test_a_clients_key_is_issued_listed_and_withdrawn(home: Path, capsys: Capture) -> None:
    assert keygen("--client", "alice") == 2
    assert "has no key on this PC" in capsys.readouterr().err
    keygen()
    capsys.readouterr()
    assert keygen("--list") == 0
    out, err = capsys.readouterr()
    assert (out, "no client of fleet 'garage' has been issued a key here" in err) == ("", True)
    assert keygen("--client", "alice") == 0
    issued = home / "alice.client.key"
    out, err = no_secret(capsys, issued, fleet_key_path("garage"))
    assert out == "alice.client.key\n"
    assert "no running node was found" in err
    key, fleet = read_key(issued), read_key(fleet_key_path("garage"))
    assert (key.client, key.server, key.print) == ("alice", fleet.pair.public, fleet.print)
    assert fleet.pair.secret.decode() not in issued.read_text()
    assert load_clients(client_list_path("garage"), fleet.pair).admitted == {key.pair.public}
    assert keygen("--client", "alice") == 2
    assert "has a key already" in capsys.readouterr().err
    assert keygen("--client", "bob", "--out", issued) == 1
    assert "not written over" in capsys.readouterr().err
    assert keygen("--client", "bob", "--out", home / "b.key") == 0
    assert keygen("--revoke", "alice") == 0
    assert keygen("--revoke", "alice") == 2
    assert "the list has bob" in capsys.readouterr().err
    assert keygen("--list") == 0
    assert capsys.readouterr().out == "alice\twithdrawn\nbob\tadmitted\n"
    bob = read_key(home / "b.key")
    assert load_clients(client_list_path("garage"), fleet.pair).admitted == {bob.pair.public}
    assert keygen("--key", issued, "--client", "eve") == 2
    assert "key of client 'alice'" in capsys.readouterr().err


def test_a_withdrawn_key_that_is_in_the_way_is_named_as_one(home: Path, capsys: Capture) -> None:
    keygen()
    assert keygen("--client", "alice") == 0
    issued = home / "alice.client.key"
    before = issued.read_bytes()
    assert keygen("--client", "bob", "--out", issued) == 1
    said = capsys.readouterr().err
    assert "alice.client.key is there already" in said
    assert "the withdrawn key" not in said
    assert keygen("--revoke", "alice") == 0
    assert keygen("--client", "alice") == 1
    said = capsys.readouterr().err
    assert "alice.client.key, the withdrawn key of 'alice', is there already and is not written over" in said
    assert "move it away, or name another file with --out FILE" in said
    assert issued.read_bytes() == before
    assert keygen("--client", "alice", "--out", home / "new.key") == 0
    (home / "carol.client.key").write_text("no key")
    assert keygen("--client", "carol") == 1
    assert "carol.client.key is there already" in capsys.readouterr().err


def test_a_node_that_does_not_answer_is_named_and_the_key_is_issued(capsys: Capture) -> None:
    keygen()
    assert keygen("--client", "alice", "--peer", "127.0.0.1:9") == 0
    assert "no node answers at 127.0.0.1:9" in capsys.readouterr().err


def test_what_makes_no_sense_together_is_refused(capsys: Capture) -> None:
    assert keygen("--out", "x") == 2
    with pytest.raises(SystemExit, match="2"):
        keygen("--client", "a", "--revoke", "b")
    keygen()
    for name in ("", "../up", "a b", "x" * 64):
        assert keygen("--client", name) == 2
    capsys.readouterr()


def export(home: Path, out: str, *words: str) -> int:
    checkpoint = home / "checkpoint"
    if not checkpoint.exists():
        load_case("tiny12").build(checkpoint)
    fixed = ["--split", "6,6", "--fleet", "garage", *words]
    return main(["export", str(checkpoint), str(home / out), *fixed])


def test_export_makes_the_key_once_and_lays_it_beside_every_shard(home: Path, capsys: Capture) -> None:
    assert export(home, "parts", "--only-shards", "1") == 0
    assert not fleet_key_path("garage").exists(), "each PC would make one of its own"
    assert "no key was laid" in capsys.readouterr().err
    assert export(home, "first") == 0
    own = read_key(fleet_key_path("garage"))
    out, err = no_secret(capsys, own.path)
    assert f"made {own.path}" in err.replace("\n", "")
    assert out == f"{home / 'first' / 'manifest.json'}\n"
    assert export(home, "second") == 0
    assert "made " not in capsys.readouterr().err
    for model in ("first", "second"):
        for place in (".", "shard-00", "shard-01"):
            path = home / model / place / FLEET_KEY
            assert read_key(path).pair == own.pair
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert export(home, "parts", "--only-shards", "0") == 0
    assert read_key(home / "parts" / "shard-00" / FLEET_KEY).pair == own.pair
    assert not (home / "parts" / "shard-01" / FLEET_KEY).exists()


def test_export_lays_no_key_where_none_is_wanted_or_another_lies(home: Path, capsys: Capture) -> None:
    assert export(home, "none", "--no-key") == 0
    assert not list(home.glob("none/**/*.key"))
    assert not fleet_key_path("garage").exists()
    assert export(home, "none", "--no-key", "--key", "x") == 2
    keygen()
    other = make_fleet_key("garage", home / "none" / FLEET_KEY)
    assert export(home, "none") == 5
    assert "keys of two fleets" in capsys.readouterr().err
    assert export(home, "none", "--key", str(other.path)) == 0
    assert read_key(home / "none" / "shard-01" / FLEET_KEY).pair == other.pair
