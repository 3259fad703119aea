"""A ring of real node processes on this machine whose stages wait as long as those of a fleet compute."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import orjson

from cascadia_p2p.bench.prompts import ID_PROMPT
from cascadia_p2p.errors import CascadiaError
from cascadia_p2p.local import LocalRing
from cascadia_p2p.matrices.encoding import Encoding
from cascadia_p2p.models.emulated.config import FAMILY, EmulatedConfig
from cascadia_p2p.node.profiles import profile_path, write_profile
from cascadia_p2p.planning.measured import FrameTime, Link, MeasuredNode, Subject
from cascadia_p2p.shards.encodings import Encodings
from cascadia_p2p.shards.manifest import (
    EMBED,
    FORMAT,
    HEAD,
    MANIFEST,
    TABLE,
    FileEntry,
    Manifest,
    ShardTable,
    layer_file,
    shard_directory,
)
from cascadia_p2p.simulate.fleet import Fleet, Hop
from cascadia_p2p.simulate.study import PolicyName, Study
from cascadia_p2p.types import Endpoint, Promise
from cascadia_p2p.workload import LevelResult, Protocol

VOCAB: Final = 1024
"""Token ids of an emulated model; choosing among more would only cost this machine time."""

START_S: Final = 300.0
_THREADS: Final = 1

_NOTHING: Final = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class Emulation:
    """What is emulated.

    Args:
        fleet: whose times are waited for, and what its nodes promise.
        hidden: numbers a row.
    """

    fleet: Fleet
    hidden: int

    @classmethod
    def of(cls, fleet: Fleet, hidden: int, promise: Promise, time_scale: float = 1.0) -> Emulation:
        """A fleet with another promise, whose times are all divided by `time_scale`."""
        part = 1.0 / time_scale
        stages = tuple(
            replace(
                stage,
                table=stage.table.scaled(part),
                head=None if stage.head is None else stage.head.scaled(part),
            )
            for stage in fleet.stages
        )
        hops = tuple(Hop(hop.latency_s * part, hop.row_s * part) for hop in fleet.hops)
        return cls(replace(fleet, stages=stages, hops=hops, promise=promise), hidden)

    @property
    def rows(self) -> int:
        """Rows a frame that the nodes promise."""
        return self.fleet.promise.rows

    def simulated(self, streams: int, protocol: Protocol) -> LevelResult:
        """A level on the same fleet under a virtual clock, where software takes no time."""
        return Study(self.fleet, protocol, ID_PROMPT).level(PolicyName.OURS, streams).result

    def config(self) -> EmulatedConfig:
        """The model that has these times."""
        stages, rows = self.fleet.stages, range(1, self.rows + 1)
        tail = stages[-1].head
        links = [tuple(hop.latency_s + hop.row_s * r for r in rows) for hop in self.fleet.hops]
        return EmulatedConfig(
            hidden=self.hidden,
            vocab=VOCAB,
            context=self.fleet.promise.context,
            frame_s=tuple(tuple(stage.table.of(r) for r in rows) for stage in stages),
            head_s=tuple(0.0 if tail is None else tail.of(r) for r in rows),
            link_s=tuple(links) or ((0.0,) * self.rows,),
        )


@dataclass(frozen=True, slots=True)
class EmulatedRing:
    """A ring that stands.

    Args:
        endpoint: where its head serves clients.
        fleet: its name, that no other fleet has; it has no key.
        model: that its nodes share.
    """

    endpoint: Endpoint
    fleet: str
    model: EmulatedConfig


@contextmanager
def emulated_ring(emulation: Emulation, tell: Callable[[str], None]) -> Iterator[EmulatedRing]:
    """A ring of one process a stage on 127.0.0.1, ended with the block.

    Args:
        emulation: what is emulated.
        tell: takes a sentence about how far it is.

    Raises:
        CascadiaError: the ring does not open; holds what the nodes said last.
    """
    config = emulation.config()
    promise = emulation.fleet.promise
    flags = ["--slots", str(promise.slots), "--rows", str(promise.rows)]
    flags += ["--context", str(promise.context), "--threads", str(_THREADS), "--no-mdns"]
    with TemporaryDirectory(prefix="cascadia-bench-") as scratch:
        model, state = Path(scratch) / "model", Path(scratch) / "state"
        manifest = write_emulated(model, config)
        _write_profiles(state, manifest, config)
        with LocalRing(model, state, flags=flags) as ring:
            yield EmulatedRing(_opened(ring, config.layers, tell), ring.fleet, config)
            tell("ending the nodes")


def _opened(ring: LocalRing, nodes: int, tell: Callable[[str], None]) -> Endpoint:
    """Start the nodes and return the head's client address when the ring is open."""
    tell(f"starting {nodes} nodes that wait instead of computing, on 127.0.0.1")
    for shard in range(nodes):
        ring.start_node("--shard", str(shard))
    endpoint: str | None = None
    opened: set[int] = set()
    for event in ring.events(START_S, until_one_ends=True):
        match event.event:
            case "clients_served":
                endpoint = str(event.fields["endpoint"])
            case "ring_open":
                opened.add(event.node)
            case "ring_closed":
                opened.clear()
        if endpoint is not None and len(opened) == nodes:
            tell("the ring is open")
            return Endpoint.parse(endpoint)
    if (words := ring.ended()) is not None:
        raise CascadiaError(f"the emulated ring can not open: {words}")
    raise CascadiaError(
        f"the emulated ring did not open within {START_S:.0f} s: this machine may be too busy for "
        f"{nodes} nodes; they said last:\n{ring.tail(1)}"
    )


