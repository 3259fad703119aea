"""A node's counters as Prometheus metrics; docs/metrics.md lists them.

Labels have few values that are known beforehand: never a client, a request or a peer.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import psutil
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from cascadia_p2p.node.meters import HeadCounts, HeadMeter, Histogram, RingMeter
from cascadia_p2p.node.refusals import PortCounts
from cascadia_p2p.node.seat import DataCounters, DataTotals
from cascadia_p2p.ring.scheduler import PrefixCounts

AGAIN_S: Final = 1.0
"""For so long a text is given again: a scraper that asks without pause costs nothing."""

STATES: Final = ("looking", "loading", "standby", "forming", "probing", "open")
"""What a node can be at; see `ring.snapshot`."""


@dataclass(frozen=True, slots=True)
class HeadMeasures:
    """What only the serving head knows.

    Args:
        counts, meter: of the head's door.
        running, queued, queue_limit: streams with a slot, without one, and the most that may be without.
        connections, connections_limit: of clients, now and at most.
        malformed: messages of clients without the shape of a request.
        prefixes: what prefix reuse has done.
    """

    counts: HeadCounts
    meter: HeadMeter
    running: int
    queued: int
    queue_limit: int
    connections: int
    connections_limit: int
    malformed: int
    prefixes: PrefixCounts


@dataclass(frozen=True, slots=True)
class Measures:
    """A node's counters at one moment.

    Args:
        info: what does not change, or seldom, in words.
        state: one of STATES.
        epoch: the highest that the node has taken part in.
        stages: nodes in the ring that it is in; 0 for none.
        peers: other nodes that it knows.
        slots: streams that have a slot in the stage here.
        misfits: operations that the stage could not follow.
        data, totals: of the data thread.
        parts: seconds by part of the work of the stage that is loaded.
        messages: control messages that were dropped, by reason.
        ring: the rings that it was in.
        strangers: connections that were turned away for want of the fleet's key.
        ports: what each port did not take.
        mdns: announcements that were of no use, by reason.
        lines_left_out: of the log.
        head: only on the serving head.
    """

    info: Mapping[str, str]
    state: str
    epoch: int
    stages: int
    peers: int
    slots: int
    misfits: int
    data: DataCounters
    totals: DataTotals
    parts: Mapping[str, float] = field(default_factory=dict)
    messages: Mapping[str, int] = field(default_factory=dict)
    strangers: int = 0
    ports: Mapping[str, PortCounts] = field(default_factory=dict)
    mdns: Mapping[str, int] = field(default_factory=dict)
    lines_left_out: int = 0
    ring: RingMeter = field(default_factory=RingMeter)
    head: HeadMeasures | None = None


class MetricsText(Collector):
    """Prometheus' text of a node's counters, made at most once a second.

    Args:
        measure: the counters now; called in the thread that asks for the text.
        clock: seconds of a steady clock.
    """

    def __init__(self, measure: Callable[[], Measures], clock: Callable[[], float] = time.monotonic) -> None:
        self._measure = measure
        self._clock = clock
        self._process = psutil.Process()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self._text = b""
        self._made_at = float("-inf")

    def text(self) -> bytes:
        """The text, at most `AGAIN_S` old."""
        now = self._clock()
        if now - self._made_at >= AGAIN_S:
            self._text, self._made_at = generate_latest(self._registry), now
        return self._text

    def collect(self) -> Iterator[Metric]:
        """All families with their samples."""
        found = self._measure()
        yield from _process(self._process)
        yield from _node(found)
        yield from _refused(found)
        yield from _work(found.data, found.totals, found.parts)
        if found.head is not None:
            yield from _requests(found.head)
            yield from _prefixes(found.head.prefixes)

    def describe(self) -> list[Metric]:
        """Nothing: what is registered is only this collector, so no names can clash."""
        return []


def _counter(name: str, words: str, value: float) -> Metric:
    return CounterMetricFamily(name, words, value=value)


def _gauge(name: str, words: str, value: float) -> Metric:
    return GaugeMetricFamily(name, words, value=value)


def _counters(name: str, words: str, label: str, values: Mapping[str, float]) -> Metric:
    made = CounterMetricFamily(name, words, labels=[label])
    for value, count in values.items():
        made.add_metric([str(value)], count)
    return made


def _gauges(name: str, words: str, label: str, values: Mapping[str, float]) -> Metric:
    made = GaugeMetricFamily(name, words, labels=[label])
    for value, count in values.items():
        made.add_metric([str(value)], count)
    return made


def _histogram(name: str, words: str, histogram: Histogram) -> Metric:
    return HistogramMetricFamily(name, words, buckets=histogram.buckets(), sum_value=histogram.sum)


def _process(process: psutil.Process) -> Iterator[Metric]:
    """What every exporter tells of its process, under the names that are usual for it."""
    with process.oneshot():
        memory, cpu = process.memory_info().rss, process.cpu_times()
        yield _gauge("process_resident_memory_bytes", "Resident memory of the process.", memory)
        yield _counter(
            "process_cpu_seconds", "CPU time of all threads, user and system.", cpu.user + cpu.system
        )
        yield _gauge(
            "process_start_time_seconds", "Start of the process in Unix time.", process.create_time()
        )
        if sys.platform != "win32":
            yield _gauge("process_open_fds", "Open file descriptors.", process.num_fds())


def _node(found: Measures) -> Iterator[Metric]:
    yield InfoMetricFamily("cascadia_node", "Who this node is and how it computes.", value=dict(found.info))
    states = {state: float(state == found.state) for state in STATES}
    yield _gauges("cascadia_node_state", "1 for the state that the node is in.", "state", states)
    yield _gauge("cascadia_head", "1 on the node that serves clients.", found.head is not None)
    yield _gauge("cascadia_peers", "Other nodes of the fleet that this one knows.", found.peers)
    yield _gauge("cascadia_ring_stages", "Nodes of the ring that this one is in; 0 for none.", found.stages)
    yield _gauge("cascadia_ring_epoch", "Number of the newest epoch that the node took part in.", found.epoch)
    ring = found.ring
    yield _counter("cascadia_epochs_opened", "Epochs that opened with this node in them.", ring.opened)
    yield _counter("cascadia_epochs_lost", "Open epochs with this node in them that ended.", ring.lost)
    yield _counter("cascadia_recoveries", "Epochs that opened after an open one was lost.", ring.recovered)
    yield _counter(
        "cascadia_outage_seconds", "Time from the loss of an epoch to the next that opened.", ring.outage_s
    )
    yield _gauge("cascadia_stage_slots_taken", "Slots of the stage that hold a stream.", found.slots)
    yield _counter("cascadia_stage_misfits", "Operations that the stage could not follow.", found.misfits)


def _refused(found: Measures) -> Iterator[Metric]:
    """What came from outside and was not taken."""
    reasons = {name.removesuffix("_messages"): count for name, count in found.messages.items()}
    yield _counters("cascadia_control_messages_dropped", "Control messages not taken.", "reason", reasons)
    yield _counter("cascadia_strangers_turned_away", "Peers without the fleet's key.", found.strangers)
    failed = CounterMetricFamily(
        "cascadia_handshakes_failed", "Connections that did not get in.", labels=["port", "reason"]
    )
    for port, counts in found.ports.items():
        for reason, count in counts.handshakes.items():
            failed.add_metric([port, reason], count)
    yield failed
    cut = {port: counts.overfull for port, counts in found.ports.items()}
    yield _counters("cascadia_connections_cut", "Connections that sent more than is taken.", "port", cut)
    surplus = {
        port: counts.others["surplus"] for port, counts in found.ports.items() if "surplus" in counts.others
    }
    yield _counters("cascadia_connections_surplus", "Connections that were too many.", "port", surplus)
    scrapes = found.ports["metrics"].others if "metrics" in found.ports else {}
    yield _counters("cascadia_scrapes_refused", "Scrapes not answered with metrics.", "reason", scrapes)
    yield _counters("cascadia_mdns_ignored", "Announcements of no use here.", "reason", found.mdns)
    yield _counter("cascadia_log_lines_left_out", "Log lines that were too many.", found.lines_left_out)


def _work(data: DataCounters, totals: DataTotals, parts: Mapping[str, float]) -> Iterator[Metric]:
    """The data thread's side: frames, rows, and where its time goes."""
    yield _counter("cascadia_frames_received", "Frames taken from the node before.", totals.frames_in)
    yield _counter("cascadia_frames_sent", "Frames handed to the next node.", totals.frames_out)
    yield _counter("cascadia_rows", "Rows (positions of streams) computed here.", totals.rows)
    yield _counters("cascadia_frames_dropped", "Frames not taken.", "reason", data.dropped)
    yield _counters("cascadia_segments_failed", "Segments not computed here.", "reason", data.failed)
    yield _counter("cascadia_frames_failed", "Frames whose computation failed.", data.errors)
    times = {"compute": data.busy_ns / 1e9, "wait": data.wait_ns / 1e9, "send": data.send_ns / 1e9}
    yield _counters(
        "cascadia_data_thread_seconds", "Time of the data thread, by what it did.", "activity", times
    )
    yield _counters("cascadia_stage_seconds", "Time of the stage's work since it was loaded.", "part", parts)
    yield SummaryMetricFamily(
        "cascadia_round_seconds",
        "On the head: from handing a frame on to its tokens' return.",
        count_value=totals.rounds,
        sum_value=totals.round_ns / 1e9,
    )


