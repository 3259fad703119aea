"""Who becomes a member of which ring: fleets, models, standbys, gaps and newcomers, as users see them."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster.conftest import Shards
from cluster.fleet import Fleet, Member, ask, fleet, slowed
from fixtures.reference import load_case

from cascadia_p2p.cli import main
from cascadia_p2p.client import AsyncClient
from cascadia_p2p.config import Limits
from cascadia_p2p.discovery import Candidate
from cascadia_p2p.errors import ErrorCode, MismatchError, RequestError
from cascadia_p2p.local import free_ports
from cascadia_p2p.types import Instance
from cascadia_p2p.wire.frames import PROTOCOL

CASE = load_case("tiny12")
OTHER = load_case("tiny12-heads")
PROMPT = CASE.prompts[1]


def run(scenario: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(100):
            await scenario

    asyncio.run(bounded())


async def right(head: Member) -> None:
    """The ring answers with the reference's tokens."""
    reply = await ask(head, PROMPT.ids, max_tokens=CASE.new_tokens)
    assert reply.token_ids == PROMPT.generated


async def die(member: Member) -> None:
    """End a node without a goodbye, as a lost cable or a kill would."""
    member.task.cancel()
    await asyncio.gather(member.task, return_exceptions=True)


def nodes(member: Member) -> set[str]:
    return {str(node["node"]) for node in member.node.status()["nodes"]}


def identity(member: Member) -> str:
    return str(member.places.identity.node_id)


# --- fleets -----------------------------------------------------------------------------------------------


