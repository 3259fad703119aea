"""One key a file: a fleet's, or a client's. TOML with keys in Z85, readable by its owner only."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import stat
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cascadia_p2p.errors import CascadiaError, UsageError
from cascadia_p2p.transport.curve import KeyPair, check_key, raw_key

MAX_BYTES: Final = 4096
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True, slots=True)
class KeyFile:
    """A key, and where it was read from.

    Args:
        path: the file.
        fleet: the fleet's name when it was made, for people.
        pair: the key.
        server: public key of the fleet, in Z85; the pair's own in a fleet's file.
        client: the client's name; None in a fleet's file.
    """

    path: Path
    fleet: str
    pair: KeyPair
    server: bytes
    client: str | None = None

    @property
    def print(self) -> str:
        """The fleet key's fingerprint: tells keys apart, and gives none away."""
        return fingerprint(self.server)


def fingerprint(public: bytes) -> str:
    """16 hex digits of a public key's hash."""
    return hashlib.sha256(raw_key(public)).hexdigest()[:16]


def check_name(name: str, what: str) -> None:
    """See that a name can stand in a key file and be one's name.

    Raises:
        UsageError: it can not.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{what} '{name}' is no name: expected 1 to 63 letters, digits, dots, dashes, underscores, a "
            "letter "
            "or digit first"
        )


def read_key(path: Path) -> KeyFile:
    """The key in a file.

    Raises:
        UsageError: there is no such file, it is no key file, it is damaged, or others may read it.
    """
    try:
        data = read_file(path, MAX_BYTES, lambda found: _require_private(path, found))
    except FileNotFoundError:
        what = "is a link that leads nowhere" if path.is_symlink() else "does not exist"
        raise UsageError(
            f"the key file {path} {what}: 'cascadia-p2p keygen' makes a fleet's key, and "
            "'cascadia-p2p keygen --client NAME' a client's"
        ) from None
    except OSError as error:
        raise _unreadable(path, error) from None
    return _parse(path, data)


def is_there(path: Path) -> bool:
    """Whether something lies where a key may lie, be it a link that leads nowhere.

    Raises:
        UsageError: that can not be told; a key that is overlooked would leave a door open.
    """
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise _unreadable(path, error) from None
    return True


def read_file(path: Path, size: int, check: Callable[[os.stat_result], None] = lambda _: None) -> bytes:
    """The content of a regular file, at most one byte more than `size`; never waits, as for a pipe's writer.

    Args:
        path: the file.
        size: bytes.
        check: looks at the file before it is read.

    Raises:
        OSError: it can not be read, or it is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no file")
        check(found)
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(size + 1)
    finally:
        os.close(descriptor)


def _unreadable(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"the key file {path} can not be read ({error.strerror}): see that it is a file, and that this user "
        "owns it and may enter its directories, or name another with --key FILE"
    )


def write_key(key: KeyFile) -> None:
    """Write a key file that only its owner may read, whole or not at all; never over another file.

    Raises:
        CascadiaError: there is a file already, or it can not be written.
    """
    role = "client" if key.client is not None else "fleet"
    lines = [
        f"# Key of client '{key.client}' of fleet '{key.fleet}'. Whoever has this file can ask the fleet."
        if key.client is not None
        else f"# Key of fleet '{key.fleet}'. Whoever has this file can join the fleet.",
        "# Keep it to yourself: no repository, no mail, mode 0600.",
        f'role = "{role}"',
        f'fleet = "{key.fleet}"',
    ]
    if key.client is not None:
        lines += [f'client = "{key.client}"', f'server = "{key.server.decode()}"']
    lines += [f'public = "{key.pair.public.decode()}"', f'secret = "{key.pair.secret.decode()}"']
    write_private(key.path, ("\n".join(lines) + "\n").encode())


def write_private(path: Path, data: bytes, *, replace: bool = False) -> None:
    """Write a file of mode 0600, whole or not at all.

    Args:
        path: the file; its directory is made, for its owner only.
        data: its content.
        replace: write over a file that is there.

    Raises:
        CascadiaError: there is one already, or it can not be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if replace:
                temporary.replace(path)
            else:
                _publish(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except FileExistsError:
        raise CascadiaError(f"{path} is there already and is not written over") from None
    except OSError as error:
        raise CascadiaError(f"{path} can not be written: {error.strerror}") from None


def _publish(temporary: Path, path: Path) -> None:
    """Give a file its name unless another one has it: two that make a key at once end up with one."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError as error:
        # Some file systems know no links.
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES, errno.EMLINK):
            raise
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None
        temporary.rename(path)


def _require_private(path: Path, found: os.stat_result) -> None:
    # Elsewhere the mode says nothing: there the directory's access list counts.
    if os.name == "posix" and found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UsageError(
            f"the key file {path} has mode {stat.S_IMODE(found.st_mode):04o}, so others on this PC may read "
            "it: "
            f"run 'chmod 600 {path}'; where that has no effect (USB sticks), copy it to a disk that has "
            "modes and "
            "name it with --key FILE"
        )


def _parse(path: Path, data: bytes) -> KeyFile:
    if len(data) > MAX_BYTES:
        raise UsageError(f"{path} is no key file: it is larger than {MAX_BYTES} bytes")
    try:
        # Editors on Windows put a mark before a text.
        table = tomllib.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        # The reason would quote the file.
        raise UsageError(f"{path} is no key file, or it is damaged: copy it again") from None
    texts = {name: value for name, value in table.items() if isinstance(value, str)}
    role, client = texts.get("role"), texts.get("client")
    wanted = {"role", "fleet", "public", "secret"} | ({"client", "server"} if role == "client" else set())
    if role not in ("fleet", "client") or (missing := wanted - texts.keys()):
        lacks = "role" if role not in ("fleet", "client") else ", ".join(sorted(missing))
        raise UsageError(f"{path} is no key file: '{lacks}' is missing or wrong; copy it again")
    for name in ("fleet", "client"):
        # What stands there may be a secret that got into the wrong line.
        if name in texts and not _NAME.fullmatch(texts[name]):
            raise UsageError(f"{path} is damaged: what it gives as '{name}' is no name; copy it again")
    pair = _pair(path, texts)
    server = _public(path, "server", texts["server"]) if role == "client" else pair.public
    return KeyFile(path, texts["fleet"], pair, server, client if role == "client" else None)


def _pair(path: Path, texts: dict[str, str]) -> KeyPair:
    with contextlib.suppress(ValueError, UnicodeEncodeError):
        pair = KeyPair.of(texts["secret"].encode("ascii"))
        if pair.public == texts["public"].encode("ascii"):
            return pair
        raise UsageError(f"{path} is damaged: its public key is not that of its secret key; copy it again")
    raise UsageError(f"{path} is damaged: 'secret' is no key of 40 characters in Z85; copy it again")


def _public(path: Path, name: str, text: str) -> bytes:
    try:
        key = text.encode("ascii")
        check_key(key)
    except (ValueError, UnicodeEncodeError):
        raise UsageError(
            f"{path} is damaged: '{name}' is no key of 40 characters in Z85; copy it again"
        ) from None
    return key
