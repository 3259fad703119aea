"""Where counters and answers disagree, and what is asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cascadia_p2p.bench.asking import Asked
from cascadia_p2p.bench.counting import NodeCount, RingCount, faults
from cascadia_p2p.bench.prompts import ID_PROMPT, IdPrompts, TextPrompts
from cascadia_p2p.errors import UsageError
from cascadia_p2p.wire.client import FinishReason, GenerateReply, Timings, Usage
from cascadia_p2p.wire.work import WorkReport
from cascadia_p2p.workload import PROMPTS

TOKENS, PROMPT = 4, 5


def asked(count: int) -> list[Asked]:
    reply = GenerateReply(
        token_ids=(1,) * TOKENS,
        finish_reason=FinishReason.LENGTH,
        usage=Usage(prompt_tokens=PROMPT, completion_tokens=TOKENS),
        timings=Timings(queue_s=0.0, ttft_s=0.0),
    )
    return [Asked((1,) * PROMPT, reply=reply)] * count


def ring(requests: int, rows: tuple[int, ...], epoch: str = "1@a") -> RingCount:
    counted = {
        "finished": requests,
        "prompt_tokens": PROMPT * requests,
        "completion_tokens": TOKENS * requests,
    }
    nodes = tuple(
        NodeCount(stage, f"node{stage}", WorkReport(seconds={}, rows=n)) for stage, n in enumerate(rows)
    )
    return RingCount(epoch, counted, nodes)


BEFORE = ring(7, (100, 50))
ROWS = 3 * (PROMPT + TOKENS - 1)
AFTER = ring(10, (100 + ROWS, 50 + ROWS))


def test_counts_that_agree_are_no_fault() -> None:
    assert faults(BEFORE, AFTER, asked(3)) == []


@pytest.mark.parametrize("rows", [ROWS - 1, ROWS + 1])
def test_a_row_too_few_or_too_many_names_the_stage(rows: int) -> None:
    (fault,) = faults(BEFORE, ring(10, (100 + ROWS, 50 + rows)), asked(3))
    assert fault == f"stage 1 (node node1) computed {rows} rows where these answers need {ROWS}"


def test_what_kept_prefixes_saved_is_not_missed() -> None:
    saved = 2 * PROMPT
    after = replace(ring(10, (100 + ROWS - saved, 50 + ROWS - saved)), reused=saved)
    assert faults(BEFORE, after, asked(3)) == []
    assert len(faults(BEFORE, replace(after, reused=saved - 1), asked(3))) == 2


@pytest.mark.parametrize("name", ["finished", "prompt_tokens", "completion_tokens"])
def test_a_count_of_the_head_that_is_another_is_named(name: str) -> None:
    after = replace(AFTER, requests={**AFTER.requests, name: AFTER.requests[name] + 1})
    (fault,) = faults(BEFORE, after, asked(3))
    assert fault.startswith(f"the head counted {AFTER.requests[name] - BEFORE.requests[name] + 1} ")


def test_a_ring_formed_anew_is_told_and_nothing_else() -> None:
    (fault,) = faults(BEFORE, ring(3, (ROWS, ROWS), "2@a"), asked(3))
    assert "formed anew (epoch 1@a, then 2@a)" in fault


def test_a_node_that_does_not_tell_is_named() -> None:
    silent = replace(AFTER, nodes=(AFTER.nodes[0], NodeCount(1, "node1")))
    assert faults(BEFORE, silent, asked(3)) == ["stage 1 (node node1) did not tell its counters"]


def test_families_come_in_turn() -> None:
    prompts = TextPrompts.families()
    texts = [prompts.of(8, request) for request in range(13)]
    assert texts[:12] == list(PROMPTS.values())
    assert texts[12] == texts[0]


def test_ids_differ_by_request_and_level_and_come_again_with_their_seed() -> None:
    prompts = IdPrompts(100, seed=3)
    all_ids = [prompts.of(streams, request) for streams in (1, 8) for request in range(8)]
    assert len(set(all_ids)) == 16
    assert all(len(ids) == ID_PROMPT and min(ids) >= 0 and max(ids) < 100 for ids in all_ids)
    assert IdPrompts(100, seed=3).of(8, 5) == prompts.of(8, 5) != IdPrompts(100, seed=4).of(8, 5)


def test_a_file_of_prompts_is_read_by_lines(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("one\n\n  two \n", encoding="utf-8")
    prompts = TextPrompts.read(path)
    assert [prompts.of(1, request) for request in range(3)] == ["one", "two", "one"]


@pytest.mark.parametrize("content", [None, b"", b" \n\n", b"\xff\xfe\xff"])
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "mine.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=r"mine\.txt"):
        TextPrompts.read(path)
