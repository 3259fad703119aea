"""The list of a fleet's clients: who was issued a key, and who has had it withdrawn.

Lists only grow, and two of them join into one whatever their order: every client of either, withdrawn where
either says so. So nodes that were told different things agree as soon as they meet, and nobody's word can
give a withdrawn key back. What carries a list from one machine to another, or lies on a disk, is
authenticated by the fleet's secret key.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, Self

import orjson

from cascadia_p2p.errors import CascadiaError, UsageError, WireError
from cascadia_p2p.keys.files import check_name, read_file, write_private
from cascadia_p2p.transport.curve import KeyPair, check_key

MAX_CLIENTS: Final = 1024
"""Clients a fleet's list holds, withdrawn ones included."""

MAX_BYTES: Final = 200_000
_ELSEWHERE: Final = (
    "move the list away: nodes that run know it too, and 'cascadia-p2p keygen' learns it from those that it "
    "finds or --peer names"
)
_PURPOSE: Final = b"cascadia-p2p client list"


@dataclass(frozen=True, slots=True)
class ClientEntry:
    """One client that was issued a key.

    Args:
        name: as it was given; two may have the same.
        key: its public key in Z85.
        revoked: its key was withdrawn.
    """

    name: str
    key: bytes
    revoked: bool = False


@dataclass(frozen=True, slots=True)
class ClientList:
    """The clients of a fleet, by public key; never changed in place."""

    entries: Mapping[bytes, ClientEntry] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def version(self) -> int:
        """How many keys were issued and withdrawn: every change makes it larger."""
        return len(self.entries) + sum(entry.revoked for entry in self.entries.values())

    @property
    def digest(self) -> str:
        """32 hex digits that tell lists apart."""
        return hashlib.sha256(self._body()).hexdigest()[:32]

    @property
    def admitted(self) -> frozenset[bytes]:
        """Public keys that may come in."""
        return frozenset(key for key, entry in self.entries.items() if not entry.revoked)

    def named(self, name: str) -> list[ClientEntry]:
        """The clients of this name that have not been withdrawn."""
        return [entry for entry in self.entries.values() if entry.name == name and not entry.revoked]

    def issue(self, name: str, key: bytes) -> Self:
        """The list with one more client.

        Raises:
            UsageError: a client of this name is on it, the name is none, or the list is full.
        """
        check_name(name, "client")
        if self.named(name):
            raise UsageError(
                f"a client '{name}' has a key already: give another name, or withdraw that key first with "
                "--revoke"
            )
        if len(self.entries) >= MAX_CLIENTS:
            raise UsageError(
                f"the list holds {MAX_CLIENTS} clients, withdrawn ones included, and takes no more: give "
                "several "
                "people one key, or make a new fleet key"
            )
        return self._with({key: ClientEntry(name, key)})

    def revoke(self, name: str) -> Self:
        """The list without the clients of this name.

        Raises:
            UsageError: there is none.
        """
        found = self.named(name)
        if not found:
            raise UsageError(f"no client '{name}' has a key: the list has {self._names() or 'nobody'}")
        return self._with({entry.key: replace(entry, revoked=True) for entry in found})

    def join(self, other: ClientList) -> Self:
        """Both lists in one.

        Raises:
            WireError: that would be too many.
        """
        new = {
            key: entry
            for key, entry in other.entries.items()
            if key not in self.entries or (entry.revoked and not self.entries[key].revoked)
        }
        if len(self.entries.keys() | new.keys()) > MAX_CLIENTS:
            raise WireError(f"two lists of clients together hold more than {MAX_CLIENTS}")
        return self._with(new) if new else self

    def seal(self, pair: KeyPair) -> bytes:
        """The list as JSON, authenticated with the fleet's key."""
        body = self._body()
        return orjson.dumps({"clients": orjson.Fragment(body), "mac": _mac(body, pair)})

    @classmethod
    def open(cls, data: bytes, pair: KeyPair) -> Self:
        """The list that was sealed with the fleet's key.

        Raises:
            WireError: it was not, or it is no list.
        """
        if len(data) > MAX_BYTES:
            raise WireError(f"a list of clients of {len(data)} bytes: expected at most {MAX_BYTES}")
        try:
            raw = orjson.loads(data)
        except orjson.JSONDecodeError:
            raise WireError("a list of clients is no JSON") from None
        if not isinstance(raw, dict) or not isinstance(raw.get("mac"), str):
            raise WireError("a list of clients needs 'clients' and 'mac'")
        made = cls()._with({entry.key: entry for entry in _entries(raw.get("clients"))})
        # The body is spelled anew: one list has one spelling.
        if not hmac.compare_digest(_mac(made._body(), pair).encode(), raw["mac"].encode()):
            raise WireError("a list of clients was not made with this fleet's key, or was changed since")
        return made

    def _names(self) -> str:
        """All names; behind the others those of which every key is withdrawn, and that this is so."""
        admitted = {entry.name for entry in self.entries.values() if not entry.revoked}
        withdrawn = {entry.name for entry in self.entries.values()} - admitted
        return ", ".join([*sorted(admitted), *(f"{name} (withdrawn)" for name in sorted(withdrawn))])

    def _with(self, changed: Mapping[bytes, ClientEntry]) -> Self:
        return type(self)(MappingProxyType({**self.entries, **changed}))

    def _body(self) -> bytes:
        rows = [
            [entry.name, entry.key.decode(), entry.revoked]
            for _, entry in sorted(self.entries.items(), key=lambda item: item[0])
        ]
        return orjson.dumps(rows)


def _mac(body: bytes, pair: KeyPair) -> str:
    key = hmac.digest(pair.secret, _PURPOSE, "sha256")
    return hmac.digest(key, body, "sha256").hex()


def _entries(raw: object) -> Iterable[ClientEntry]:
    if not isinstance(raw, list) or len(raw) > MAX_CLIENTS:
        raise WireError(f"'clients' should be a list of at most {MAX_CLIENTS}")
    for row in raw:
        match row:
            case [str(name), str(key), bool(revoked)]:
                try:
                    check_name(name, "client")
                    check_key(key.encode("ascii"))
                except (UsageError, ValueError):
                    raise WireError("a list of clients holds something that is no name or no key") from None
                yield ClientEntry(name, key.encode("ascii"), revoked)
            case _:
                raise WireError("a client is [name, key, revoked]")


def load_clients(path: Path, pair: KeyPair) -> ClientList:
    """The list in a file; an empty one when there is no file.

    Raises:
        CascadiaError: it can not be read, or it was not made with this fleet's key.
    """
    try:
        data = read_file(path, MAX_BYTES)
    except FileNotFoundError:
        return ClientList()
    except OSError as error:
        raise CascadiaError(
            f"the list of clients {path} can not be read ({error.strerror}): see that it is a file, and that "
            f"this user owns it, or {_ELSEWHERE}"
        ) from None
    try:
        return ClientList.open(data, pair)
    except WireError as error:
        raise CascadiaError(
            f"{path}: {error}; see that the key is this fleet's own (--key FILE), and if it is, {_ELSEWHERE}"
        ) from None


def save_clients(path: Path, clients: ClientList, pair: KeyPair) -> None:
    """Write the list, whole or not at all.

    Raises:
        CascadiaError: it can not be written.
    """
    write_private(path, clients.seal(pair), replace=True)
