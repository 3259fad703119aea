"""A closed fleet on hosts of its own: strangers at every port, and what a listener on the cable sees."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cluster.test_node_lab import PATIENCE_S, Host
from fixtures.reference import load_case

from cascadia_p2p.keys.files import KeyFile, read_key
from cascadia_p2p.keys.places import FLEET_KEY
from cascadia_p2p.transport.curve import raw_key
from cascadia_p2p.wire.frames import MAGIC

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]

CASE = load_case("tiny12")
PROMPT = CASE.prompts[1]
FLEET = "closed-lab"
CONTROL, DATA, CLIENTS = 7600, 7601, 7700
HEAD, TAIL, CLIENT, STRANGER = range(4)
ZMTP_GREETING = 64

PORTS = """
found = set()
for name in ("tcp", "tcp6"):
    with open(f"/proc/net/{name}") as table:
        for words in map(str.split, list(table)[1:]):
            host, _, port = words[1].partition(":")
            if words[3] == "0A" and host not in ("0100007F", 24 * "0" + "01000000"):
                found.add(int(port, 16))
print(*sorted(found))
"""

KNOCK = """
import json, socket, sys, time
def greeting(mechanism):
    return b"\\xff" + bytes(8) + b"\\x7f\\x03\\x01" + mechanism.ljust(20, b"\\0") + bytes(32)
hello = b"\\x04\\xc8\\x05HELLO\\x01" + bytes(193)
said = {
    "nothing": b"",
    "a web request": b"GET / HTTP/1.1\\r\\nHost: head\\r\\n\\r\\n",
    "noise": bytes(range(1, 256)) * 4,
    "a greeting in the clear": greeting(b"NULL") + b"\\x04\\x19\\x05READY\\x0bSocket-Type\\0\\0\\0\\x03REQ",
    "a false hello": greeting(b"CURVE") + hello,
}
doors = {}
for port in map(int, sys.argv[2].split(",")):
    for name, words in said.items():
        door = doors[f"{port} {name}"] = socket.create_connection((sys.argv[1], port), 60)
        try:
            door.sendall(words)
        except OSError:
            pass
time.sleep(1)
heard = {}
for name, door in doors.items():
    door.setblocking(False)
    got = b""
    try:
        while part := door.recv(4096):
            got += part
    except OSError:
        pass
    heard[name] = got.hex()
    door.close()
print(json.dumps(heard))
"""

TRY = """
import json, sys, time, zmq
host, ports, server = sys.argv[1], map(int, sys.argv[2].split(",")), sys.argv[3].encode()
hello = json.dumps({"type": "status_query"}).encode()
prompt = json.dumps({"prompt": "STRANGERS-PROMPT"}).encode()
with zmq.Context() as context:
    made = {}
    for port in ports:
        for kind, parts in (("REQ", [prompt]), ("DEALER", [hello]), ("PUSH", [b"FRAME", bytes(100)])):
            for key in ("none", "own server", "fleet server"):
                each = context.socket(getattr(zmq, kind))
                each.linger = 0
                if key != "none":
                    public, secret = zmq.curve_keypair()
                    each.curve_publickey, each.curve_secretkey = public, secret
                    each.curve_serverkey = server if key == "fleet server" else public
                each.immediate = 1
                each.connect(f"tcp://{host}:{port}")
                made[port, kind, key] = each, parts
    time.sleep(1)
    got = []
    for name, (each, parts) in made.items():
        if each.poll(0, zmq.POLLOUT):
            each.send_multipart(parts)
            got.append([*name, name[1] != "PUSH" and each.poll(500) and repr(each.recv_multipart())])
    for each, _ in made.values():
        each.close()
print(json.dumps(got))
"""

ASK = """
import sys, time
from cascadia_p2p.client import Client
with Client(sys.argv[1], key=sys.argv[2], timeout_s=60) as client:
    for _ in range(2000):
        time.sleep(0.05)
        try:
            client.generate([1, 2, 3], max_tokens=2)
        except Exception as error:
            print("over", time.time(), type(error).__name__, error, flush=True)
            try:
                client.generate([1, 2, 3], max_tokens=2)
            except Exception as again:
                print("again", type(again).__name__, again, flush=True)
            break
        print("answered", time.time(), flush=True)
