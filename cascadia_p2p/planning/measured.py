"""What was measured on a node: the file that `profile` writes and `plan` reads."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from cascadia_p2p.errors import UsageError

Name = Annotated[str, Field(min_length=1, max_length=64)]
Bytes = Annotated[int, Field(ge=0, lt=2**50)]
Rate = Annotated[float, Field(gt=0, lt=1e15, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, lt=1e6, allow_inf_nan=False)]


class Timed(StrEnum):
    """What a time is of."""

    SPARSE = "sparse_layer"
    """One decoder layer with experts, its attention included."""
    DENSE = "dense_layer"
    """One decoder layer without experts."""
    HEAD = "head"
    """The final norm, the vocabulary head and the choice of the token."""
    FRAME = "frame"
    """What a frame costs a stage besides: receiving, embedding, sending."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PartTime(_Section):
    """The median time of one part for a frame of so many rows.

    Args:
        part: what was timed.
        rows: rows in the frame.
        seconds: after warming up, outliers left out.
        weight_bytes: weights of the part that was timed, in memory. When given, the time is scaled to the
            part of the planned model; else it is taken to be of the planned model.
    """

    part: Timed
    rows: Annotated[int, Field(ge=1, le=4096)]
    seconds: Seconds
    weight_bytes: Annotated[int, Field(ge=1, lt=2**50)] | None = None


class Link(_Section):
    """A way over the network.

    Args:
        rate: bytes a second that get through.
        latency_s: seconds that the first byte takes one way, both hosts' software included.
    """

    rate: Rate
    latency_s: Seconds


class Hop(Link):
    """The measured way to one other node, by its name."""

    to: Name


class Subject(_Section):
    """What a profile was taken of; the same on another start of the same node.

    Args:
        fingerprint: of the exported model.
        shard: its index.
        device, precision, cache, threads: as `join` has them.
    """

    fingerprint: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    shard: Annotated[int, Field(ge=0, le=4095)]
    device: Name
    precision: Name
    cache: Name
    threads: Annotated[int, Field(ge=1, le=4096)]


class FrameTime(_Section):
    """What frames of one kind took.

    Args:
        kind: decode is one row each of so many streams, prefill one window of one stream.
        rows: of a frame.
        positions: that each stream held before.
        frames: that were timed.
        seconds: of a frame, the median, the vocabulary head included.
        parts: seconds by part of the work (`engine.timing.WorkPart`), medians.
        read_bytes: weights, keys and values that a frame reads; of experts the expected share.
        bus_before, bus_after: bytes a second that memory gave before and after these frames.
    """

    kind: Literal["decode", "prefill"]
    rows: Annotated[int, Field(ge=1, le=4096)]
    positions: Annotated[int, Field(ge=0, lt=2**31)]
    frames: Annotated[int, Field(ge=1, lt=2**31)]
    seconds: Seconds
    parts: Annotated[dict[Name, Seconds], Field(max_length=32)]
    read_bytes: Bytes
    bus_before: Rate
    bus_after: Rate

    @property
    def bus(self) -> float:
        """Bytes a second that memory gave around these frames."""
        return (self.bus_before + self.bus_after) / 2

    @property
    def steady(self) -> bool:
        """Whether memory was equally fast before and after."""
        return max(self.bus_before, self.bus_after) < 1.15 * min(self.bus_before, self.bus_after)

    @property
    def ratio(self) -> float:
        """The frame's time, in times that reading its bytes takes."""
        return self.seconds * self.bus / max(self.read_bytes, 1)


class MeasuredNode(_Section):
    """One node's measurements.

    Args:
        format: version of this file's form.
        name: of the node, unique among those of a plan.
        memory_shown: bytes that its system says it has.
        memory_usable: bytes that were free for a node; without it the usual share is left to the system.
        gpu_limit: bytes that its GPU may take.
        bandwidth: bytes a second that its memory delivers to the device that multiplies.
        overhead_bytes: measured peak beside weights, caches and buffers; replaces the reserve when larger.
        times: of parts. What is missing is taken from the bandwidth.
        link: its way to the network; to a node that no hop names, the slower of both nodes' rates counts,
            and the mean of their latencies.
        hops: measured ways to single nodes.
        subject: what was loaded when the times were taken.
        frames: whole frames of that stage, from which `times` come.
    """

    format: Literal[1] = 1
    name: Name
    memory_shown: Bytes | None = None
    memory_usable: Bytes | None = None
    gpu_limit: Bytes | None = None
    bandwidth: Rate
    overhead_bytes: Bytes = 0
    times: Annotated[tuple[PartTime, ...], Field(max_length=1024)] = ()
    link: Link
    hops: Annotated[tuple[Hop, ...], Field(max_length=1024)] = ()
    subject: Subject | None = None
    frames: Annotated[tuple[FrameTime, ...], Field(max_length=1024)] = ()

    @model_validator(mode="after")
    def _one_time_each(self) -> Self:
        seen: set[tuple[Timed, int]] = set()
        for time in self.times:
            if (time.part, time.rows) in seen:
                raise ValueError(f"{time.part} has two times for {time.rows} rows: keep one")
            seen.add((time.part, time.rows))
        return self

    def decoding(self) -> list[tuple[int, float]]:
        """Rows and seconds of the decoding frames that were timed, by rows."""
        return sorted((each.rows, each.seconds) for each in self.frames if each.kind == "decode")

    def named(self, name: str) -> MeasuredNode:
        """The same measurements under another name."""
        return self.model_copy(update={"name": name})

    def hop_to(self, other: MeasuredNode) -> Link:
        """The way from this node to another."""
        for hop in self.hops:
            if hop.to == other.name:
                return hop
        rate = min(self.link.rate, other.link.rate)
        return Link(rate=rate, latency_s=(self.link.latency_s + other.link.latency_s) / 2)


_FILE: TypeAdapter[MeasuredNode | list[MeasuredNode]] = TypeAdapter(MeasuredNode | list[MeasuredNode])


def read_measured(raw: bytes, where: str) -> list[MeasuredNode]:
    """The nodes in a file's content: one object, or a list of them.

    Args:
        raw: JSON.
        where: the file's name, for the error.

    Raises:
        UsageError: another form.
    """
    try:
        found = _FILE.validate_json(raw, strict=False)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(
            str(part) for part in first["loc"] if part not in ("MeasuredNode", "list[MeasuredNode]")
        )
        message = first["msg"].removeprefix("Value error, ")
        raise UsageError(
            f"{where} is no profile of a node: {place + ': ' if place else ''}{message}"
        ) from None
    return found if isinstance(found, list) else [found]


def told_apart(nodes: Sequence[MeasuredNode]) -> list[MeasuredNode]:
    """The nodes, with a number behind every name that occurs more than once."""
    counts: dict[str, int] = {}
    for node in nodes:
        counts[node.name] = counts.get(node.name, 0) + 1
    used: dict[str, int] = {}
    result: list[MeasuredNode] = []
    for node in nodes:
        if counts[node.name] == 1:
            result.append(node)
            continue
        used[node.name] = used.get(node.name, 0) + 1
        result.append(node.named(f"{node.name[:58]}-{used[node.name]}"))
    return result
