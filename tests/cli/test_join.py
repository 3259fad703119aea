"""`join` that can not be: each fault is named in one sentence with what to do, and has its exit code."""

from __future__ import annotations

import json
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from cli.conftest import Outcome, Run
from cluster.conftest import Shards
from cluster.standing import standing_ring
from fixtures.reference import load_case

from cascadia_p2p import __version__
from cascadia_p2p.client import Client
from cascadia_p2p.engine.openvino.device import available_devices
from cascadia_p2p.local import free_ports
from cascadia_p2p.wire.frames import PROTOCOL


@pytest.fixture(scope="session")
def model(shards: Shards) -> Path:
    return shards("tiny12", (5, 7))


@pytest.fixture(scope="session")
def whole(shards: Shards) -> Path:
    return shards("tiny12", (12,))


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(model, tmp_path / "model"))


def sentence(outcome: Outcome) -> str:
    """The last line, which is what the user is left with."""
    assert "Traceback" not in outcome.err
    assert outcome.out == ""
    last = outcome.err.strip().splitlines()[-1]
    assert last.startswith("cascadia-p2p: ")
    return last


def test_a_missing_file_is_named(joins: Run, copy: Path) -> None:
    gone = copy / "shard-01" / "layer-007.weights"
    size = gone.stat().st_size
    gone.unlink()
    outcome = joins(copy, "--shard", 1)
    assert outcome.code == 1
    said = sentence(outcome)
    assert f"{gone} is missing, expected {size} bytes" in said
    assert "copy the shard's directory again" in said


def test_with_json_logs_the_last_sentence_is_json_too(joins: Run, copy: Path) -> None:
    (copy / "shard-01" / "layer-007.weights").unlink()
    outcome = joins(copy, "--shard", 1, "--log-format", "json")
    assert outcome.code == 1
    lines = [json.loads(line) for line in outcome.err.splitlines()]
    assert lines[-1]["event"] == "node_failed"
    assert lines[-1]["exit_code"] == 1
    assert "layer-007.weights is missing" in lines[-1]["message"]


def test_a_truncated_file_is_named_with_both_sizes(joins: Run, copy: Path) -> None:
    cut = copy / "shard-00" / "embed.weights"
    size = cut.stat().st_size
    with cut.open("r+b") as file:
        file.truncate(size - 1)
    outcome = joins(copy, "--shard", 0)
    assert outcome.code == 1
    said = sentence(outcome)
    assert f"{cut} is cut short: {size - 1} bytes, expected {size}" in said
    assert "copy the shard's directory again" in said


def test_a_file_of_another_content_is_named_with_both_sums(joins: Run, copy: Path) -> None:
    spoilt = copy / "shard-01" / "layer-011.weights"
    content = bytearray(spoilt.read_bytes())
    content[-1000] ^= 1
    spoilt.write_bytes(content)
    outcome = joins(copy, "--shard", 1)
    assert outcome.code == 1
    said = sentence(outcome)
    assert f"{spoilt} is damaged or of another model: its sha256 is " in said
    assert ", expected " in said
    assert "copy the shard's directory again" in said


def test_a_shard_directory_alone_is_judged_the_same(joins: Run, copy: Path) -> None:
    (copy / "shard-01" / "head.weights").unlink()
    outcome = joins(copy / "shard-01")
    assert outcome.code == 1
    assert f"{copy / 'shard-01' / 'head.weights'} is missing" in sentence(outcome)


def test_damaged_tables_and_tokenizers_are_named(joins: Run, copy: Path) -> None:
    (copy / "shard-00" / "tokenizer.json").write_text("{}")
    outcome = joins(copy, "--shard", 0)
    assert outcome.code == 1
    assert "tokenizer.json is cut short" in sentence(outcome)
    (copy / "shard-00" / "shard.json").write_text("{}")
    outcome = joins(copy, "--shard", 0)
    assert outcome.code == 1
    assert "shard.json" in sentence(outcome)
    (copy / "manifest.json").write_text("{")
    outcome = joins(copy, "--shard", 0)
    assert outcome.code == 1
    assert "manifest.json is no JSON" in sentence(outcome)