"""


@dataclass
class World:
    """The lab, what was made for it, and everything that its programs said."""

    lab: Any
    root: Path
    key: KeyFile
    said: list[str]

    def run(self, host: int, *arguments: str | Path, code: int = 0, home: str = "user") -> str:
        """A command of ours on a host, with a configuration directory of that host's own."""
        command = self.lab.command(host, [sys.executable, "-m", "cascadia_p2p", *arguments])
        env = self.env(f"{home}-{host}")
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env)
        self.said += [done.stdout, done.stderr]
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    def env(self, name: str) -> dict[str, str]:
        paths = f"{Path(__file__).parents[2]}"
        return os.environ | {"XDG_CONFIG_HOME": str(self.root / name), "PYTHONPATH": paths}

    def join(self, host: int, model: Path, *flags: str) -> Host:
        arguments = ["join", "--model", str(model), "--fleet", FLEET, "--threads", "1", *flags]
        arguments += ["--state-dir", str(self.root / f"state-{host}"), "--log-format", "json"]
        command = [sys.executable, "-m", "cascadia_p2p", *arguments]
        home = f"XDG_CONFIG_HOME={self.root / f'user-{host}'}"
        return Host(self.lab.start(host, ["sh", "-c", 'exec env "$@" 2>&1', "sh", home, *command]))


