"""Where keys lie: the user's configuration directory, beside shards, and wherever --key says."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import platformdirs

from cascadia_p2p.errors import MismatchError, UsageError
from cascadia_p2p.keys.files import KeyFile, check_name, is_there, read_key, write_key, write_private
from cascadia_p2p.transport.curve import KeyPair

APP: Final = "cascadia-p2p"
FLEET_KEY: Final = "fleet.key"
"""The fleet's key where it lies beside shards."""

SHARDS: Final = "shard-*"


def keys_directory() -> Path:
    """Where the user's keys lie, one or two files a fleet."""
    return platformdirs.user_config_path(APP) / "keys"


def fleet_key_path(fleet: str, directory: Path | None = None) -> Path:
    """The fleet's own key among the user's."""
    check_name(fleet, "fleet")
    return (directory or keys_directory()) / f"{fleet}.key"


def client_key_path(fleet: str, directory: Path | None = None) -> Path:
    """A client's key for a fleet among the user's."""
    check_name(fleet, "fleet")
    return (directory or keys_directory()) / f"{fleet}.client.key"


def client_list_path(fleet: str, directory: Path | None = None) -> Path:
    """The list of clients that was kept where keys are issued."""
    check_name(fleet, "fleet")
    return (directory or keys_directory()) / f"{fleet}.clients.json"


def keys_beside(model: Path) -> list[Path]:
    """The key files in an exported model's directory and in those of its shards."""
    found = [directory / FLEET_KEY for directory in (model, *sorted(model.glob(SHARDS)))]
    return [path for path in found if is_there(path)]


def find_fleet_key(
    fleet: str, *, key: Path | None = None, model: Path | None = None, directory: Path | None = None
) -> KeyFile | None:
    """The key that a node uses: as named, else from beside its shards, else the user's; None without any.

    Args:
        fleet: the fleet's name.
        key: the file that the user names.
        model: directory of the exported model, or of one shard.
        directory: the user's keys, elsewhere than usual.

    Raises:
        UsageError: a file is no fleet key, damaged, or readable by others.
        MismatchError: shards in one directory lie beside different keys.
    """
    if key is not None:
        return require_fleet_key(key)
    if model is not None and (beside := keys_beside(model)):
        return _one(require_fleet_key(path) for path in beside)
    path = fleet_key_path(fleet, directory)
    return require_fleet_key(path) if is_there(path) else None


def find_key_to_lay(
    fleet: str, *, key: Path | None, out: Path, directory: Path | None = None
) -> KeyFile | None:
    """The key to lay beside an exported model's shards: as `find_fleet_key`, and no other may be the user's.

    Raises:
        UsageError: a file is no fleet key, damaged, or readable by others.
        MismatchError: another key lies there than the user's own for this fleet.
    """
    found = find_fleet_key(fleet, key=key, model=out, directory=directory)
    if found is None or key is not None:
        return found
    own = find_fleet_key(fleet, directory=directory)
    return found if own is None else _one((found, own))


def require_fleet_key(path: Path) -> KeyFile:
    """The fleet's key in a file.

    Raises:
        UsageError: it is something else.
    """
    found = read_key(path)
    if found.client is not None:
        raise UsageError(
            f"{path} is the key of client '{found.client}': nodes need the fleet's own, {FLEET_KEY} beside "
            "the shards or what 'cascadia-p2p keygen' made"
        )
    return found


def named_key(name: str | Path) -> Path:
    """The key file that somebody named, '~' being somebody's home.

    Raises:
        UsageError: nobody's.
    """
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise UsageError(f"the key file {name} does not exist: '~' names no user here") from None


def find_client_key(fleet: str, *, key: Path | None = None, directory: Path | None = None) -> KeyFile | None:
    """The key that a client uses: as named, else the client's among the user's, else the fleet's own.

    Raises:
        UsageError: a file is no key, damaged, or readable by others.
    """
    if key is not None:
        return read_key(key)
    for path in (client_key_path(fleet, directory), fleet_key_path(fleet, directory)):
        if is_there(path):
            return read_key(path)
    return None


def make_fleet_key(fleet: str, path: Path) -> KeyFile:
    """A new key for a fleet.

    Raises:
        UsageError: the place is inside a repository.
        CascadiaError: there is one already, or it can not be written.
    """
    if (repository := repository_of(path)) is not None:
        raise UsageError(
            f"{path} would lie in the repository {repository}, and keys that are committed are keys no more: "
            "name a place outside with --key FILE"
        )
    pair = KeyPair.new()
    made = KeyFile(path, fleet, pair, pair.public)
    write_key(made)
    return made


def lay_key(key: KeyFile, out: Path, shards: Iterable[Path]) -> list[Path]:
    """Put a fleet's key into an exported model's directory and into those of its shards.

    Where the same key lies, nothing is written. In a repository the files are kept from being committed.

    Args:
        key: the fleet's.
        out: the model's directory.
        shards: the directories of its shards.

    Returns:
        The files that were written.

    Raises:
        MismatchError: another key lies there.
    """
    written = []
    targets = [directory / FLEET_KEY for directory in (out, *shards)]
    for path in targets:
        if is_there(path) and require_fleet_key(path).pair != key.pair:
            raise _differ(read_key(path), key)
    for path in targets:
        if not is_there(path):
            write_key(KeyFile(path, key.fleet, key.pair, key.server))
            written.append(path)
    ignore = out / ".gitignore"
    if repository_of(out) is not None and not ignore.exists():
        write_private(ignore, f"{FLEET_KEY}\n".encode())
    return written


def repository_of(path: Path) -> Path | None:
    """The repository that a path lies in, or would lie in."""
    for parent in path.absolute().parents:
        # Where one may not look one can not write either.
        with contextlib.suppress(OSError):
            if any((parent / name).exists() for name in (".git", ".hg", ".svn", ".jj")):
                return parent
    return None


def _one(found: Iterable[KeyFile]) -> KeyFile:
    first, *others = found
    for other in others:
        if other.pair != first.pair:
            raise _differ(first, other)
    return first


def _differ(one: KeyFile, other: KeyFile) -> MismatchError:
    return MismatchError(
        f"{one.path} (fingerprint {one.print}) and {other.path} ({other.print}) are keys of two fleets: "
        "remove "
        "the one that is not this fleet's, or name the right one with --key FILE"
    )
