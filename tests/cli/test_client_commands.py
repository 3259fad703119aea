"""`generate` and `status` as a user runs them: what is printed where, and the exit codes."""

from __future__ import annotations

import asyncio
import io
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from cli.conftest import Outcome, Run
from cluster.conftest import Shards
from cluster.standing import StandingRing, standing_ring
from doctor.doctor_world import speaking_node
from fixtures.reference import load_case

from cascadia_p2p import __version__
from cascadia_p2p.cli import COMMANDS
from cascadia_p2p.cli import status as status_command
from cascadia_p2p.cli.status import _show, journal_words
from cascadia_p2p.client import AsyncClient
from cascadia_p2p.transport.control import ControlServer
from cascadia_p2p.transport.curve import KeyPair, Keys
from cascadia_p2p.transport.network import Network

CASE = load_case("tiny12-eos")
STOPPED = CASE.prompts[1]
IDS = ",".join(map(str, STOPPED.ids))

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture(scope="module")
def ring(shards: Shards, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandingRing]:
    with standing_ring(tmp_path_factory.mktemp("commands"), shards(CASE, (6, 6)), 2, context=300) as made:
        yield made


@pytest.fixture
def at(ring: StandingRing) -> tuple[str, str]:
    return "--endpoint", ring.endpoint.tcp


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a busy machine's nodes take to say where their time goes."""
    monkeypatch.setattr(status_command, "WORK_S", 60.0)


@pytest.fixture
def absent() -> str:
    """An address where nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{unused.getsockname()[1]}"


# --- generate ---------------------------------------------------------------------------------------------


def test_generate_prints_the_text_and_nothing_else(run: Run, at: tuple[str, str]) -> None:
    done = run("generate", "--token-ids", IDS, *at)
    assert (done.code, done.err) == (0, "")
    # The end-of-sequence id is not text.
    assert done.out == bytes(STOPPED.generated[:-1]).decode() + "\n"


def test_generate_json_is_the_whole_reply(run: Run, at: tuple[str, str]) -> None:
    done = run("generate", "--token-ids", IDS, "--json", "--max-tokens", 5, *at)
    assert (done.code, done.err) == (0, "")
    reply = json.loads(done.out)
    assert reply["token_ids"] == list(STOPPED.generated[:5])
    assert reply["finish_reason"] == "length"
    assert reply["usage"] == {"prompt_tokens": 20, "completion_tokens": 5, "cached_tokens": 0}


def test_generate_takes_text_from_the_command_line_or_stdin(
    run: Run, at: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "Grüße\n"
    told = run("generate", text, "--json", *at)
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    piped = run("generate", "-", "--json", *at)
    assert told.code == piped.code == 0
    assert json.loads(told.out)["token_ids"] == json.loads(piped.out)["token_ids"]
    assert json.loads(piped.out)["usage"]["prompt_tokens"] == len(text.encode())


def test_generate_stops_where_it_is_told(run: Run, at: tuple[str, str]) -> None:
    stop = STOPPED.generated[2]
    done = run("generate", "--token-ids", IDS, "--json", "--stop-token-ids", f"279,{stop}", *at)
    assert json.loads(done.out)["token_ids"] == list(STOPPED.generated[:3])
    longer = run("generate", "--token-ids", IDS, "--json", "--ignore-eos", "--max-tokens", 24, *at)
    assert len(json.loads(longer.out)["token_ids"]) == 24


def test_generate_draws_the_same_tokens_again_with_the_same_seed(run: Run, at: tuple[str, str]) -> None:
    flags = ("--token-ids", IDS, "--ignore-eos", "--max-tokens", 12, "--temperature", "4", "--top-k", "200")
    first = json.loads(run("generate", *flags, "--top-p", "0.99", "--json", *at).out)
    again = ("--top-p", "0.99", "--json", "--seed", first["seed"])
    assert json.loads(run("generate", *flags, *again, *at).out)["token_ids"] == first["token_ids"]
    other = ("--top-p", "0.99", "--json", "--seed", first["seed"] ^ 1)
    assert json.loads(run("generate", *flags, *other, *at).out)["token_ids"] != first["token_ids"]
    assert first["token_ids"] != list(STOPPED.generated[:12])


def test_generate_prints_scores_beside_the_answer(run: Run, at: tuple[str, str]) -> None:
    plain = run("generate", "--token-ids", IDS, "--max-tokens", 3, *at)
    whole = run("generate", "--token-ids", IDS, "--max-tokens", 3, "--logprobs", 2, "--json", *at)
    scores = json.loads(whole.out)["logprobs"]
    assert [score["token_id"] for score in scores] == list(STOPPED.generated[:3])
    for flags in ((), ("--stream",)):
        done = run("generate", "--token-ids", IDS, "--max-tokens", 3, "--logprobs", 2, *flags, *at)
        assert done.out == plain.out
        lines = done.err.splitlines()
        assert len(lines) == 3
        for line, score in zip(lines, scores, strict=True):
            best, second = score["top_logprobs"]
            assert line.strip() == (
                f"{score['logprob']:.4f} {score['token']!r}  |  {best['logprob']:.4f} {best['token']!r}"
                f"  {second['logprob']:.4f} {second['token']!r}"
            )
    alone = run("generate", "--token-ids", IDS, "--max-tokens", 1, "--logprobs", 0, *at)
    assert alone.err.strip() == f"{scores[0]['logprob']:.4f} {scores[0]['token']!r}"


PAUSE: Any = (
    {"queued": 2},
    {"seq": 1, "text": "a", "token_ids": [97]},
    {"seq": 2, "text": "", "token_ids": [], "notice": "desk-2 is lost; the answer goes on"},
    {
        "seq": 3, "final": True, "text": "ab", "token_ids": [97, 98], "finish_reason": "length",
        "usage": {"prompt_tokens": 1, "completion_tokens": 2, "cached_tokens": 0},
        "timings": {"queue_s": 0.0, "ttft_s": 0.1},
    },
)  # fmt: skip
"""What a head says of a request that waits, and whose answer pauses."""


@pytest.fixture
def pausing() -> Iterator[str]:
    """The address of a head whose ring is lost in the midst of each answer, and opens again."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router, stopping = context.socket(zmq.ROUTER), threading.Event()
    endpoint = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"

    def serve() -> None:
        while not stopping.is_set():
            if not router.poll(20):
                continue
            *route, data = router.recv_multipart()
            request = json.loads(data)
            if request.get("op") == "status":
                router.send_multipart([*route, b'{"status": {"state": "open"}}'])
            elif request["op"] == "generate":
                for reply in PAUSE:
                    router.send_multipart([*route, json.dumps({"id": request["id"]} | reply).encode()])

    thread = threading.Thread(target=serve)
    thread.start()
    yield endpoint
    stopping.set()
    thread.join()
    context.destroy(linger=0)