def _requests(head: HeadMeasures) -> Iterator[Metric]:
    counts, meter = head.counts, head.meter
    yield _counter("cascadia_prompt_tokens", "Tokens of prompts whose answer began.", meter.prompt_tokens)
    yield _counter("cascadia_generated_tokens", "Tokens of answers.", meter.generated_tokens)
    yield _histogram(
        "cascadia_time_to_first_token_seconds", "From a request to its first token.", meter.first_token
    )
    yield _histogram(
        "cascadia_inter_token_seconds", "From one token of an answer to the next.", meter.between_tokens
    )
    yield _gauge("cascadia_requests_running", "Streams that have a slot.", head.running)
    yield _gauge("cascadia_requests_queued", "Streams that wait for a slot.", head.queued)
    yield _gauge("cascadia_requests_queue_limit", "Streams that may wait for a slot.", head.queue_limit)
    yield _counter("cascadia_requests_accepted", "Requests that went to the scheduler.", counts.accepted)
    yield _counter("cascadia_requests_finished", "Requests answered in full.", counts.finished)
    yield _counter("cascadia_requests_cancelled", "Requests that their clients ended.", counts.cancelled)
    rejected = {code.value: count for code, count in meter.rejected.items()}
    failed = {code.value: count for code, count in meter.failed.items()}
    yield _counters("cascadia_requests_rejected", "Requests not taken.", "reason", rejected)
    yield _counters("cascadia_requests_failed", "Requests taken that ended in an error.", "reason", failed)
    yield _gauge("cascadia_client_connections", "Connections of clients.", head.connections)
    yield _gauge("cascadia_client_connections_limit", "The most that are served.", head.connections_limit)
    yield _counter("cascadia_client_messages_malformed", "Messages of no request's shape.", head.malformed)


def _prefixes(counts: PrefixCounts) -> Iterator[Metric]:
    yield _gauge("cascadia_prefix_entries", "Beginnings of prompts that are kept.", counts.kept)
    yield _gauge("cascadia_prefix_entries_limit", "The most that the ring keeps.", counts.entries)
    looked = {"hit": counts.hits, "miss": counts.misses}
    yield _counters("cascadia_prefix_lookups", "Streams by whether they started from one.", "result", looked)
    yield _counter("cascadia_prefix_tokens_reused", "Positions not computed again.", counts.tokens_reused)
    yield _counter("cascadia_prefix_evictions", "Beginnings let go for others.", counts.evictions)
