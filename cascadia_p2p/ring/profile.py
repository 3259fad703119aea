"""What a node knows of itself at start, and the times that the ring's rules use."""

from __future__ import annotations

from dataclasses import dataclass

from cascadia_p2p.errors import UsageError
from cascadia_p2p.types import Endpoint, Instance, NodeId, Promise


@dataclass(frozen=True, slots=True)
class NodeProfile:
    """The unchanging facts of one process.

    Args:
        node: kept in the state directory.
        instance: drawn at each start.
        host: the machine's name, for people.
        software: full version of this package.
        fleet: only nodes of one fleet join.
        model: the model's name, for people.
        fingerprint: 64 hex digits over config, source index, split, encodings and tokenizer.
        sources: samples of the checkpoint's files as introductions hold them.
        shards: shards that the model is split into.
        layers, hidden: size of the model.
        holds: shards whose files are here.
        promise: what this node can hold.
        control, data: where this node's sockets can be reached.
        client: where clients would be served if this node became the head.
        device: for people.
        precision, cache: how exactly it computes, and how it keeps keys and values; "" when not known.
        pid: of this process.
        shard: the shard that a person asked for.

    Raises:
        UsageError: a shard outside the model, none held, or one asked for that is not held.
    """

    node: NodeId
    instance: Instance
    host: str
    software: str
    fleet: str
    model: str
    fingerprint: str
    shards: int
    layers: int
    hidden: int
    holds: tuple[int, ...]
    promise: Promise
    control: Endpoint
    data: Endpoint
    client: Endpoint | None
    device: str
    pid: int
    shard: int | None = None
    sources: tuple[str, ...] = ()
    precision: str = ""
    cache: str = ""

    def __post_init__(self) -> None:
        held = ", ".join(map(str, sorted(self.holds)))
        if not self.holds:
            raise UsageError(
                f"no shard of model '{self.model}' is here: copy one of its shard directories to this machine"
            )
        if strange := [index for index in self.holds if not 0 <= index < self.shards]:
            raise UsageError(
                f"shard {strange[0]} is here, but model '{self.model}' has shards 0 to {self.shards - 1}: "
                "remove that directory or export the model again"
            )
        if self.shard is not None and self.shard not in self.holds:
            raise UsageError(
                f"--shard {self.shard} is not here: this node has shard {held} of 0 to {self.shards - 1}"
            )

    @property
    def asked(self) -> int | None:
        """The one shard that this node is for: asked for, or the only one here; None when any will do."""
        if self.shard is not None:
            return self.shard
        return self.holds[0] if len(set(self.holds)) == 1 else None


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds, all on this node's own monotonic clock.

    Args:
        tick: how often the owner promises to hand in a Tick.
        settle: no newcomer for so long, then shards are assigned.
        settle_limit: newcomers that keep coming delay an assignment no longer than this.
        state: between two State messages when nothing changes.
        beat: between two beats of head and members.
        suspect, gone: silence of a node that beats.
        far_suspect, far_gone: silence of a node that only sends State.
        contest: silence after which a new instance replaces one that beats.
        far_contest: the same for one that only sends State.
        stall: a gap between ticks that shows this node itself was stalled.
        ready: from FORM to the last READY.
        resend: before FORM or OPEN is repeated.
        probe: between two probe frames; probe_name: before the silent hop is named; probe_limit: before
            giving up.
        departed: an instance that said goodbye is not listened to for so long.
        echo: one whose port refuses is not listened to for so long: what it said last may still be under way.
        strange: a member that says it is in another epoch for so long has left this one.
        reassign: a shard stays without a node for so long before a loaded node is moved to it.
        candidate: the best holder of shard 0 for so long serves clients, with or without a ring.
        retry, retry_limit: back-off of a head whose formation failed, first and longest, before jitter.
        avoid: a node that failed a formation is the last choice for so long.
        stable: a ring that was open for so long starts its back-off anew.
        remind: before a sentence about a state that goes on is said again.
        clone: a newcomer refused for its identity for so long gives up.
        stuck: no progress with work at hand; stuck_layers: the same in profiled layer times.
        load_silent: a load that has not got on for so long has stalled, and its shard is another's to take.
        claim_tolerance: claims whose ages differ by less are equally old.
        redial, redial_limit: before a lost address is dialled again, first and longest.
        stranger_redial: before a node that refused is dialled again.
    """

    tick: float = 0.05
    settle: float = 1.0
    settle_limit: float = 10.0
    state: float = 1.0
    beat: float = 0.1
    suspect: float = 0.6
    gone: float = 2.0
    far_suspect: float = 2.5
    far_gone: float = 6.0
    contest: float = 0.35
    far_contest: float = 1.5
    stall: float = 0.6
    ready: float = 5.0
    resend: float = 0.5
    probe: float = 0.25
    probe_name: float = 2.0
    probe_limit: float = 6.0
    departed: float = 10.0
    echo: float = 1.0
    strange: float = 1.5
    reassign: float = 3.0
    candidate: float = 0.5
    retry: float = 0.3
    retry_limit: float = 4.0
    avoid: float = 15.0
    stable: float = 10.0
    remind: float = 10.0
    clone: float = 5.0
    stuck: float = 5.0
    stuck_layers: float = 20.0
    load_silent: float = 180.0
    claim_tolerance: float = 1.0
    redial: float = 0.5
    redial_limit: float = 5.0
    stranger_redial: float = 5.0
