"""The head's part: form a ring of loaded nodes, prove it with a probe, open it, form it anew after a loss.

Candidate is the node whose loaded claim on shard 0 goes first among those that are not suspect. It forms as
soon as live loaded nodes cover every shard, and says which shards are missing, in words, when they do not
(on change, and every ten seconds). The members of one formation are fixed; what goes wrong with any of them
ends the epoch, and a new epoch is formed: at once after a ring that was stable or whose member is gone, else
after a back-off that grows and is jittered by instance, so that two candidates do not meet again and again.

FORM is repeated until READY, OPEN until the member's State says `serving`: either may be lost with a
connection. Whoever is not READY in time is named, and is the last choice for its shard for a while (never
banned: it may be the only one).

While the ring is open a member is suspect after `Times.suspect` without a beat, or as soon as its connection
closes: nothing new is admitted until it is heard. It is lost when it is silent for `Times.gone`, when its
connection is closed and its port refuses, when a new instance of it appears, when it says goodbye, when it
reports a broken hop, when it says that it is in another epoch, or when it or the hop to it is stuck
(`watch`).
"""

from __future__ import annotations

import zlib

from cascadia_p2p.ring.actions import (
    BecomeHead,
    OpenRing,
    PauseAdmission,
    ResumeAdmission,
    SendProbe,
    SetPace,
    StopBeingHead,
)
from cascadia_p2p.ring.claims import ranked
from cascadia_p2p.ring.core import Core, Seat
from cascadia_p2p.ring.formation import Attempt, next_epoch, plan, shard_list
from cascadia_p2p.ring.membership import Peer
from cascadia_p2p.ring.stagetime import Pace, StageTime, ring_time
from cascadia_p2p.ring.watch import HopWatch
from cascadia_p2p.types import Epoch, Instance, NodeId, Promise
from cascadia_p2p.wire.messages import Beat, ClaimState, Close, Form, Member, Open, Ready, Reject


