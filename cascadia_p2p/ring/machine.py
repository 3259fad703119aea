"""The ring machine: one node's whole behaviour towards the others, as a function of events and time.

`handle(event, now)` takes what happened and gives back what to do; it opens no socket, starts no thread and
reads no clock. It is the one place where messages are checked against who sent them, and where events reach
the roles:

    core        shared state, outbox            assigner    who loads what
    membership  who is there                    head        form, probe, open, close
    greeting    who suits whom                  follower    accept, follow, notice a lost head

Traffic. Every node sends its State to every peer once a second and whenever it changes. Beats go every 0.1 s
between a head and the members of its forming or open ring, in both directions, and nowhere else; a member
answers its head's beat, and beats by itself when none comes. Everything
is repeated until its effect is seen, so that no single lost message matters: State by time, Assign until
State shows it, FORM until READY, OPEN until State says serving, CLOSE by State or silence. A node of which
this one knows nothing and that speaks as if it did is sent a greeting: that mends a link that only one side
has given up.

Strangers. Whoever does not suit is refused in a sentence that both consoles show. A node that never met
anyone that suits and is refused by an open ring, for its version or its model, ends with exit code 5 (for
its identity, when that lasts); every other refusal is a warning, and the search goes on. Another fleet's
ring is nobody's business and ends nobody.

Nothing that comes from outside raises here: a message that can not be true (an unknown sender, another
instance, an epoch that is not ours) is counted and dropped.
"""

from __future__ import annotations

from cascadia_p2p.errors import CascadiaError, UsageError
from cascadia_p2p.ring import snapshot
from cascadia_p2p.ring.actions import (
    Action,
    Answer,
    Broadcast,
    Dial,
    Drained,
    Fatal,
    TakeJournal,
    TakeJournalAck,
)
from cascadia_p2p.ring.assigner import Assigner
from cascadia_p2p.ring.core import Core
from cascadia_p2p.ring.events import (
    ConnectionLost,
    ConnectionRefused,
    Counters,
    DataThreadDied,
    Drain,
    Event,
    Heard,
    HopBroken,
    Leave,
    LoadFailed,
    LoadProgress,
    ProbeReturned,
    ShardLoaded,
    Switched,
    SwitchFailed,
    Tick,
    Undecodable,
)
from cascadia_p2p.ring.follower import Follower
from cascadia_p2p.ring.formation import plan, shard_list
from cascadia_p2p.ring.head import Head
from cascadia_p2p.ring.meeting import Meeting
from cascadia_p2p.ring.membership import Peer
from cascadia_p2p.ring.profile import NodeProfile, Times
from cascadia_p2p.wire.messages import (
    Assign,
    Beat,
    Bye,
    ClaimState,
    Clients,
    Close,
    Form,
    Greeting,
    Introduction,
    Journal,
    JournalAck,
    Open,
    OtherVersion,
    Ready,
    Refusal,
    Reject,
    State,
    StatusQuery,
    StatusReport,
)


