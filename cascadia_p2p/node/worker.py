"""The node's two working threads behind one door: the data thread, and the one that loads shards."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import structlog
from pydantic import JsonValue

from cascadia_p2p.config import Config
from cascadia_p2p.engine.load import LoadProgress, load_stage
from cascadia_p2p.engine.stage import Stage
from cascadia_p2p.engine.timing import WorkTimes
from cascadia_p2p.errors import CascadiaError
from cascadia_p2p.node.conductor import HeadConductor
from cascadia_p2p.node.data_thread import DataThread
from cascadia_p2p.node.places import Places
from cascadia_p2p.node.profiles import find_profile, layer_seconds, pace, subject_of
from cascadia_p2p.node.seat import DataCounters, Seat
from cascadia_p2p.planning.measured import MeasuredNode
from cascadia_p2p.ring import events
from cascadia_p2p.ring.actions import SwitchEpoch
from cascadia_p2p.shards.reader import ShardReader, VerifyProgress
from cascadia_p2p.text.chat import Chat
from cascadia_p2p.text.tokenizer import Tokenizer
from cascadia_p2p.types import Epoch, Promise
from cascadia_p2p.wire.frames import FrameLimits
from cascadia_p2p.wire.work import WorkReport

JOIN_S = 30.0
TELL_S = 5.0
"""Between two lines that say how far loading is, in seconds."""

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class LoadedShard:
    """A shard that is ready to compute.

    Args:
        shard: its index.
        stage: the engine.
        tokenizer: with shard 0, when the model has one.
        chat: beside the tokenizer.
        profile: what was measured of this shard on this machine earlier, if it was.
    """

    shard: int
    stage: Stage
    tokenizer: Tokenizer | None
    chat: Chat | None = None
    profile: MeasuredNode | None = None

    @property
    def layer_s(self) -> float:
        """Measured seconds between two signs of progress in a large frame; 0 when not known."""
        return 0.0 if self.profile is None else layer_seconds(self.profile, len(self.stage.model.layers))


@dataclass(frozen=True, slots=True)
class _Start:
    """The totals when the shard was loaded, from which on its work is told."""

    counters: DataCounters
    times: WorkTimes


def _times(loaded: LoadedShard | None) -> WorkTimes:
    return WorkTimes() if loaded is None else loaded.stage.times()


class _GivenUpError(Exception):
    """What is being loaded is not wanted any more."""


class Worker:
    """Loads shards, and runs the loaded one in epochs.

    Args:
        places: model and sockets.
        config: device, precision, threads.
        conductor: the scheduler's side, used when this node is the head.
        emit: takes events of the ring machine, from any thread.
        loaded: a shard that need not be loaded again.
    """

    def __init__(
        self,
        places: Places,
        config: Config,
        conductor: HeadConductor,
        emit: Callable[[events.Event], None],
        loaded: LoadedShard | None = None,
    ) -> None:
        self._places = places
        self._config = config
        self._conductor = conductor
        self._emit = emit
        self._data = DataThread(places.receiver, places.transport, self)
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="loader")
        self._wanted: int | None = None
        self.loaded = loaded
        self._since = _Start(replace(self._data.counters), _times(loaded))
        self._stopping = threading.Event()
        self._told_at = time.monotonic()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's, once shard 0 is loaded here; None when it has none."""
        return None if self.loaded is None else self.loaded.tokenizer

    @property
    def chat(self) -> Chat | None:
        """How the model chats, once shard 0 is loaded here; None when it has no tokenizer."""
        return None if self.loaded is None else self.loaded.chat

    def start(self) -> None:
        """Take frames from now on."""
        self._data.start()

    async def stop(self) -> None:
        """End both threads."""
        self._stopping.set()
        self._data.stop()
        self._loader.shutdown(wait=False, cancel_futures=True)
        if not await asyncio.to_thread(self._data.join, JOIN_S):
            _log.warning("data_thread_slow", message="the data thread is still busy and is left behind")

    # --- loading ------------------------------------------------------------------------------------------

    def load(self, shard: int) -> None:
        """Load a shard in place of any other; told by LoadProgress, then ShardLoaded or LoadFailed."""
        self._wanted = shard
        if self.loaded is not None and self.loaded.shard == shard:
            self._ready(self.loaded)
            return
        self.loaded = None
        self._loader.submit(self._load, shard)

    def _load(self, shard: int) -> None:
        try:
            reader = ShardReader(self._places.model.directory, shard)
            _log.info("shard_loading", message=f"checking and loading shard {shard}", shard=shard)
            reader.verify(self._places.identity.directory, lambda done: self._verified(shard, done))
            stage = load_stage(
                self._places.model.directory,
                shard,
                self._places.promise,
                self._config.device,
                self._config.precision,
                self._config.threads,
                lambda progress: self._loaded(shard, progress),
                cache=self._config.cache,
            )
            tokenizer = self._places.model.tokenizer(shard) if shard == 0 else None
            chat = self._places.model.chat(shard, tokenizer) if tokenizer is not None else None
            if chat is not None and chat.fault is not None:
                _log.warning("chat_template", message=f"messages can not be taken: {chat.fault}")
            self._since = _Start(replace(self._data.counters), stage.times())
            loaded = LoadedShard(shard, stage, tokenizer, chat, self._profile(reader))
            self.loaded = loaded
            # What was loaded lives as long as the process: a collection that walks it would stall frames.
            gc.collect()
            gc.freeze()
        except _GivenUpError:
            return
        except CascadiaError as error:
            self._emit(events.LoadFailed(shard, error))
        except Exception as error:
            _log.exception("load_failed", message=f"shard {shard} can not be loaded")
            failure = CascadiaError(f"shard {shard} can not be loaded: {type(error).__name__}: {error}")
            self._emit(events.LoadFailed(shard, failure))
        else:
            self._ready(loaded)

    def _ready(self, loaded: LoadedShard) -> None:
        """Tell that a shard can compute, and how its time grows with rows."""
        known = () if loaded.profile is None else pace(loaded.profile)
        self._emit(events.ShardLoaded(loaded.shard, loaded.layer_s, known))

    def _profile(self, reader: ShardReader) -> MeasuredNode | None:
        found = find_profile(self._config.state_root, subject_of(self._config, reader))
        if found is not None:
            _log.info("profile_found", message=f"shard {reader.index} was measured here before")
        return found

    def _verified(self, shard: int, progress: VerifyProgress) -> None:
        self._report_load(shard, 0.3 * progress.done / max(1, progress.total))

    def _loaded(self, shard: int, progress: LoadProgress) -> None:
        share = progress.done / max(1, progress.total)
        self._report_load(shard, 0.3 + (0.2 * share if progress.phase == "kernels" else 0.2 + 0.5 * share))

    def _report_load(self, shard: int, share: float) -> None:
        if self._stopping.is_set() or self._wanted != shard:
            raise _GivenUpError
        if time.monotonic() - self._told_at >= TELL_S:
            self._told_at = time.monotonic()
            _log.info("load_progress", message=f"shard {shard} is loaded to {share:.0%}", shard=shard)
        self._emit(events.LoadProgress(shard, share))

    # --- epochs -------------------------------------------------------------------------------------------

    def switch(self, action: SwitchEpoch) -> None:
        """Take a place in an epoch; told by Switched or SwitchFailed."""
        if self.loaded is None:
            self._emit(events.SwitchFailed(action.epoch, "no shard is loaded here"))
            return
        seat = Seat(
            epoch=action.epoch,
            index=action.stage,
            stages=len(action.members),
            stage=self.loaded.stage,
            limits=self._limits(action.promise),
            successor=action.successor.data,
            conductor=self._conductor if action.stage == 0 else None,
        )
        self._data.form(seat)

    def probe(self, epoch: Epoch, number: int) -> None:
        """Send a probe round the ring."""
        self._data.probe(epoch, number)

    def open(self, epoch: Epoch) -> None:
        """Start frames, on the head."""
        self._data.open(epoch)

    def close_epoch(self, epoch: Epoch) -> None:
        """Leave an epoch."""
        self._data.close(epoch)

    def call(self, function: Callable[[], None]) -> None:
        """Run a function in the data thread, between frames."""
        self._data.call(function)

    def after(self, function: Callable[[], None]) -> None:
        """In the data thread: run a function once the frame at hand is sent."""
        self._data.after(function)

    def counters(self) -> events.Counters:
        """What the data thread has done, for the ring machine."""
        counted = self._data.counters
        return events.Counters(
            epoch=counted.epoch,
            progress=counted.progress,
            frames_in=counted.frames_in,
            frames_out=counted.frames_out,
            waiting_send=counted.waiting_send,
            probe_seen=counted.probe_seen,
        )

    @property
    def data(self) -> DataCounters:
        """The data thread's counters as it writes them; any field may be read."""
        return self._data.counters

    def part_seconds(self) -> dict[str, float]:
        """Seconds by part of the work of the loaded shard's stage; empty while none is loaded."""
        loaded = self.loaded
        return {} if loaded is None else {part.value: s for part, s in loaded.stage.times().seconds.items()}

    def report(self) -> dict[str, JsonValue]:
        """The data thread's counters for `status`: times in seconds, drops by reason, work by part.

        Frames and rows at the top are those of this epoch. Misfits, which are operations that the stage could
        not follow, times, and frames and rows under `work` are since the shard was loaded. `frame_ms` and
        `row_ms` are means of these, by part.
        """
        counted = self._data.counters
        work = self._work()
        shown: dict[str, JsonValue] = {}
        if work is not None:
            means = {"frame_ms": work.frame_ms(), "row_ms": work.row_ms()}
            shown = work.model_dump(mode="json") | {
                name: {part: round(each, 6) for part, each in mean.items()} for name, mean in means.items()
            }
        return {
            "progress": counted.progress,
            "frames_in": counted.frames_in,
            "frames_out": counted.frames_out,
            "rows": counted.rows,
            "errors": counted.errors,
            "misfits": 0 if self.loaded is None else self.loaded.stage.misfits,
            "slots_taken": 0 if self.loaded is None else self.loaded.stage.taken,
            "round_ms": round(counted.round_ns / 1e6 / counted.rounds, 6) if counted.rounds else None,
            "busy_s": round(counted.busy_ns / 1e9, 6),
            "wait_s": round(counted.wait_ns / 1e9, 6),
            "send_s": round(counted.send_ns / 1e9, 6),
            "dropped": {str(reason): count for reason, count in counted.dropped.items() if count},
            "failed": {reason: count for reason, count in counted.failed.items() if count},
            "work": shown or None,
        }

    def _work(self) -> WorkReport | None:
        """Where the time of the loaded shard went; None while none is loaded."""
        loaded, counted, before = self.loaded, self._data.counters, self._since.counters
        if loaded is None:
            return None
        times = loaded.stage.times().since(self._since.times)
        seconds = {part.value: round(each, 6) for part, each in times.seconds.items()}
        busy = (counted.busy_ns - before.busy_ns) / 1e9
        return WorkReport(
            seconds=seconds,
            frames=times.frames,
            rows=times.rows,
            wait_s=round((counted.wait_ns - before.wait_ns) / 1e9, 6),
            send_s=round((counted.send_ns - before.send_ns) / 1e9, 6),
            # The stage's own clock is read a moment later than the data thread's.
            other_s=round(max(busy - sum(seconds.values()), 0.0), 6),
        )

    def _limits(self, promise: Promise) -> FrameLimits:
        """A stream has one segment a frame; a slot is kept, released, started, attached, an entry evicted."""
        return FrameLimits(
            hidden=self._places.model.config.hidden,
            rows=promise.rows,
            segments=min(promise.rows, promise.slots),
            operations=4 * promise.slots + 2 * promise.kept,
            records=min(promise.rows, promise.slots),
        )

    # --- what the data thread reports -----------------------------------------------------------------------

    def switched(self, epoch: Epoch) -> None:
        """See `DataReports`."""
        self._emit(events.Switched(epoch))

    def switch_failed(self, epoch: Epoch, sentence: str) -> None:
        """See `DataReports`."""
        self._emit(events.SwitchFailed(epoch, sentence))

    def probe_returned(self, epoch: Epoch, number: int) -> None:
        """See `DataReports`."""
        self._emit(events.ProbeReturned(epoch, number))

    def hop_broken(self, epoch: Epoch, sentence: str) -> None:
        """See `DataReports`."""
        self._emit(events.HopBroken(epoch, sentence))

    def died(self, sentence: str) -> None:
        """See `DataReports`."""
        self._emit(events.DataThreadDied(sentence))
