"""One node: its life from the command line to the goodbye, with every part joined.

The event loop serves discovery, control connections and clients; the data thread computes; a loader thread
fills the shard. The ring machine decides: everything that happens becomes one of its events, and what it asks
for is done here, in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from enum import Enum
from typing import Final, TypeVar, assert_never

import structlog
from pydantic import JsonValue

from cascadia_p2p import __version__
from cascadia_p2p.config import Config
from cascadia_p2p.discovery.discovery import Candidate, Discovery
from cascadia_p2p.discovery.interfaces import Address
from cascadia_p2p.discovery.txt import Announcement
from cascadia_p2p.errors import CascadiaError
from cascadia_p2p.identity import Identity
from cascadia_p2p.logs import lines_left_out
from cascadia_p2p.node.answers import AnswerDesk
from cascadia_p2p.node.client_book import ClientBook
from cascadia_p2p.node.conductor import HeadConductor
from cascadia_p2p.node.control import MAX_DIALLED, ControlPlane
from cascadia_p2p.node.head import HeadService, StatusBody
from cascadia_p2p.node.journal import JournalWriter
from cascadia_p2p.node.journal_copy import JournalCopy
from cascadia_p2p.node.meters import RingMeter
from cascadia_p2p.node.metrics import HeadMeasures, Measures, MetricsText
from cascadia_p2p.node.places import Places, times_of
from cascadia_p2p.node.refusals import Refusals
from cascadia_p2p.node.scrapes import MetricsServer
from cascadia_p2p.node.statuses import StatusDesk
from cascadia_p2p.node.worker import LoadedShard, Worker
from cascadia_p2p.ring import actions, events
from cascadia_p2p.ring.machine import RingMachine
from cascadia_p2p.ring.policy import Policy
from cascadia_p2p.ring.scheduler import Scheduler, Update
from cascadia_p2p.transport.client_server import ClientServer
from cascadia_p2p.types import Endpoint, Promise
from cascadia_p2p.wire import PROTOCOL
from cascadia_p2p.wire.messages import Clients, Journal, JournalAck, StatusQuery, StatusReport

T = TypeVar("T")

DOOR_EVERY_S: Final = 0.1
DOOR_TRIES: Final = 20
"""How often a client port that is in use is tried again."""

ANNOUNCE_TICKS: Final = 8
CLIENT_LIST_TICKS: Final = 20

_log = structlog.get_logger()


class Ending(Enum):
    """Why a node's life ended well."""

    LEFT = "left"
    """It was asked to."""
    MOVED = "moved"
    """This machine has another address: the same process goes on as a new instance there."""


