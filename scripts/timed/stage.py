"""A child that times our engine: one node's stage with a whole model in it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from cascadia_p2p.compiled import compiling
from cascadia_p2p.engine.kernels.instructions import instructions
from cascadia_p2p.engine.load import load_stage
from cascadia_p2p.types import Promise
from cascadia_p2p.wire.frames import OperationKind, SegmentFlag, operation_table, segment_table
from timed.serving import serve

PROMISE = Promise(slots=8, context=1024, rows=64)


class Stage:
    """An exported model of one shard.

    Args:
        model: directory of the export.
        precision: of activations.
        threads: of the kernels.
    """

    def __init__(self, model: Path, precision: str, threads: int) -> None:
        self._stage = load_stage(model, 0, PROMISE, threads=threads, precision=precision)
        self._precision = precision
        self._at = 0

    @property
    def vocab(self) -> int:
        """Valid ids."""
        return self._stage.model.vocab

    def about(self) -> dict[str, object]:
        """How it computes."""
        return {
            "precision": self._precision,
            "threads": compiling.threads(),
            "instructions": str(instructions()),
        }

    def prefill(self, ids: np.ndarray) -> None:
        """Start every stream anew, and feed its prompt in windows of as many rows as a frame has."""
        streams, length = ids.shape
        operations = operation_table(streams)
        operations["kind"] = OperationKind.START
        operations["slot"] = operations["stream"] = np.arange(streams)
        self._stage.apply(segment_table(), operations, np.empty(0, np.int32), _nothing)
        for stream in range(streams):
            for at in range(0, length, PROMISE.rows):
                part = ids[stream, at : at + PROMISE.rows]
                self._frame(part, np.array([stream]), at, want=at + len(part) == length)
        self._at = length

    def decode(self, ids: np.ndarray) -> None:
        """One frame with a row of every stream."""
        self._frame(ids, np.arange(len(ids)), self._at, want=True)
        self._at += 1

    def parts(self) -> dict[str, float]:
        """Seconds by part of the work."""
        return {str(part): seconds for part, seconds in self._stage.times().seconds.items()}

    def _frame(self, ids: np.ndarray, streams: np.ndarray, start: int, want: bool) -> None:
        segments = segment_table(len(streams))
        segments["slot"] = segments["stream"] = streams
        segments["start"], segments["rows"] = start, len(ids) // len(streams)
        segments["flags"] = SegmentFlag.WANT_TOKEN if want else 0
        rows = self._stage.apply(segments, operation_table(), ids.astype(np.int32), _nothing)
        records = self._stage.tokens(segments, rows)
        if segments["error"].any() or (want and records["status"].any()):
            raise SystemExit("the stage failed, and times mean nothing")


def _nothing() -> None:
    pass


def main() -> int:
    """Load, warm up and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--precision", default="fine")
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    stage = Stage(args.model, args.precision, args.threads)
    return serve(stage, stage.vocab)


if __name__ == "__main__":
    sys.exit(main())