def _write_profiles(state: Path, manifest: Manifest, config: EmulatedConfig) -> None:
    """Put where `join` looks what `profile` would have measured on the machines of the fleet."""
    for shard, times in enumerate(config.frame_s):
        subject = Subject(
            fingerprint=manifest.fingerprint,
            shard=shard,
            device="CPU",
            precision="fine",
            cache="f32",
            threads=_THREADS,
        )
        last = shard == config.layers - 1
        frames = tuple(
            FrameTime(
                kind="decode",
                rows=rows,
                positions=0,
                frames=1,
                seconds=seconds + (config.head_s[rows - 1] if last else 0.0),
                parts={},
                read_bytes=0,
                bus_before=1.0,
                bus_after=1.0,
            )
            for rows, seconds in enumerate(times, 1)
        )
        link = Link(rate=1e9, latency_s=config.link_s[shard][0])
        name = f"stage {shard}"
        measured = MeasuredNode(name=name, bandwidth=1.0, link=link, subject=subject, frames=frames)
        write_profile(profile_path(state, subject), measured)


def write_emulated(directory: Path, config: EmulatedConfig) -> Manifest:
    """Write an exported model whose weights are empty files: one shard a stage, loaded like any other."""
    encodings = Encodings(
        experts=Encoding.F32, projections=Encoding.F32, head=Encoding.F32, embedding=Encoding.F32
    )
    shards = config.layers
    fingerprint = hashlib.sha256(orjson.dumps([FAMILY, config.to_json()])).hexdigest()
    files: dict[str, FileEntry] = {}
    for shard in range(shards):
        folder = directory / shard_directory(shard)
        folder.mkdir(parents=True)
        names = [
            *([EMBED] if shard == 0 else []),
            layer_file(shard),
            *([HEAD] if shard == shards - 1 else []),
        ]
        table = ShardTable(
            format=FORMAT, fingerprint=fingerprint, shard=shard, files={name: {} for name in names}
        )
        for name in names:
            (folder / name).touch()
            files[f"{folder.name}/{name}"] = FileEntry(size=0, sha256=_NOTHING)
        raw = table.to_bytes()
        (folder / TABLE).write_bytes(raw)
        files[f"{folder.name}/{TABLE}"] = FileEntry(size=len(raw), sha256=hashlib.sha256(raw).hexdigest())
    manifest = Manifest(
        format=FORMAT,
        family=FAMILY,
        config=config.to_json(),
        split=[1] * shards,
        encodings=encodings,
        stored=encodings,
        tokenizer=[],
        files=files,
        fingerprint=fingerprint,
    )
    (directory / MANIFEST).write_bytes(manifest.to_bytes())
    return manifest
