"""The lab's own command line, and that its cables and switch do what tests rely on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
from speakers import ROOT

pytestmark = pytest.mark.lab
NAME = f"c{os.getpid()}"


def netlab_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "netlab.py"), "--name", NAME, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=20)


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