class Node:
    """A node that runs until it is asked to leave, or until it must end.

    Args:
        config: all settings.
        places: the model's directory, the state directory and the sockets, opened by the caller.
        loaded: a shard that an earlier node of this process had loaded.
    """

    def __init__(self, config: Config, places: Places, loaded: LoadedShard | None = None) -> None:
        self._config = config
        self._places = places
        self._identity: Identity = places.identity
        self._model = places.model
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[Ending] = self._loop.create_future()
        self._started = time.monotonic()
        self._times = times_of(config.limits)
        self._profile = profile = places.profile(config)
        self._machine = RingMachine(profile, time.monotonic(), self._times)
        # The loop hears of tokens once the next frame is on its way: waking it earlier delays that frame.
        deliver = self._from_data_thread(self._deliver)
        self._conductor = HeadConductor(
            Scheduler(Policy(queue_limit=config.queue)),
            lambda updates: self._worker.after(lambda: deliver(updates)),
        )
        self._candidates: dict[Endpoint, Candidate] = {}
        self._worker = Worker(places, config, self._conductor, self._from_data_thread(self._handle), loaded)
        self._plane = ControlPlane(
            places.network,
            places.control,
            places.door,
            lambda: self._machine.greeting(time.monotonic()),
            self._handle,
            self._watch_task,
        )
        self._discovery = Discovery(
            config.fleet,
            places.address,
            instance=profile.instance,
            peers=config.peers,
            mdns=config.mdns,
            bind=config.bind,
            moved=self._moved,
            alone_s=config.limits.alone_s,
        )
        self._book = places.door.book
        if self._book is not None:
            self._book.changed = self._clients_changed
        self._head: HeadService | None = None
        self._journal_sessions = itertools.count(1)
        self._journal_copy = JournalCopy(profile.node, profile.instance)
        self._rings = RingMeter()
        listener = places.metrics
        self._scrapes = None if listener is None else MetricsServer(listener, MetricsText(self.measure).text)
        self._statuses = StatusDesk(self.status)
        self._refusals = Refusals(places.control, places.receiver, places.network.dialled, self._scrapes)
        self._tasks: list[asyncio.Task[None]] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._announced: Announcement | None = None
        self._promised: Promise | None = None
        """What the ring that this node heads, or headed last, can hold."""
        self._leaving = ""
        self._door_timer: asyncio.TimerHandle | None = None
        self._drain_timer: asyncio.TimerHandle | None = None

    @property
    def loaded(self) -> LoadedShard | None:
        """The shard that is loaded, for a node that follows this one in the same process."""
        return self._worker.loaded

    async def run(self) -> Ending:
        """Live; returns after `leave`, or when the network gave this machine another address.

        Raises:
            CascadiaError: this node can not go on; the exit code is the error's.
        """
        try:
            self._plane.start()
            self._worker.start()
            if self._scrapes is not None:
                await self._scrapes.start()
            await self._discovery.start(self._announcement())
            self._tasks = [
                asyncio.create_task(self._tick(), name="tick"),
                asyncio.create_task(self._follow_hints(), name="hints"),
            ]
            self._say_hello()
            for task in self._tasks:
                task.add_done_callback(self._watch_task)
            return await self._ended
        finally:
            await self._close()

    def drain(self, reason: str) -> None:
        """End as soon as this node can be spared, `drain_s` seconds at most; only in the event loop."""
        if self._ended.done() or self._drain_timer is not None:
            return
        self._drain_timer = self._loop.call_later(self._config.limits.drain_s, self.leave, reason)
        self._leaving = reason
        if self._head is not None:
            self._head.drain(reason)
        self._handle(events.Drain(reason))
        self._handle(events.Tick())

    def leave(self, reason: str) -> None:
        """Say goodbye and end; only in the event loop."""
        if self._ended.done():
            return
        self._handle(events.Leave(reason))
        self._end(Ending.LEFT)

    def status(self) -> StatusBody:
        """What `status` shows: the machine's view, and what this node counted itself."""
        body: StatusBody = dict(self._machine.snapshot(time.monotonic()))
        dropped = body["dropped"]
        if isinstance(dropped, dict):
            malformed = self._places.control.malformed
            body["dropped"] = dropped | {"malformed_messages": malformed, "log_lines": lines_left_out()}
        ports = self._refusals.counts(self._head_server)
        body["ports"] = {port: {**counts.shown()} for port, counts in ports.items()}
        body["mdns"] = {**self._discovery.dropped()}
        body["protocol"] = PROTOCOL
        body["door"] = self._places.door.report() | {"turned_away": self._plane.strangers}
        body["uptime_s"] = round(time.monotonic() - self._started, 3)
        body["cpu_s"] = round(time.process_time(), 6)
        body["data_thread"] = self._worker.report()
        body["vocabulary"] = {"ids": self._model.facts.vocab, "tokenizer": self._model.has_tokenizer}
        body["engine"] = {
            "device": self._config.device,
            "precision": self._config.precision,
            "cache": self._config.cache,
            "threads": self._config.threads,
        }
        if self._head is not None:
            counts = self._head.counts
            requests: dict[str, JsonValue] = {
                name: getattr(counts, name) for name in type(counts).__dataclass_fields__
            }
            requests["pending"] = self._head.pending
            requests["running"] = self._conductor.running
            requests["queued"] = self._conductor.waiting
            requests["queue_limit"] = self._config.queue
            body["requests"] = requests
            body["prefixes"] = dict(asdict(self._conductor.prefixes))
        copied = self._journal_copy.report()
        body["journal"] = {"told": [] if self._head is None else self._head.journal.report(), **copied}
        return body

    def measure(self) -> Measures:
        """The counters that the node's metrics tell; in the event loop."""
        machine, worker, profile = self._machine, self._worker, self._profile
        shard, loaded = machine.shard, worker.loaded
        info = {
            "node": profile.node,
            "fleet": profile.fleet,
            "version": __version__,
            "model": profile.fingerprint,
            "shard": "" if shard is None else str(shard),
            "device": self._config.device,
            "precision": self._config.precision,
            "cache": self._config.cache,
        }
        malformed = {"malformed_messages": self._places.control.malformed}
        return Measures(
            info=info,
            state=machine.state,
            epoch=machine.epoch,
            stages=machine.stages,
            peers=machine.peers,
            slots=0 if loaded is None else loaded.stage.taken,
            misfits=0 if loaded is None else loaded.stage.misfits,
            data=worker.data,
            totals=worker.data.totals(),
            parts=worker.part_seconds(),
            messages=machine.counts() | malformed,
            strangers=self._plane.strangers,
            ports=self._refusals.counts(self._head_server),
            mdns=self._discovery.dropped(),
            lines_left_out=lines_left_out(),
            ring=self._rings,
            head=None if self._head is None else self._measure_head(self._head),
        )

    @property
    def _head_server(self) -> ClientServer | None:
        return None if self._head is None else self._head.server

    def _measure_head(self, head: HeadService) -> HeadMeasures:
        return HeadMeasures(
            counts=head.counts,
            meter=head.meter,
            running=self._conductor.running,
            queued=self._conductor.waiting,
            queue_limit=self._config.queue,
            connections=head.server.connections,
            connections_limit=head.server.limit,
            malformed=head.server.faults,
            prefixes=self._conductor.prefixes,
        )

    # --- events in ----------------------------------------------------------------------------------------

    def _from_data_thread(self, function: Callable[[T], None]) -> Callable[[T], None]:
        def hand_over(value: T) -> None:
            # The loop may have closed while the data thread said its last word.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(function, value)

        return hand_over

    def _handle(self, event: events.Event) -> None:
        if isinstance(event, events.Heard) and isinstance(event.message, StatusQuery):
            report = StatusReport(
                node=self._profile.node, instance=self._profile.instance, body=self._statuses.get()
            )
            self._plane.answer(event.link, report)
            return
        if isinstance(event, events.Heard) and isinstance(event.message, Clients):
            if self._book is not None and self._book.hear(event.message):
                self._plane.answer(event.link, self._client_list(self._book, whole=True))
            return
        if self._machine.judges_counters(event):
            self._do_all(self._counters())
        self._do_all(event)

    def _do_all(self, event: events.Event) -> None:
        for action in self._machine.handle(event, time.monotonic()):
            self._do(action)

    def _deliver(self, updates: Sequence[Update]) -> None:
        if self._head is not None:
            self._head.deliver(updates)

    async def _tick(self) -> None:
        for number in itertools.count():
            await asyncio.sleep(self._times.tick)
            self._handle(self._counters())
            self._handle(events.Tick(self._plane.deaf))
            self._refusals.look(self._head_server)
            self._keep_journal()
            if number % ANNOUNCE_TICKS == 0:
                self._announce()
            if number % CLIENT_LIST_TICKS == 0 and self._book is not None:
                self._book.look()
                self._plane.broadcast(self._client_list(self._book, whole=False))
            if not self._places.network.guarded:
                self._end(
                    CascadiaError("the authenticator has ended, so no peer is let in: start the node again")
                )

    def _keep_journal(self) -> None:
        """Look after the standbys of this head, and after what this standby has taken."""
        if self._head is not None:
            standbys = self._machine.standbys
            for standby in standbys:
                # What comes to a node over a connection of its own is lost where that ends before it is read.
                self._plane.dial(standby.intro.control)
            self._head.follow([(standby.node, standby.instance) for standby in standbys])
        elif (ack := self._journal_copy.due(self._loop.time())) is not None:
            self._acknowledge(ack)

    def _take_journal(self, message: Journal) -> None:
        if (ack := self._journal_copy.hear(message, self._loop.time())) is not None:
            self._acknowledge(ack)

    def _acknowledge(self, ack: JournalAck) -> None:
        if self._journal_copy.head is not None:
            self._plane.send(self._journal_copy.head, ack)

    def _client_list(self, book: ClientBook, *, whole: bool) -> Clients:
        return book.message(self._profile.node, self._profile.instance, whole=whole)

    def _clients_changed(self) -> None:
        """Tell all nodes, and end the connections of those who are not admitted any more."""
        if self._book is not None:
            self._plane.broadcast(self._client_list(self._book, whole=True))
        if self._head is not None:
            self._head.expel()

    def _counters(self) -> events.Counters:
        counters = self._worker.counters()
        if self._head is None or self._promised is None:
            return counters
        slots, context = self._head.needs(self._promised)
        return replace(counters, running=self._conductor.running, slots=slots, context=context)

    def _announce(self) -> None:
        """Bring what mDNS says of this node, and how often it asks, up to date."""
        self._discovery.expect_more(not self._machine.is_open)
        self._discovery.accompanied(self._machine.peers > 0)
        announcement = self._announcement()
        if announcement != self._announced:
            self._announced = announcement
            self._discovery.announce(announcement)

    async def _follow_hints(self) -> None:
        async for candidate in self._discovery:
            self._greet(candidate)

    def _greet(self, candidate: Candidate) -> None:
        if candidate.endpoint == self._profile.control:
            self._discovery.own(candidate)
            return
        if len(self._candidates) < MAX_DIALLED or candidate.endpoint in self._candidates:
            self._candidates[candidate.endpoint] = candidate
        self._plane.dial(candidate.endpoint, lasting=candidate.peer is not None)

    def _found(self, endpoint: Endpoint | None, *, there: bool) -> None:
        """A node was met at an address that discovery had offered, or is gone from there."""
        candidate = self._candidates.get(endpoint) if endpoint is not None else None
        if candidate is not None:
            (self._discovery.reached if there else self._discovery.lost)(candidate)

    def _moved(self, address: Address) -> None:
        self._handle(events.Leave(f"its address has changed to {address.ip}"))
        self._end(Ending.MOVED)

    def _watch_task(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error(
                "task_failed", message=f"the node's own task '{task.get_name()}' failed", exc_info=error
            )
            self._end(CascadiaError(f"an internal task failed ({error}): start the node again"))

    # --- actions out --------------------------------------------------------------------------------------

    def _do(self, action: actions.Action) -> None:
        match action:
            case actions.Send(node, message):
                self._plane.send(node, message)
            case actions.Broadcast(nodes, message):
                self._plane.send_all(nodes, message)
            case actions.Answer(link, message):
                self._plane.answer(link, message)
            case actions.Route(link, node, instance):
                self._plane.route(link, node, instance)
                self._found(self._plane.dialled_address(link), there=True)
                if self._book is not None:
                    self._plane.answer(link, self._client_list(self._book, whole=False))
            case actions.Dial(endpoint):
                self._plane.dial(endpoint)
            case actions.Retry(link, after_s):
                self._plane.retry(link, after_s)
            case actions.Abandon(link):
                self._found(self._plane.dialled_address(link), there=True)
                self._plane.abandon(link)
            case actions.DropPeer(node, instance):
                for endpoint in self._plane.addresses_of(node):
                    self._found(endpoint, there=False)
                self._plane.drop_peer(node, instance)
            case actions.TakeJournal(message):
                self._take_journal(message)
            case actions.TakeJournalAck(message):
                if self._head is not None:
                    self._head.journal.heard(message, self._loop.time())
            case actions.Drained():
                self._loop.call_soon(self.leave, self._leaving)
            case actions.Say():
                getattr(_log, action.level)(action.event, message=action.sentence, **action.fields)
            case actions.Fatal(error):
                self._end(error)
            case _:
                self._do_ring(action)

    def _do_ring(
        self,
        action: actions.LoadShard
        | actions.SwitchEpoch
        | actions.SendProbe
        | actions.SetPace
        | actions.OpenRing
        | actions.CloseRing
        | actions.PauseAdmission
        | actions.ResumeAdmission
        | actions.BecomeHead
        | actions.StopBeingHead,
    ) -> None:
        conductor, call = self._conductor, self._worker.call
        match action:
            case actions.LoadShard(shard):
                self._worker.load(shard)
            case actions.SwitchEpoch():
                self._worker.switch(action)
            case actions.SendProbe(epoch, number):
                self._worker.probe(epoch, number)
            case actions.SetPace(times):
                call(lambda: conductor.pace(times.slowest, times.trip))
            case actions.OpenRing(epoch, members, promise, survived):
                self._rings.open(epoch, time.monotonic())
                self._worker.open(epoch)
                if members[0].node == self._profile.node:
                    self._promised = promise
                    call(lambda: conductor.open(len(members), promise, survived=survived))
            case actions.CloseRing(epoch, reason, missing, was_open, held):
                self._rings.close(epoch, time.monotonic())
                self._worker.close_epoch(epoch)
                if was_open and epoch.head == self._profile.instance:
                    call(lambda: conductor.suspend(reason, missing, held))
                    if self._head is not None:
                        self._head.interrupted(reason)
            case actions.PauseAdmission():
                call(lambda: conductor.admit(False))
            case actions.ResumeAdmission():
                call(lambda: conductor.admit(True))
            case actions.BecomeHead():
                self._open_door()
            case actions.StopBeingHead(reason):
                self._close_door(reason)
            case _:
                assert_never(action)

    def _open_door(self, tries: int = DOOR_TRIES) -> None:
        server = ClientServer(self._places.network)
        try:
            for host in dict.fromkeys(("127.0.0.1", self._places.address.ip)):
                guarded = not Endpoint(host, self._places.client_port).loopback
                server.bind(host, self._places.client_port, guarded=guarded)
        except CascadiaError as error:
            server.close()
            if tries > 0:
                # The head before this one may end on the same machine in a moment.
                self._door_timer = self._loop.call_later(DOOR_EVERY_S, self._open_door, tries - 1)
            else:
                self._end(error)
            return
        desk = AnswerDesk(self._model.facts, self._worker.tokenizer, self._worker.chat)
        self._head = HeadService(
            server,
            desk,
            self._conductor,
            self._worker,
            status=self._statuses.get,
            missing=lambda: self._machine.missing(time.monotonic()),
            queue_wait_s=self._config.limits.queue_wait_s,
            recovery_s=self._config.limits.recovery_s,
            watch=self._watch_task,
            journal=JournalWriter(
                self._profile.node, self._profile.instance, self._plane.post, self._journal_sessions
            ),
            kept=self._journal_copy.take_over(),
        )
        self._worker.call(self._conductor.begin)
        self._head.start()
        where = ", ".join(endpoint.tcp for endpoint in server.endpoints)
        _log.info(
            "clients_served", message=f"clients are served at {where}", endpoint=server.endpoints[0].tcp
        )

    def _close_door(self, reason: str) -> None:
        head, self._head = self._head, None
        if self._door_timer is not None:
            self._door_timer.cancel()
        if head is not None:
            task = asyncio.create_task(head.close(reason), name="door-closing")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
            task.add_done_callback(self._watch_task)

    # --- words --------------------------------------------------------------------------------------------

    def _say_hello(self) -> None:
        profile = self._profile
        if self._places.address.warning:
            _log.warning("no_network", message=self._places.address.warning)
        if self._places.door.warning:
            _log.warning("insecure", message=self._places.door.warning)
        if self._places.context_warning:
            _log.warning("context_cut", message=self._places.context_warning)
        _log.info(
            "node_started",
            message=f"node {profile.node} of fleet '{profile.fleet}', model '{profile.model}': control at "
            f"{profile.control}, data at {profile.data}; {self._places.door.words()}; Ctrl-C leaves",
            node=profile.node,
            control=str(profile.control),
            version=__version__,
        )

    def _announcement(self) -> Announcement:
        profile = self._profile
        intro = self._machine.greeting(time.monotonic())
        return Announcement(
            protocol=PROTOCOL,
            fleet=profile.fleet,
            node_id=profile.node,
            instance=profile.instance,
            model=profile.fingerprint,
            shard=intro.claim.shard,
            shards=profile.shards,
            control=profile.control.port,
            data=profile.data.port,
            client=intro.client.port if intro.client is not None else None,
            closed=self._places.door.key is not None,
        )

    # --- the end ------------------------------------------------------------------------------------------

    def _end(self, how: Ending | CascadiaError) -> None:
        if self._ended.done():
            return
        if isinstance(how, Ending):
            self._ended.set_result(how)
        else:
            self._ended.set_exception(how)

    async def _close(self) -> None:
        if self._drain_timer is not None:
            self._drain_timer.cancel()
        self._close_door("this node is leaving")
        if self._scrapes is not None:
            await self._scrapes.close()
        await asyncio.gather(*self._closing, return_exceptions=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._discovery.stop()
        await self._worker.stop()
        self._refusals.close()
        await self._plane.close()