def test_no_model_says_how_to_get_one(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    outcome = run("join", "--no-mdns", "--state-dir", tmp_path / "state")
    assert outcome.code == 2
    said = sentence(outcome)
    assert "no model" in said
    assert "--model DIR" in said
    assert "cascadia-p2p export" in said


def test_a_directory_that_is_no_model_is_named(joins: Run, tmp_path: Path) -> None:
    outcome = joins(tmp_path)
    assert outcome.code == 2
    assert f"flag --model: {tmp_path} holds no manifest.json" in sentence(outcome)
    outcome = joins(tmp_path / "absent")
    assert outcome.code == 2
    assert f"{tmp_path / 'absent'}" in sentence(outcome)


@pytest.mark.parametrize("offset", [0, 1])
def test_a_port_in_use_is_named_with_its_flag(joins: Run, model: Path, offset: int) -> None:
    port = free_ports()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port + offset))
        taken.listen()
        outcome = joins(model, "--port", port)
    assert outcome.code == 3
    said = sentence(outcome)
    assert f"port {port + offset} on 127.0.0.1 is in use" in said
    assert "--port" in said


def test_a_client_port_in_use_is_named_with_its_flag(joins: Run, whole: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        outcome = joins(whole, "--client-port", port)
    assert outcome.code == 3
    said = sentence(outcome)
    assert f"port {port} on 127.0.0.1 is in use" in said
    assert "--client-port" in said


def test_an_address_of_another_machine_is_named(joins: Run, model: Path) -> None:
    outcome = joins(model, "--bind", "192.0.2.7")
    assert outcome.code == 2
    said = sentence(outcome)
    assert "--bind 192.0.2.7" in said
    assert "127.0.0.1" in said


def test_an_unknown_device_is_named_with_those_that_there_are(joins: Run, model: Path) -> None:
    for flags in (("--shard", 1), ()):
        outcome = joins(model, "--device", "NPU.7", *flags)
        assert outcome.code == 2
        said = sentence(outcome)
        assert "--device NPU.7" in said
        assert "CPU" in said
        assert outcome.err.count("can not be loaded") <= 1


def test_more_memory_than_there_is_is_refused_before_loading(
    joins: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cascadia_p2p.engine.load.available_memory", lambda: 300 * 2**20)
    outcome = joins(model, "--shard", 1, "--slots", 4096, "--context", 4096)
    assert outcome.code == 4
    said = sentence(outcome)
    assert "GiB of memory and 300 MiB are free" in said
    assert "4096 slots of 4096 positions" in said
    assert "it would fit with --slots " in said


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--peer", "nowhere"), "flag --peer: 'nowhere' is not an address: expected HOST:PORT"),
        (("--peer", "10.0.0.1:70000"), "port 70000: expected 1 to 65535"),
        (("--peer", "10.0.0.1:7600", "--peer", "http://b:1"), "'http://b:1' is not an address"),
        (("--shard", 5), "--shard 5 is not here: this node has shard 0, 1 of 0 to 1"),
        (("--shard", "one"), "--shard"),
        (("--shard", -1), "--shard"),
        (("--slots", 0), "--slots"),
        (("--context", "many"), "--context"),
        (("--cache", "f16"), "--cache"),
        (("--precision", "sloppy"), "--precision"),
        (("--fleet", "two words"), "'two words' is not a fleet's name"),
        (("--port", 7000, "--client-port", 7001), "7001"),
        (("--bind", "0.0.0.0"), "give one of its addresses"),
        (("--config", "/nowhere/cascadia.toml"), "/nowhere/cascadia.toml"),
    ],
)
def test_wrong_flags_are_named(joins: Run, model: Path, flags: tuple[object, ...], words: str) -> None:
    outcome = joins(model, *flags)
    assert outcome.code == 2
    assert words in sentence(outcome)