def test_generate_says_why_a_whole_answer_waits(run: Run, pausing: str) -> None:
    done = run("generate", "x", "--endpoint", pausing, "--timeout", 60)
    assert (done.code, done.out) == (0, "ab\n")
    assert "one request is before it" in done.err
    assert "desk-2 is lost; the answer goes on" in done.err


def test_whole_answers_in_an_event_loop_say_why_they_wait(pausing: str) -> None:
    async def heard() -> list[int | str]:
        said: list[int | str] = []
        async with AsyncClient(pausing, timeout_s=60.0) as client:
            reply = await client.generate("x", on_queued=said.append, on_notice=said.append)
        assert reply.text == "ab"
        return said

    assert asyncio.run(heard()) == [2, PAUSE[2]["notice"]]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "give either PROMPT or --token-ids"),
        (("hello", "--token-ids", "1"), 2, "give either PROMPT or --token-ids"),
        (("--token-ids", "1,x"), 2, "--token-ids '1,x': expected numbers with commas"),
        (("--token-ids", ""), 2, "--token-ids"),
        (("hello", "--stop-token-ids", "a"), 2, "--stop-token-ids 'a': expected numbers"),
        (("hello", "--max-tokens", "0"), 2, "'0' is not a number of 1 or more"),
        (("hello", "--max-tokens", "lots"), 2, "'lots' is not a number of 1 or more"),
        (("hello", "--temperature", "hot"), 2, "'hot' is not a number"),
        (("hello", "--temperature", "nan"), 2, "field 'temperature' should be"),
        (("hello", "--temperature", "-1"), 2, "'temperature' should be greater than or equal to 0"),
        (("hello", "--temperature", "1", "--top-p", "2"), 2, "'top_p' should be less than or equal to 1"),
        (("hello", "--top-k", "2"), 2, "field 'top_k' goes with 'temperature' only"),
        (("hello", "--top-k", "2.5"), 2, "'2.5' is not a whole number"),
        (("hello", "--seed", str(2**64)), 2, "'seed' should be less than 18446744073709551616"),
        (("hello", "--logprobs", "21"), 2, "'logprobs': expected true, false, or a number of alternatives"),
        (("hello", "--endpoint", "here"), 2, "flag --endpoint: 'here' is not an address"),
        (("hello", "--fleet", ""), 2, "--fleet"),
        (("hello", "--timeout", "0"), 2, "--timeout"),
        (("hello", "--fleet", "caf\udce9"), 2, "flag --fleet: 'caf\\udce9' holds bytes that are no text"),
        (("caf\udce9",), 2, "a text in it is no Unicode"),
        (("",), 2, "'prompt' is empty"),
        (("--token-ids", "1,280"), 2, "holds 280: this model's ids are 0 to 279"),
        (("--token-ids", "-1"), 2, "'token_ids[0]' should be greater than or equal to 0, and is -1"),
        (("--token-ids", ",".join(["5"] * 301)), 1, "prompt is 301 tokens; this ring holds 300 a stream"),
    ],
)
def test_generate_refuses_in_one_sentence(
    run: Run, at: tuple[str, str], arguments: tuple[str, ...], code: int, words: str
) -> None:
    endpoint = () if "--endpoint" in arguments else at
    done = run("generate", *arguments, *endpoint)
    assert (done.code, done.out) == (code, "")
    last = done.err.strip().splitlines()[-1]
    assert last.startswith("cascadia-p2p")
    assert words in last
    assert "Traceback" not in done.err
    assert "pydantic" not in done.err


