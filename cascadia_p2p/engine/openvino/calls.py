"""From the arguments of a layer's call to the inputs of its compiled model."""

from __future__ import annotations

import numpy as np

from cascadia_p2p.engine.matrix import F32, I32
from cascadia_p2p.engine.openvino.guards import Rows, power_above
from cascadia_p2p.engine.openvino.runner import Runner


class PlainProjections:
    """Products of the same rows."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def __call__(self, x: F32) -> tuple[Rows, ...]:
        return self._runner((x,))


class PlainMlp:
    """A dense layer as it is, its result times `scale`.

    The factor stands outside of the model: inside, plugins fold it into weights and decompress them for it.
    """

    factor = 1.0
    """What the result is still to be multiplied by."""

    def __init__(self, runner: Runner, scale: float = 1.0) -> None:
        self._runner, self._scale = runner, np.float32(scale)

    def __call__(self, x: F32) -> Rows:
        results = self._runner((x,))[0]
        if self._scale != 1.0:
            results *= self._scale
        return results


class PlainExperts:
    """Routed experts by ids, shared ones as a plain MLP beside them."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def __call__(self, x: F32, ids: I32, weights: F32, shared: F32) -> Rows:
        return self._runner((x, ids, weights, shared))[0]


class StackedExperts:
    """Shared experts behind the routed ones in one stack, as ids that every row has.

    Args:
        runner: of a model with inputs x, ids and weights.
        routed: routed experts.
        chosen: of which each row has so many.
        shared: shared experts.
        rows: most rows a call.
    """

    def __init__(self, runner: Runner, routed: int, chosen: int, shared: int, rows: int) -> None:
        self._runner, self._chosen = runner, chosen
        self._ids = np.zeros((rows, chosen + shared), np.int32)
        self._ids[:, chosen:] = np.arange(routed, routed + shared)
        self._weights = np.zeros((rows, chosen + shared), np.float32)

    def __call__(self, x: F32, ids: I32, weights: F32, shared: F32) -> Rows:
        rows, chosen = len(x), self._chosen
        self._ids[:rows, :chosen] = ids
        self._weights[:rows, :chosen] = weights
        self._weights[:rows, chosen:] = shared
        return self._runner((x, self._ids[:rows], self._weights[:rows]))[0]


class SlicedMlp:
    """A dense layer as experts that every row passes; the result is the layer's divided by `factor`.

    Args:
        runner: of a model with inputs x, ids and weights.
        slices: how many there are.
        rows: most rows a call.
    """

    def __init__(self, runner: Runner, slices: int, rows: int) -> None:
        self._runner = runner
        # No partial sum in FP16 is larger than the largest of the slices.
        self.factor = float(power_above(np.array(slices, np.float32)))
        self._ids = np.tile(np.arange(slices, dtype=np.int32), (rows, 1))
        self._weights = np.full((rows, slices), 1.0 / self.factor, np.float32)

    def __call__(self, x: F32) -> Rows:
        rows = len(x)
        return self._runner((x, self._ids[:rows], self._weights[:rows]))[0]