class Head:
    """The role of the node that serves shard 0."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.attempt: Attempt | None = None
        self.paused: str | None = None
        self._avoided: dict[NodeId, float] = {}
        self._failures = 0
        self._retry_at = core.now
        self._candidate_since: float | None = None
        self._probe = 0
        self._paces: tuple[Pace, ...] = ()
        self._silent: tuple[NodeId, Instance] | None = None

    # ------------------------------------------------------------------ becoming the head

    def consider(self) -> None:
        """Form a ring when this node is the one to do it and every shard is covered."""
        core = self._core
        candidate = self._is_candidate()
        self._serve_clients(candidate)
        if core.seat is not None or not candidate or core.now < self._retry_at:
            return
        if core.leaving is not None and not core.counters.slots:
            return
        self._avoided = {node: until for node, until in self._avoided.items() if until > core.now}
        chosen = plan(core, self._avoided)
        if chosen.members is None:
            return
        self._form(chosen.members, chosen.promise.least(core.profile.promise))

    def _is_candidate(self) -> bool:
        core = self._core
        if core.heads:
            return True
        if core.seat is not None or core.shard != 0 or core.state is not ClaimState.LOADED:
            return False
        if self._others_have_a_head():
            return False
        # One that leaves counts for as long as it serves clients: there must be one door.
        rivals = [
            peer
            for peer in core.peers
            if peer.claim.shard == 0
            and not (peer.leaving and peer.client is None)
            and not core.peers.is_suspect(peer, core.now)
        ]
        claims = [core.own_holder(), *(core.holder(peer) for peer in rivals)]
        return ranked(claims, core.times.claim_tolerance)[0].node == core.node

    def _others_have_a_head(self) -> bool:
        """Whether somebody is in the ring of a head that this node has yet to meet."""
        core = self._core
        met = {core.instance, *(peer.instance for peer in core.peers)}
        return any(
            peer.ring is not None and peer.ring.head not in met and not core.peers.is_suspect(peer, core.now)
            for peer in core.peers
        )

    def _serve_clients(self, candidate: bool) -> None:
        core = self._core
        if not candidate:
            self._candidate_since = None
            if core.serves_clients:
                core.serves_clients = False
                core.act(StopBeingHead(f"{core.label} is no longer the first holder of shard 0"))
            return
        if self._candidate_since is None:
            self._candidate_since = core.now
        if not core.serves_clients and (
            core.heads or core.now - self._candidate_since >= core.times.candidate
        ):
            core.serves_clients = True
            core.act(BecomeHead())

    def _form(self, members: tuple[Member, ...], promise: Promise) -> None:
        core = self._core
        seat = core.sit(next_epoch(core), members, promise)
        self.attempt = Attempt(
            form_at=core.now,
            beat_at={member.node: core.now for member in seat.others},
            watch=HopWatch(len(members), core.now),
            first_probe=self._probe + 1,
        )
        core.say(
            "info",
            "ring_forming",
            f"{core.label} forms a ring of {len(members)} in epoch {seat.epoch}",
            epoch=str(seat.epoch),
            members=len(members),
        )
        self._serve_clients(candidate=True)
        self._send_form(seat, self.attempt)

    # ------------------------------------------------------------------ messages of members

    def on_ready(self, message: Ready, peer: Peer) -> None:
        """A member took the epoch."""
        seat, attempt = self._own(message.epoch)
        if seat is None or attempt is None or peer.node not in attempt.beat_at:
            return
        attempt.ready.add(peer.node)
        attempt.beat_at[peer.node] = self._core.now
        self._start_probing(seat, attempt)

    def on_reject(self, message: Reject, peer: Peer) -> None:
        """A member did not take the epoch."""
        seat, attempt = self._own(message.epoch)
        if seat is None or attempt is None or peer.node not in attempt.beat_at:
            return
        self._avoid(peer.node)
        self._end(f"{peer.label} refused: {message.reason}", self._shards_of(seat, {peer.node}))

    def on_close(self, message: Close, peer: Peer) -> None:
        """A member can not go on."""
        seat, attempt = self._own(message.epoch)
        if seat is not None and attempt is not None and peer.node in attempt.beat_at:
            self._end(message.reason, self._shards_of(seat, {peer.node}))

    def on_beat(self, beat: Beat, peer: Peer) -> None:
        """A sign of life and the counters of a member, if it is in the same epoch."""
        core, seat = self._core, self._core.seat
        attempt = self.attempt
        if (
            seat is None
            or attempt is None
            or peer.node not in attempt.beat_at
            or beat.epoch != seat.epoch.counter
        ):
            return
        attempt.beat_at[peer.node] = core.now
        stage = next(index for index, member in enumerate(seat.members) if member.node == peer.node)
        attempt.watch.update(stage, beat, core.now)

    # ------------------------------------------------------------------ the data thread

    def on_switched(self, epoch: Epoch) -> None:
        """The own data thread is in the epoch."""
        seat, attempt = self._own(epoch)
        if seat is not None and attempt is not None:
            seat.switched = True
            self._start_probing(seat, attempt)

    def on_failed(self, epoch: Epoch, sentence: str) -> None:
        """The own data thread can not enter, or not go on in, the epoch."""
        seat, _ = self._own(epoch)
        if seat is not None:
            self._end(f"{self._core.label} (shard 0): {sentence}", ())

    def on_probe(self, epoch: Epoch, number: int) -> None:
        """A probe came round: the ring is whole."""
        core = self._core
        seat, attempt = self._own(epoch)
        if seat is None or attempt is None or attempt.opened_at is not None or number < attempt.first_probe:
            return
        if attempt.probing_since is None:
            return
        seat.open = True
        attempt.opened_at = attempt.open_at = core.now
        core.dirty = True
        self._tell_pace(seat)
        survived = self._silent is not None and core.peers.get(*self._silent) is not None
        self._silent = None
        core.act(OpenRing(seat.epoch, seat.members, seat.promise, survived))
        self._send_open(seat, [member.node for member in seat.others])
        core.say(
            "info",
            "ring_open",
            f"the ring is open: {len(seat.members)} nodes, {seat.promise.slots} slots of "
            f"{seat.promise.context} positions",
            epoch=str(seat.epoch),
            members=len(seat.members),
        )

    # ------------------------------------------------------------------ loss

    def on_gone(self, peer: Peer, reason: str, *, left: bool = False, silent: bool = False) -> None:
        """A peer is gone, or has said goodbye; if it was a member, so is the ring."""
        seat = self._core.seat
        if seat is not None and self.attempt is not None and peer.node in self.attempt.beat_at:
            lost = None if left else peer.node
            shards = self._shards_of(seat, {peer.node})
            self._end(reason, shards, lost=lost, silent=peer if silent else None, at_once=True)

    def leave(self, reason: str) -> None:
        """This node ends; tell the members."""
        if self._core.heads:
            self._end(reason, (0,))

    # ------------------------------------------------------------------ time

    def tick(self) -> None:
        """Repeat what may be lost, and judge the members."""
        seat, attempt = self._core.seat, self.attempt
        if seat is None or attempt is None:
            return
        attempt.watch.update(0, self._core.beat(), self._core.now)
        if self._judge_members(seat, attempt):
            return
        if attempt.opened_at is not None:
            self._keep_open(seat, attempt)
        elif attempt.probing_since is not None:
            self._keep_probing(seat, attempt)
        else:
            self._keep_forming(seat, attempt)

    def _judge_members(self, seat: Seat, attempt: Attempt) -> bool:
        """End the epoch when a member is lost; whether it did."""
        core = self._core
        for member in seat.others:
            peer = core.peers.get(member.node, member.instance)
            if peer is None:
                self._end(f"{core.name(member.node)} is gone", (member.shard,), lost=member.node)
                return True
            silent = core.peers.silence(attempt.beat_at[member.node], core.now)
            if silent >= core.times.gone:
                self._avoid(member.node)
                core.drop(peer, redial=True)
                reason = f"{peer.label} has sent no heartbeat for {silent:.1f} s"
                self._end(reason, (member.shard,), lost=member.node, silent=peer)
                return True
            if self._has_left(peer, seat, attempt):
                self._end(f"{peer.label} has left epoch {seat.epoch}", (member.shard,))
                return True
        return False

    def _has_left(self, peer: Peer, seat: Seat, attempt: Attempt) -> bool:
        """Whether a member says that it is in a newer epoch, or for longer than a State travels in none."""
        core = self._core
        if peer.ring is not None and peer.ring.counter > seat.epoch.counter:
            return True
        if peer.node not in attempt.ready or peer.ring == seat.epoch:
            attempt.strange_since.pop(peer.node, None)
            return False
        since = attempt.strange_since.setdefault(peer.node, core.now)
        return core.peers.silence(since, core.now) >= core.times.strange

    def _keep_forming(self, seat: Seat, attempt: Attempt) -> None:
        core = self._core
        late = [member for member in seat.members if not self._is_ready(seat, attempt, member)]
        if core.peers.silence(seat.since, core.now) >= core.times.ready:
            names = ", ".join(f"{core.name(member.node)} (shard {member.shard})" for member in late)
            for member in late:
                self._avoid(member.node)
            self._end(
                f"no READY within {core.times.ready:g} s from {names}", tuple(member.shard for member in late)
            )
        elif core.now - attempt.form_at >= core.times.resend:
            self._send_form(seat, attempt)

    def _keep_probing(self, seat: Seat, attempt: Attempt) -> None:
        core = self._core
        started = attempt.probing_since if attempt.probing_since is not None else core.now
        waited = core.peers.silence(started, core.now)
        if waited >= core.times.probe_limit:
            stage = attempt.watch.unseen(attempt.first_probe)
            self._avoid(seat.members[stage].node if stage else seat.members[-1].node)
            self._end(self._silent_hop(seat, stage), ())
            return
        if waited >= core.times.probe_name:
            sentence = self._silent_hop(seat, attempt.watch.unseen(attempt.first_probe))
            core.say_seldom("probe", "warning", "probe_lost", sentence)
        if core.now - attempt.probe_at >= core.times.probe:
            self._send_probe(seat, attempt)

    def _keep_open(self, seat: Seat, attempt: Attempt) -> None:
        core = self._core
        if core.now - attempt.open_at >= core.times.resend:
            attempt.open_at = core.now
            deaf = [peer.node for peer in core.peers if peer.node in attempt.beat_at and not _serves(peer)]
            self._send_open(seat, deaf)
        if attempt.opened_at is not None and core.now - attempt.opened_at >= core.times.stable:
            self._failures = 0
        leavers = [peer for peer in core.peers if peer.leaving and peer.node in attempt.beat_at]
        if leavers and self._spare(leavers, seat):
            return
        self._pause_or_resume(
            [*self._suspects(attempt), *(f"{peer.label} is leaving" for peer in leavers)],
            drains=core.leaving is not None,
        )
        self._tell_pace(seat)
        slowest = max([core.layer_s, *(peer.layer_s for peer in core.peers if peer.node in attempt.beat_at)])
        limit = max(core.times.stuck, core.times.stuck_layers * slowest)
        blame = attempt.watch.blame(lambda since: core.peers.silence(since, core.now), limit)
        if blame is None:
            return
        member = seat.members[blame.stage]
        self._avoid(member.node)
        name = f"{core.name(member.node)} (shard {member.shard})"
        if blame.hop:
            sender = seat.members[blame.stage - 1]
            reason = (
                f"{core.name(sender.node)} (shard {sender.shard}) has sent frames that {name} has not taken "
                f"at {member.data} for {blame.seconds:.1f} s: the hop between them is broken"
            )
        else:
            reason = f"{name} took a frame and has made no progress for {blame.seconds:.1f} s: it is stuck"
        self._end(reason, (member.shard,), lost=member.node)

    def _tell_pace(self, seat: Seat) -> None:
        """Tell the scheduler the stages' times when any of them has become known."""
        core = self._core
        peers = [core.peers.get(member.node) for member in seat.others]
        paces = (core.pace, *(() if peer is None else peer.pace for peer in peers))
        if paces == self._paces:
            return
        self._paces = paces
        times = ring_time([StageTime.measured(pace) for pace in paces])
        if times is not None:
            core.act(SetPace(times))

    def _suspects(self, attempt: Attempt) -> list[str]:
        core = self._core
        found: list[str] = []
        for node, beat_at in attempt.beat_at.items():
            peer = core.peers.get(node)
            silent = core.peers.silence(beat_at, core.now)
            if peer is None or peer.lost_at is not None:
                found.append(f"the connection to {core.name(node)} is closed")
            elif silent >= core.times.suspect:
                found.append(f"{peer.label} has sent no heartbeat for more than {core.times.suspect:g} s")
        return found

    def _spare(self, leavers: list[Peer], seat: Seat) -> bool:
        """Let members go that asked for it, if others take their places or nothing runs; whether that was."""
        core = self._core
        chosen = plan(core, self._avoided)
        if chosen.members is None and core.counters.running:
            return False
        names = " and ".join(peer.label for peer in leavers)
        missing = () if chosen.members else self._shards_of(seat, {peer.node for peer in leavers})
        self._end(f"{names} {'is' if len(leavers) == 1 else 'are'} leaving", missing, at_once=True)
        return True

    def _pause_or_resume(self, suspects: list[str], *, drains: bool = False) -> None:
        core = self._core
        if drains:
            suspects = [*suspects, f"{core.label} is leaving"]
        if suspects and self.paused is None:
            self.paused = "; ".join(suspects)
            core.act(PauseAdmission(self.paused))
            core.say("warning", "member_suspect", f"{self.paused}; no new request is started for now")
        elif not suspects and self.paused is not None:
            self.paused = None
            core.act(ResumeAdmission())
            core.say("info", "member_heard", "all members are heard again; requests are started again")

    # ------------------------------------------------------------------ inside

    def _own(self, epoch: Epoch) -> tuple[Seat | None, Attempt | None]:
        """The seat and the attempt, if the epoch is this head's present one."""
        seat = self._core.seat
        return (seat, self.attempt) if seat is not None and seat.epoch == epoch else (None, None)

    def _is_ready(self, seat: Seat, attempt: Attempt, member: Member) -> bool:
        return seat.switched if member.node == self._core.node else member.node in attempt.ready

    def _start_probing(self, seat: Seat, attempt: Attempt) -> None:
        if attempt.probing_since is not None:
            return
        if all(self._is_ready(seat, attempt, member) for member in seat.members):
            attempt.probing_since = self._core.now
            self._send_probe(seat, attempt)

    def _send_probe(self, seat: Seat, attempt: Attempt) -> None:
        self._probe += 1
        attempt.probe_at = self._core.now
        self._core.act(SendProbe(seat.epoch, self._probe))

    def _send_form(self, seat: Seat, attempt: Attempt) -> None:
        core = self._core
        attempt.form_at = core.now
        message = Form(
            node=core.node,
            instance=core.instance,
            epoch=seat.epoch,
            members=seat.members,
            promise=seat.promise,
        )
        for member in seat.others:
            if member.node not in attempt.ready:
                core.send(member.node, message)

    def _send_open(self, seat: Seat, nodes: list[NodeId]) -> None:
        core = self._core
        message = Open(node=core.node, instance=core.instance, epoch=seat.epoch, promise=seat.promise)
        for node in nodes:
            core.send(node, message)

    def _avoid(self, node: NodeId) -> None:
        self._avoided[node] = self._core.now + self._core.times.avoid

    def _shards_of(self, seat: Seat, nodes: set[NodeId]) -> tuple[int, ...]:
        return tuple(member.shard for member in seat.members if member.node in nodes)

    def _silent_hop(self, seat: Seat, stage: int) -> str:
        core = self._core
        sender, receiver = seat.members[stage - 1], seat.members[stage]
        return (
            f"the probe does not come round: it left {core.name(sender.node)} (shard {sender.shard}) and "
            f"did not reach {core.name(receiver.node)} (shard {receiver.shard}) at {receiver.data}; is that "
            "port open in its firewall?"
        )

    def _end(
        self,
        reason: str,
        missing: tuple[int, ...],
        *,
        lost: NodeId | None = None,
        silent: Peer | None = None,
        at_once: bool = False,
    ) -> None:
        """End the epoch here and at every member, and form again.

        Args:
            reason: a sentence.
            missing: shards that nobody serves now.
            lost: a member that went without a goodbye; what it was computing may be why.
            silent: the same, where nothing but its silence says so: it may be heard again as it was.
            at_once: form again without a pause: the cause is gone.
        """
        core, seat, attempt = self._core, self._core.seat, self.attempt
        if seat is None or attempt is None:
            return
        message = Close(node=core.node, instance=core.instance, epoch=seat.epoch, reason=reason[:4096])
        for member in seat.others:
            core.send(member.node, message)
        self.attempt = None
        self.paused = None
        if seat.open:
            self._silent = None if silent is None else (silent.node, silent.instance)
        core.stand_up(reason, missing, self._held_by(lost, seat, attempt))
        stable = attempt.opened_at is not None and core.now - attempt.opened_at >= core.times.stable
        if stable:
            self._failures = 0
        wait = 0.0 if stable or at_once else self._back_off()
        self._retry_at = core.now + wait
        lacks = f"; {shard_list(missing)} is missing" if len(missing) == 1 else ""
        core.say(
            "warning",
            "ring_closed" if seat.open else "formation_failed",
            f"{'the ring closed' if seat.open else 'the ring could not be formed'}: {reason}{lacks}",
            epoch=str(seat.epoch),
            retry_s=round(wait, 3),
        )

    def _held_by(self, lost: NodeId | None, seat: Seat, attempt: Attempt) -> int:
        """The first frame that a lost member had not passed on; 0 when none was lost while serving."""
        if lost is None or not seat.open:
            return 0
        attempt.watch.update(0, self._core.beat(), self._core.now)
        stage = next(index for index, member in enumerate(seat.members) if member.node == lost)
        return attempt.watch.held(stage)

    def _back_off(self) -> float:
        core = self._core
        self._failures += 1
        base = min(core.times.retry * 2.0 ** min(self._failures - 1, 16), core.times.retry_limit)
        draw: float = zlib.crc32(f"{core.instance}:{self._failures}:{self._probe}".encode()) / 2**32
        return base * (0.5 + draw)


def _serves(peer: Peer) -> bool:
    return peer.claim.state is ClaimState.SERVING