class RingMachine:
    """One node of the ring, without its sockets.

    Args:
        profile: what this node is.
        now: seconds on a monotonic clock; every later time must come from the same one.
        times: only tests change these.
    """

    def __init__(self, profile: NodeProfile, now: float, times: Times | None = None) -> None:
        self._core = Core(profile, times or Times(), now)
        self._assigner = Assigner(self._core)
        self._head = Head(self._core)
        self._follower = Follower(self._core)
        self._meeting = Meeting(self._core, self._on_gone)
        self._left: str | None = None
        self._drained = False
        self._ticked_at = now
        self._beat_at = now
        self._gap_since: tuple[str, float] = ("", now)
        self.ignored = 0
        """Messages that could not be true."""
        self.undecodable = 0
        """Messages that could not be read."""
        self.refused_journals = 0
        """Journals by others than the present head."""

    # ------------------------------------------------------------------ the outside

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event; what to do, in order."""
        core = self._core
        core.now = max(core.now, now)
        self._notice_stall(event)
        if self._left is not None:
            return self._after_leaving(event)
        self._dispatch(event)
        if self._left is None and (core.dirty or isinstance(event, Tick)):
            core.dirty = False
            self._settle()
            core.tell_state()
        return core.take()

    @property
    def peers(self) -> int:
        """Other nodes of the fleet that this one knows now."""
        return len(self._core.peers)

    @property
    def epoch(self) -> int:
        """Number of the newest epoch that this node has accepted; 0 for none."""
        return self._core.counter

    @property
    def stages(self) -> int:
        """Nodes of the ring that this one is in; 0 for none."""
        return 0 if self._core.seat is None else len(self._core.seat.members)

    @property
    def state(self) -> str:
        """What `status` shows under this name."""
        return snapshot.state_of(self._core, self._head)

    @property
    def shard(self) -> int | None:
        """The shard that this node holds or loads."""
        return self._core.shard

    @property
    def standbys(self) -> tuple[Peer, ...]:
        """The nodes that have loaded this node's shard too, are in no ring, and stay."""
        return tuple(
            peer
            for peer in self._core.peers
            if peer.claim.shard == self._core.shard
            and peer.claim.state is ClaimState.LOADED
            and peer.ring is None
            and not peer.leaving
        )

    @property
    def is_open(self) -> bool:
        """Whether this node is a stage of an open ring."""
        return self._core.serving

    def greeting(self, now: float) -> Greeting:
        """The message to send first on every connection that this node dials."""
        self._core.now = max(self._core.now, now)
        return self._core.greeting()

    def snapshot(self, now: float) -> dict[str, snapshot.Value]:
        """What this node knows of the ring, as plain values for `status`."""
        self._core.now = max(self._core.now, now)
        return snapshot.take(self._core, self._head, self.counts())

    def missing(self, now: float) -> tuple[int, ...]:
        """Shards that nobody serves, without a ring; none while there is one."""
        self._core.now = max(self._core.now, now)
        return snapshot.missing(self._core)

    def judges_counters(self, event: Event) -> bool:
        """Whether what follows an event must know the counters of now, and not those of the last tick.

        A member answers its head's beat with them. A head that loses a member, or is to end, sees by them
        what its requests need.
        """
        if isinstance(event, Heard):
            return isinstance(event.message, Bye | Close if self._core.heads else Beat)
        return isinstance(event, Drain | ConnectionLost | ConnectionRefused)

    def counts(self) -> dict[str, int]:
        """What was dropped, by reason."""
        return {
            "ignored_messages": self.ignored,
            "undecodable_messages": self.undecodable,
            "refused_greetings": self._meeting.refused,
            "refused_journals": self.refused_journals,
        }

    # ------------------------------------------------------------------ events

    def _dispatch(self, event: Event) -> None:
        match event:
            case Tick():
                self._tick()
            case Heard():
                self._hear(event)
            case Undecodable():
                self.undecodable += 1
                self._meeting.on_undecodable(event.link, event.source, event.sentence)
            case ConnectionLost() | ConnectionRefused():
                self._connection(event)
            case Counters():
                self._core.counters = event
            case Drain():
                self._drain(event.reason)
            case Leave():
                self._leave(event.reason)
            case DataThreadDied():
                self._leave(f"its data thread ended: {event.sentence}")
                self._core.act(
                    Fatal(CascadiaError(f"the data thread ended: {event.sentence}; start the node again"))
                )
            case LoadProgress() | ShardLoaded() | LoadFailed():
                self._load(event)
            case _:
                self._data_thread(event)

    def _data_thread(self, event: Switched | SwitchFailed | ProbeReturned | HopBroken) -> None:
        role = self._head if self._core.heads else self._follower
        match event:
            case Switched():
                role.on_switched(event.epoch)
            case SwitchFailed() | HopBroken():
                role.on_failed(event.epoch, event.sentence)
            case ProbeReturned():
                self._head.on_probe(event.epoch, event.number)

    def _hear(self, event: Heard) -> None:
        message = event.message
        match message:
            case OtherVersion():
                self._meeting.on_other_version(message, event.link, event.source)
            case Introduction():
                self._meeting.on_introduction(message, event.link, event.source)
            case Refusal():
                self._meeting.on_refusal(message, event.link, event.source)
            case StatusQuery():
                core = self._core
                body = snapshot.take(core, self._head, self.counts())
                core.act(Answer(event.link, StatusReport(node=core.node, instance=core.instance, body=body)))
            case StatusReport() | Clients():
                self.ignored += 1
            case _:
                self._hear_peer(message, event.link)

    def _hear_peer(
        self,
        message: State | Assign | Form | Ready | Reject | Open | Close | Beat | Bye | Journal | JournalAck,
        link: int,
    ) -> None:
        core = self._core
        peer = core.peers.get(message.node, message.instance)
        if peer is None:
            self.ignored += 1
            if not core.peers.is_buried(message.instance, core.now) and message.instance != core.instance:
                self._meeting.greet_unknown(message.node, link)
            return
        core.peers.hear(peer, core.now)
        match message:
            case State():
                self._meeting.accepted()
                core.dirty |= peer.update(message, core.now)
            case Assign():
                self._assigner.on_assign(message)
            case Form():
                self._follower.on_form(message, peer)
            case Ready():
                self._head.on_ready(message, peer)
            case Reject():
                self._head.on_reject(message, peer)
            case Open():
                self._follower.on_open(message, peer)
            case Close():
                role = self._head if core.heads else self._follower
                role.on_close(message, peer)
            case Beat():
                peer.beat, peer.beat_at = message, core.now
                beaten = self._head if core.heads else self._follower
                beaten.on_beat(message, peer)
                if core.seat is not None and peer.node == core.seat.head.node:
                    self._beat(answering=True)
            case Journal():
                if self._is_head_of_this(peer):
                    core.act(TakeJournal(message))
                else:
                    self.refused_journals += 1
            case JournalAck():
                core.act(TakeJournalAck(message))
            case Bye():
                core.peers.bury(peer.instance, core.now + core.times.departed)
                core.drop(peer, redial=False)
                self._on_gone(peer, f"{peer.label} left: {message.reason}", left=True)

    def _is_head_of_this(self, peer: Peer) -> bool:
        """Whether this node is a standby of shard 0 and the peer heads the newest ring, or would form one."""
        core = self._core
        if core.shard != 0 or core.seat is not None or core.serves_clients:
            return False
        newest = max((each.ring for each in core.peers if each.ring is not None), default=None)
        if newest is not None:
            return newest.head == peer.instance
        first = core.winners().get(0)
        return first is not None and first.node == peer.node

    def _connection(self, event: ConnectionLost | ConnectionRefused) -> None:
        core = self._core
        peer = core.peers.get(event.node, event.instance)
        if peer is None:
            return
        if isinstance(event, ConnectionLost):
            core.dirty, peer.lost_at = True, core.now
            if core.heads and core.seat is not None:
                # Their answers tell what the stage that may be lost has passed on.
                core.act(Broadcast(tuple(member.node for member in core.seat.others), core.beat()))
            return
        if event.former not in (None, peer.intro.control):
            return
        core.dirty = True
        core.peers.bury(peer.instance, core.now + core.times.echo)
        core.drop(peer, redial=True)
        reason = f"{peer.label} refuses connections at {peer.intro.control}: its process has ended"
        self._on_gone(peer, reason)

    def _load(self, event: LoadProgress | ShardLoaded | LoadFailed) -> None:
        core = self._core
        if event.shard != core.shard or core.state is not ClaimState.LOADING:
            return
        match event:
            case LoadProgress():
                core.progress, core.moved_at = min(1.0, max(0.0, event.share)), core.now
            case ShardLoaded():
                core.progress, core.layer_s, core.pace = 1.0, max(0.0, event.layer_s), event.pace
                core.set_state(ClaimState.LOADED)
                core.say(
                    "info", "shard_loaded", f"{core.label} has loaded shard {event.shard}", shard=event.shard
                )
            case LoadFailed():
                core.holds = tuple(shard for shard in core.holds if shard != event.shard)
                core.shard, core.progress = None, 0.0
                core.set_state(ClaimState.WANTED)
                core.say("error", "load_failed", f"shard {event.shard} can not be loaded: {event.error}")
                # What is wrong with a flag is wrong for every shard.
                if not core.holds or isinstance(event.error, UsageError):
                    core.act(Fatal(event.error))

    # ------------------------------------------------------------------ time

    def _tick(self) -> None:
        core = self._core
        self._assigner.start()
        for peer, reason in core.peers.gone(core.now):
            core.drop(peer, redial=True)
            self._on_gone(peer, reason, silent=True)
        if core.heads:
            self._head.tick()
        else:
            self._follower.tick()
        for endpoint in core.addresses.due(core.now):
            core.act(Dial(endpoint))
        self._beat()

    def _settle(self) -> None:
        """Decide what follows from the present table."""
        self._assigner.tick()
        self._head.consider()
        self._tell_drained()
        self._tell_role()
        self._tell_stalled()
        self._tell_waiting()

    def _beat(self, *, answering: bool = False) -> None:
        """Beat when it is time; a member whose head beats does so at once, and by itself only after more.

        So a head hears all members together, and wakes for all of them once.
        """
        core, seat = self._core, self._core.seat
        beat = core.times.beat
        if seat is None or core.now < self._beat_at - (1.4 * beat if answering else 0.0):
            return
        self._beat_at = max(self._beat_at + beat, core.now + beat / 2)
        if answering:
            self._beat_at = core.now + 1.5 * beat
        others = [member.node for member in seat.others] if core.heads else [seat.head.node]
        if others:
            core.act(Broadcast(tuple(others), core.beat()))

    def _notice_stall(self, event: Event) -> None:
        core = self._core
        gap = core.now - self._ticked_at
        if gap >= core.times.stall:
            granted = core.peers.stalled(core.now)
            core.say(
                "warning",
                "own_stall",
                f"{core.label} stood still for {gap:.1f} s"
                + ("; it judges nobody for a while" if granted else ""),
                seconds=round(gap, 3),
            )
            self._ticked_at = core.now
        if isinstance(event, Tick):
            self._ticked_at = core.now
            if event.deaf:
                core.peers.deaf(core.now)

    # ------------------------------------------------------------------ loss and leaving

    def _on_gone(self, peer: Peer, reason: str, *, left: bool = False, silent: bool = False) -> None:
        core = self._core
        core.dirty = True
        core.say("info", "peer_gone", reason, peer=peer.node, peer_instance=peer.instance)
        if core.heads:
            self._head.on_gone(peer, reason, left=left, silent=silent)
        else:
            self._follower.on_gone(peer, reason)

    def _drain(self, reason: str) -> None:
        core = self._core
        if core.leaving is None:
            core.leaving, core.dirty = reason, True
            core.say("info", "draining", f"{core.label} takes no new work and leaves when it can: {reason}")

    def _tell_drained(self) -> None:
        """Say once that nothing needs this node: it has no seat, or heads a ring that nobody waits for."""
        core = self._core
        idle = not core.counters.slots
        if core.leaving is not None and not self._drained and idle and (core.seat is None or core.heads):
            self._drained = True
            core.act(Drained())

    def _leave(self, reason: str) -> None:
        core = self._core
        self._left = reason
        self._head.leave(f"{core.label} leaves: {reason}")
        core.stand_up(f"{core.label} leaves: {reason}")
        if nodes := tuple(peer.node for peer in core.peers):
            core.act(Broadcast(nodes, self._bye()))
        core.say("info", "leaving", f"{core.label} leaves: {reason}")

    def _bye(self) -> Bye:
        return Bye(node=self._core.node, instance=self._core.instance, reason=(self._left or "")[:4096])

    def _after_leaving(self, event: Event) -> list[Action]:
        if isinstance(event, Leave):
            return self._core.take()
        if isinstance(event, Heard) and isinstance(event.message, Greeting):
            return [Answer(event.link, self._bye())]
        return []

    # ------------------------------------------------------------------ words

    def _tell_role(self) -> None:
        """Say when this node becomes, or ceases to be, another's standby."""
        core = self._core
        first = core.winners().get(core.shard) if core.shard is not None and core.seat is None else None
        standby = first is not None and first.node != core.node
        if standby == core.standby:
            return
        core.standby = standby
        if standby and first is not None:
            does = "waits" if core.state is ClaimState.LOADED else "loads it and waits"
            core.say(
                "info",
                "standby",
                f"shard {core.shard} is held by {core.name(first.node)}; {core.label} is its standby: it "
                f"{does}, and takes over when that node is lost",
                shard=core.shard or 0,
            )
        elif core.seat is None:
            core.say(
                "info",
                "not_standby",
                f"{core.label} is now first for shard {core.shard}",
                shard=core.shard or 0,
            )

    def _tell_stalled(self) -> None:
        """Say that loading does not get on, again every `Times.load_silent`."""
        core = self._core
        if core.load_stalled and core.seldom("stalled", core.times.load_silent):
            core.say(
                "warning",
                "load_stalled",
                f"shard {core.shard} has stood at {core.progress:.0%} for "
                f"{core.now - core.moved_at:.0f} s: see whether the disk that holds it answers and whether "
                "this PC is out of memory, or end this node and start it again",
                shard=core.shard or 0,
            )

    def _being_loaded(self, shards: tuple[int, ...]) -> bool:
        """Whether each of these shards is being loaded by somebody."""
        best = self._core.winners()
        return all(shard in best and best[shard].state is ClaimState.LOADING for shard in shards)

    def _tell_waiting(self) -> None:
        """Say what a ring still lacks: when that has changed and lasts, and every `Times.remind` seconds.

        While all that is missing is being loaded, only the reminders: loading ends by itself.
        """
        core = self._core
        elsewhere = any(peer.claim.state is ClaimState.SERVING for peer in core.peers)
        if core.seat is not None or core.shard is None or elsewhere:
            self._gap_since = ("", core.now)
            return
        chosen = plan(core)
        if chosen.words != self._gap_since[0]:
            self._gap_since = (chosen.words, core.now)
        patience = core.times.remind if self._being_loaded(chosen.missing) else core.times.candidate
        if chosen.words and core.now - self._gap_since[1] >= patience:
            core.say_seldom(
                "waiting",
                "info",
                "ring_waits",
                f"the ring waits for {chosen.words}",
                missing=shard_list(chosen.missing),
            )
