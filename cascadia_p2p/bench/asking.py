"""Asks a ring by the protocol: many answers at a time in one event loop, with the time of every token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cascadia_p2p.client import AsyncClient, Prompt
from cascadia_p2p.errors import RequestError, UnreachableError
from cascadia_p2p.wire.client import GenerateReply
from cascadia_p2p.workload import Protocol, Timeline


@dataclass(frozen=True, slots=True)
class Asked:
    """One request and what became of it.

    Args:
        prompt: that was sent.
        timeline: None when no token came.
        reply: None when it failed.
        fault: what was wrong with it; None when nothing was.
    """

    prompt: Prompt
    timeline: Timeline | None = None
    reply: GenerateReply | None = None
    fault: str | None = None


async def run_cohort(client: AsyncClient, prompts: Sequence[Prompt], protocol: Protocol) -> list[Asked]:
    """Ask all prompts, one after the other by the protocol's gap, and wait for all answers.

    Raises:
        UnreachableError: the head can not be reached, or went away.
    """
    begin = time.perf_counter()

    async def ask_at(place: int, prompt: Prompt) -> Asked:
        await asyncio.sleep(begin + protocol.offset_s(place) - time.perf_counter())
        return await ask(client, prompt, protocol.tokens)

    tasks = [asyncio.create_task(ask_at(place, prompt)) for place, prompt in enumerate(prompts)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def ask(client: AsyncClient, prompt: Prompt, tokens: int) -> Asked:
    """One answer of exactly `tokens` tokens; a refusal, or another number of them, is told as its fault.

    Raises:
        UnreachableError: the head can not be reached, or went away.
    """
    start = time.perf_counter()
    times: list[float] = []
    ids: list[int] = []
    fault: str | None = None
    try:
        async with client.stream(prompt, max_tokens=tokens, ignore_eos=True) as stream:
            async for piece in stream:
                now = time.perf_counter()
                times += [now] * len(piece.token_ids)
                ids += piece.token_ids
            reply = stream.reply
    except UnreachableError:
        raise
    except RequestError as error:
        return Asked(prompt, fault=f"{error.code.value}: {error.message}")
    if tuple(ids) != reply.token_ids:
        fault = f"its pieces held {len(ids)} tokens, and the whole answer {len(reply.token_ids)} or others"
    elif len(ids) != tokens:
        fault = f"it has {len(ids)} tokens where {tokens} were asked for: is the ring's context too small?"
    timeline = Timeline(start, tuple(times), reply.usage.prompt_tokens) if times else None
    return Asked(prompt, timeline, reply, fault)