def test_stk_10_an_absent_head_is_said_within_the_connect_timeout(
    run: Run, absent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in (("generate", "hello"), ("status",)):
        started = time.monotonic()
        done = run(*command, "--endpoint", absent)
        assert time.monotonic() - started < 60
        assert (done.code, done.out) == (6, "")
        assert f"answers at {absent.removeprefix('tcp://')}" in done.err
        assert "nothing listens there" in done.err
        advice = (
            "a node listens at the address that its console names"
            if command[0] == "status"
            else ("check the address and 'cascadia-p2p status'")
        )
        assert advice in done.err
        assert ("'cascadia-p2p status'" in done.err) == (command[0] != "status")
        # Once at full length is enough.
        monkeypatch.setattr("cascadia_p2p.client.CONNECT_S", 0.5)


def test_what_accepts_connections_and_says_nothing_is_not_waited_for(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cascadia_p2p.client.CONNECT_S", 0.5)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        done = run("generate", "hello", "--endpoint", f"127.0.0.1:{silent.getsockname()[1]}")
    assert done.code == 6
    assert "nothing came back" in done.err


def test_no_fleet_on_the_network_is_said_with_what_to_do(run: Run) -> None:
    done = run("status", "--fleet", "nobody-has-this-name")
    assert (done.code, done.out) == (6, "")
    assert "no node of fleet 'nobody-has-this-name' answers" in done.err
    assert "cascadia-p2p join" in done.err
    assert "--endpoint" in done.err


# --- status -----------------------------------------------------------------------------------------------


def test_status_json_tells_all_of_the_ring(run: Run, ring: StandingRing, at: tuple[str, str]) -> None:
    assert run("generate", "a", "--max-tokens", 1, *at).code == 0
    done = run("status", "--json", *at)
    assert (done.code, done.err) == (0, "")
    body: dict[str, Any] = json.loads(done.out)
    assert body["state"] == "open"
    assert body["fleet"] == ring.name
    assert body["epoch"]["counter"] >= 1
    assert body["missing"] == []
    assert [stage["shard"] for stage in body["stages"]] == [0, 1]
    assert {node["node"] for node in body["nodes"]} == {stage["node"] for stage in body["stages"]}
    assert {node["claim"] for node in body["nodes"]} == {"serving"}
    assert all(node["software"] == __version__ for node in body["nodes"])
    assert all(stage["progress"] is not None for stage in body["stages"])
    assert body["promise"]["context"] == 300
    assert body["requests"]["accepted"] >= body["requests"]["finished"] > 0
    assert body["data_thread"]["frames_out"] > 0
    for node in body["nodes"]:
        work, engine = node["work"], node["engine"]
        assert (engine["device"], engine["precision"], engine["cache"]) == ("CPU", "fine", "f32")
        assert work["frames"] >= 1
        assert work["rows"] >= work["frames"]
        assert all(work["seconds"][part] > 0 for part in ("projections", "attention", "glue"))
        assert work["frame_ms"]["attention"] * work["frames"] == pytest.approx(
            1e3 * work["seconds"]["attention"], abs=0.01
        )
    # The last node chooses the tokens.
    tail = body["stages"][-1]["node"]
    assert all((node["work"]["seconds"]["head"] > 0) == (node["node"] == tail) for node in body["nodes"])


def test_status_is_told_by_any_node_at_its_control_port(run: Run, ring: StandingRing) -> None:
    for member in ring.fleet.members:
        done = run("status", "--json", "--endpoint", str(member.control))
        assert done.code == 0
        body = json.loads(done.out)
        assert body["state"] == "open"
        assert body["nodes"][0]["control"] == str(member.control)


def test_any_nodes_control_address_leads_to_the_head(run: Run, ring: StandingRing) -> None:
    for member in ring.fleet.members:
        done = run("generate", "--token-ids", IDS, "--max-tokens", 3, "--endpoint", str(member.control))
        assert (done.code, done.err) == (0, "")
        assert done.out == bytes(STOPPED.generated[:3]).decode() + "\n"
        told = run("status", "--json", "--timeout", 20, "--peer", str(member.control))
        assert json.loads(told.out)["nodes"][0]["control"] == str(member.control)
    both = run("status", "--peer", "127.0.0.1:1", "--endpoint", ring.endpoint.tcp)
    assert (both.code, "not both" in both.err) == (2, True)
    assert run("status", "--timeout", 0).code == 2


def test_status_text_is_for_people(run: Run, ring: StandingRing, at: tuple[str, str]) -> None:
    done = run("status", *at)
    assert (done.code, done.err) == (0, "")
    assert f"fleet '{ring.name}'" in done.out
    assert "ring open" in done.out
    lines = re.findall(
        r"\(CPU fine f32\): \d+\.\d\d ms a frame of \d+\.\d rows, .*attention \d+%.*; busy", done.out
    )
    assert len(lines) == 2
    assert f"clients are served at {ring.endpoint}" in done.out
    for member in ring.fleet.members:
        assert str(member.control) in done.out
    assert "finished" in done.out


# --- the parser ---------------------------------------------------------------------------------------------


def test_rpc_07_status_says_that_loading_does_not_get_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    node = {"node": "ab" * 8, "host": "desk-3", "shard": 2, "claim": "loading", "progress": 0.4}

    async def shown(stalled: bool) -> str:
        body: Any = {"fleet": "f", "model": "m", "state": "looking", "nodes": [node | {"stalled": stalled}]}
        async with speaking_node(body) as endpoint:
            done = await asyncio.to_thread(run, "status", "--peer", endpoint)
        assert done.code == 0
        return str(done.out)

    assert "loading 40%, stalled" in asyncio.run(shown(True))
    assert "loading 40%  " in asyncio.run(shown(False))


@pytest.mark.parametrize("terminal", [False, True])
def test_status_never_breaks_an_address(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    controls = ("10.91.0.1:7610", "10.91.0.222:65432", "[fd00::1234:5678:9abc:def0]:7610")
    nodes: list[Any] = [
        {"node": f"{i}a" * 8, "host": "desk-with-a-name", "shard": i, "control": control, "heard_s": 12.5}
        | {"claim": "loading", "progress": 0.86, "standby": i == 1, "client": control}
        for i, control in enumerate(controls)
    ]
    body: Any = {"fleet": "f", "model": "m", "state": "open", "nodes": nodes}
    if terminal:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    _show(body)
    lines = capsys.readouterr().out.splitlines()
    for node in nodes:
        name = f"desk-with-a-name/{node['node'][:8]}"
        assert sum(name in line and f" {node['control']} " in line for line in lines) == 1
    assert f"clients are served at {', '.join(controls)}" in lines
    words = "loading, standby 86%"
    assert any(words in line for line in lines) or terminal
    assert not terminal or any("loading, " in line and "standby" not in line for line in lines)


def test_status_says_which_key_opens_a_node_that_is_closed_to_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    fleet = KeyPair.new()
    door = Keys(fleet, fleet.public, lambda _domain, key: key == fleet.public)

    async def shown() -> Outcome:
        with Network(door) as network:
            closed = ControlServer(network, "127.0.0.1", 0)
            reading = asyncio.create_task(closed.receive())
            rows: Any = [
                {"node": "ab" * 8, "host": "desk-1", "claim": "serving"},
                {"node": "cd" * 8, "host": "desk-2", "claim": "serving", "control": str(closed.endpoint)},
            ]
            body: Any = {"node": "ab" * 8, "fleet": "f", "model": "m", "state": "open", "nodes": rows}
            async with speaking_node(body) as endpoint:
                done = await asyncio.to_thread(run, "status", "--peer", endpoint)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            closed.close()
        return done

    done = asyncio.run(shown())
    assert done.code == 0
    assert re.search(r"desk-1/abababab .*it does not say where its time goes", done.out)
    assert re.search(r"desk-2/cdcdcdcd .*only the fleet's own key .*opens it", done.out)


def test_status_without_the_fleets_key_knocks_at_no_closed_door(run: Run) -> None:
    """Nodes there would warn of a stranger, at each look of somebody at the head's own PC."""

    async def scenario() -> Outcome:
        with socket.socket() as door:
            door.bind(("127.0.0.1", 0))
            door.listen()
            door.setblocking(False)
            rows: Any = [
                {"node": "ab" * 8, "host": "desk-1", "claim": "serving"},
                {
                    "node": "cd" * 8,
                    "host": "desk-2",
                    "claim": "serving",
                    "control": f"127.0.0.1:{door.getsockname()[1]}",
                },
            ]
            body: Any = {
                "node": "ab" * 8,
                "fleet": "f",
                "state": "open",
                "nodes": rows,
                "door": {"closed": True},
            }
            async with speaking_node(body) as endpoint:
                done = await asyncio.to_thread(run, "status", "--peer", endpoint)
            with pytest.raises(BlockingIOError):
                door.accept()
        return done

    done = asyncio.run(scenario())
    assert done.code == 0
    assert re.search(r"desk-2/cdcdcdcd .*only the fleet's own key \(--key FILE\) opens it", done.out)


def test_help_of_every_command_names_its_flags(run: Run) -> None:
    done = run("--help")
    assert done.code == 0
    assert all(name in done.out for name in COMMANDS)
    assert "130 Ctrl-C" in done.out
    flags = {
        "export": ("CHECKPOINT", "OUT", "--shards", "--split", "--experts", "--head", "--key", "--no-key"),
        "join": (
            "--model", "--shard", "--fleet", "--bind", "--port", "--client-port", "--peer", "--no-mdns",
            "--device", "--precision", "--cache", "--slots", "--context", "--config", "--state-dir",
            "--log-format", "--key", "--insecure",
        ),
        "generate": ("PROMPT", "--token-ids", "--endpoint", "--fleet", "--max-tokens", "--json", "--stream"),
        "chat": ("--system", "--stop", "--reasoning-effort", "--hide-reasoning", "--endpoint", "--fleet"),
        "status": ("--endpoint", "--fleet", "--json", "--timeout", "--peer"),
        "simulate": ("--streams", "--policy", "--split", "--order", "--json", "--plot", "--hop-ms"),
        "bench": (
            "--levels", "--tokens", "--requests", "--emulate", "--time-scale", "--json", "--plot", "--key",
            "--endpoint", "--fleet",
        ),
        "demo": ("--nodes", "--prompt", "--chat", "--sample"),
        "pull": ("NAME",),
        "keygen": ("--fleet", "--key", "--client", "--revoke", "--list", "--out", "--peer"),
        "plan": ("--nodes", "--memory", "--device", "--context", "--slots", "--json"),
        "doctor": ("--json", "--peer"),
        "profile": ("--model", "--rows", "--positions", "--out", "--precision", "--threads", "--json"),
    }  # fmt: skip
    assert set(flags) == set(COMMANDS)
    for name, expected in flags.items():
        done = run(name, "--help")
        assert (done.code, done.err) == (0, "")
        for flag in expected:
            assert flag in done.out
        # Hidden, for the demo's own nodes.
        assert "--while-stdin-open" not in done.out


def test_version(run: Run) -> None:
    done = run("--version")
    assert (done.code, done.out) == (0, f"cascadia-p2p {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "cascadia-p2p: error: the following arguments are required: COMMAND"),
        (("serve",), "'serve'"),
        (("join", "--modle", "x"), "join: error: unrecognized arguments: --modle x; did you mean --model?"),
        (("status", "--peer", "a:1", "b"), "status: error: unrecognized arguments: b\n"),
        (("--what",), ""),
    ],
)
def test_usage_errors_end_with_2(run: Run, arguments: tuple[str, ...], words: str) -> None:
    done = run(*arguments)
    assert (done.code, done.out) == (2, "")
    assert words in done.err
    assert "usage: cascadia-p2p" in done.err


def test_the_module_runs_as_a_program(process: Start) -> None:
    started = process("--version")
    assert started.communicate(timeout=90) == (f"cascadia-p2p {__version__}\n", "")
    assert started.returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_rpc_03_output_that_finds_the_disk_full_is_said(
    run: Run, at: tuple[str, str], form: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full, Path("/dev/full").open("w") as stdout:
        full.setattr(sys, "stdout", stdout)
        done = run("status", *form, *at)
    assert done.code == 1
    assert done.err == "cascadia-p2p: the output can not be written: No space left on device\n"


def test_a_reader_that_has_gone_ends_the_command_quietly(process: Start, at: tuple[str, str]) -> None:
    started = [process("status", "--json", *at), process("status", *at), process("generate", "a", *at)]
    for each in started:
        assert each.stdout is not None
        each.stdout.close()
        each.stdout = None
    for each in started:
        assert each.communicate(timeout=90)[1] == ""
        assert each.returncode == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--nodes", "0"), "give 1 to 30"),
        (("--nodes", "31"), "give 1 to 30"),
        (("--sample", "--nodes", "67"), "give 1 to 66"),
        (("--max-tokens", "0"), "give 1 or more"),
    ],
)
def test_demo_refuses_what_it_can_not_do(run: Run, flags: tuple[str, ...], words: str) -> None:
    done = run("demo", *flags)
    assert (done.code, done.out) == (2, "")
    assert words in done.err


def test_a_config_file_and_the_environment_serve_all_commands(
    run: Run, ring: StandingRing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(f'endpoint = "{ring.endpoint}"\nfleet = "{ring.name}"\n')
    assert run("status", "--config", file).code == 0
    monkeypatch.setenv("CASCADIA_ENDPOINT", str(ring.endpoint))
    assert json.loads(run("generate", "hi", "--json", "--max-tokens", 1).out)["finish_reason"] == "length"
    file.write_text('endpint = "here"\n')
    done = run("status", "--config", file)
    assert done.code == 2
    assert f"file {file}: unknown key 'endpint'; did you mean 'endpoint'?" in done.err


def test_status_says_whom_a_head_tells_of_its_answers_and_what_a_standby_knows() -> None:
    told = {"node": "ab" * 8, "followed": False, "answers": 3, "unread_bytes": 9}
    nodes = [{"node": "ab" * 8, "host": "pc1"}]
    head = {"nodes": nodes, "journal": {"told": [told, told | {"followed": True}], "from": None}}
    assert journal_words(head) == [
        f"standby pc1/abababab has been told {words} of the 3 answers of this head"
        for words in ("not yet all", "all")
    ]
    standby = {"journal": {"told": [], "from": "cd" * 8, "answers": 4, "complete": 1, "ids": 300}}
    assert journal_words(standby) == ["this standby has been told 4 answers, 1 complete"]
    assert journal_words({}) == []