@pytest.fixture(scope="module")
def world(netlab: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Shards that the command exports, with the key that it makes; one copied to each of two hosts."""
    root = tmp_path_factory.mktemp("closed")
    CASE.build(root / "checkpoint")
    exact = [f"--{part}=f32" for part in ("experts", "projections", "head", "embedding")]
    with netlab.Lab(4, f"k{os.getpid()}") as lab:
        environment = os.environ | {"XDG_CONFIG_HOME": str(root / f"user-{TAIL}")}
        command = ["export", root / "checkpoint", root / "out", "--split", "6,6", "--fleet", FLEET, *exact]
        done = subprocess.run(
            [sys.executable, "-m", "cascadia_p2p", *map(str, command)],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        )
        made = World(lab, root, read_key(root / "out" / FLEET_KEY), [done.stdout, done.stderr])
        for host in (HEAD, TAIL):
            shutil.copytree(root / "out" / f"shard-0{host}", root / f"pc-{host}")
            assert read_key(root / f"pc-{host}" / FLEET_KEY).pair == made.key.pair
        yield made


def generate(world: World, host: int, *flags: str | Path, code: int = 0) -> str:
    ids = ",".join(map(str, PROMPT.ids))
    asked = ["generate", "--fleet", FLEET, "--token-ids", ids, "--max-tokens", str(CASE.new_tokens), "--json"]
    return world.run(host, *asked, *flags, code=code)


def test_a_closed_fleet_answers_its_own_and_shows_strangers_nothing(world: World) -> None:
    lab = world.lab
    refused = world.run(STRANGER, "join", "--model", strip_key(world), "--fleet", FLEET, code=2)
    assert "no key" in refused
    assert "--insecure" in refused
    lab.capture(world.root / "cables")
    nodes = [world.join(host, world.root / f"pc-{host}") for host in (HEAD, TAIL)]
    for node in nodes:
        node.wait("ring_open")
    ips = [lab.ip(host) for host in range(4)]

    # The client: issued on one host, told to the fleet by address, used on another.
    alice = world.root / "alice.client.key"
    issued = ["keygen", "--fleet", FLEET, "--client", "alice", "--out", alice, "--no-mdns"]
    assert "told" in world.run(TAIL, *issued, "--peer", f"{ips[HEAD]}:{CONTROL}")
    expected = list(PROMPT.generated)
    answer = json.loads(generate(world, CLIENT, "--key", alice))
    assert answer["token_ids"] == expected
    # The head's own PC needs none; nor does whoever has the fleet's own key need another.
    assert json.loads(generate(world, HEAD))["token_ids"] == expected
    assert json.loads(generate(world, TAIL))["token_ids"] == expected
    assert "takes only clients with a key" in generate(world, CLIENT, code=6)
    status = json.loads(world.run(TAIL, "status", "--fleet", FLEET, "--json"))
    assert status["door"]["closed"]
    assert status["door"]["clients"] == 1
    assert all(node["work"] for node in status["nodes"]), "each node answered whoever has the fleet's key"

    strangers(world, ips, nodes)
    withdraw(world, alice, f"tcp://{ips[HEAD]}:{CLIENTS}")
    # That it would have been seen: the same words in the clear.
    words = f"CONTROL-WORDS {list(PROMPT.ids)}"
    sender = f"import socket; socket.socket(2, 2).sendto({words!r}.encode(), ({ips[HEAD]!r}, 9))"
    lab.run(STRANGER, [sys.executable, "-c", sender])
    # The switch may take it late.
    time.sleep(3.0)
    lab.capture(None)
    look_at(world, (world.root / "cables").read_bytes(), answer["text"])
    no_secret_was_shown(world, nodes)


def strip_key(world: World) -> Path:
    """A shard that somebody copied without its key."""
    path = world.root / "without"
    shutil.copytree(world.root / "out" / "shard-00", path, ignore=shutil.ignore_patterns(FLEET_KEY))
    return path


def strangers(world: World, ips: list[str], nodes: list[Host]) -> None:
    """A host without a key, with another one, and with the fleet's public one, at every port that is open."""
    lab = world.lab
    for host, ports in ((HEAD, [CONTROL, DATA, CLIENTS]), (TAIL, [CONTROL, DATA])):
        assert list(map(int, lab.run(host, [sys.executable, "-c", PORTS]).split())) == ports
        knocked = [sys.executable, "-c", KNOCK, ips[host], ",".join(map(str, ports))]
        for knock, heard in json.loads(lab.run(STRANGER, knocked, timeout=60)).items():
            got = bytes.fromhex(heard)
            # The greeting of ZMTP says how one may prove oneself, and no more.
            assert len(got) <= ZMTP_GREETING, knock
            assert got[12:32] in (b"", b"CURVE".ljust(20, b"\0")), knock
    public = world.key.pair.public.decode()
    for host, ports in ((HEAD, f"{CONTROL},{DATA},{CLIENTS}"), (TAIL, f"{CONTROL},{DATA}")):
        let_in = lab.run(STRANGER, [sys.executable, "-c", TRY, ips[host], ports, public], timeout=60)
        assert json.loads(let_in) == []
    for host, node in zip((HEAD, TAIL), nodes, strict=True):
        deadline = time.monotonic() + PATIENCE_S
        # Who hangs up at once may be gone before its address is read; it knocks again.
        while not (named := [line for line in node.lines if tells(line, ips[STRANGER])]):
            assert time.monotonic() < deadline, node.lines[-5:]
            lab.run(STRANGER, [sys.executable, "-c", TRY, ips[host], str(CONTROL), public], timeout=60)
        assert str(world.root / f"pc-{host}" / FLEET_KEY) in named[0]["message"]
    assert "ring_closed" not in [line["event"] for node in nodes for line in node.lines]


def tells(line: dict[str, Any], address: str) -> bool:
    return line["event"] == "other_key" and address in line["message"]


def withdraw(world: World, alice: Path, endpoint: str) -> None:
    """Take a client's key back while it asks: its session ends within five seconds, and it gets no other."""
    client = world.lab.start(CLIENT, [sys.executable, "-c", ASK, endpoint, alice])
    assert client.stdout is not None
    assert client.stdout.readline().startswith("answered")
    # Nobody is told here: the node on this PC reads the list, and tells the others.
    world.run(TAIL, "keygen", "--fleet", FLEET, "--revoke", "alice", "--no-mdns")
    withdrawn = (
        (world.root / f"user-{TAIL}" / "cascadia-p2p" / "keys" / f"{FLEET}.clients.json").stat().st_mtime
    )
    lines = [line.split(maxsplit=3) for line in client.stdout.read().splitlines()]
    over = next(line for line in lines if line[0] == "over")
    # Five seconds, and what a busy machine takes to see to it.
    assert float(over[1]) - withdrawn < 20.0
    assert lines[-1][:2] == ["again", "NotAdmittedError"]
    assert "does not admit this key" in generate(world, CLIENT, "--key", alice, code=6)


def look_at(world: World, cables: bytes, text: str) -> None:
    """Nothing of the fleet's talk is to be read on the cables, and they were listened to."""
    ids = ",".join(map(str, PROMPT.ids)).encode()
    assert b"CURVE" in cables
    assert cables.count(b"\x07MESSAGE") > 100, "encrypted messages went by"
    assert str(list(PROMPT.ids)).encode() in cables
    assert len(text) > 4
    for plain in (b"token_ids", b"max_tokens", b"finish_reason", b'"type"', b"hello", b"STRANGERS", ids):
        assert plain not in cables
    for plain in (MAGIC, text.encode()):
        assert plain not in cables
    for key in (world.key.pair.secret, read_key(world.root / "alice.client.key").pair.secret):
        assert key not in cables
        assert raw_key(key) not in cables


def no_secret_was_shown(world: World, nodes: list[Host]) -> None:
    """Neither in a log, nor by a command, nor in what others may read of a process."""
    shown = [json.dumps(line) for node in nodes for line in node.lines] + world.said
    for node in nodes:
        for name in ("cmdline", "environ"):
            shown.append(Path(f"/proc/{node.process.pid}/{name}").read_bytes().decode())
    text = "\n".join(shown)
    assert "ring_open" in text
    for path in (world.root / "out" / FLEET_KEY, world.root / "alice.client.key"):
        secret = read_key(path).pair.secret
        assert secret.decode() not in text
        assert raw_key(secret).hex() not in text
        assert json.dumps(secret.decode()) not in text
