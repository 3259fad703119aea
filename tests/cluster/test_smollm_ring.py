"""The real SmolLM2 on a ring of three nodes, asked by a client over real sockets."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.fleet import ask, fleet
from fixtures.smollm import load_prompts

from cascadia_p2p.shards.export import export
from cascadia_p2p.wire.client import GenerateReply


@pytest.fixture(scope="module")
def model(smollm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    out = tmp_path_factory.mktemp("smollm-ring")
    export(smollm, out / "model", shards=3)
    yield out / "model"
    # Half a gigabyte that pytest would keep.
    shutil.rmtree(out)


def test_three_nodes_answer_a_question(model: Path, tmp_path: Path) -> None:
    prompt = load_prompts()[0]

    async def run() -> GenerateReply:
        async with fleet(tmp_path) as nodes:
            for shard in range(3):
                await nodes.start(model, shard=shard)
            reply: GenerateReply = await ask(await nodes.open(), prompt.text, max_tokens=32)
            return reply

    reply = asyncio.run(run())
    assert reply.token_ids == prompt.transformers[:32]
    assert all(word in reply.text.lower() for word in ("sky", "blue", "light", "scatter")), reply.text