def test_exo_06_two_fleets_on_one_network_never_mix(
    shards: Shards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However long a busy machine takes to look.
    monkeypatch.setattr("cascadia_p2p.client.FIND_S", 60.0)

    async def scenario() -> None:
        # Other weights in each, so that an answer shows whose it is.
        models = [shards(CASE, (6, 6)), shards(OTHER, (6, 6))]
        async with fleet(tmp_path / "one") as one:
            two = Fleet(tmp_path / "two", said=one.said)
            try:
                rings = [one, two]
                for shard in (0, 1):
                    for ring, model in zip(rings, models, strict=True):
                        await ring.start(model, shard=shard, mdns=True, peers=())
                for ring, case in zip(rings, (CASE, OTHER), strict=True):
                    await ring.open()
                    async with AsyncClient(fleet=ring.name, timeout_s=60) as client:
                        reply = await client.generate(case.prompts[1].ids, max_tokens=case.new_tokens)
                    assert reply.token_ids == case.prompts[1].generated
                    own = {identity(member) for member in ring.members}
                    assert all(nodes(member) == own for member in ring.members)
            finally:
                await two.stop()
        # Another fleet's nodes are nobody's business.
        assert not one.sentences("refused")

    run(scenario())


def test_exo_06_fleets_that_name_each_other_as_peers_do_not_mix_either(
    shards: Shards, tmp_path: Path
) -> None:
    async def scenario() -> None:
        model = shards(CASE, (6, 6))
        async with fleet(tmp_path) as ring:
            for shard in (0, 1):
                await ring.start(model, shard=shard)
            head = await ring.open()
            stranger = await ring.start(model, shard=1, fleet="another", peers=(head.control,))
            await ring.until(
                lambda: any(line["event"] == "refused" for line in ring.said), "the stranger is refused"
            )
            said = [sentence for sentence in ring.sentences("refused") if "'another'" in sentence]
            assert said
            assert all(f"'{ring.name}'" in sentence and "--fleet" in sentence for sentence in said)
            assert nodes(stranger) == {identity(stranger)}
            assert not stranger.task.done()
            await right(head)

    run(scenario())


# --- models and versions ----------------------------------------------------------------------------------


def test_a_newcomer_with_another_model_ends_when_the_ring_is_open(shards: Shards, tmp_path: Path) -> None:
    async def scenario() -> None:
        model, other = shards(CASE, (6, 6)), shards(OTHER, (6, 6))
        async with fleet(tmp_path) as ring:
            for shard in (0, 1):
                await ring.start(model, shard=shard)
            head = await ring.open()
            newcomer = await ring.start(other, shard=1)
            with pytest.raises(MismatchError) as ended:
                await asyncio.wait_for(newcomer.task, 60)
            assert ended.value.exit_code == 5
            prints = [
                str(each.places.model.manifest.fingerprint)[:16] for each in (ring.members[0], newcomer)
            ]
            here, there = f"{identity(head)[:8]}", f"{identity(newcomer)[:8]}"
            said = ring.sentences("refused")
            # On the ring's console and on the newcomer's.
            assert any(sentence.startswith("refused the node at") for sentence in said)
            assert any(sentence.startswith("refused by the node at") for sentence in said)
            for sentence in (*said, str(ended.value)):
                assert all(each in sentence for each in prints)
                assert there in sentence
                assert "copy the shards of the same export, or use another --fleet" in sentence
            assert any(here in sentence for sentence in said)
            ring.members.remove(newcomer)
            assert head.state == "open"
            await right(head)

    run(scenario())


def test_a_stranger_does_not_empty_a_fleet_that_is_still_forming(shards: Shards, tmp_path: Path) -> None:
    async def scenario() -> None:
        model, other = shards(CASE, (6, 6)), shards(OTHER, (6, 6))
        async with fleet(tmp_path) as ring:
            first = await ring.start(model, shard=0)
            stranger = await ring.start(other, shard=1)
            await ring.until(lambda: len(ring.sentences("refused")) >= 2, "both are told")
            assert not stranger.task.done()
            assert not first.task.done()
            second = await ring.start(model, shard=1, peers=(first.control,))
            head = await ring.open()
            assert nodes(head) == {identity(first), identity(second)}
            await right(head)
            stranger.task.cancel()

    run(scenario())


def test_rpc_04_another_build_of_the_same_protocol_joins_with_a_warning(
    shards: Shards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        model = shards(CASE, (6, 6))
        async with fleet(tmp_path) as ring:
            await ring.start(model, shard=0)
            with monkeypatch.context() as patch:
                patch.setattr("cascadia_p2p.node.places.__version__", "9.9.9+build.7")
                await ring.start(model, shard=1)
            head = await ring.open()
            await right(head)
            said = ring.sentences("software_mixed")
            assert said
            assert all(
                "9.9.9+build.7" in sentence and f"both speak protocol {PROTOCOL}" in sentence
                for sentence in said
            )
            versions = {str(node["software"]) for node in head.node.status()["nodes"]}
            assert "9.9.9+build.7" in versions
            assert len(versions) == 2

    run(scenario())


def test_a_copied_state_directory_is_told_on_both_consoles_and_nothing_flaps(
    shards: Shards, tmp_path: Path
) -> None:
    """Two living nodes of one id: who came first stays."""

    async def scenario() -> None:
        model = shards(CASE, (6, 6))
        async with fleet(tmp_path) as ring:
            for shard in (0, 1):
                await ring.start(model, shard=shard)
            head = await ring.open()
            original = ring.members[1]
            state = shutil.copytree(original.places.identity.directory.parent, tmp_path / "copy")
            copy = await ring.start(model, shard=1, state_dir=state)
            assert identity(copy) == identity(original)
            for whose in ("refused the node at", "refused by the node at"):
                await ring.until(
                    lambda: any(each.startswith(whose) for each in ring.sentences("refused")),  # noqa: B023
                    f"a console says '{whose}'",
                )
            for sentence in ring.sentences("refused"):
                assert f"node id {identity(original)} is in use by" in sentence
                assert "a state directory was copied; give one of them another --state-dir" in sentence
            await right(head)
            assert not ring.sentences("peer_replaced")
            assert head.node.status()["epoch"]["counter"] == 1
            (tail,) = [node for node in head.node.status()["nodes"] if node["node"] == identity(original)]
            assert tail["control"] == str(original.control)
            await copy.stop()

    run(scenario())


# --- shards -----------------------------------------------------------------------------------------------


def test_a_node_for_a_shard_that_is_held_becomes_its_standby_and_takes_over(
    shards: Shards, tmp_path: Path
) -> None:
    async def scenario() -> None:
        model = shards(CASE, (6, 6))
        async with fleet(tmp_path) as ring:
            head = await ring.start(model, shard=0)
            holder = await ring.start(model, shard=1)
            await ring.open()
            standby = await ring.start(model, shard=1)
            await ring.until(lambda: standby.state == "standby", "the newcomer is a standby")
            sentence = ring.sentences("standby")[-1]
            assert f"shard 1 is held by {label(holder)}; {label(standby)} is its standby" in sentence
            assert "takes over when that node is lost" in sentence

            def claimed() -> tuple[str, list[str]]:
                claim = head.node.status()["claims"][1]
                return claim["node"], claim["standbys"]

            # What one node knows of another's claim comes by a message.
            await ring.until(lambda: bool(claimed()[1]), "the head knows of the standby")
            assert claimed() == (identity(holder), [identity(standby)])
            await right(head)
            epoch = head.node.status()["epoch"]["counter"]

            undisturbed = (await ask(head, PROMPT.ids, max_tokens=490)).token_ids
            with slowed(head):
                waiting = [asyncio.create_task(ask(head, PROMPT.ids, max_tokens=490)) for _ in range(3)]
                await ring.until(lambda: head.node.status()["requests"]["pending"] == 3, "three requests run")
                await die(holder)
            assert [reply.token_ids for reply in await asyncio.gather(*waiting)] == [undisturbed] * 3

            assert await ring.open() is head
            status = head.node.status()
            assert status["epoch"]["counter"] > epoch
            assert [stage["node"] for stage in status["stages"]] == [identity(head), identity(standby)]
            await right(head)

            # And the other way round: who comes back is the standby now.
            back = await ring.start(model, shard=1, state_dir=holder.places.identity.directory.parent)
            assert identity(back) == identity(holder)
            await ring.until(lambda: back.state == "standby", "the old holder is the standby")
            await right(head)

    run(scenario())


def test_a_standby_of_the_head_takes_the_client_port_too(shards: Shards, tmp_path: Path) -> None:
    async def scenario() -> None:
        model, port = shards(CASE, (6, 6)), free_ports()
        async with fleet(tmp_path) as ring:
            first = await ring.start(model, shard=0, client_port=port)
            await ring.start(model, shard=1, client_port=port)
            await ring.open()
            # The port is in use, and only a serving head needs it.
            spare = await ring.start(model, shard=0, client_port=port)
            await ring.until(lambda: spare.state == "standby", "the newcomer is a standby")
            await right(first)
            await die(first)
            assert await ring.open() is spare
            assert spare.client.port == port
            await right(spare)

    run(scenario())


def test_a_gap_in_the_shards_is_named_everywhere(
    shards: Shards, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        model = shards(CASE, (4, 4, 4))
        async with fleet(tmp_path) as ring:
            limits = Limits(recovery_s=0.6)
            head = await ring.start(model, shard=0, limits=limits)
            tail = await ring.start(model, shard=2)
            await ring.until(lambda: bool(head.node.status().get("requests")), "the head takes requests")
            for each in (head, tail):
                await ring.until(lambda: each.node.status()["missing"] == [1], "they have met")  # noqa: B023
            # A client that waits is told in the end, and not before.
            started = time.monotonic()
            with pytest.raises(RequestError, match="missing: shard 1") as told:
                await ask(head, PROMPT.ids)
            assert told.value.code is ErrorCode.RING_INCOMPLETE
            assert time.monotonic() - started >= 0.6
            await ring.until(
                lambda: any("waits for shard 1 " in each for each in ring.sentences("ring_waits")),
                "the log names the gap",
            )
            for endpoint in (head.client, head.control, tail.control):
                status = ("status", "--endpoint", str(endpoint))
                assert await asyncio.to_thread(main, [*status, "--json"]) == 0
                body = json.loads(capsys.readouterr().out)
                assert body["missing"] == [1]
                assert body["state"] == "looking"
                assert await asyncio.to_thread(main, list(status)) == 0
                assert "waiting for shard 1 (" in capsys.readouterr().out
            assert await asyncio.to_thread(main, ["generate", "hi", "--endpoint", str(head.client)]) == 1
            said = capsys.readouterr()
            assert said.out == ""
            assert "cascadia-p2p: the ring is incomplete: " in said.err
            assert "missing: shard 1" in said.err
            await ring.start(model, shard=1)
            await right(await ring.open())

    run(scenario())


def test_clients_of_a_node_that_leaves_are_told(shards: Shards, tmp_path: Path) -> None:
    async def scenario() -> None:
        model = shards(CASE, (6, 6))
        async with fleet(tmp_path) as ring:
            head = await ring.start(model, shard=0, limits=Limits(recovery_s=0.5))
            tail = await ring.start(model, shard=1)
            await ring.open()
            for leaver, shard in ((tail, 1), (head, 0)):
                with slowed(head):
                    waiting = [asyncio.create_task(ask(head, PROMPT.ids, max_tokens=490)) for _ in range(6)]
                    await ring.until(lambda: head.node.status()["requests"]["pending"] == 6, "all six wait")
                    await leaver.stop()
                for error in await asyncio.gather(*waiting, return_exceptions=True):
                    assert isinstance(error, RequestError), (shard, error)
                    assert error.code is ErrorCode.RING_INCOMPLETE
                    assert f"{label(leaver)} left" in error.message or shard == 0
                if leaver is tail:
                    await ring.start(model, shard=1)
                    await ring.open()

    run(scenario())


def test_cas_18_requests_from_before_the_ring_are_answered_when_it_opens(
    shards: Shards, tmp_path: Path
) -> None:
    async def scenario() -> None:
        model = shards(CASE, (4, 4, 4))
        async with fleet(tmp_path) as ring:
            head = await ring.start(model, shard=0)
            await ring.until(lambda: bool(head.node.status().get("requests")), "the head takes requests")
            early = [
                asyncio.create_task(ask(head, prompt.ids, max_tokens=CASE.new_tokens))
                for prompt in CASE.prompts * 2
            ]
            long = asyncio.create_task(ask(head, [5] * 600))
            await ring.until(lambda: head.node.status()["requests"]["pending"] == 9, "all nine wait")
            await ring.start(model, shard=2)
            await ring.start(model, shard=1)
            replies = await asyncio.gather(*early)
            assert [reply.token_ids for reply in replies] == [p.generated for p in CASE.prompts] * 2
            # Only an open ring knows its context.
            with pytest.raises(RequestError, match="prompt is 600 tokens; this ring holds 512"):
                await long

    run(scenario())


def test_eleven_nodes_without_a_shard_take_each_one_once(shards: Shards, tmp_path: Path) -> None:
    async def scenario() -> None:
        split = (1,) * 10 + (2,)
        model = shards(CASE, split)
        async with fleet(tmp_path) as ring:
            # Two that hear of each other late may both take the first shard: no stall is to look like quiet.
            limits = Limits(settle_s=5.0)
            await ring.start(model, limits=limits)
            await asyncio.gather(*(ring.start(model, limits=limits) for _ in split[1:]))
            head = await ring.open()
            status = head.node.status()
            assert [stage["shard"] for stage in status["stages"]] == list(range(11))
            assert len({stage["node"] for stage in status["stages"]}) == 11
            assert sorted(node["shard"] for node in status["nodes"]) == list(range(11))
            assert not ring.sentences("standby")
            await right(head)

    run(scenario())


# --- company ----------------------------------------------------------------------------------------------


def test_exo_01_a_node_says_when_it_is_alone_and_only_then(shards: Shards, tmp_path: Path) -> None:
    async def scenario() -> None:
        model = shards(CASE, (6, 6))
        async with fleet(tmp_path) as ring:
            limits = Limits(alone_s=0.3)
            await ring.start(model, shard=0, limits=limits)
            await ring.until(lambda: bool(ring.sentences("alone")), "the first node says that it is alone")
            assert ring.name in ring.sentences("alone")[0]
            # Found by the other, and finding nobody itself, it is not alone any more.
            await ring.start(model, shard=1, limits=limits)
            head = await ring.open()
            ring.said.clear()
            deadline = time.monotonic() + 1.0
            await ring.until(lambda: time.monotonic() > deadline, "three times that time")
            assert not ring.sentences("alone")
            await right(head)

    run(scenario())


def test_forged_announcements_of_its_own_address_are_no_company_and_are_not_kept(
    shards: Shards, tmp_path: Path
) -> None:
    async def scenario() -> None:
        model = shards(CASE, (6, 6))
        async with fleet(tmp_path) as ring:
            alone = await ring.start(model, shard=0, limits=Limits(alone_s=0.3))
            node = alone.node
            for number in range(100):
                forged = replace(node._announcement(), instance=Instance(f"{number:016x}"))
                node._greet(Candidate(alone.control, forged))
            node._greet(Candidate(alone.control, peer=alone.control))
            await ring.until(lambda: bool(ring.sentences("alone")), "the node says that it is alone")
            assert not node._discovery._reached

    run(scenario())


def label(member: Member) -> str:
    """How a node is called in sentences."""
    return f"{member.node.status()['nodes'][0]['host']}/{identity(member)[:8]}"
