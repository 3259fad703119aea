"""A network of ring machines under a virtual clock: delays, cuts, kills, freezes; rules that always hold."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from cascadia_p2p.errors import CascadiaError
from cascadia_p2p.ring import actions as a
from cascadia_p2p.ring import events as e
from cascadia_p2p.ring.machine import RingMachine
from cascadia_p2p.ring.profile import NodeProfile, Times
from cascadia_p2p.types import Endpoint, Epoch, Instance, NodeId, Promise
from cascadia_p2p.wire.messages import Bye, ControlMessage, Member, decode_control, encode

FINGERPRINT = "a" * 64
TIMES = Times()


def profile(index: int, run: int = 0, **changes: object) -> NodeProfile:
    """The node number `index` in its run number `run`."""
    host = f"10.{index >> 16}.{index >> 8 & 255}.{index & 255}"
    base = NodeProfile(
        node=NodeId(f"{index:016x}"),
        instance=Instance(f"{index:08x}{run:08x}"),
        host=f"pc{index}",
        software="0.1.0",
        fleet="test",
        model="toy",
        fingerprint=FINGERPRINT,
        shards=3,
        layers=6,
        hidden=64,
        holds=(0, 1, 2),
        promise=Promise(4, 128, 8),
        control=Endpoint(host, 7600),
        data=Endpoint(host, 7601),
        client=Endpoint(host, 7610),
        device="CPU",
        pid=1000 + index,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


@dataclass(eq=False)
class End:
    """One side of a link."""

    number: int
    owner: SimNode
    dialled: Endpoint | None
    other: End | None = None
    open: bool = True
    arrival: float = 0.0
    greeted_at: float = 0.0


@dataclass
class Data:
    """What the data thread of a node is doing."""

    epoch: Epoch | None = None
    members: tuple[Member, ...] = ()
    stage: int = 0
    probe_seen: int = 0
    progress: int = 0
    frames_in: int = 0
    frames_out: int = 0
    waiting_send: bool = False
    history: list[Epoch] = field(default_factory=list)


class SimNode:
    """The owner of one machine: sockets, loader and data thread, all simulated."""

    def __init__(self, world: World, own: NodeProfile, load_s: float) -> None:
        self.world = world
        self.profile = own
        self.load_s = load_s
        self.machine = RingMachine(own, self.clock, TIMES)
        self.alive = True
        self.frozen = False
        self.deaf = False
        self.died_at: float | None = None
        self.thawed_at = world.now
        self.routes: dict[NodeId, list[End]] = defaultdict(list)
        self.instances: dict[NodeId, Instance] = {}
        self.ends: list[End] = []
        self.wanted: dict[Endpoint, float] = {}
        self.buffer: list[e.Event] = []
        self.data = Data()
        self.loading: int | None = None
        self.loaded_at: float | None = None
        self.open_at: float | None = None
        self.serves_clients = False
        self.paused = False
        self.said: list[a.Say] = []
        self.fatal: CascadiaError | None = None
        self.actions: list[a.Action] = []
        self.closed: list[a.CloseRing] = []
        self.lies = False
        self.needs = (0, 0, 0)
        self.drained = False

    @property
    def core(self):  # type: ignore[no-untyped-def]
        return self.machine._core

    @property
    def clock(self) -> float:
        """What the node's own clock shows: nobody else's shows the same."""
        return self.world.now + self.world.skews.get(self.profile.host, 0.0)

    @property
    def name(self) -> str:
        return self.profile.host

    def sentences(self, event: str | None = None) -> str:
        return "\n".join(say.sentence for say in self.said if event in (None, say.event))

    # ---------------------------------------------------------------- events in, actions out

    def feed(self, event: e.Event) -> None:
        if not self.alive:
            return
        if self.frozen:
            self.buffer.append(event)
            return
        for action in self.machine.handle(event, self.clock):
            self.do(action)
        self.world.check(self)

    def tick(self) -> None:
        if not self.alive:
            return
        if not self.frozen:
            data = self.data
            self.feed(
                e.Counters(
                    data.epoch,
                    data.progress,
                    data.frames_in,
                    data.frames_out,
                    data.waiting_send,
                    data.probe_seen,
                    *self.needs,
                )
            )
            self.feed(e.Tick(self.deaf))
            self.redial()
        self.world.after(self.world.rng.uniform(0.04, 0.06), self.tick)

    def redial(self) -> None:
        routed = {end for ends in self.routes.values() for end in ends}
        for end in self.ends:
            if (
                end.dialled is not None
                and end.open
                and end not in routed
                and end.greeted_at + 1.0 <= self.world.now
            ):
                end.greeted_at = self.world.now
                self.world.transmit(end, self.machine.greeting(self.clock))
        busy = {end.dialled for end in self.ends if end.open}
        for endpoint, due in list(self.wanted.items()):
            if endpoint not in busy and due <= self.world.now:
                self.wanted[endpoint] = self.world.now + 0.5
                self.world.dial(self, endpoint)

    def do(self, action: a.Action) -> None:
        self.actions.append(action)
        match action:
            case a.Say():
                self.said.append(action)
            case a.Route():
                end = self.end(action.link)
                if end is not None:
                    self.instances[action.node] = action.instance
                    self.routes[action.node] = [end, *(x for x in self.routes[action.node] if x is not end)]
            case a.Send():
                self.send(action.node, action.message)
            case a.Broadcast():
                for node in action.nodes:
                    self.send(node, action.message)
            case a.Answer():
                if (end := self.end(action.link)) is not None:
                    self.world.transmit(end, action.message)
            case a.Dial():
                self.wanted.setdefault(action.endpoint, self.world.now)
            case a.Retry():
                if (end := self.end(action.link)) is not None:
                    if end.dialled is not None:
                        self.wanted[end.dialled] = self.world.now + action.after_s
                    self.world.after(0.01, lambda: self.world.close(end))
            case a.Abandon():
                if (end := self.end(action.link)) is not None:
                    self.wanted.pop(end.dialled, None)  # type: ignore[arg-type]
                    self.world.close(end)
            case a.DropPeer():
                if self.instances.get(action.node) == action.instance:
                    for end in self.routes.pop(action.node, []):
                        self.world.close(end)
            case a.LoadShard():
                self.load(action.shard)
            case a.SwitchEpoch():
                self.switch(action)
            case a.SendProbe():
                self.world.probe(self, action.epoch, action.number)
            case a.OpenRing():
                self.open_at = self.world.now
                self.world.opened(self, action)
            case a.CloseRing():
                self.closed.append(action)
                self.paused = False
                if self.data.epoch == action.epoch:
                    self.data.epoch = None
            case a.BecomeHead():
                self.serves_clients = True
            case a.StopBeingHead():
                self.serves_clients = False
            case a.PauseAdmission():
                self.paused = True
            case a.ResumeAdmission():
                self.paused = False
            case a.Drained():
                self.drained = True
            case a.Fatal():
                self.fatal = action.error
                self.world.kill(self)

    def end(self, number: int) -> End | None:
        return next((end for end in self.ends if end.number == number and end.open), None)

    def send(self, node: NodeId, message: ControlMessage) -> None:
        for end in self.routes[node]:
            if end.open:
                self.world.transmit(end, message)
                return

    def load(self, shard: int) -> None:
        self.loading = shard

        def loaded() -> None:
            if self.alive and self.loading == shard:
                self.loaded_at = self.world.now
                self.feed(e.ShardLoaded(shard))

        self.world.after(self.load_s, loaded)

    def switch(self, action: a.SwitchEpoch) -> None:
        def switched() -> None:
            if not self.alive:
                return
            if self.frozen:
                self.world.after(0.05, switched)
                return
            if self.core.seat is None or self.core.seat.epoch != action.epoch:
                return
            self.data = Data(
                action.epoch, action.members, action.stage, history=[*self.data.history, action.epoch]
            )
            self.feed(e.Switched(action.epoch))

        self.world.after(self.world.rng.uniform(0.001, self.world.switch_s), switched)


class World:
    """Virtual time, the network, and the rules that hold at every instant."""

    def __init__(self, seed: int = 0, latency: tuple[float, float] = (0.0002, 0.002)) -> None:
        self.rng = random.Random(seed)
        self.latency = latency
        self.switch_s = 0.02
        self.now = 1000.0
        self.skews: dict[str, float] = {}
        self.nodes: list[SimNode] = []
        self.addresses: dict[Endpoint, SimNode] = {}
        self.blocked: set[tuple[str, str]] = set()
        self.blocked_since: dict[tuple[str, str], float] = {}
        self.blocked_data: set[tuple[str, str]] = set()
        self.waiting: list[tuple[End, ControlMessage]] = []
        self.loss = 0.0
        self.doubled = 0.0
        self.codec = False
        self.mdns = True
        self.messages: dict[str, int] = defaultdict(int)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._links = itertools.count(1)
        self._checked_at = 0.0

    # ---------------------------------------------------------------- time

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + seconds, next(self._count), call))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self._heap and self._heap[0][0] <= end:
            self.now, _, call = heapq.heappop(self._heap)
            call()
        self.now = end

    def run_until(self, done: Callable[[], bool], limit: float, step: float = 0.02) -> float:
        """Run until `done`, at most `limit` seconds; the seconds that it took."""
        start = self.now
        while not done():
            if self.now - start >= limit:
                raise AssertionError(f"not done after {limit} s of virtual time\n{self.describe()}")
            self.run(step)
        return self.now - start

    def describe(self) -> str:
        lines = []
        for node in self.nodes:
            core, seat = node.core, node.core.seat
            lines.append(
                f"{node.name}/{node.profile.instance[-3:]} {'alive' if node.alive else 'dead'} "
                f"shard {core.shard} {core.claim_state} counter {core.counter} peers {len(core.peers)} "
                f"seat {seat.epoch if seat else None} open {bool(seat and seat.open)} standby {core.standby}"
            )
            lines += [f"      {say.event}: {say.sentence}" for say in node.said[-3:]]
        return "\n".join(lines)

    # ---------------------------------------------------------------- processes

    def start(self, own: NodeProfile, load_s: float = 0.5, knows: tuple[Endpoint, ...] = ()) -> SimNode:
        node = SimNode(self, own, load_s)
        self.nodes.append(node)
        self.addresses[own.control] = node
        if self.mdns:
            for other in list(self.nodes):
                if other is node:
                    continue
                if other.alive:
                    self.after(
                        self.rng.uniform(0.02, 1.2), lambda o=other: o.wanted.setdefault(own.control, 0.0)
                    )
                self.after(
                    self.rng.uniform(0.02, 1.2),
                    lambda o=other: node.wanted.setdefault(o.profile.control, 0.0),
                )
        for endpoint in knows:
            node.wanted[endpoint] = 0.0
        self.after(self.rng.uniform(0.0, 0.05), node.tick)
        return node

    def kill(self, node: SimNode, *, silently: bool = False) -> None:
        """SIGKILL, or with `silently` the power cord: nobody is told."""
        if not node.alive:
            return
        node.alive = False
        node.died_at = self.now
        for end in list(node.ends):
            if silently:
                end.open = False
            else:
                self.close(end)

    def restart(self, node: SimNode, **changes: object) -> SimNode:
        run = int(node.profile.instance[8:], 16) + 1
        instance = Instance(node.profile.instance[:8] + f"{run:08x}")
        return self.start(replace(node.profile, instance=instance, **changes), node.load_s)  # type: ignore[arg-type]

    def freeze(self, node: SimNode) -> None:
        node.frozen = True
        node.died_at = self.now

    def thaw(self, node: SimNode) -> None:
        if not node.alive or not node.frozen:
            return
        node.frozen = False
        node.died_at = None
        node.thawed_at = self.now
        buffered, node.buffer = node.buffer, []
        for event in buffered:
            node.feed(event)

    # ---------------------------------------------------------------- network

    def cut(self, one: SimNode, other: SimNode, *, both: bool = True) -> None:
        for pair in [(one.name, other.name), (other.name, one.name)][: 2 if both else 1]:
            self.blocked.add(pair)
            self.blocked_since.setdefault(pair, self.now)

    def isolate(self, group: list[SimNode]) -> None:
        for one in group:
            for other in self.nodes:
                if other not in group:
                    self.cut(one, other)

    def heal(self) -> None:
        self.blocked.clear()
        self.blocked_since.clear()
        waiting, self.waiting = self.waiting, []
        for end, message in waiting:
            self.transmit(end, message)

    def passes(self, one: SimNode, other: SimNode) -> bool:
        return (one.name, other.name) not in self.blocked

    def delay(self) -> float:
        return self.rng.uniform(*self.latency)

    def dial(self, node: SimNode, endpoint: Endpoint) -> None:
        def connect() -> None:
            target = self.addresses.get(endpoint)
            if not node.alive or node.frozen or target is None:
                return
            if not (self.passes(node, target) and self.passes(target, node)):
                return
            if not target.alive:
                self.refused(node, endpoint)
                return
            here, there = End(next(self._links), node, endpoint), End(next(self._links), target, None)
            here.other, there.other = there, here
            node.ends.append(here)
            target.ends.append(there)
            here.greeted_at = self.now
            self.transmit(here, node.machine.greeting(self.now))

        self.after(self.delay() * 2, connect)

    def refused(self, node: SimNode, endpoint: Endpoint) -> None:
        for peer in list(node.core.peers):
            if peer.intro.control == endpoint:
                node.feed(e.ConnectionRefused(peer.node, peer.instance))

    def close(self, end: End) -> None:
        """One side ends a link; the other notices, when the way is clear."""
        other = end.other
        end.open = False
        if end in end.owner.ends:
            end.owner.ends.remove(end)
        if other is not None and other.open:
            other.arrival = max(other.arrival, self.now + self.delay())
            self.after(other.arrival - self.now, lambda: self._noticed(other))

    def _noticed(self, end: End) -> None:
        node = end.owner
        end.open = False
        if end in node.ends:
            node.ends.remove(end)
        if end.dialled is None or not node.alive:
            return
        for peer_id, ends in list(node.routes.items()):
            if end in ends:
                ends.remove(end)
                node.feed(e.ConnectionLost(peer_id, node.instances[peer_id]))
        self.after(
            0.03, lambda: self.dial(node, end.dialled) if node.alive and end.dialled in node.wanted else None
        )

    def transmit(self, end: End, message: ControlMessage) -> None:
        other = end.other
        if not end.open or other is None:
            return
        if not self.passes(end.owner, other.owner):
            self.waiting.append((end, message))
            return
        self.messages[message.type] += 1
        if self.rng.random() < self.loss:
            return
        if self.codec:
            decoded = decode_control(encode(message))
            assert decoded == message
        other.arrival = max(other.arrival, self.now + self.delay())

        def arrive() -> None:
            if other.open or isinstance(message, Bye):
                other.owner.feed(e.Heard(message, other.number, str(end.owner.profile.control)))

        self.after(other.arrival - self.now, arrive)
        if self.rng.random() < self.doubled:
            self.after(other.arrival - self.now + self.rng.uniform(0.0, 0.3), arrive)

    def reset_a_link(self) -> None:
        """Close one open link, as a router that forgot it does."""
        if ends := [end for node in self.living for end in node.ends if end.open]:
            self.close(self.rng.choice(ends))

    def probe(self, head: SimNode, epoch: Epoch, number: int) -> None:
        members = head.data.members
        by_instance = {node.profile.instance: node for node in self.nodes}

        def hop(stage: int, before: SimNode) -> None:
            last = stage == len(members)
            node = head if last else by_instance[members[stage].instance]
            lost = not self.passes(before, node) or (before.name, node.name) in self.blocked_data
            if lost or not node.alive or node.frozen or node.data.epoch != epoch:
                return
            node.data.progress += 1
            if last:
                node.feed(e.ProbeReturned(epoch, number))
                return
            node.data.probe_seen = number
            self.after(self.delay(), lambda: hop(stage + 1, node))

        if head.data.epoch == epoch:
            self.after(self.delay(), lambda: hop(1, head))

    # ---------------------------------------------------------------- what must hold

    def opened(self, node: SimNode, action: a.OpenRing) -> None:
        members = action.members
        assert [member.shard for member in members] == list(range(node.profile.shards))
        assert len({member.node for member in members}) == len(members)
        for member in members:
            found = next(x for x in self.nodes if x.profile.instance == member.instance)
            assert action.epoch in found.data.history, "every member's data thread had entered the epoch"
            if found.alive and not found.frozen and found.data.epoch == action.epoch:
                assert found.core.shard == member.shard
                assert found.core.state == "loaded"
            if not found.alive:
                assert found.died_at is not None
                assert self.now - found.died_at < 3.0

    def check(self, node: SimNode) -> None:
        """Rules that hold after every event of a node."""
        if self.now - self._checked_at < 0.1:
            return
        self._checked_at = self.now
        heads: dict[Epoch, SimNode] = {}
        for one in self.nodes:
            seat = one.core.seat
            if not one.alive or one.frozen or seat is None:
                continue
            assert one.core.shard == seat.members[seat.stage].shard
            assert one.core.counter >= seat.epoch.counter
            if seat.stage == 0:
                assert seat.epoch not in heads, "two heads of one epoch"
                heads[seat.epoch] = one
                if seat.open:
                    self._check_losses(one)

    def _check_losses(self, head: SimNode) -> None:
        """A head does not stay open for long with a member that can not be there."""
        limit = TIMES.gone + 0.7
        if head.deaf or self.now - head.thawed_at < limit + TIMES.gone:
            return
        for member in head.core.seat.members[1:]:
            found = next(x for x in self.nodes if x.profile.instance == member.instance)
            if found.died_at is not None:
                gone = self.now - found.died_at
                assert gone < limit, f"{head.name} is open with {found.name}, dead for {gone:.1f} s"
            since = self.blocked_since.get((found.name, head.name))
            if since is not None:
                assert self.now - since < limit + TIMES.gone, (
                    f"{head.name} is open with {found.name}, cut off"
                )

    # ---------------------------------------------------------------- questions

    @property
    def living(self) -> list[SimNode]:
        return [node for node in self.nodes if node.alive]

    def head(self) -> SimNode | None:
        found = [node for node in self.living if node.core.heads and node.core.serving and not node.frozen]
        return found[0] if len(found) == 1 else None

    def is_open(self) -> bool:
        """One head is open, and every member agrees."""
        head = self.head()
        if head is None:
            return False
        epoch = head.core.seat.epoch
        by_instance = {node.profile.instance: node for node in self.living}
        for member in head.core.seat.members:
            found = by_instance.get(member.instance)
            if found is None or found.frozen or found.core.seat is None:
                return False
            if found.core.seat.epoch != epoch or not found.core.seat.open:
                return False
        return True

    def ring(self) -> list[str]:
        """Names of the open ring's members in order."""
        head = self.head()
        assert head is not None
        names = {node.profile.instance: node.name for node in self.nodes}
        return [names[member.instance] for member in head.core.seat.members]


def fleet(
    world: World, nodes: int, shards: int = 3, *, asked: bool = True, load_s: float = 0.2, **changes: object
) -> list[SimNode]:
    """Start nodes 1, 2, ...: with `asked`, each with `--shard` in turn; else any shard will do."""
    started = []
    for index in range(1, nodes + 1):
        shard = (index - 1) % shards if asked else None
        own = profile(index, shards=shards, holds=tuple(range(shards)), shard=shard, **changes)
        started.append(world.start(own, load_s))
    return started


def open_fleet(world: World, nodes: int, shards: int = 3, **changes: object) -> list[SimNode]:
    """The same, and run until the ring is open and everybody knows everybody."""
    started = fleet(world, nodes, shards, **changes)  # type: ignore[arg-type]
    world.run_until(
        lambda: (
            world.is_open() and all(len(node.core.peers) == nodes - 1 and node.loaded_at for node in started)
        ),
        20,
    )
    world.run(0.3)
    return started
