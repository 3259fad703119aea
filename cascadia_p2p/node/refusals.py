"""What a node's ports did not take, by port and reason: for `status` and the metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cascadia_p2p.node.scrapes import MetricsServer
from cascadia_p2p.transport.client_server import ClientServer
from cascadia_p2p.transport.control import ControlServer
from cascadia_p2p.transport.curve import Knock
from cascadia_p2p.transport.data import DataReceiver
from cascadia_p2p.transport.dialled import Dialled


@dataclass(frozen=True, slots=True)
class PortCounts:
    """What one port did not take.

    Args:
        handshakes: that came to nothing, by reason.
        overfull: connections that were ended because they sent more than is taken.
        others: what else, by reason.
    """

    handshakes: Mapping[str, int] = field(default_factory=dict)
    overfull: int = 0
    others: Mapping[str, int] = field(default_factory=dict)

    def shown(self) -> dict[str, int]:
        """Everything in one table."""
        named = {f"handshake_{reason}": count for reason, count in self.handshakes.items()}
        return named | {"overfull": self.overfull} | dict(self.others)


class Refusals:
    """Follows the ports of a node in its event loop; `look` is called often.

    Args:
        control: takes nodes.
        receiver: takes frames, in another thread.
        dialled: the connections to other nodes' ports.
        scrapes: takes scrapers, if there are any.
    """

    def __init__(
        self,
        control: ControlServer,
        receiver: DataReceiver,
        dialled: Dialled,
        scrapes: MetricsServer | None,
    ) -> None:
        self._control = control
        self._receiver = receiver
        self._dialled = dialled
        self._watch = receiver.watch()
        self._scrapes = scrapes

    def look(self, clients: ClientServer | None) -> None:
        """Take what has happened, and end connections that send too much."""
        self._control.look()
        self._watch.look()
        self._dialled.look()
        if clients is not None:
            clients.look()

    def counts(self, clients: ClientServer | None) -> dict[str, PortCounts]:
        """What was not taken since the node began, and on the clients' port since it is the head."""
        control = self._control
        others = {"malformed": control.malformed, "surplus": control.meter.surplus}
        surplus = {"surplus": self._receiver.meter.surplus}
        found = {
            "control": PortCounts(_named(control.failed), control.meter.cut, others),
            "data": PortCounts(_named(self._watch.failed), self._receiver.meter.cut, surplus),
            "dialled": PortCounts(overfull=self._dialled.meter.cut),
        }
        if clients is not None:
            others = {"malformed": clients.faults, "expelled": clients.expelled}
            found["client"] = PortCounts(_named(clients.failed), clients.meter.cut, others)
        if self._scrapes is not None:
            found["metrics"] = PortCounts(others=self._scrapes.refused)
        return found

    def close(self) -> None:
        """Stop; behind the end of the receiver."""
        self._watch.close()


def _named(failed: Mapping[Knock, int]) -> dict[str, int]:
    return {knock.value: count for knock, count in failed.items()}