def test_a_shard_that_is_not_in_this_directory_is_named(joins: Run, model: Path) -> None:
    outcome = joins(model / "shard-01", "--shard", 0)
    assert outcome.code == 2
    assert "--shard 0 is not here: this node has shard 1 of 0 to 1" in sentence(outcome)


def test_an_export_without_its_shards_says_so(joins: Run, copy: Path) -> None:
    shutil.rmtree(copy / "shard-00")
    shutil.rmtree(copy / "shard-01")
    outcome = joins(copy)
    assert outcome.code == 2
    assert "copy one of its shard directories to this machine" in sentence(outcome)


def test_a_state_directory_that_can_not_be_written_is_named(joins: Run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    outcome = joins(model, "--state-dir", tmp_path / "file")
    assert outcome.code == 1
    said = sentence(outcome)
    assert f"the state directory {tmp_path / 'file'} can not be used" in said
    assert "--state-dir DIR" in said


# --- other models and versions ------------------------------------------------------------------------------


def test_a_model_that_is_not_the_rings_ends_with_5_and_both_fingerprints(
    joins: Run, shards: Shards, tmp_path: Path, model: Path
) -> None:
    case, other = load_case("tiny12"), shards("tiny12-heads", (5, 7))
    with standing_ring(tmp_path / "ring", model, 2) as ring:
        flags = ("--fleet", ring.name, "--peer", ring.head.control)
        outcome = joins(other, "--shard", 1, *flags)
        assert outcome.code == 5
        said = sentence(outcome)
        for directory in (model, other):
            assert json.loads((directory / "manifest.json").read_text())["fingerprint"][:16] in said
        assert "one ring needs one export" in said
        assert "or use another --fleet" in said
        # Another split of the same model is another ring, too.
        outcome = joins(shards("tiny12", (12,)), *flags)
        assert outcome.code == 5
        assert "split into" in sentence(outcome)
        with Client(ring.endpoint) as client:
            assert (
                client.generate(case.prompts[0].ids, max_tokens=5).token_ids == case.prompts[0].generated[:5]
            )


@pytest.fixture
def ring_of_tomorrow() -> Iterator[str]:
    """A node of an open ring that speaks protocol 99; its address."""
    context, over = zmq.Context(), threading.Event()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    refusal = {"type": "refusal", "protocol": 99, "software": "99.1", "message": "no", "serving": True}

    def serve() -> None:
        while not over.is_set():
            if router.poll(50):
                identity, _ = router.recv_multipart()
                router.send_multipart([identity, json.dumps(refusal | {"later": [1]}).encode()])
        router.close(linger=0)

    thread = threading.Thread(target=serve)
    thread.start()
    yield f"127.0.0.1:{port}"
    over.set()
    thread.join()
    context.term()


def test_rpc_05_a_ring_of_another_protocol_ends_with_5_and_both_versions(
    joins: Run, model: Path, ring_of_tomorrow: str
) -> None:
    outcome = joins(model, "--peer", ring_of_tomorrow)
    assert outcome.code == 5
    said = sentence(outcome)
    assert f"runs cascadia-p2p {__version__} (protocol {PROTOCOL})" in said
    assert f"the node at {ring_of_tomorrow} runs cascadia-p2p 99.1 (protocol 99)" in said
    assert "install the same release on both" in said


def test_a_gpu_that_is_not_there_is_refused_at_once_with_what_it_lacks(run: Run, tmp_path: Path) -> None:
    if any(name.startswith("GPU") for name in available_devices()):
        pytest.skip("this machine has a GPU")
    done = run("join", "--device", "gpu", "--state-dir", tmp_path)
    assert done.code == 2
    assert re.search(r"--device GPU: OpenVINO \S+ sees CPU, not GPU; .+: .+", sentence(done))
    assert not list(tmp_path.iterdir()), "nothing was begun"
