"""Nodes that each exported their own shards, from different files, make one ring; another model's do not."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from cluster.fleet import fleet
from fixtures.exports import exact_export as export
from fixtures.reference import load_case

from cascadia_p2p.client import AsyncClient
from cascadia_p2p.errors import MismatchError
from cascadia_p2p.sample.checkpoint import make_checkpoint
from cascadia_p2p.shards.export import needed_files

SPLIT = (4, 4, 4)
FILES = 60


def export_apart(source: Path, root: Path, shard: int) -> Path:
    """What a PC exports that fetched only what this shard needs."""
    here = root / f"pc{shard}"
    here.mkdir(parents=True)
    files = needed_files(source, split=SPLIT, only=[shard])
    for path in source.iterdir():
        if path.suffix != ".safetensors" or path.name in files:
            shutil.copy(path, here)
    export(here, root / f"model{shard}", split=SPLIT, only=[shard])
    shutil.rmtree(here)
    return root / f"model{shard}"


def test_shards_exported_apart_make_one_ring_and_another_models_shard_is_refused(tmp_path: Path) -> None:
    case = load_case("tiny12")
    ours = make_checkpoint(tmp_path / "in", "tiny12", spelling="A", files=FILES)
    others = make_checkpoint(tmp_path / "other", "tiny12", spelling="A", files=FILES, seed=1)
    models = [export_apart(ours, tmp_path / "ours", shard) for shard in range(3)]
    stranger = export_apart(others, tmp_path / "others", 1)

    async def run() -> None:
        async with fleet(tmp_path) as ring:
            for model in (models[2], models[0], models[1]):
                await ring.start(model)
            head = await ring.open()
            late = await ring.start(stranger)
            with pytest.raises(MismatchError, match=r"of one config but of other weights: file \d+ of 60"):
                await asyncio.wait_for(late.task, 60.0)
            async with AsyncClient(head.client, timeout_s=120.0) as client:
                prompt = case.prompts[0]
                reply = await client.generate(prompt.ids, max_tokens=case.new_tokens)
            assert reply.token_ids == prompt.generated

    asyncio.run(run())
