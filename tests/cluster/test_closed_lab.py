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

pytestmark = [pytest.mark.lab, pytest.mark.timeout(240)]

CASE = load_case("tiny12")
PROMPT = CASE.prompts[1]
FLEET = "closed-lab"
CONTROL, DATA, CLIENTS = 7600, 7601, 7700
HEAD, TAIL, CLIENT, STRANGER = range(4)

LISTEN = """
import signal, socket, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
tap.bind(("eth0", 0))
with open(sys.argv[1], "wb", 0) as out:
    print("listening", flush=True)
    while True:
        out.write(tap.recv(65536))
"""

SCAN = """
import socket, sys
found = []
for port in range(1, 65536):
    with socket.socket() as probe:
        probe.settimeout(1)
        if not probe.connect_ex((sys.argv[1], port)):
            found.append(port)
print(*found)
"""

TRY = """
import json, sys, tomllib, zmq
host, ports, server = sys.argv[1], map(int, sys.argv[2].split(",")), sys.argv[3].encode()
hello = json.dumps({"type": "status_query"}).encode()
prompt = json.dumps({"prompt": "STRANGERS-PROMPT"}).encode()
got = []
with zmq.Context() as context:
    for port in ports:
        for kind, parts in (("REQ", [prompt]), ("DEALER", [hello]), ("PUSH", [b"FRAME", bytes(100)])):
            for key in ("none", "own server", "fleet server"):
                with context.socket(getattr(zmq, kind)) as made:
                    made.linger = 0
                    if key != "none":
                        public, secret = zmq.curve_keypair()
                        made.curve_publickey, made.curve_secretkey = public, secret
                        made.curve_serverkey = server if key == "fleet server" else public
                    made.immediate = 1
                    made.connect(f"tcp://{host}:{port}")
                    if made.poll(200, zmq.POLLOUT):
                        made.send_multipart(parts)
                        heard = kind != "PUSH" and made.poll(500) and repr(made.recv_multipart())
                        got.append([port, kind, key, heard])
print(json.dumps(got))
"""

ASK = """
import sys, time
from cascadia_p2p.client import Client
with Client(sys.argv[1], key=sys.argv[2], timeout_s=10) as client:
    for _ in range(400):
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
        done = subprocess.run(command, capture_output=True, text=True, timeout=40, env=env)
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


def listen(world: World, host: int) -> tuple[subprocess.Popen[str], Path]:
    """Write everything that passes a host's cable to a file."""
    path = world.root / f"cable-{host}"
    tap = world.lab.start(host, [sys.executable, "-c", LISTEN, path])
    assert tap.stdout.readline().strip() == "listening"
    return tap, path


def generate(world: World, host: int, *flags: str | Path, code: int = 0) -> str:
    ids = ",".join(map(str, PROMPT.ids))
    asked = ["generate", "--fleet", FLEET, "--token-ids", ids, "--max-tokens", str(CASE.new_tokens), "--json"]
    return world.run(host, *asked, *flags, code=code)


def test_a_closed_fleet_answers_its_own_and_shows_strangers_nothing(world: World) -> None:
    lab = world.lab
    refused = world.run(STRANGER, "join", "--model", strip_key(world), "--fleet", FLEET, code=2)
    assert "no key" in refused
    assert "--insecure" in refused
    taps = [listen(world, host) for host in (HEAD, TAIL, CLIENT)]
    nodes = [world.join(host, world.root / f"pc-{host}") for host in (HEAD, TAIL)]
    for node in nodes:
        node.wait("ring_open")
    ips = [lab.ip(host) for host in range(4)]

    # The client: issued on one host, told to the fleet by address, used on another.
    alice = world.root / "alice.client.key"
    issued = ["keygen", "--fleet", FLEET, "--client", "alice", "--out", alice, "--no-mdns"]
    assert "told" in world.run(TAIL, *issued, "--peer", f"{ips[HEAD]}:{CONTROL}")
    expected = list(PROMPT.generated)
    assert json.loads(generate(world, CLIENT, "--key", alice))["token_ids"] == expected
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
    # That the listeners would have seen it: the same words in the clear.
    for host in (HEAD, CLIENT):
        words = f"CONTROL-WORDS {list(PROMPT.ids)}"
        sender = f"import socket; socket.socket(2, 2).sendto({words!r}.encode(), ({ips[host]!r}, 9))"
        lab.run(STRANGER, [sys.executable, "-c", sender])
    time.sleep(0.3)
    for tap, _ in taps:
        tap.terminate()
        tap.wait(10)
    look_at(world, [path.read_bytes() for _, path in taps])
    no_secret_was_shown(world, nodes)


def strip_key(world: World) -> Path:
    """A shard that somebody copied without its key."""
    path = world.root / "without"
    shutil.copytree(world.root / "out" / "shard-00", path, ignore=shutil.ignore_patterns(FLEET_KEY))
    return path


def strangers(world: World, ips: list[str], nodes: list[Host]) -> None:
    """A host without a key, with another one, and with the fleet's public one, at every port that is open."""
    lab = world.lab
    found = lab.run(STRANGER, [sys.executable, "-c", SCAN, ips[HEAD]], timeout=60)
    assert found.split() == [str(CONTROL), str(DATA), str(CLIENTS)]
    public = world.key.pair.public.decode()
    for host, ports in ((HEAD, f"{CONTROL},{DATA},{CLIENTS}"), (TAIL, f"{CONTROL},{DATA}")):
        let_in = lab.run(STRANGER, [sys.executable, "-c", TRY, ips[host], ports, public], timeout=30)
        assert json.loads(let_in) == []
    for host, node in zip((HEAD, TAIL), nodes, strict=True):
        deadline = time.monotonic() + PATIENCE_S
        # Who hangs up at once may be gone before its address is read; it knocks again.
        while not (named := [line for line in node.lines if tells(line, ips[STRANGER])]):
            assert time.monotonic() < deadline, node.lines[-5:]
            lab.run(STRANGER, [sys.executable, "-c", TRY, ips[host], str(CONTROL), public], timeout=30)
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
    assert float(over[1]) - withdrawn < 5.0
    assert lines[-1][:2] == ["again", "NotAdmittedError"]
    assert "does not admit this key" in generate(world, CLIENT, "--key", alice, code=6)


def look_at(world: World, cables: list[bytes]) -> None:
    """Nothing of the fleet's talk is to be read on the cables, and the listeners did listen."""
    ids = ",".join(map(str, PROMPT.ids)).encode()
    for cable in cables:
        assert len(cable) > 10_000
        assert b"CURVE" in cable
        assert b"\x07MESSAGE" in cable, "encrypted messages went by"
        for plain in (b"token_ids", b"max_tokens", ids, b"CP2P", b'"type"', b"hello", b"STRANGERS"):
            assert plain not in cable
        for key in (world.key.pair.secret, read_key(world.root / "alice.client.key").pair.secret):
            assert key not in cable
            assert raw_key(key) not in cable
    for cable in (cables[0], cables[2]):
        assert str(list(PROMPT.ids)).encode() in cable


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
