"""The lab's own command line, and that its cables and switch do what tests rely on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from speakers import ROOT

pytestmark = pytest.mark.lab
NAME = f"c{os.getpid()}"


def netlab_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "netlab.py"), "--name", NAME, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@pytest.fixture
def lab(netlab: ModuleType) -> Iterator[None]:
    assert netlab_command("up", "-n", "2").returncode == 0
    yield
    netlab_command("down")


def test_command_line_from_up_to_down(lab: None) -> None:
    assert "is up already" in netlab_command("up", "-n", "2").stderr
    assert (
        netlab_command("exec", "1", "--", "ip", "-br", "addr", "show", "eth0").stdout.split()[2]
        == "10.77.0.2/24"
    )
    assert sorted(netlab_command("each", "--", "echo", "{i}", "{ip}").stdout.splitlines()) == [
        "0 10.77.0.1",
        "1 10.77.0.2",
    ]
    assert "host 7 does not exist: there are 0 to 1" in netlab_command("cut", "7").stderr
    assert netlab_command("status").stdout.count("processes: none") == 2
    assert netlab_command("down").returncode == 0
    gone = netlab_command("status")
    assert gone.returncode == 1
    assert f"there is no lab '{NAME}'" in gone.stderr


def test_cut_takes_the_carrier_and_silent_cut_keeps_it(lab: None) -> None:
    def carrier() -> str:
        return netlab_command("exec", "0", "cat", "/sys/class/net/eth0/carrier").stdout.strip()

    assert carrier() == "1"
    netlab_command("cut", "0")
    assert carrier() == "0"
    netlab_command("heal", "0")
    assert carrier() == "1"
    netlab_command("cut", "0", "--silent")
    assert carrier() == "1"


def test_multicast_and_silent_cut_drop_what_they_say(netlab: ModuleType) -> None:
    hear = (
        "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('', 9999));"
        "group, own = map(socket.inet_aton, ('239.1.1.1', '10.77.0.2'));"
        "s.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group + own);"
        "print('ready', flush=True)\n"
        "while True: print(s.recv(99).decode(), flush=True)"
    )
    say = (
        "import socket, sys; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM);"
        "s.setsockopt(0, socket.IP_MULTICAST_IF, socket.inet_aton('10.77.0.1'));"
        "s.sendto(sys.argv[2].encode(), (sys.argv[1], 9999))"
    )
    with netlab.Lab(2, NAME) as lab:
        hearer = lab.start(1, [sys.executable, "-c", hear])

        def send(to: str, word: str) -> None:
            lab.run(0, [sys.executable, "-c", say, to, word])

        assert hearer.stdout.readline() == "ready\n"
        send("239.1.1.1", "many-1")
        lab.multicast(1, False)
        send("239.1.1.1", "many-2")
        send("10.77.0.2", "one-3")
        lab.multicast(1, True)
        send("239.1.1.1", "many-4")
        lab.cut(1, silent=True)
        send("10.77.0.2", "one-5")
        lab.heal(1)
        send("10.77.0.2", "one-6")
        assert [hearer.stdout.readline().strip() for _ in range(4)] == ["many-1", "one-3", "many-4", "one-6"]


COUNT = """
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
SO_RCVBUFFORCE = 33
s.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 8 << 20)
s.bind(('', 9999))
print('ready', flush=True)
heard = 0
while (word := s.recv(2000)) != b'end':
    heard += 1
print(heard, flush=True)
"""

SEND = """
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
to = (sys.argv[1], 9999)
s.sendto(b'first', to)
for _ in range(int(sys.argv[2])):
    s.sendto(bytes(1000), to)
