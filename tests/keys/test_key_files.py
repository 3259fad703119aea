from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from cascadia_p2p.errors import CascadiaError, MismatchError, UsageError
from cascadia_p2p.keys.files import KeyFile, read_key, write_key
from cascadia_p2p.keys.places import (
    FLEET_KEY,
    client_key_path,
    find_client_key,
    find_fleet_key,
    find_key_to_lay,
    fleet_key_path,
    lay_key,
    make_fleet_key,
    repository_of,
)
from cascadia_p2p.transport.curve import KeyPair

FLEET = "garage"


def client_file(path: Path, server: KeyPair) -> KeyFile:
    key = KeyFile(path, FLEET, KeyPair.new(), server.public, "alice")
    write_key(key)
    return key


def test_keys_survive_their_files_and_are_the_owners_alone(tmp_path: Path) -> None:
    made = make_fleet_key(FLEET, tmp_path / "keys" / "a.key")
    assert read_key(made.path) == made
    issued = client_file(tmp_path / "alice.key", made.pair)
    assert read_key(issued.path) == issued
    for path in (made.path, issued.path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(made.path.parent.stat().st_mode) == 0o700
    assert len(list(made.path.parent.iterdir())) == 1, "no temporary file stays"
    assert made.print == issued.print
    assert made.pair.secret.decode() not in repr(made)


def test_no_key_is_written_over(tmp_path: Path) -> None:
    made = make_fleet_key(FLEET, tmp_path / "a.key")
    before = made.path.read_bytes()
    with pytest.raises(CascadiaError, match="not written over"):
        make_fleet_key(FLEET, made.path)
    assert made.path.read_bytes() == before


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o700 | 0o077, 0o610])
def test_a_key_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    made = make_fleet_key(FLEET, tmp_path / "a.key")
    made.path.chmod(mode)
    with pytest.raises(UsageError, match=f"chmod 600 {made.path}"):
        read_key(made.path)
    made.path.chmod(0o400)
    assert read_key(made.path) == made


def spoil(old: str, new: str) -> Callable[[str], str]:
    return lambda text: text.replace(old, new)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda _: "", "'role' is missing"),
        (lambda _: "\x00\xff nonsense", "no key file"),
        (lambda text: text[: len(text) // 2], "missing|no key file"),
        (lambda text: text + "x" * 5000, "larger than"),
        (spoil('role = "fleet"', 'role = "king"'), "'role' is missing"),
        (spoil('role = "fleet"', "role = 1"), "'role' is missing"),
        (spoil('role = "fleet"', 'role = "client"'), "client, server"),
        (spoil(f'fleet = "{FLEET}"', 'fleet = "a/b"'), "is no name"),
        (spoil('secret = "', 'secret = "x'), "'secret' is no key"),
        (spoil('public = "', 'public = "x'), "public key is not that"),
        (lambda _: "a = " + "[" * 2000, "no key file"),
        (lambda text: text.replace('secret = "', 'secret = "')[:-5] + 'é"\n', "no key"),
    ],
)
def test_damaged_key_files_are_refused_without_showing_them(
    tmp_path: Path, change: Callable[[str], str], words: str
) -> None:
    made = make_fleet_key(FLEET, tmp_path / "a.key")
    text = change(made.path.read_text())
    made.path.write_bytes(text.encode("utf-8"))
    with pytest.raises(UsageError, match=words) as caught:
        read_key(made.path)
    assert str(made.path) in str(caught.value)
    assert made.pair.secret.decode()[:20] not in str(caught.value)


@pytest.mark.parametrize("field", ["fleet", "client"])
def test_a_secret_in_the_wrong_line_is_not_shown(tmp_path: Path, field: str) -> None:
    made = make_fleet_key(FLEET, tmp_path / "a.key")
    text = client_file(tmp_path / "b.key", made.pair).path.read_text()
    secret = made.pair.secret.decode()
    named = {"fleet": FLEET, "client": "alice"}[field]
    made.path.write_text(text.replace(f'{field} = "{named}"', f'{field} = "{secret}"'))
    with pytest.raises(UsageError, match=f"'{field}' is no name") as caught:
        read_key(made.path)
    assert secret[:12] not in str(caught.value)


def test_a_key_file_that_an_editor_has_marked_and_given_other_line_ends_is_read(tmp_path: Path) -> None:
    made = make_fleet_key(FLEET, tmp_path / "a.key")
    made.path.write_bytes(b"\xef\xbb\xbf" + made.path.read_bytes().replace(b"\n", b"\r\n"))
    assert read_key(made.path) == made


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names")
def test_a_pipe_is_no_key_and_nobody_waits_for_its_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.key", 0o600)
    with pytest.raises(UsageError, match=r"can not be read \(it is no file\)"):
        read_key(tmp_path / "a.key")


