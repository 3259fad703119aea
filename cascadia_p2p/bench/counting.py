"""What the nodes of a ring counted themselves, and whether that agrees with what was asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from pydantic import JsonValue

from cascadia_p2p.bench.asking import Asked
from cascadia_p2p.client import AsyncClient
from cascadia_p2p.errors import UnreachableError, UsageError
from cascadia_p2p.types import Endpoint
from cascadia_p2p.wire.work import WorkReport, read_work

_REQUESTS: Final = ("finished", "prompt_tokens", "completion_tokens")


@dataclass(frozen=True, slots=True)
class NodeCount:
    """Counters of one node, since its process started or its shard was loaded.

    Args:
        stage: its place in the ring.
        node: its id.
        work: frames, rows and times; None when it did not say.
        cpu_s: of its process, all threads.
    """

    stage: int
    node: str
    work: WorkReport | None = None
    cpu_s: float | None = None


@dataclass(frozen=True, slots=True)
class RingCount:
    """Counters of a ring at one moment.

    Args:
        epoch: of the ring; another one means that it was formed anew.
        requests: what the head counted of `finished`, `prompt_tokens` and `completion_tokens`.
        nodes: in the ring's order.
        reused: prompt tokens that kept prefixes saved.
    """

    epoch: str
    requests: Mapping[str, int]
    nodes: tuple[NodeCount, ...]
    reused: int = 0


NodeAsker: TypeAlias = Callable[[Endpoint], Awaitable[dict[str, JsonValue]]]
"""Asks the node whose control port this is for its status; raises UnreachableError."""


async def count_ring(client: AsyncClient, ask: NodeAsker | None) -> RingCount:
    """Ask the head, then every other node of the ring.

    Args:
        client: to the head.
        ask: asks the others; without it the head's counts are all.

    Raises:
        UnreachableError: the head does not answer.
    """
    body = await client.status()
    counted, epoch, stages = body.get("requests"), body.get("epoch"), body.get("stages")
    prefixes = body.get("prefixes")
    rows = [row for row in stages if isinstance(row, dict)] if isinstance(stages, list) else []
    if ask is None:
        rows = [row for row in rows if row.get("node") == body.get("node")]
    nodes = await asyncio.gather(*(_count_node(row, body, ask) for row in rows))
    requests = counted if isinstance(counted, dict) else {}
    return RingCount(
        epoch=f"{epoch['counter']}@{epoch['head']}" if isinstance(epoch, dict) else "",
        requests={name: _whole(requests.get(name)) for name in _REQUESTS},
        nodes=tuple(nodes),
        reused=_whole(prefixes.get("tokens_reused")) if isinstance(prefixes, dict) else 0,
    )


async def _count_node(
    row: Mapping[str, JsonValue], head: Mapping[str, JsonValue], ask: NodeAsker | None
) -> NodeCount:
    stage, node = _whole(row.get("stage")), str(row.get("node"))
    body = head
    if ask is not None and node != head.get("node"):
        try:
            body = await ask(Endpoint.parse(str(row.get("control"))))
        except (UnreachableError, UsageError):
            return NodeCount(stage, node)
    thread, cpu = body.get("data_thread"), body.get("cpu_s")
    work = read_work(thread.get("work")) if isinstance(thread, dict) else None
    return NodeCount(stage, node, work, float(cpu) if isinstance(cpu, int | float) else None)


def faults(before: RingCount, after: RingCount, asked: Sequence[Asked]) -> list[str]:
    """Where counters and answers disagree, a sentence each; empty when all is right.

    Every node computes each prompt token and each answer token but the last, once; what the head says kept
    prefixes saved is left out.
    """
    if before.epoch != after.epoch:
        return [
            f"the ring was formed anew (epoch {before.epoch}, then {after.epoch}): a node was lost, and "
            "times and counts say nothing"
        ]
    replies = [each.reply for each in asked if each.reply is not None]
    prompt = sum(reply.usage.prompt_tokens for reply in replies)
    tokens = sum(len(reply.token_ids) for reply in replies)
    expected = dict(zip(_REQUESTS, (len(replies), prompt, tokens), strict=True))
    found: list[str] = []
    for name, count in expected.items():
        counted = after.requests[name] - before.requests[name]
        if counted != count:
            found.append(
                f"the head counted {counted} {_WORDS[name]} where {count} came here: does anybody else "
                "use the ring?"
            )
    rows = prompt + tokens - len(replies) - (after.reused - before.reused)
    for old, new in zip(before.nodes, after.nodes, strict=True):
        if old.work is None or new.work is None:
            found.append(f"stage {new.stage} (node {new.node}) did not tell its counters")
        elif (counted := new.work.rows - old.work.rows) != rows:
            found.append(
                f"stage {new.stage} (node {new.node}) computed {counted} rows where these answers need {rows}"
            )
    return found


_WORDS: Final = {
    "finished": "finished requests",
    "prompt_tokens": "prompt tokens",
    "completion_tokens": "answer tokens",
}


def _whole(value: JsonValue) -> int:
    return value if isinstance(value, int) else 0
