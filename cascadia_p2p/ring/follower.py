"""A member's part in another's ring: accept FORM, answer READY, follow OPEN and CLOSE, notice a lost head.

A node accepts FORM when it comes from the head it follows, or when it follows none; the epoch must be newer
than any it has accepted, name this very instance with the shard it has loaded, and promise no more than it
can hold. While its head lives it refuses every other. Its head lives as long as its beats come; beats come
every `Times.beat` from the moment of FORM in both directions, so that either side notices a cut in any
direction: who hears nothing closes, stops beating, and thereby tells the other. A member also stops when its
head says, for longer than messages can be under way, that it is in another epoch: a CLOSE that was lost.
"""

from __future__ import annotations

from cascadia_p2p.ring.actions import OpenRing
from cascadia_p2p.ring.core import MAX_JUMP, Core, Seat
from cascadia_p2p.ring.membership import Peer
from cascadia_p2p.types import Epoch
from cascadia_p2p.wire.messages import Beat, ClaimState, Close, Form, Open, Ready, Reject


class Follower:
    """The role of a node whose seat is not the head's."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._beat_at = core.now
        self._strange_since: float | None = None

    # ------------------------------------------------------------------ messages of the head

    def on_form(self, form: Form, peer: Peer) -> None:
        """Accept the epoch, or say why not."""
        core = self._core
        if core.seat is not None and core.seat.epoch == form.epoch and not core.heads:
            if core.seat.switched:
                self._ready(core.seat)
            return
        if reason := self._objection(form, peer):
            core.send(
                peer.node, Reject(node=core.node, instance=core.instance, epoch=form.epoch, reason=reason)
            )
            core.say_seldom(
                f"reject {peer.node}",
                "warning",
                "form_rejected",
                f"{peer.label} was refused: {reason}",
                peer=peer.node,
            )
            return
        if core.seat is not None:
            core.stand_up(f"{peer.label} forms the ring anew")
        seat = core.sit(form.epoch, form.members, form.promise)
        self._beat_at, self._strange_since = core.now, None
        core.say(
            "info",
            "ring_joined",
            f"{core.label} takes stage {seat.stage + 1} of {len(form.members)} in the ring of {peer.label}",
            epoch=str(form.epoch),
            stage=seat.stage,
        )

    def on_open(self, message: Open, peer: Peer) -> None:
        """The ring serves."""
        core, seat = self._core, self._core.seat
        if (
            seat is None
            or seat.epoch != message.epoch
            or core.heads
            or seat.head.node != peer.node
            or seat.open
        ):
            return
        if not seat.switched:
            return
        seat.open = True
        core.dirty = True
        core.act(OpenRing(seat.epoch, seat.members, seat.promise))
        core.say(
            "info",
            "ring_open",
            f"the ring of {peer.label} is open: {len(seat.members)} nodes, shard {core.shard} is served here",
            epoch=str(seat.epoch),
        )

    def on_close(self, message: Close, peer: Peer) -> None:
        """The head ends the epoch."""
        seat = self._core.seat
        if seat is not None and seat.epoch == message.epoch and seat.head.node == peer.node:
            self._leave(f"{peer.label} closed the ring: {message.reason}")

    def on_beat(self, beat: Beat, peer: Peer) -> None:
        """A sign of life of the head, if it is in the same epoch."""
        seat = self._core.seat
        if seat is not None and seat.head.node == peer.node and beat.epoch == seat.epoch.counter:
            self._beat_at = self._core.now

    # ------------------------------------------------------------------ the data thread

    def on_switched(self, epoch: Epoch) -> None:
        """The data thread is in the epoch."""
        seat = self._core.seat
        if seat is not None and seat.epoch == epoch:
            seat.switched = True
            self._ready(seat)

    def on_failed(self, epoch: Epoch, sentence: str) -> None:
        """The data thread can not enter, or not go on in, the epoch."""
        core, seat = self._core, self._core.seat
        if seat is None or seat.epoch != epoch:
            return
        reason = f"{core.label} (shard {core.shard}): {sentence}"
        if seat.switched:
            core.send(
                seat.head.node, Close(node=core.node, instance=core.instance, epoch=epoch, reason=reason)
            )
        else:
            core.send(
                seat.head.node, Reject(node=core.node, instance=core.instance, epoch=epoch, reason=reason)
            )
        self._leave(reason)

    # ------------------------------------------------------------------ loss

    def on_gone(self, peer: Peer, reason: str) -> None:
        """A peer is gone; if it was the head, so is the ring."""
        seat = self._core.seat
        if seat is not None and seat.head.node == peer.node:
            self._leave(f"the head is lost: {reason}", missing=(0,))

    def tick(self) -> None:
        """Judge the head."""
        core, seat = self._core, self._core.seat
        if seat is None:
            return
        head = core.peers.get(seat.head.node, seat.head.instance)
        if head is None:
            self._leave(f"the head {core.name(seat.head.node)} is gone", missing=(0,))
            return
        silent = core.peers.silence(self._beat_at, core.now)
        if silent >= core.times.gone:
            core.drop(head, redial=True)
            self._leave(
                f"the head is lost: {head.label} has sent no heartbeat for {silent:.1f} s", missing=(0,)
            )
            return
        if head.ring == seat.epoch:
            self._strange_since = None
        elif self._strange_since is None:
            self._strange_since = core.now
        elif core.peers.silence(self._strange_since, core.now) >= core.times.strange:
            self._leave(f"{head.label} is no longer in epoch {seat.epoch}")

    # ------------------------------------------------------------------ inside

    def _objection(self, form: Form, peer: Peer) -> str | None:
        core, seat = self._core, self._core.seat
        head = form.members[0]
        if head.node != peer.node or head.instance != peer.instance or form.epoch.head != peer.instance:
            return f"the first member of epoch {form.epoch} is not its sender {peer.label}"
        if core.leaving is not None:
            return f"{core.label} is leaving"
        if seat is not None and core.heads:
            return f"{core.label} is itself the head of epoch {seat.epoch}"
        if seat is not None and seat.head.instance != peer.instance:
            return f"{core.label} is in epoch {seat.epoch} of {core.name(seat.head.node)}, which is alive"
        if form.epoch.counter > core.counter + MAX_JUMP:
            return f"epoch {form.epoch} is too far beyond {core.counter}, which {core.label} has accepted"
        if form.epoch.counter <= core.counter:
            return f"epoch {form.epoch} is not newer than {core.counter}, which {core.label} has accepted"
        return self._misfit(form)

    def _misfit(self, form: Form) -> str | None:
        core = self._core
        if [member.shard for member in form.members] != list(range(core.profile.shards)):
            return (
                f"epoch {form.epoch} does not hold shards 0 to {core.profile.shards - 1} once each, in order"
            )
        if len({member.node for member in form.members}) != len(form.members):
            return f"epoch {form.epoch} names a node twice"
        own = [member for member in form.members if member.node == core.node]
        if not own or own[0].instance != core.instance:
            return f"epoch {form.epoch} does not name instance {core.instance} of {core.label}"
        if core.state is not ClaimState.LOADED or own[0].shard != core.shard:
            return f"{core.label} has not loaded shard {own[0].shard}"
        least = form.promise.least(core.profile.promise)
        if least != form.promise:
            return (
                f"epoch {form.epoch} promises {form.promise.slots} slots of {form.promise.context} "
                f"positions, {form.promise.rows} rows a frame and {form.promise.kept} kept prefixes; "
                f"{core.label} can hold {core.profile.promise.slots} of {core.profile.promise.context}, "
                f"{core.profile.promise.rows} rows and {core.profile.promise.kept} prefixes"
            )
        return None

    def _ready(self, seat: Seat) -> None:
        core = self._core
        core.send(seat.head.node, Ready(node=core.node, instance=core.instance, epoch=seat.epoch))

    def _leave(self, reason: str, missing: tuple[int, ...] = ()) -> None:
        core = self._core
        core.stand_up(reason, missing)
        core.say(
            "warning",
            "ring_closed",
            f"{reason}; {core.label} keeps shard {core.shard} loaded and waits for a ring",
        )