def test_a_key_that_can_not_be_looked_at_is_not_taken_for_none(tmp_path: Path) -> None:
    """Whoever took it for none would serve in the clear, or with another key."""
    keys, model = tmp_path / "keys", tmp_path / "model"
    (model / "shard-00").mkdir(parents=True)
    # Which nobody may enter, not even root.
    keys.symlink_to("keys")
    for find in (find_fleet_key, find_client_key):
        with pytest.raises(UsageError, match=r"can not be read \(.*that this user owns it"):
            find(FLEET, directory=keys)
    for beside in (model, model / "shard-00"):
        (beside / FLEET_KEY).symlink_to(tmp_path / "gone")
        with pytest.raises(UsageError, match="a link that leads nowhere"):
            find_fleet_key(FLEET, model=model, directory=tmp_path / "empty")
        (beside / FLEET_KEY).unlink()
    assert find_fleet_key(FLEET, model=model, directory=tmp_path / "empty") is None


def test_what_is_no_file_is_no_key(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        read_key(tmp_path / "nothing")
    with pytest.raises(UsageError, match=r"can not be read|is no file"):
        read_key(tmp_path)


def test_no_key_is_made_inside_a_repository(tmp_path: Path) -> None:
    (tmp_path / "clone" / ".git").mkdir(parents=True)
    inside = tmp_path / "clone" / "deep" / "a.key"
    assert repository_of(inside) == tmp_path / "clone"
    with pytest.raises(UsageError, match="repository"):
        make_fleet_key(FLEET, inside)
    assert not inside.exists()


def test_a_node_takes_the_named_key_then_that_beside_its_shards_then_the_users(tmp_path: Path) -> None:
    directory, model = tmp_path / "keys", tmp_path / "model"
    (model / "shard-01").mkdir(parents=True)
    assert find_fleet_key(FLEET, model=model, directory=directory) is None
    own = make_fleet_key(FLEET, fleet_key_path(FLEET, directory))
    assert find_fleet_key(FLEET, model=model, directory=directory) == own
    assert find_fleet_key("other", model=model, directory=directory) is None
    beside = make_fleet_key(FLEET, model / "shard-01" / FLEET_KEY)
    assert find_fleet_key(FLEET, model=model, directory=directory) == beside
    named = make_fleet_key(FLEET, tmp_path / "named.key")
    assert find_fleet_key(FLEET, key=named.path, model=model, directory=directory) == named
    make_fleet_key(FLEET, model / FLEET_KEY)
    with pytest.raises(MismatchError, match="two fleets"):
        find_fleet_key(FLEET, model=model, directory=directory)


def test_a_client_takes_its_own_key_before_the_fleets_and_a_node_refuses_it(tmp_path: Path) -> None:
    assert find_client_key(FLEET, directory=tmp_path) is None
    own = make_fleet_key(FLEET, fleet_key_path(FLEET, tmp_path))
    assert find_client_key(FLEET, directory=tmp_path) == own
    issued = client_file(client_key_path(FLEET, tmp_path), own.pair)
    assert find_client_key(FLEET, directory=tmp_path) == issued
    with pytest.raises(UsageError, match="client 'alice'"):
        find_fleet_key(FLEET, key=issued.path)


def test_a_key_is_laid_beside_every_shard_once(tmp_path: Path) -> None:
    key = make_fleet_key(FLEET, tmp_path / "keys" / "a.key")
    out = tmp_path / "out"
    shards = [out / "shard-00", out / "shard-01"]
    for shard in shards:
        shard.mkdir(parents=True)
    assert lay_key(key, out, shards) == [directory / FLEET_KEY for directory in (out, *shards)]
    assert lay_key(key, out, shards) == []
    for directory in (out, *shards):
        laid = read_key(directory / FLEET_KEY)
        assert laid.pair == key.pair
    assert not (out / ".gitignore").exists()
    other = make_fleet_key(FLEET, tmp_path / "keys" / "b.key")
    with pytest.raises(MismatchError, match=other.print):
        lay_key(other, out, shards)


def test_a_key_laid_in_a_repository_is_kept_from_being_committed(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    out = tmp_path / "out"
    (out / "shard-00").mkdir(parents=True)
    key = KeyFile(tmp_path / "unwritten", FLEET, pair := KeyPair.new(), pair.public)
    lay_key(key, out, [out / "shard-00"])
    assert (out / ".gitignore").read_text().split() == [FLEET_KEY]


def test_an_export_beside_another_key_than_the_users_is_refused(tmp_path: Path) -> None:
    directory, out = tmp_path / "keys", tmp_path / "out"
    own = make_fleet_key(FLEET, fleet_key_path(FLEET, directory))
    assert find_key_to_lay(FLEET, key=None, out=out, directory=directory) == own
    other = make_fleet_key(FLEET, out / FLEET_KEY)
    with pytest.raises(MismatchError, match="two fleets"):
        find_key_to_lay(FLEET, key=None, out=out, directory=directory)
    assert find_key_to_lay(FLEET, key=other.path, out=out, directory=directory) == other


def test_two_that_make_a_key_at_once_end_up_with_one(tmp_path: Path) -> None:
    path = tmp_path / "a.key"
    start, outcomes = threading.Barrier(8), []

    def make() -> None:
        start.wait()
        try:
            outcomes.append(make_fleet_key(FLEET, path))
        except CascadiaError:
            outcomes.append(None)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [winner] = [each for each in outcomes if each is not None]
    assert read_key(path) == winner
    assert list(tmp_path.iterdir()) == [path]
