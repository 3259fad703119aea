"""The text that scrapers get, its meters, and the server that hands it out."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cascadia_p2p.config import load_config
from cascadia_p2p.errors import ErrorCode, PortError, UsageError
from cascadia_p2p.node import scrapes
from cascadia_p2p.node.meters import BETWEEN_TOKENS_S, HeadCounts, HeadMeter, Histogram, RingMeter
from cascadia_p2p.node.metrics import STATES, HeadMeasures, Measures, MetricsText
from cascadia_p2p.node.refusals import PortCounts
from cascadia_p2p.node.scrapes import MAX_CONNECTIONS, MAX_HEAD_BYTES, MetricsServer
from cascadia_p2p.node.seat import DataCounters
from cascadia_p2p.ring.scheduler import PrefixCounts
from cascadia_p2p.transport.network import listen
from cascadia_p2p.types import Epoch, Instance

ROOT = Path(__file__).resolve().parents[2]
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def measures(head: HeadMeasures | None = None) -> Measures:
    data = DataCounters(
        frames_in=3, frames_out=4, rows=50, busy_ns=1_500_000_000, rounds=2, round_ns=3_000_000
    )
    data.dropped["gap"] = 7
    return Measures(
        info={"node": "n1", "shard": '3"\n'},
        state="open",
        epoch=9,
        stages=2,
        peers=1,
        slots=1,
        misfits=0,
        data=data,
        totals=data.totals(),
        parts={"attention": 0.25},
        messages={"ignored_messages": 5},
        ports={
            "control": PortCounts({"foreign": 3, "key": 1}, overfull=2, others={"surplus": 9}),
            "metrics": PortCounts(others={"surplus": 4}),
        },
        mdns={"malformed": 6},
        lines_left_out=8,
        head=head,
    )


def a_head() -> HeadMeasures:
    meter = HeadMeter()
    meter.first(12, 0.3)
    meter.next(0.0042)
    meter.next(100.0)
    meter.rejected[ErrorCode.OVERLOADED] += 2
    prefixes = PrefixCounts(entries=16, kept=3, hits=4, misses=5, tokens_reused=640)
    return HeadMeasures(HeadCounts(accepted=3), meter, 1, 2, 256, 4, 1000, 0, prefixes)


def parsed(text: bytes) -> Samples:
    families = list(text_string_to_metric_families(text.decode()))
    assert len({family.name for family in families}) == len(families)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_the_text_is_read_back_with_every_value_and_label() -> None:
    found = parsed(MetricsText(lambda: measures(a_head())).text())
    assert found["cascadia_frames_received_total", ()] == 3
    assert found["cascadia_rows_total", ()] == 50
    assert found["cascadia_handshakes_failed_total", (("port", "control"), ("reason", "foreign"))] == 3
    assert found["cascadia_connections_cut_total", (("port", "control"),)] == 2
    surplus = "cascadia_connections_surplus_total"
    assert found[surplus, (("port", "control"),)] == 9
    assert found[surplus, (("port", "metrics"),)] == 4
    assert found["cascadia_scrapes_refused_total", (("reason", "surplus"),)] == 4
    assert found["cascadia_mdns_ignored_total", (("reason", "malformed"),)] == 6
    assert found["cascadia_log_lines_left_out_total", ()] == 8
    assert found["cascadia_segments_failed_total", (("reason", "position"),)] == 0
    assert found["cascadia_frames_dropped_total", (("reason", "gap"),)] == 7
    assert found["cascadia_data_thread_seconds_total", (("activity", "compute"),)] == 1.5
    assert found["cascadia_stage_seconds_total", (("part", "attention"),)] == 0.25
    assert found["cascadia_round_seconds_count", ()] == 2
    assert found["cascadia_round_seconds_sum", ()] == pytest.approx(0.003)
    assert found["cascadia_node_info", (("node", "n1"), ("shard", '3"\n'))] == 1
    states = {state: found["cascadia_node_state", (("state", state),)] for state in STATES}
    assert [state for state, on in states.items() if on] == ["open"]
    assert found["cascadia_control_messages_dropped_total", (("reason", "ignored"),)] == 5
    assert found["cascadia_prompt_tokens_total", ()] == 12
    assert found["cascadia_generated_tokens_total", ()] == 3
    assert found["cascadia_requests_rejected_total", (("reason", "overloaded"),)] == 2
    assert found["cascadia_requests_failed_total", (("reason", "internal"),)] == 0
    assert found["cascadia_prefix_tokens_reused_total", ()] == 640
    assert found["cascadia_time_to_first_token_seconds_bucket", (("le", "0.25"),)] == 0
    assert found["cascadia_time_to_first_token_seconds_bucket", (("le", "0.5"),)] == 1
    assert found["cascadia_inter_token_seconds_bucket", (("le", "0.005"),)] == 1
    assert found["cascadia_inter_token_seconds_bucket", (("le", "30.0"),)] == 1
    assert found["cascadia_inter_token_seconds_bucket", (("le", "+Inf"),)] == 2
    assert found["cascadia_inter_token_seconds_sum", ()] == pytest.approx(100.0042)
    assert found["process_resident_memory_bytes", ()] > 1 << 20


def test_only_the_head_tells_of_requests() -> None:
    names = {name for name, _ in parsed(MetricsText(measures).text())}
    assert "cascadia_frames_sent_total" in names
    assert not [name for name in names if name.startswith(("cascadia_requests", "cascadia_prefix"))]


def test_names_follow_the_conventions_and_each_has_help_and_type() -> None:
    for family in text_string_to_metric_families(MetricsText(lambda: measures(a_head())).text().decode()):
        assert re.fullmatch(r"(cascadia|process)_[a-z_]+", family.name), family.name
        assert family.documentation.endswith("."), family.name
        assert family.type in ("counter", "gauge", "histogram", "summary"), family.name
        assert not family.name.endswith(("_ms", "_ns", "_mb", "_count")), family.name
        if family.type == "counter":
            assert all(sample.name.endswith("_total") for sample in family.samples), family.name
        for sample in family.samples:
            assert set(sample.labels) <= {
                "reason",
                "part",
                "activity",
                "state",
                "result",
                "le",
                "port",
                "node",
                "shard",
            }


def test_the_docs_list_every_name_and_no_other() -> None:
    told: set[str] = set()
    for family in text_string_to_metric_families(MetricsText(lambda: measures(a_head())).text().decode()):
        single = family.type in ("gauge", "counter")
        told |= {sample.name for sample in family.samples} if single else {family.name}
    listed = re.findall(
        r"^\| (`.*?`) \|", (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert {name for cell in listed for name in re.findall(r"`([a-z_]+)`", cell)} == told


def test_every_state_that_status_knows_has_its_sample() -> None:
    from cascadia_p2p.ring import snapshot

    words = set(
        re.findall(r'"([a-z]+)"', re.split(r"\ndef ", re.split(r"def state_of", _source(snapshot))[1])[0])
    )
    assert words == set(STATES)


def _source(module: object) -> str:
    import inspect

    return inspect.getsource(module)  # type: ignore[arg-type]


def test_a_text_is_made_at_most_once_a_second() -> None:
    made, now = [], [100.0]

    def measure() -> Measures:
        made.append(now[0])
        return measures()

    text = MetricsText(measure, lambda: now[0])
    for now[0] in (100.0, 100.5, 100.99, 101.0, 101.5):
        assert text.text()
    assert made == [100.0, 101.0]


def test_a_bound_belongs_to_its_bucket() -> None:
    histogram = Histogram(BETWEEN_TOKENS_S)
    for value in (0.0, 0.001, 0.0010001, 30.0, 31.0):
        histogram.observe(value)
    buckets = dict(histogram.buckets())
    assert (buckets["0.001"], buckets["0.0025"], buckets["30.0"], buckets["+Inf"]) == (2, 3, 4, 5)


def test_totals_of_a_data_thread_go_on_over_epochs() -> None:
    counters = DataCounters()
    for _ in range(3):
        counters.enter(Epoch(1, Instance("a")))
        counters.frames_in += 2
        counters.rows += 10
        counters.rounds, counters.round_ns = 1, 500
        counters.enter(None)
        assert counters.rows == 0
    totals = counters.totals()
    assert (totals.frames_in, totals.rows, totals.rounds, totals.round_ns) == (6, 30, 3, 1500)


def test_a_recovery_is_an_opening_behind_a_loss() -> None:
    ring, first, second = RingMeter(), Epoch(1, Instance("a")), Epoch(3, Instance("a"))
    ring.open(first, 1.0)
    assert (ring.opened, ring.recovered) == (1, 0)
    ring.close(first, 10.0)
    # An epoch that never opened is neither lost nor a recovery.
    ring.close(Epoch(2, Instance("a")), 11.0)
    ring.open(second, 12.5)
    assert (ring.opened, ring.lost, ring.recovered, ring.outage_s) == (2, 1, 1, 2.5)


# --- the server ---------------------------------------------------------------------------------------------


@asynccontextmanager
async def serving(text: bytes = b"a 1\n") -> AsyncIterator[int]:
    listener = listen("127.0.0.1", 0, "--metrics-port", "--metrics-bind")
    server = MetricsServer(listener, lambda: text)
    await server.start()
    try:
        yield server.endpoint.port
    finally:
        await server.close()


async def said(port: int, request: bytes, *, end: bool = False) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        if end:
            writer.write_eof()
        return await asyncio.wait_for(reader.read(), 20.0)
    except ConnectionError:
        return b""
    finally:
        writer.close()


REQUESTS = [
    (b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n", b"200 OK"),
    (b"GET /metrics?a=b HTTP/1.0\r\n\r\n", b"200 OK"),
    (b"GET / HTTP/1.1\r\n\r\n", b"404 Not Found"),
    (b"GET /metrics/../../etc/passwd HTTP/1.1\r\n\r\n", b"404 Not Found"),
    (b"POST /metrics HTTP/1.1\r\nContent-Length: 9\r\n\r\n", b"405 Method Not Allowed"),
    (b"hello\r\n\r\n", b"400 Bad Request"),
    (b"GET /metrics SPDY/3\r\n\r\n", b"400 Bad Request"),
    (b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL\r\n\r\n", b"400 Bad Request"),
    (b"GET /metrics HTTP/1.1\r\nA: " + b"a" * MAX_HEAD_BYTES * 4, b"431 Request Header Fields Too Large"),
]


@pytest.mark.parametrize(("request_", "status"), REQUESTS, ids=lambda value: repr(value)[:30])
def test_each_request_gets_its_status(request_: bytes, status: bytes) -> None:
    async def scenario() -> None:
        async with serving() as port:
            reply = await said(port, request_)
            # What is too long is answered, or ended while it is still being sent.
            assert reply.startswith(b"HTTP/1.1 " + status) or (status.startswith(b"431") and not reply)
            ended = await said(port, b"GET /metrics HTTP/1.1\r\n\r\n")
            head, body = ended.split(b"\r\n\r\n", 1)
            assert body == b"a 1\n"
            assert b"Content-Length: 4" in head
            assert b"version=0.0.4" in head

    asyncio.run(scenario())


def test_head_has_no_body() -> None:
    async def scenario() -> None:
        async with serving() as port:
            reply = await said(port, b"HEAD /metrics HTTP/1.1\r\n\r\n")
            assert reply.endswith(b"Connection: close\r\n\r\n")

    asyncio.run(scenario())


def test_silent_connections_end_and_more_than_the_limit_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    async def held(port: int) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MAX_CONNECTIONS)]
        await asyncio.sleep(0.1)
        return silent

    async def scenario() -> None:
        async with serving() as port:
            for patience_s in (2.0, 10.0, 60.0):
                with monkeypatch.context() as patch:
                    patch.setattr(scrapes, "PATIENCE_S", patience_s)
                    silent = await held(port)
                if await said(port, b"GET /metrics HTTP/1.1\r\n\r\n") == b"":
                    break
                # A stalled machine: their time was over before one more came.
                assert patience_s < 60.0
            ended = await asyncio.gather(*(reader.read() for reader, _ in silent), return_exceptions=True)
            assert all(each == b"" or isinstance(each, ConnectionError) for each in ended)
            assert (await said(port, b"GET /metrics HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 200")
            for _, writer in silent:
                writer.close()

    asyncio.run(scenario())


def test_half_a_request_ends_the_connection_without_an_answer() -> None:
    async def scenario() -> None:
        async with serving() as port:
            assert await said(port, b"GET /metrics HT", end=True) == b""

    asyncio.run(scenario())


def test_what_fails_within_is_said_once_and_ends_only_the_connection() -> None:
    def broken() -> bytes:
        raise RuntimeError("broken")

    async def scenario() -> None:
        listener = listen("127.0.0.1", 0, "--metrics-port", "--metrics-bind")
        server = MetricsServer(listener, broken)
        await server.start()
        for _ in range(2):
            assert await said(server.endpoint.port, b"GET /metrics HTTP/1.1\r\n\r\n") == b""
        assert (await said(server.endpoint.port, b"GET / HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 404")
        await server.close()

    asyncio.run(scenario())


# --- settings -----------------------------------------------------------------------------------------------


def test_a_taken_port_names_the_flag() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortError, match=rf"port {port} on 127\.0\.0\.1 is in use.*--metrics-port"):
            listen("127.0.0.1", port, "--metrics-port", "--metrics-bind")
    with pytest.raises(PortError, match="--metrics-bind"):
        listen("192.0.2.1", 0, "--metrics-port", "--metrics-bind")


@pytest.mark.parametrize("port", [7600, 7601, 7700])
def test_the_port_can_not_be_one_of_the_others(port: int) -> None:
    with pytest.raises(UsageError, match=f"flag --metrics-port: .*{port} is taken"):
        load_config({"metrics_port": port}, environ={})


def test_metrics_are_off_by_default_and_stay_on_this_machine() -> None:
    config = load_config({}, environ={})
    assert (config.metrics_port, config.metrics_bind) == (None, "127.0.0.1")
    assert load_config({"metrics_port": 0}, environ={}).metrics_port == 0
