"""A small network of namespaces on one Linux machine, for tests: each host is a namespace on one switch.

    netlab.py [--name lab] up -n 11     make the switch and the hosts
    netlab.py exec HOST -- COMMAND...   run a command in one host
    netlab.py each -- COMMAND...        run it in every host, {i} and {ip} replaced; wait for all
    netlab.py cut HOST [--silent]       pull the cable; --silent drops frames while the link stays up
    netlab.py restore HOST              put it back
    netlab.py multicast HOST on|off     let the switch deliver multicast to that host, or not
    netlab.py status                    hosts, addresses, processes
    netlab.py down                      end what runs inside, and remove all

Needs root and iproute2. The switch is a bridge in a namespace of its own, so the machine's own network is
never touched. Host i has the device eth0 with 10.77.0.(i+1)/24 and fd77::(i+1)/64.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

ROOT = Path(__file__).resolve().parent.parent
MAX_HOSTS = 250


class LabError(Exception):
    """The lab can not do what was asked; `str()` is a sentence."""


def missing() -> str | None:
    """Why a lab can not be made here, or None when it can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("bridge") is None:
        return "iproute2 ('ip' and 'bridge') is not installed"
    probe = f"netlab-probe-{os.getpid()}"
    try:
        _run(["ip", "netns", "add", probe])
    except LabError as error:
        return f"this machine does not allow network namespaces ({error})"
    try:
        _batch(probe, ["link add br0 type bridge", "link add v0 type veth peer name v1"])
    except LabError as error:
        return f"this machine's kernel has no bridge or no veth devices ({error})"
    finally:
        _run(["ip", "netns", "del", probe])
    return None


class Lab:
    """Hosts on one switch; a context manager that removes all at the end.

    Args:
        hosts: how many.
        name: prefix of the namespaces; one that no other lab on the machine uses.
    """

    def __init__(self, hosts: int, name: str = "lab") -> None:
        if not 1 <= hosts <= MAX_HOSTS:
            raise LabError(f"{hosts} hosts: expected 1 to {MAX_HOSTS}")
        self.hosts = hosts
        self.name = name
        self._started: list[subprocess.Popen[str]] = []

    @classmethod
    def existing(cls, name: str) -> Self:
        """The lab that was brought up under this name before."""
        hosts = sum(each.startswith(f"{name}-h") for each in _namespaces())
        if hosts == 0:
            raise LabError(f"there is no lab '{name}': 'netlab.py up' makes one")
        return cls(hosts, name)

    @property
    def switch(self) -> str:
        """The switch's namespace."""
        return f"{self.name}-sw"

    def namespace(self, host: int) -> str:
        """A host's namespace."""
        if not 0 <= host < self.hosts:
            raise LabError(f"host {host} does not exist: there are 0 to {self.hosts - 1}")
        return f"{self.name}-h{host}"

    def ip(self, host: int) -> str:
        """A host's IPv4 address."""
        return f"10.77.0.{host + 1}"

    def ip6(self, host: int) -> str:
        """A host's IPv6 address."""
        return f"fd77::{host + 1:x}"

    def up(self) -> None:
        """Make the namespaces, the switch and the cables."""
        if self.switch in _namespaces():
            raise LabError(f"lab '{self.name}' is up already: 'netlab.py down' removes it")
        try:
            self._build()
        except LabError:
            self.down()
            raise

    def down(self) -> None:
        """End what runs inside the hosts, and remove them; harmless when there is nothing."""
        there = _namespaces()
        ours = [each for each in there if each == self.switch or each.startswith(f"{self.name}-h")]
        for namespace in ours:
            _kill_inside(namespace)
        for process in self._started:
            process.wait(timeout=10)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        self._started.clear()
        for namespace in ours:
            _run(["ip", "netns", "del", namespace])

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def command(self, host: int, command: Sequence[str | Path]) -> list[str]:
        """The command line that runs a command in a host; signals reach the command itself."""
        return ["ip", "netns", "exec", self.namespace(host), *map(str, command)]

    def run(self, host: int, command: Sequence[str | Path], timeout: float = 10.0) -> str:
        """Run a command in a host and return what it prints.

        Raises:
            LabError: it fails or takes longer than `timeout` seconds.
        """
        return _run(self.command(host, command), timeout=timeout)

    def start(
        self, host: int, command: Sequence[str | Path], stderr: IO[str] | int | None = None
    ) -> subprocess.Popen[str]:
        """Start a command in a host with its output in a pipe; `down` ends it."""
        process = subprocess.Popen(
            self.command(host, command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self._started.append(process)
        return process

    def cascadia(
        self, host: int, *arguments: str, stderr: IO[str] | int | None = None
    ) -> subprocess.Popen[str]:
        """Start `cascadia-p2p ARGUMENTS` in a host, as in `lab.cascadia(0, "join", "--model", "OUT")`."""
        return self.start(host, [sys.executable, "-m", "cascadia_p2p", *arguments], stderr)

    def configure(self, host: int, *lines: str) -> None:
        """Run lines of `ip` in a host, as in `link add docker0 type bridge`."""
        _batch(self.namespace(host), lines)

    def cut(self, host: int, *, silent: bool = False) -> None:
        """Pull a host's cable; `silent` drops its frames while the link stays up, as a broken switch does."""
        self.namespace(host)
        if silent:
            _run(["bridge", "-n", self.switch, "link", "set", "dev", f"v{host}", "state", "0"])
        else:
            _batch(self.switch, [f"link set v{host} down"])

    def restore(self, host: int) -> None:
        """Undo `cut`."""
        self.namespace(host)
        _batch(self.switch, [f"link set v{host} up"])
        _run(["bridge", "-n", self.switch, "link", "set", "dev", f"v{host}", "state", "3"])

    def multicast(self, host: int, allowed: bool) -> None:
        """Whether the switch delivers multicast to a host; off is what Wi-Fi isolation does."""
        self.namespace(host)
        value = "on" if allowed else "off"
        _run(["bridge", "-n", self.switch, "link", "set", "dev", f"v{host}", "mcast_flood", value])

    def status(self) -> str:
        """One line a host: addresses and processes."""
        lines = []
        for host in range(self.hosts):
            namespace = self.namespace(host)
            addresses = " ".join(_run(["ip", "-n", namespace, "-br", "addr", "show", "dev", "eth0"]).split())
            lines.append(f"{host:3} {namespace} {addresses} processes: {_pids(namespace) or 'none'}")
        return "\n".join(lines)

    def _build(self) -> None:
        _run(["ip", "netns", "add", self.switch])
        for host in range(self.hosts):
            _run(["ip", "netns", "add", self.namespace(host)])
        cables = [
            line
            for host in range(self.hosts)
            for line in (
                f"link add v{host} type veth peer name eth0 netns {self.namespace(host)}",
                f"link set v{host} master br0",
                f"link set v{host} up",
            )
        ]
        _batch(
            self.switch,
            ["link add br0 type bridge forward_delay 0 mcast_snooping 0", *cables, "link set br0 up"],
        )
        for host in range(self.hosts):
            self.configure(
                host,
                "link set lo up",
                # No automatic link-local address: its duplicate check makes the link useless for seconds.
                "link set dev eth0 addrgenmode none",
                "link set eth0 up",
                f"addr add {self.ip(host)}/24 brd + dev eth0",
                f"addr add {self.ip6(host)}/64 dev eth0 nodad",
            )


def _run(command: Sequence[str], *, timeout: float = 10.0, text: str | None = None) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, input=text)
    except subprocess.TimeoutExpired as error:
        raise LabError(f"'{' '.join(command)}' took longer than {timeout:g} s") from error
    if done.returncode:
        reason = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        raise LabError(f"'{' '.join(command)}': {reason}")
    return done.stdout


def _batch(namespace: str, lines: Iterable[str]) -> None:
    _run(["ip", "-n", namespace, "-batch", "-"], text="\n".join(lines) + "\n")


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _run(["ip", "netns", "list"]).splitlines() if line.strip()]


