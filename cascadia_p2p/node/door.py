"""Whether a node's sockets are closed to strangers: its key, and what it may do without one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from cascadia_p2p.config import Config
from cascadia_p2p.discovery.interfaces import Address
from cascadia_p2p.errors import UsageError
from cascadia_p2p.keys.files import KeyFile
from cascadia_p2p.keys.places import FLEET_KEY, client_list_path, find_fleet_key, fleet_key_path
from cascadia_p2p.node.client_book import ClientBook
from cascadia_p2p.transport.control import Dial, Stranger
from cascadia_p2p.transport.curve import Keys, Knock
from cascadia_p2p.types import Endpoint


@dataclass(frozen=True, slots=True)
class Door:
    """A node's key, or that it has none.

    Args:
        key: the fleet's key; None speaks in the clear.
        book: whom it lets in besides nodes; None without a key.
        fleet: the fleet's name.
        model: the directory with this node's shards.
        warning: a sentence to say at the start; else empty.
    """

    key: KeyFile | None
    book: ClientBook | None
    fleet: str
    model: Path
    warning: str = ""

    @classmethod
    def find(cls, config: Config, model: Path, address: Address, state: Path) -> Door:
        """The door of a node at this address.

        Args:
            config: all settings.
            model: directory of the exported model.
            address: that it binds.
            state: the node's own directory.

        Raises:
            UsageError: the key can not be used, or there is none and the address is not this PC's alone.
            MismatchError: there are two.
        """
        key = find_fleet_key(config.fleet, key=config.key, model=model)
        if key is not None:
            kept = state / f"clients-{key.print}.json"
            book = ClientBook(key, kept, client_list_path(config.fleet))
            ignored = f"--insecure has no effect: this node has the key {key.path}" if config.insecure else ""
            return cls(key, book, config.fleet, model, ignored)
        if address.loopback:
            return cls(None, None, config.fleet, model)
        if not config.insecure:
            raise UsageError(
                f"no key: without one a node serves only its own PC, and this one would serve {address.ip}. "
                "Copy "
                f"{FLEET_KEY} from a PC of the fleet to {model / FLEET_KEY}; or, for the first PC, run "
                f"'cascadia-p2p keygen --fleet {config.fleet}'; or stay on this PC with --bind 127.0.0.1; or "
                "give "
                "--insecure where everybody on the network may read and use the fleet"
            )
        return cls(
            None,
            None,
            config.fleet,
            model,
            f"--insecure: nothing is encrypted, and everybody who reaches {address.ip} can read and use this "
            "fleet, and join it; 'cascadia-p2p keygen' makes a key that closes it",
        )

    @property
    def keys(self) -> Keys | None:
        """What the node's sockets need."""
        if self.key is None or self.book is None:
            return None
        return Keys(self.key.pair, self.key.pair.public, self.book.admits)

    def words(self) -> str:
        """The door in a few words, for people."""
        if self.key is None:
            return "open: no key"
        return f"closed with key {self.key.path} (fingerprint {self.key.print})"

    def report(self) -> dict[str, JsonValue]:
        """The door for `status`; no key is in it."""
        if self.key is None or self.book is None:
            return {"closed": False}
        clients = self.book.clients
        return {
            "closed": True,
            "fingerprint": self.key.print,
            "clients": len(clients.admitted),
            "client_list": clients.version,
            "rejected_lists": self.book.rejected,
        }

    def dial_failed(self, endpoint: Endpoint, why: Dial) -> str:
        """What to say of a node that was dialled and does not agree about keys."""
        if why is Dial.CLOSED:
            return (
                f"the node at {endpoint} takes only nodes with the fleet's key, and this one has none: copy "
                f"{FLEET_KEY} from beside that PC's shards to {self.model / FLEET_KEY}, and start again"
            )
        mine = self._mine()
        if why is Dial.IN_THE_CLEAR:
            return (
                f"the node at {endpoint} has no key and stays outside: copy {mine} there, beside its shards"
            )
        return f"the node at {endpoint} has another key or none, or is no node: {self._one_key()}"

    def turned_away(self, stranger: Stranger) -> str | None:
        """What to say of somebody who knocked; None when it has nothing to do with keys."""
        host = stranger.host or "an unknown address"
        if self.key is None:
            if stranger.why is not Knock.MECHANISM:
                return None
            return (
                f"turned away {host}: it has a fleet's key, and this node has none. If both belong "
                f"together, copy {FLEET_KEY} from beside that PC's shards to {self.model / FLEET_KEY}"
            )
        has = {
            Knock.MECHANISM: "no key",
            Knock.KEY: "another key",
            Knock.REFUSED: "a client's key, or one of no node",
        }.get(stranger.why)
        if has is None:
            return None
        if stranger.why is Knock.KEY:
            return f"turned away {host}: it has {has}; {self._one_key()}"
        return (
            f"turned away {host}: it has {has}. If it is a node of this fleet, copy {self._mine()} "
            "there, "
            f"beside its shards as {FLEET_KEY}"
        )

    def _one_key(self) -> str:
        """What to do where two keys meet: neither side can know whose is the fleet's."""
        return (
            "to be in one fleet both need the key of the PCs that were there first: copy "
            f"{self._mine()} there, beside its shards as {FLEET_KEY}, or, if this PC is the new one, that "
            f"PC's {FLEET_KEY} here over {self._mine()}; and start the new one again"
        )

    def _mine(self) -> Path:
        return self.key.path if self.key is not None else fleet_key_path(self.fleet)