"""


def heard(lab: Any, number: int) -> int:
    """How many of so many datagrams from host 0 reach host 1."""
    counter = lab.start(1, [sys.executable, "-c", COUNT])
    assert counter.stdout.readline() == "ready\n"
    lab.run(0, [sys.executable, "-c", SEND, lab.ip(1), str(number)])
    lab.heal()
    end = f"import socket; socket.socket(2, 2).sendto(b'end', ({lab.ip(1)!r}, 9999))"
    lab.run(0, [sys.executable, "-c", end])
    return int(counter.stdout.readline()) - 1


def test_switch_loses_a_share_of_frames_on_the_ways_that_are_named(netlab: ModuleType) -> None:
    with netlab.Lab(3, NAME) as lab:
        # Only so many wait for the answer to the first ARP request.
        assert heard(lab, 1) == 1
        assert heard(lab, 400) == 400
        lab.lose(30)
        some = heard(lab, 1000)
        # Binomial: 700 with a deviation of 15.
        assert 600 < some < 800
        lab.lose(30, 1, direction="out")
        lab.cut(0, silent=True, direction="in", toward=2)
        lab.cut(1, silent=True, toward=2)
        assert heard(lab, 100) == 100
        with pytest.raises(netlab.LabError, match="101 percent: expected 0 to 100"):
            lab.lose(101)


def test_delay_and_throttle_hold_frames_back_and_a_capture_shows_them(
    netlab: ModuleType, tmp_path: Path
) -> None:
    with netlab.Lab(2, NAME) as lab:
        heard(lab, 1)
        lab.capture(tmp_path / "pcap")
        lab.delay(150)
        echo = (
            "import socket; s = socket.socket(2, 2); s.bind(('', 9998)); print('ready', flush=True)\n"
            "data, who = s.recvfrom(99); s.sendto(data, who)"
        )
        answering = lab.start(1, [sys.executable, "-c", echo])
        assert answering.stdout.readline() == "ready\n"
        ask = (
            "import socket, time; s = socket.socket(2, 2); at = time.monotonic();"
            f"s.sendto(b'CAPTURED-WORDS', ({lab.ip(1)!r}, 9998)); s.recv(99); print(time.monotonic() - at)"
        )
        assert float(lab.run(0, [sys.executable, "-c", ask])) >= 0.3
        lab.heal()
        lab.throttle(0.1, 1)
        # 300 frames of 1 kB are 25 s on such a cable, whose queue takes half a second of them.
        assert heard(lab, 300) < 150
        lab.capture(None)
        assert lab.counts()["late"] > 100
        assert (tmp_path / "pcap").read_bytes().count(b"CAPTURED-WORDS") == 2


def test_cuts_of_the_command_line_are_undone_by_heal(lab: None, netlab: ModuleType) -> None:
    here = netlab.Lab.existing(NAME)
    reach = f"import socket; socket.create_connection(({here.ip(1)!r}, 9), 0.5)"
    refused = "ConnectionRefusedError"

    def reaches() -> bool:
        # Behind a cut, addresses are asked for once a second only.
        return refused in netlab_command("exec", "0", sys.executable, "-c", reach).stderr

    assert netlab_command("cut", "1", "--direction", "in", "--toward", "0").returncode == 0
    assert not reaches()
    assert netlab_command("flap", "1", "--each", "0.1", "--seconds", "0.3").returncode == 0
    assert any(reaches() for _ in range(40))
    for direction in ("in", "out"):
        here.cut(1, direction=direction)
        assert not reaches()
        here.heal(1)
    assert any(reaches() for _ in range(40))
    assert "expected 0 to 100" in netlab_command("lose", "900").stderr


def test_who_is_not_root_or_lacks_a_compiler_is_told(netlab: ModuleType, monkeypatch: Any) -> None:
    monkeypatch.setattr(netlab.os, "geteuid", lambda: 1000)
    assert netlab.missing() == "network namespaces need root"
    monkeypatch.undo()
    found = netlab.shutil.which
    monkeypatch.setattr(netlab.shutil, "which", lambda name: None if name in ("cc", "gcc") else found(name))
    assert "no C compiler" in netlab.missing()