def _pids(namespace: str) -> list[int]:
    return [int(pid) for pid in _run(["ip", "netns", "pids", namespace]).split()]


def _kill_inside(namespace: str) -> None:
    deadline = time.monotonic() + 5
    while (pids := [pid for pid in _pids(namespace) if pid != os.getpid()]) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)


def _each(lab: Lab, command: Sequence[str]) -> int:
    processes = [
        subprocess.Popen(
            lab.command(
                host, [part.replace("{i}", str(host)).replace("{ip}", lab.ip(host)) for part in command]
            )
        )
        for host in range(lab.hosts)
    ]
    return max(abs(process.wait()) for process in processes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", default="lab", help="prefix of the namespaces (default: lab)")
    commands = parser.add_subparsers(dest="action", required=True)
    commands.add_parser("up").add_argument("-n", "--hosts", type=int, default=11)
    commands.add_parser("down")
    commands.add_parser("status")
    commands.add_parser("each").add_argument("command", nargs=argparse.REMAINDER)
    for action in ("exec", "cut", "restore", "multicast"):
        command = commands.add_parser(action)
        command.add_argument("host", type=int)
        if action == "exec":
            command.add_argument("command", nargs=argparse.REMAINDER)
        elif action == "cut":
            command.add_argument("--silent", action="store_true")
        elif action == "multicast":
            command.add_argument("switch", choices=["on", "off"])
    return parser


def _act(arguments: argparse.Namespace) -> int:
    if arguments.action == "up":
        lab = Lab(arguments.hosts, arguments.name)
        lab.up()
        print(lab.status())
        return 0
    lab = Lab.existing(arguments.name)
    command = [part for index, part in enumerate(getattr(arguments, "command", [])) if index or part != "--"]
    match arguments.action:
        case "down":
            lab.down()
        case "status":
            print(lab.status())
        case "exec":
            line = lab.command(arguments.host, command)
            os.execvp(line[0], line)
        case "each":
            return _each(lab, command)
        case "cut":
            lab.cut(arguments.host, silent=arguments.silent)
        case "restore":
            lab.restore(arguments.host)
        case "multicast":
            lab.multicast(arguments.host, arguments.switch == "on")
    return 0


def main() -> int:
    """Run one command; the exit code is 1 for a failure."""
    arguments = _parser().parse_args()
    reason = missing()
    if reason is not None:
        print(f"netlab: {reason}", file=sys.stderr)
        return 1
    try:
        return _act(arguments)
    except LabError as error:
        print(f"netlab: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
