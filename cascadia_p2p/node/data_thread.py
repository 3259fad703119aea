"""The data thread: receives frames, runs them through the stage, sends them on; the only user of all three.

It never waits for the event loop. The owner leaves commands, which are taken between frames; a new epoch, the
end of one, and stop are taken between layers. On the head it also asks the conductor for frames to start.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import structlog

from cascadia_p2p.node.seat import DataCounters, DataReports, Drop, Inputs, PlanLike, Seat, empty_rows
from cascadia_p2p.transport.interfaces import FrameReceiver, FrameSender, FrameTransport
from cascadia_p2p.types import Epoch
from cascadia_p2p.wire.frames import (
    Frame,
    FrameError,
    FrameKind,
    Rows,
    SegmentError,
    Table,
    alternative_table,
    decode_header,
    encode_header,
    record_table,
)
from cascadia_p2p.wire.model import MAX_COUNT

SEND_WAIT_MS: Final = 20
PROBE_WAIT_MS: Final = 50

# Reading a member off its class is a function call in Python 3.11; every frame needs these.
_PROBE: Final = FrameKind.PROBE
_TOKENS: Final = FrameKind.TOKENS

_log = structlog.get_logger()


class _AbandonFrame(Exception):  # noqa: N818 - a turn of control, not an error
    """What is being done belongs to an epoch that is over."""


class DataThread:
    """One node's data thread.

    All methods may be called from any thread; commands are carried out in the order they came.

    Args:
        receiver: where frames arrive; closed by the thread.
        transport: makes the sender of each epoch.
        reports: takes what the owner must know.
    """

    def __init__(self, receiver: FrameReceiver, transport: FrameTransport, reports: DataReports) -> None:
        self.counters = DataCounters()
        self._receiver = receiver
        self._transport = transport
        self._reports = reports
        self._commands: deque[Callable[[], None]] = deque()
        self._interrupts: deque[Callable[[], bool]] = deque()
        self._after: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._seat: Seat | None = None
        self._sender: FrameSender | None = None
        self._started = 0
        self._expected = 1
        self._open = False
        self._broken = False
        self._buffer: Rows | None = None
        self._failures: set[str] = set()
        self._left: deque[int] = deque()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="data", daemon=True)

    # --- commands of the owner ----------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def form(self, seat: Seat) -> None:
        """Take this place; abandons the frame at hand. Answered by `switched` or `switch_failed`."""
        self._interrupt(lambda: self._enter(seat), lambda: not self._outdated(seat.epoch))

    def probe(self, epoch: Epoch, number: int) -> None:
        """Send a probe round the ring, unless the successor can not be reached yet: then ask again."""
        self._command(lambda: self._send_probe(epoch, number))

    def open(self, epoch: Epoch) -> None:
        """On the head: start frames of this epoch."""
        self._command(lambda: self._set_open(epoch))

    def close(self, epoch: Epoch) -> None:
        """Leave this epoch; abandons the frame at hand."""
        self._interrupt(lambda: self._leave(epoch), lambda: self._in(epoch))

    def call(self, function: Callable[[], None]) -> None:
        """Run a function in the thread, between frames; what it raises is logged."""
        self._command(lambda: self._call(function))

    def after(self, function: Callable[[], None]) -> None:
        """Run a function as soon as no frame waits to be started; from within the thread only.

        For what wakes another thread: that thread then takes the interpreter while a frame is on its way, and
        not before.
        """
        self._after.append(function)

    def stop(self) -> None:
        """End the thread soon, whatever it does; `join` waits for it."""
        self._interrupt(self._stop, lambda: True)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end; False when it still runs."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def _command(self, command: Callable[[], None]) -> None:
        with self._lock:
            self._commands.append(command)
        self._receiver.wake()

    def _interrupt(self, command: Callable[[], None], concerns: Callable[[], bool]) -> None:
        """A command that abandons the frame at hand, if it `concerns` the epoch that the frame belongs to."""
        with self._lock:
            self._interrupts.append(concerns)
            self._commands.append(lambda: self._take_interrupt(command))
        self._receiver.wake()

    # --- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self.turn()
        except BaseException as error:
            _log.exception("data_thread_died", message="the data thread has ended on its own")
            self._reports.died(f"the data thread has ended: {type(error).__name__}: {error}")
        finally:
            self._run_after()
            self._seat = None
            self.counters.enter(None)
            if self._sender is not None:
                self._sender.close()
            self._receiver.close()

    def turn(self) -> None:
        """Carry out the commands, then do one thing: take a frame, start one, or wait."""
        while self._commands and not self._stopping:
            self._commands.popleft()()
        if self._stopping:
            return
        if self._sender is not None:
            self._sender.look()
        seat = self._seat
        try:
            if seat is None or not seat.head or not self._open:
                self._wait()
            elif self._take_answer():
                # Its tokens may be what the next frame begins with.
                pass
            elif (plan := self._plan(seat)) is not None:
                self._start_frame(seat, plan)
                self._run_after()
            else:
                self._wait()
        except _AbandonFrame:
            self.counters.dropped[Drop.ABANDONED] += 1

    def _take_answer(self) -> bool:
        """Take what has come, without waiting; what is dropped holds up no frame that could start."""
        header = self._receiver.recv_header(False)
        if header is None:
            return False
        before = self.counters.frames_in
        self._take(header)
        return self.counters.frames_in > before

    def _wait(self) -> None:
        """Wait for a frame or a wake."""
        self._run_after()
        started = time.perf_counter_ns()
        header = self._receiver.recv_header(True)
        self.counters.wait_ns += time.perf_counter_ns() - started
        if header is not None:
            self._take(header)

    # --- frames that arrive -------------------------------------------------------------------------------

    def _take(self, header: bytearray) -> None:
        """Judge a frame and do what it asks; whatever does not belong here is counted and dropped."""
        seat, dropped = self._seat, self.counters.dropped
        if seat is None:
            dropped[Drop.NO_EPOCH] += 1
            return
        try:
            frame = decode_header(header, seat.limits)
        except FrameError as error:
            dropped[error.fault] += 1
            return
        if frame.epoch != seat.epoch:
            dropped[Drop.EPOCH] += 1
        elif self._broken:
            dropped[Drop.BROKEN] += 1
        elif frame.kind is _PROBE:
            self._take_probe(seat, frame)
        elif (frame.kind is _TOKENS) != seat.head:
            dropped[Drop.PLACE] += 1
        elif self._in_order(frame) and self._receive_rows(frame):
            self._expected += 1
            self.counters.frames_in += 1
            if seat.head:
                self._count_round()
                self._answer(seat, frame.number, frame.records, frame.alternatives)
            else:
                self._pass_on(seat, frame, header)

    def _in_order(self, frame: Frame) -> bool:
        """Whether it is the one frame that is due; a later one means that frames were lost."""
        if frame.number == self._expected:
            return True
        if frame.number < self._expected:
            self.counters.dropped[Drop.REPEATED] += 1
            return False
        self.counters.dropped[Drop.GAP] += 1
        self._break(
            f"frame {frame.number} came where {self._expected} was due: frames were lost on the way here"
        )
        return False

    def _receive_rows(self, frame: Frame) -> bool:
        """Receive the payload that the header speaks of, if the message has exactly that."""
        rows = frame.rows
        if not rows:
            fits = not self._receiver.more
        elif self._buffer is None:
            fits = False
        else:
            frame.payload = self._buffer[:rows]
            fits = self._receiver.recv_payload(frame.payload)
        if not fits:
            self.counters.dropped[Drop.PAYLOAD] += 1
        return fits

    def _take_probe(self, seat: Seat, frame: Frame) -> None:
        if frame.number > MAX_COUNT:
            # No head of ours counts so far, and beats could not carry it.
            self.counters.dropped[Drop.PLACE] += 1
            return
        self.counters.probe_seen = frame.number
        self.counters.progress += 1
        if seat.head:
            self._reports.probe_returned(seat.epoch, frame.number)
        else:
            self._send(encode_header(frame), None)

    def _count_round(self) -> None:
        """A frame is back: answers come in the order in which frames left."""
        if self._left:
            self.counters.round_ns += time.perf_counter_ns() - self._left.popleft()
            self.counters.rounds += 1

    def _answer(self, seat: Seat, number: int, records: Table, alternatives: Table) -> None:
        """Give the tail's answer to the conductor."""
        self.counters.progress += 1
        try:
            if seat.conductor is not None:
                seat.conductor.on_tokens(number, records, alternatives)
        except Exception as error:
            self._break_for("the scheduler does not take the ring's answer", error)

    # --- frames that leave --------------------------------------------------------------------------------

    def _plan(self, seat: Seat) -> PlanLike | None:
        """The conductor's next frame, if it has one that the ring can take."""
        try:
            plan = None if seat.conductor is None else seat.conductor.schedule()
        except Exception as error:
            self._break_for("the scheduler failed", error)
            return None
        if plan is None:
            return None
        self._started += 1
        limits = seat.limits
        fits = len(plan.operations) <= limits.operations and len(plan.segments) <= limits.segments
        if plan.number != self._started or len(plan.tokens) > limits.rows or not fits:
            self._break(f"the scheduler made a frame that does not fit: number {plan.number}")
            return None
        return plan

    def _start_frame(self, seat: Seat, plan: PlanLike) -> None:
        """Run a plan through the first stage and send it on."""
        frame = Frame(
            FrameKind.ACTIVATIONS,
            seat.epoch,
            plan.number,
            seat.limits.hidden,
            plan.segments,
            plan.operations,
        )
        rows = self._compute(seat, frame, plan.tokens)
        if seat.alone:
            records, alternatives = self._read_tokens(seat, frame, rows)
            self._count_failed(seat, records["status"], records["stage"])
            self._answer(seat, frame.number, records, alternatives)
        else:
            self._count_failed(seat, frame.segments["error"], frame.segments["stage"])
            self._send(encode_header(frame), rows)
            self._left.append(time.perf_counter_ns())
            self.counters.frames_out += 1

    def _pass_on(self, seat: Seat, frame: Frame, header: bytearray) -> None:
        """Run a received frame; then the next stage gets its rows, or the head its tokens.

        The header goes on as it came: what the stage marked in the segments, it marked in these bytes.
        """
        inputs = np.empty((0, seat.limits.hidden), np.float32) if frame.payload is None else frame.payload
        rows = self._compute(seat, frame, inputs)
        if seat.tail:
            records, alternatives = self._read_tokens(seat, frame, rows)
            self._count_failed(seat, records["status"], records["stage"])
            answer = Frame(_TOKENS, frame.epoch, frame.number, records=records, alternatives=alternatives)
            self._send(encode_header(answer), None)
        else:
            self._count_failed(seat, frame.segments["error"], frame.segments["stage"])
            self._send(header, rows)
        self.counters.frames_out += 1

    def _compute(self, seat: Seat, frame: Frame, inputs: Inputs) -> Rows:
        """The stage's rows; if it fails, zeros and every segment marked: the frame still goes round."""
        count = len(inputs)
        started = time.perf_counter_ns()
        try:
            rows = seat.stage.apply(frame.segments, frame.operations, inputs, self._on_layer)
            if rows.shape != (count, seat.limits.hidden) or rows.dtype != np.float32:
                raise TypeError(f"the stage returned {rows.dtype} {rows.shape} for {count} rows")
        except _AbandonFrame:
            raise
        except Exception as error:
            self._failed(seat, frame.segments, error)
            rows = np.zeros((count, seat.limits.hidden), np.float32)
        finally:
            self.counters.busy_ns += time.perf_counter_ns() - started
        self.counters.rows += count
        self.counters.progress += 1
        if rows.base is not None and self._buffer is not None and np.may_share_memory(rows, self._buffer):
            return rows.copy()
        return rows if rows.flags.c_contiguous else np.ascontiguousarray(rows)

    def _read_tokens(self, seat: Seat, frame: Frame, rows: Rows) -> tuple[Table, Table]:
        """The tail's records with their alternatives.

        If the head of the model fails, a record for every segment, with the error.
        """
        started = time.perf_counter_ns()
        try:
            return seat.stage.tokens(frame.segments, rows)
        except Exception as error:
            self._failed(seat, frame.segments, error)
            return _error_records(frame.segments), alternative_table()
        finally:
            self.counters.busy_ns += time.perf_counter_ns() - started
            self.counters.progress += 1

    def _failed(self, seat: Seat, segments: Table, error: Exception) -> None:
        """Mark the segments that have no error yet; log each kind of failure once."""
        self.counters.errors += 1
        fresh = segments["error"] == SegmentError.NONE
        segments["error"][fresh] = SegmentError.INTERNAL
        segments["stage"][fresh] = seat.index
        kind = f"{type(error).__name__}: {error}"[:200]
        if kind not in self._failures and len(self._failures) < 100:
            self._failures.add(kind)
            _log.error("stage_failed", message="a frame could not be computed", error=kind, exc_info=error)

    def _count_failed(self, seat: Seat, errors: npt.NDArray[Any], stages: npt.NDArray[Any]) -> None:
        """Count the segments that failed at this stage, and say so: what came before it may be lying."""
        if not errors.any():
            return
        for error, stage in zip(errors.tolist(), stages.tolist(), strict=True):
            if error and stage == seat.index:
                name = SegmentError(error).name.lower()
                self.counters.failed[name] += 1
                _log.warning(
                    "segment_refused",
                    message=f"stage {stage} can not compute what came for a stream: {name.replace('_', ' ')}",
                    reason=name,
                    stage=stage,
                )

    def _on_layer(self) -> None:
        self.counters.progress += 1
        if self._sender is not None:
            self._sender.look()
        self._heed()

    def _heed(self) -> None:
        """Abandon the frame at hand when a command ends its epoch."""
        if self._interrupts and any(concerns() for concerns in tuple(self._interrupts)):
            self.counters.waiting_send = False
            raise _AbandonFrame

    def _send(self, header: bytes | bytearray, payload: Rows | None) -> None:
        """Hand a frame to the successor's socket, however long that takes while the epoch lasts."""
        sender, counters = self._sender, self.counters
        if sender is None:
            return
        started = time.perf_counter_ns()
        if payload is not None and not len(payload):
            payload = None
        while not sender.send(header, payload):
            counters.waiting_send = True
            self._heed()
            sender.wait(SEND_WAIT_MS)
        counters.waiting_send = False
        counters.send_ns += time.perf_counter_ns() - started

    # --- commands, in the thread --------------------------------------------------------------------------

    def _take_interrupt(self, command: Callable[[], None]) -> None:
        self._interrupts.popleft()
        command()

    def _in(self, epoch: Epoch) -> bool:
        return self._seat is not None and self._seat.epoch == epoch

    def _outdated(self, epoch: Epoch) -> bool:
        return self._seat is not None and epoch < self._seat.epoch

    def _enter(self, seat: Seat) -> None:
        """Drop everything of older epochs and take the new place."""
        if self._outdated(seat.epoch):
            self._reports.switch_failed(seat.epoch, f"this node is in the newer epoch {self.counters.epoch}")
            return
        self._vacate()
        try:
            seat.stage.number = seat.index
            seat.stage.reset()
            if not seat.head and (self._buffer is None or self._buffer.nbytes != seat.limits.payload_bytes):
                self._buffer = empty_rows(seat.limits)
            if not seat.alone:
                self._sender = self._transport.connect(seat.successor)
        except Exception as error:
            _log.exception("switch_failed", message="the epoch can not be entered", epoch=str(seat.epoch))
            self._reports.switch_failed(seat.epoch, f"{type(error).__name__}: {error}")
            return
        self._seat = seat
        self.counters.enter(seat.epoch)
        self._reports.switched(seat.epoch)

    def _leave(self, epoch: Epoch) -> None:
        if self._in(epoch):
            self._vacate()

    def _vacate(self) -> None:
        """Be in no epoch, and hold none of its streams: this node may be a standby for a long time now."""
        if self._seat is not None:
            self._seat.stage.reset()
        self._seat = None
        self._open = self._broken = False
        self._started, self._expected = 0, 1
        self._left.clear()
        self.counters.enter(None)
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def _set_open(self, epoch: Epoch) -> None:
        if self._in(epoch):
            self._open = not self._broken

    def _send_probe(self, epoch: Epoch, number: int) -> None:
        seat = self._seat
        if seat is None or seat.epoch != epoch or not seat.head:
            return
        if seat.alone:
            self.counters.probe_seen = number
            self._reports.probe_returned(epoch, number)
        elif self._sender is not None:
            header = encode_header(Frame(FrameKind.PROBE, epoch, number))
            if not self._sender.send(header, None):
                self._sender.wait(PROBE_WAIT_MS)
                self._sender.send(header, None)

    def _call(self, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception:
            _log.exception("data_call_failed", message="a command in the data thread failed")

    def _run_after(self) -> None:
        while self._after:
            self._call(self._after.popleft())

    def _stop(self) -> None:
        self._stopping = True

    def _break_for(self, what: str, error: Exception) -> None:
        _log.error("scheduler_failed", message=what, exc_info=error)
        self._break(f"{what}: {error}")

    def _break(self, sentence: str) -> None:
        """Take no more frames of this epoch, and say why, once."""
        seat = self._seat
        if seat is None or self._broken:
            return
        self._broken, self._open = True, False
        _log.warning("hop_broken", message=sentence, epoch=str(seat.epoch), stage=seat.index)
        self._reports.hop_broken(seat.epoch, sentence)


def _error_records(segments: Table) -> Table:
    """A record with its error for every segment."""
    records = record_table(len(segments))
    for name in ("stream", "slot", "stage"):
        records[name] = segments[name]
    records["status"] = segments["error"]
    records["position"] = segments["start"] + segments["rows"]
    records["token"] = -1
    return records
