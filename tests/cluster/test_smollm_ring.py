"""The real SmolLM2, weights as in its file, on a ring of ten nodes, asked over real sockets."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from cluster.fleet import fleet
from fixtures.smollm import load_prompts

from cascadia_p2p.client import AsyncClient
from cascadia_p2p.shards.export import export
from cascadia_p2p.wire.client import GenerateReply

NEW_TOKENS = 16
NODES = 10
PROMPTS = 8


@pytest.mark.timeout(900)
def test_prompts_get_the_references_answers(smollm: Path, tmp_path: Path) -> None:
    """All at once, so that frames hold rows of several of them."""
    export(smollm, tmp_path / "model", shards=NODES)
    prompts = load_prompts()[:PROMPTS]

    async def run() -> list[GenerateReply]:
        async with fleet(tmp_path) as ring:
            for shard in range(NODES):
                await ring.start(tmp_path / "model", shard=shard, slots=8, precision="exact")
            head = await ring.open(300.0)
            async with AsyncClient(head.client, timeout_s=600.0) as client:
                asked = [client.generate(prompt.text, max_tokens=NEW_TOKENS) for prompt in prompts]
                return list(await asyncio.gather(*asked))

    replies = asyncio.run(run())
    # More than a hundred megabytes that pytest would keep.
    shutil.rmtree(tmp_path / "model")
    for prompt, reply in zip(prompts, replies, strict=True):
        assert reply.token_ids == prompt.transformers[:NEW_TOKENS], prompt.text
    assert all(word in replies[0].text for word in ("sky", "blue")), replies[0].text
