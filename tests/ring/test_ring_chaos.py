"""Whatever befalls a fleet, the rules of `ring_world` hold; when it stops, the ring is open again soon."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from ring_world import SimNode, World, profile

from cascadia_p2p.ring import events as e

SHARDS = 3
BOUND_S = 20.0
"""Virtual seconds from the last fault to an open ring; most runs need under three."""


class Fleet(RuleBasedStateMachine):
    """Five nodes for three shards, and everything that may befall them."""

    @initialize(
        seed=st.integers(0, 999),
        kind=st.sampled_from(["asked", "any", "different"]),
        loss=st.sampled_from([0.0, 0.0, 0.3]),
        doubled=st.sampled_from([0.0, 0.1]),
    )
    def start(self, seed: int, kind: str, loss: float, doubled: float) -> None:
        self.world = World(seed)
        self.world.loss, self.world.doubled = loss, doubled
        rng = self.world.rng
        for index in range(1, SHARDS + 3):
            shard = (index - 1) % SHARDS
            holds = set(range(SHARDS))
            if kind == "different":
                holds = {shard, *rng.sample(range(SHARDS), rng.randint(0, SHARDS - 1))}
            asked = shard if kind == "asked" else None
            own = profile(index, shards=SHARDS, holds=tuple(sorted(holds)), shard=asked)
            self.world.start(own, load_s=rng.uniform(0.05, 1.5))
            self.world.run(rng.uniform(0.0, 0.4))

    def latest(self) -> list[SimNode]:
        return list({node.profile.node: node for node in self.world.nodes}.values())

    def pick(self, number: int, nodes: list[SimNode]) -> SimNode:
        return nodes[number % len(nodes)]

    @rule(seconds=st.sampled_from([0.05, 0.3, 1.0, 3.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.world.run(seconds)

    @precondition(lambda self: self.world.living)
    @rule(number=st.integers(0, 9), silently=st.booleans(), seconds=st.sampled_from([0.0, 0.3, 3.0]))
    def kill(self, number: int, silently: bool, seconds: float) -> None:
        self.world.kill(self.pick(number, self.world.living), silently=silently)
        self.world.run(seconds)

    @precondition(lambda self: any(not node.alive for node in self.latest()))
    @rule(number=st.integers(0, 9), seconds=st.sampled_from([0.0, 0.3, 3.0]))
    def restart(self, number: int, seconds: float) -> None:
        self.world.restart(self.pick(number, [node for node in self.latest() if not node.alive]))
        self.world.run(seconds)

    @precondition(lambda self: len(self.world.living) > 1)
    @rule(one=st.integers(0, 9), other=st.integers(1, 8), both=st.booleans())
    def cut(self, one: int, other: int, both: bool) -> None:
        living = self.world.living
        first = one % len(living)
        second = (first + 1 + other % (len(living) - 1)) % len(living)
        self.world.cut(living[first], living[second], both=both)

    @precondition(lambda self: self.world.living)
    @rule(size=st.integers(1, 4))
    def part(self, size: int) -> None:
        self.world.isolate(self.world.living[:size])

    @rule()
    def heal(self) -> None:
        self.world.heal()

    @rule(count=st.integers(1, 4))
    def reset_links(self, count: int) -> None:
        for _ in range(count):
            self.world.reset_a_link()

    @precondition(lambda self: self.world.living)
    @rule(number=st.integers(0, 9), seconds=st.sampled_from([0.3, 1.0, 3.0]))
    def freeze(self, number: int, seconds: float) -> None:
        self.world.freeze(self.pick(number, self.world.living))
        self.world.run(seconds)

    @precondition(lambda self: any(node.frozen for node in self.world.living))
    @rule()
    def thaw(self) -> None:
        for node in self.world.living:
            self.world.thaw(node)

    @precondition(lambda self: self.world.living)
    @rule(number=st.integers(0, 9), running=st.integers(0, 4))
    def use(self, number: int, running: int) -> None:
        """Streams come and go; only a head's count."""
        self.pick(number, self.world.living).needs = (running, running, 128 if running else 0)

    @precondition(lambda self: any(not node.frozen for node in self.world.living))
    @rule(number=st.integers(0, 9), seconds=st.sampled_from([0.05, 0.3, 3.0]))
    def drain(self, number: int, seconds: float) -> None:
        """Ctrl-C, and after a while the end, spared or not."""
        node = self.pick(number, [node for node in self.world.living if not node.frozen])
        node.feed(e.Drain("Ctrl-C"))
        self.world.run(seconds)
        if node.alive and not node.frozen:
            node.feed(e.Leave("Ctrl-C"))
            self.world.run(0.01)
            self.world.kill(node)

    @invariant()
    def nobody_ends_by_itself(self) -> None:
        if hasattr(self, "world"):
            assert all(node.fatal is None for node in self.world.nodes)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.heal()
        world.loss = world.doubled = 0.0
        for node in self.latest():
            node.needs = (0, 0, 0)
            world.thaw(node)
            if not node.alive:
                world.restart(node)
        world.run_until(world.is_open, BOUND_S)
        world.run(3.0)
        assert world.is_open()
        assert sum(node.serves_clients for node in world.living) == 1


Fleet.TestCase.settings = settings(
    max_examples=30,
    stateful_step_count=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
test_a_fleet_survives_anything = Fleet.TestCase


@pytest.mark.parametrize("seed", range(2))
def test_eleven_shards_on_thirteen_nodes_under_kills_and_cuts(seed: int) -> None:
    world = World(seed)
    rng = world.rng
    for index in range(1, 14):
        world.start(profile(index, shards=11, holds=tuple(range(11))), load_s=rng.uniform(0.1, 1.0))
    world.run_until(world.is_open, 20)
    for _ in range(5):
        victims = rng.sample(world.living, 2)
        world.kill(victims[0], silently=rng.random() < 0.5)
        world.isolate([victims[1]])
        world.run(rng.uniform(0.5, 4.0))
        world.heal()
        world.restart(victims[0])
        world.run_until(world.is_open, BOUND_S)
        assert len(set(world.ring())) == 11
