"""Meeting other nodes: answer greetings, admit who suits, refuse who does not, in words on both consoles.

A refusal ends this process only when this node is a newcomer (no other has ever taken it in), the other
node's ring is open, and the reason is the version or the model; or the identity, when that lasts for
`Times.clone`, since a restarted node is taken for a copy until its former run is seen to have ended. Any
other refusal is a warning, said again only after a while, and the address is dialled again.
"""

from __future__ import annotations

from collections.abc import Callable

from cascadia_p2p.errors import MismatchError
from cascadia_p2p.ring.actions import Abandon, Answer, Dial, DropPeer, Fatal, Retry, Route
from cascadia_p2p.ring.core import Core
from cascadia_p2p.ring.greeting import (
    ENDING,
    check,
    clone,
    is_self,
    label,
    mixed_numbers,
    mixed_software,
    other_version,
    refusal,
    replaced,
)
from cascadia_p2p.ring.membership import Admission, Peer
from cascadia_p2p.wire.messages import (
    ClaimState,
    Greeting,
    Introduction,
    OtherVersion,
    Refusal,
    RefusalCode,
)


class Meeting:
    """The doors of a node.

    Args:
        core: the shared state.
        gone: called with a peer that a newer instance replaces, and the reason.
    """

    def __init__(self, core: Core, gone: Callable[[Peer, str], None]) -> None:
        self._core = core
        self._gone = gone
        self._met_anyone = False
        self._identity_since: float | None = None
        self.refused = 0

    def on_introduction(self, intro: Introduction, link: int, source: str) -> None:
        """A greeting, or the answer to ours."""
        core = self._core
        own = core.introduction()
        if is_self(own, intro):
            core.act(Answer(link, core.welcome()) if isinstance(intro, Greeting) else Abandon(link))
            return
        fault = check(own, intro, serving=core.serving)
        if fault is not None:
            self._refuse(fault, link, source)
            if intro.claim.state is ClaimState.SERVING:
                self._end_if_newcomer(fault.code, fault.message)
            return
        before = core.peers.get(intro.node)
        outcome = core.peers.admit(intro, core.now)
        if outcome in (Admission.BURIED, Admission.CONTESTED, Admission.FULL):
            self._turn_away(outcome, own, intro, before, link, source)
            return
        if before is not None and outcome is Admission.REPLACED:
            core.act(DropPeer(before.node, before.instance))
            self._gone(before, f"{before.label} was restarted")
        self._admitted(own, intro, outcome, link)

    def on_refusal(self, message: Refusal, link: int, source: str) -> None:
        """Another node does not want this one."""
        core = self._core
        if message.node == core.node and message.instance == core.instance:
            return
        core.act(Retry(link, self._delay(message.code)))
        peer = core.peers.get(message.node, message.instance)
        if peer is not None and message.code is not RefusalCode.MALFORMED and core.seat is None:
            core.drop(peer, redial=False)
        core.say_seldom(
            f"refused by {message.node} {message.code}",
            "info" if message.code is RefusalCode.FLEET else "warning",
            "refused",
            f"refused by the node at {source}: {message.message}",
            code=message.code.value,
            source=source,
        )
        if message.serving:
            self._end_if_newcomer(message.code, message.message)

    def on_other_version(self, message: OtherVersion, link: int, source: str) -> None:
        """A greeting or refusal of another protocol version."""
        core = self._core
        own = core.introduction()
        sentence = other_version(own, message, source)
        if message.type != "refusal":
            core.act(Answer(link, refusal(own, RefusalCode.VERSION, sentence, serving=core.serving)))
        core.act(Retry(link, core.times.stranger_redial))
        self.refused += 1
        core.say_seldom(f"version {source}", "warning", "refused", sentence, code="version", source=source)
        if message.serving:
            self._end_if_newcomer(RefusalCode.VERSION, sentence)

    def on_undecodable(self, link: int, source: str, sentence: str) -> None:
        """Bytes that are no message: the sender is told, seldom."""
        core = self._core
        if not core.seldom("undecodable", core.times.remind):
            return
        core.say("warning", "undecodable", f"dropped what {source} sent: {sentence}", source=source)
        answer = refusal(core.introduction(), RefusalCode.MALFORMED, sentence, serving=core.serving)
        core.act(Answer(link, answer))

    def accepted(self) -> None:
        """Another node has taken this one in: it is no newcomer any more."""
        self._met_anyone, self._identity_since = True, None

    def greet_unknown(self, node: str, link: int) -> None:
        """A node speaks that this one does not know (any more): introduce this one again, seldom."""
        if self._core.seldom(f"unknown {node}", self._core.times.state):
            self._core.act(Answer(link, self._core.greeting()))

    # ------------------------------------------------------------------ inside

    def _admitted(self, own: Introduction, intro: Introduction, outcome: Admission, link: int) -> None:
        core = self._core
        if not isinstance(intro, Greeting):
            self.accepted()
        core.dirty = True
        core.addresses.met(intro.control)
        for endpoint in intro.peers:
            if all(peer.intro.control != endpoint for peer in core.peers):
                core.addresses.add(endpoint, core.now)
        core.act(Route(link, intro.node, intro.instance))
        if isinstance(intro, Greeting):
            core.act(Answer(link, core.welcome()))
        if outcome is Admission.KNOWN:
            return
        # Only the end of a connection that this node dialled shows at once that a process has ended.
        core.act(Dial(intro.control))
        shard = (
            "no shard yet" if intro.claim.shard is None else f"shard {intro.claim.shard} {intro.claim.state}"
        )
        core.say(
            "info",
            "peer_joined" if outcome is Admission.NEW else "peer_replaced",
            f"met {label(intro)} at {intro.control}: {shard}",
            peer=intro.node,
            peer_instance=intro.instance,
        )
        if warning := mixed_software(own, intro):
            core.say_seldom(f"mixed {intro.node}", "warning", "software_mixed", warning, peer=intro.node)
        if warning := mixed_numbers(own, intro):
            core.say_seldom(f"numbers {intro.node}", "warning", "numbers_mixed", warning, peer=intro.node)

    def _turn_away(
        self,
        outcome: Admission,
        own: Introduction,
        intro: Introduction,
        before: Peer | None,
        link: int,
        source: str,
    ) -> None:
        core = self._core
        if outcome is Admission.CONTESTED and before is not None:
            self._refuse(clone(own, before.intro, intro, serving=core.serving), link, source)
        elif outcome is Admission.BURIED:
            self._refuse(replaced(own, intro, serving=core.serving), link, source)
        else:
            sentence = f"{core.label} knows {len(core.peers)} nodes and takes no more"
            self._refuse(refusal(own, RefusalCode.FULL, sentence, serving=core.serving), link, source)

    def _refuse(self, answer: Refusal, link: int, source: str) -> None:
        core = self._core
        self.refused += 1
        core.act(Answer(link, answer))
        core.act(Retry(link, self._delay(answer.code)))
        core.say_seldom(
            f"refuse {source} {answer.code}",
            "info" if answer.code is RefusalCode.FLEET else "warning",
            "refused",
            f"refused the node at {source}: {answer.message}",
            code=answer.code.value,
            source=source,
        )

    def _delay(self, code: RefusalCode) -> float:
        identity = code is RefusalCode.IDENTITY
        return self._core.times.redial if identity else self._core.times.stranger_redial

    def _end_if_newcomer(self, code: RefusalCode, sentence: str) -> None:
        core = self._core
        if self._met_anyone or core.seat is not None or code not in ENDING:
            return
        if code is RefusalCode.IDENTITY:
            if self._identity_since is None:
                self._identity_since = core.now
            if core.now - self._identity_since < core.times.clone:
                return
        core.act(Fatal(MismatchError(sentence)))
