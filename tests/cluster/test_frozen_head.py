"""A head that is frozen while its standby takes over, and continued: it serves nobody any more."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from cluster.conftest import Shards
from fixtures.reference import load_case

from cascadia_p2p.client import AsyncClient
from cascadia_p2p.errors import CascadiaError, UnreachableError
from cascadia_p2p.local import HOST, LocalNode, LocalRing, free_ports
from cascadia_p2p.types import Endpoint

CASE = load_case("tiny12")
PROMPT = CASE.prompts[1]
LENGTH = 400
PATIENCE_S = 60.0


async def status(endpoint: Endpoint) -> dict[str, Any]:
    """What a head says of its ring; empty while nobody serves there."""
    with suppress(CascadiaError):
        async with AsyncClient(endpoint, timeout_s=5, retry=False) as client:
            return dict(await client.status())
    return {}


async def until(endpoint: Endpoint, what: str, **wanted: Any) -> dict[str, Any]:
    """Wait until a head is open, and knows nodes at these control addresses with these claims."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        said = await status(endpoint)
        claims = {node["control"]: node["claim"] for node in said.get("nodes", ())}
        if said.get("state") == "open" and all(claims.get(at) == claim for at, claim in wanted.items()):
            return said
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.1)


@asynccontextmanager
async def frozen(node: LocalNode) -> AsyncIterator[None]:
    """Stop a process for the block."""
    node.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        node.process.send_signal(signal.SIGCONT)


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="processes can not be frozen here")
def test_a_frozen_head_that_wakes_has_been_replaced_and_serves_nobody(
    shards: Shards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reader goes on at the standby: every token once, as without the loss."""
    flags = ("--threads", "1", "--slots", "4", "--context", "1024")

    # However long a busy machine takes to look.
    monkeypatch.setattr("cascadia_p2p.client.FIND_S", 60.0)

    async def scenario(ring: LocalRing) -> None:
        ports = [Endpoint(HOST, free_ports()) for _ in range(2)]
        old = ring.start_node("--shard", "0", "--client-port", str(ports[0].port))
        ring.start_node("--shard", "1")
        await until(ports[0], "a ring")
        standby = ring.start_node("--shard", "0", "--client-port", str(ports[1].port))
        await until(ports[0], "a standby of the head", **{str(standby.control): "loaded"})
        ids: list[int] = []
        async with AsyncClient(fleet=ring.fleet, timeout_s=PATIENCE_S) as client:
            answer = client.stream(PROMPT.ids, max_tokens=LENGTH, ignore_eos=True)
            async for piece in answer:
                ids += piece.token_ids
                if len(ids) >= 20:
                    break
            async with frozen(old):
                taken = await until(ports[1], "the standby serves")
            rest = asyncio.create_task(collect(answer, ids))
            after = await until(ports[1], "the old head waits", **{str(old.control): "loaded"})
            await asyncio.wait_for(rest, PATIENCE_S)
            again = await client.generate(PROMPT.ids, max_tokens=LENGTH, ignore_eos=True)
        assert answer.reply.token_ids == tuple(ids) == again.token_ids
        assert after["stages"][0]["control"] == str(standby.control)
        assert after["epoch"] == taken["epoch"], "the old head ended nothing when it woke"
        with pytest.raises(UnreachableError):
            async with AsyncClient(ports[0], timeout_s=5, retry=False) as late:
                await late.generate(PROMPT.ids)
        said = "\n".join(old.lines)
        assert "is its standby" in said
        assert '"level":"error"' not in said

    with LocalRing(shards(CASE, (6, 6)), tmp_path, flags=flags) as ring:
        asyncio.run(scenario(ring))


async def collect(answer: Any, ids: list[int]) -> None:
    """Read an answer to its end."""
    async for piece in answer:
        ids += piece.token_ids
