"""The fleet's list of clients at one node: kept on the disk, agreed with the other nodes, asked at the "
"door."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import structlog

from cascadia_p2p.errors import CascadiaError, WireError
from cascadia_p2p.keys.clients import ClientList, load_clients, save_clients
from cascadia_p2p.keys.files import KeyFile
from cascadia_p2p.transport.curve import Domain
from cascadia_p2p.types import Instance, NodeId
from cascadia_p2p.wire.messages import Clients

_log = structlog.get_logger()


class ClientBook:
    """Who may come in, now.

    Args:
        key: the fleet's.
        kept: the file in which this node keeps the list over restarts.
        issued: the file that 'keygen' writes on this PC; looked at again and again.
    """

    def __init__(self, key: KeyFile, kept: Path, issued: Path) -> None:
        self._key = key
        self._kept = kept
        self._issued = issued
        self._issued_stamp: tuple[int, int] | None = None
        """Of the file as it was taken last."""
        self._complained: tuple[tuple[int, int], str] | None = None
        self._list = ClientList()
        self._admitted: frozenset[bytes] = frozenset()
        self.rejected = 0
        """Lists that were not made with the fleet's key."""
        self.changed: Callable[[], None] = lambda: None
        """Called after the list has changed."""
        try:
            self._take(load_clients(kept, key.pair))
        except CascadiaError as error:
            _reject(error)
        self.look()

    @property
    def clients(self) -> ClientList:
        """The list."""
        return self._list

    def admits(self, domain: Domain, key: bytes) -> bool:
        """Whether whoever has this key may come in; from any thread."""
        if key == self._key.pair.public:
            return True
        return domain is Domain.CLIENTS and key in self._admitted

    def look(self) -> None:
        """Take what was issued or withdrawn on this PC since the last look; what fails is tried again."""
        try:
            found = self._issued.stat()
        except FileNotFoundError:
            return
        except OSError:
            # Reading it says why.
            stamp = (0, 0)
        else:
            stamp = (found.st_mtime_ns, found.st_ino)
        if stamp == self._issued_stamp:
            return
        try:
            self._take(load_clients(self._issued, self._key.pair))
        except CascadiaError as error:
            if self._complained != (stamp, str(error)):
                self._complained = stamp, str(error)
                _reject(error)
        else:
            self._issued_stamp, self._complained = stamp, None

    def message(self, node: NodeId, instance: Instance, *, whole: bool) -> Clients:
        """What other nodes are told: the list's digest, and the list itself if `whole`."""
        sealed = self._list.seal(self._key.pair).decode() if whole else None
        return Clients(node=node, instance=instance, digest=self._list.digest, sealed=sealed)

    def hear(self, message: Clients) -> bool:
        """Take what another node or a 'keygen' has; whether it should be sent this node's list."""
        if message.sealed is not None:
            try:
                self._take(ClientList.open(message.sealed.encode(), self._key.pair))
            except WireError as error:
                self.rejected += 1
                _log.warning("client_list_rejected", message=f"{error}; it was not taken")
                return False
        return message.digest != self._list.digest

    def _take(self, other: ClientList) -> None:
        joined = self._list.join(other)
        if joined is self._list:
            return
        self._list, self._admitted = joined, joined.admitted
        try:
            save_clients(self._kept, joined, self._key.pair)
        except CascadiaError as error:
            _log.warning("client_list_not_kept", message=f"{error}; after a restart it is learnt anew")
        _log.info(
            "client_list",
            message=f"list of clients at version {joined.version}: {len(self._admitted)} admitted",
            version=joined.version,
            admitted=len(self._admitted),
        )
        self.changed()


def _reject(error: CascadiaError) -> None:
    # Nobody is admitted by a list that can not be read, and nobody who was withdrawn comes back.
    _log.warning("client_list_rejected", message=str(error))
