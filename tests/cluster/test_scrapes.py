"""Real nodes, scraped while they answer, and what strangers to HTTP can do at that port: nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import orjson
from cluster.conftest import Shards
from fixtures.reference import load_case
from prometheus_client.parser import text_string_to_metric_families

from cascadia_p2p.client import Client
from cascadia_p2p.local import LocalRing
from cascadia_p2p.types import Endpoint

CASE = load_case("tiny12")
PROMPT = CASE.prompts[2]
TOKENS = 6
START_S = 180.0


def scrape(at: str) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{at}/metrics", timeout=60.0) as reply:
        assert reply.status == 200
        text = reply.read().decode()
    return {
        sample.name + "".join(f"|{value}" for key, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def garbage(at: str) -> None:
    host, port = at.split(":")
    for bytes_ in (b"\xff" * 64, b"\0" * 100_000, os.urandom(50_000), b"GET " + b"/" * 100_000, b""):
        with socket.create_connection((host, int(port)), timeout=60.0) as made:
            try:
                made.sendall(bytes_)
                made.shutdown(socket.SHUT_WR)
                while made.recv(4096):
                    pass
            except ConnectionError:
                continue


def test_two_nodes_are_scraped_and_noise_leaves_the_ring_unharmed(shards: Shards, tmp_path: Path) -> None:
    model = shards(CASE, (5, 7))
    flags = ("--no-mdns", "--threads", "1", "--slots", "2", "--context", "256", "--metrics-port", "0")
    # A node that a stalled machine keeps silent for a while is not lost: losses are counted here.
    limits = tmp_path / "limits.toml"
    limits.write_text("[limits]\ngone_s = 60.0\nstuck_s = 60.0\n")
    with LocalRing(model, tmp_path, flags=(*flags, "--config", str(limits))) as ring:
        for _ in range(2):
            ring.start_node()
        ports: dict[int, str] = {}
        said: dict[str, dict[str, object]] = {}
        for event in ring.events(START_S):
            said[event.event] = event.fields
            if event.event == "metrics_served":
                ports[event.node] = str(event.fields["endpoint"])
            whole = said.get("ring_open", {}).get("members") == 2
            # In whatever order their lines are read.
            if whole and "clients_served" in said and len(ports) == 2:
                break
        assert len(ports) == 2, ring.tail()
        endpoint = Endpoint.parse(str(said["clients_served"]["endpoint"]))

        with Client(endpoint, timeout_s=60.0) as client:
            first = client.generate(PROMPT.ids, max_tokens=TOKENS)
            assert list(first.token_ids) == list(PROMPT.generated[:TOKENS])
            counts = [scrape(at) for at in ports.values()]
            head = next(each for each in counts if each["cascadia_head"])
            member = next(each for each in counts if not each["cascadia_head"])
            assert head["cascadia_generated_tokens_total"] == TOKENS
            assert head["cascadia_prompt_tokens_total"] == len(PROMPT.ids)
            assert head["cascadia_time_to_first_token_seconds_count"] == 1
            assert head["cascadia_inter_token_seconds_count"] == TOKENS - 1
            assert head["cascadia_requests_finished_total"] == 1
            assert head["cascadia_client_connections"] == 1
            assert head["cascadia_round_seconds_count"] >= TOKENS
            assert "cascadia_generated_tokens_total" not in member
            for each in (head, member):
                assert each["cascadia_node_state|open"] == 1
                assert each["cascadia_ring_stages"] == 2
                assert each["cascadia_epochs_opened_total"] == 1
                assert each["cascadia_recoveries_total"] == 0
                assert each["cascadia_rows_total"] == len(PROMPT.ids) + TOKENS - 1
                assert each["cascadia_data_thread_seconds_total|compute"] > 0
                assert each["cascadia_stage_seconds_total|attention"] > 0
                assert each["process_resident_memory_bytes"] > 1 << 20

            for at in ports.values():
                garbage(at)
            again = client.generate(PROMPT.ids, max_tokens=TOKENS)
            assert again.token_ids == first.token_ids
        time.sleep(1.0)
        later = [scrape(at) for at in ports.values()]
        assert [each["cascadia_epochs_lost_total"] for each in later] == [0, 0]
        assert sum(each.get("cascadia_generated_tokens_total", 0) for each in later) == 2 * TOKENS
        assert ring.ended() is None

        # Every line behind the first names the node that it comes from.
        for node in ring.nodes:
            lines = [orjson.loads(line) for line in node.lines]
            assert len({line["node"] for line in lines if "node" in line}) == 1
            assert all("node" in line for line in lines if line["event"] in ("ring_open", "ring_joined"))


def test_a_taken_metrics_port_ends_the_node_with_the_flag_s_name(shards: Shards, tmp_path: Path) -> None:
    model = shards(CASE, (5, 7))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = [sys.executable, "-m", "cascadia_p2p", "join", "--model", str(model), "--bind", "127.0.0.1"]
        command += ["--port", "0", "--client-port", "0", "--no-mdns", "--state-dir", str(tmp_path)]
        command += ["--metrics-port", str(taken.getsockname()[1])]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 3
    assert "--metrics-port" in ended.stderr
    assert "is in use" in ended.stderr
