"""Shows what choosing scales by squared error gains over the plain rules: `python scripts/quantise_gain.py`.

At the same bytes: 4-bit codes with an FP16 scale for 32 inputs, and 8-bit codes with a float32 scale an
output. The plain rules put the largest magnitude of a group at 7, or at -8, and that of an output at 127.
Weights are drawn, or those of a checkpoint or a model that `pull` knows: its own rounding counts as exact.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from cascadia_p2p.catalog import KNOWN, source_path
from cascadia_p2p.compiled.compiling import set_threads
from cascadia_p2p.errors import CascadiaError
from cascadia_p2p.matrices.encoding import GROUP, Encoding
from cascadia_p2p.matrices.packing import dense
from cascadia_p2p.matrices.quantise import encode, prepare
from cascadia_p2p.models.layout import TensorRole
from cascadia_p2p.shards.opening import open_source

F32 = npt.NDArray[np.float32]
Rule = Callable[[F32], F32]
"""From weights [outputs, inputs] to what is left of them."""

PIECE: Final = 2**20


@dataclass
class Sums:
    """Squares of weights and of what a rule takes from them."""

    error: float = 0.0
    energy: float = 0.0
    count: int = 0

    def add(self, values: F32, found: F32) -> None:
        """Take a matrix into account."""
        self.error += float(np.square(values - found, dtype=np.float64).sum())
        self.energy += float(np.square(values, dtype=np.float64).sum())
        self.count += values.size


@dataclass(frozen=True)
class Result:
    """One rule on one kind of weights.

    Args:
        weights: which.
        form: int4 or int8.
        rule: how scales are chosen.
        mse: mean squared error.
        relative_l2: root of squared error over energy.
        against_plain: squared error over that of the largest at 7, or at 127.
    """

    weights: str
    form: str
    rule: str
    mse: float
    relative_l2: float
    against_plain: float


def by_group(values: F32, low: int, high: int, symmetric: bool) -> F32:
    """A plain rule with FP16 scales."""
    missing = -values.shape[1] % GROUP
    groups = np.pad(values, ((0, 0), (0, missing))).reshape(len(values), -1, GROUP)
    extreme = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], -1)
    scales = (np.abs(extreme) / high if symmetric else extreme / low).astype(np.float16).astype(np.float32)
    codes = np.clip(np.rint(groups / np.where(scales == 0, np.float32(1), scales)), low, high)
    found: F32 = (codes * scales).reshape(len(values), -1)[:, : values.shape[1]]
    return found


def by_output(values: F32) -> F32:
    """The plain rule with a float32 scale an output."""
    scales = np.abs(values).max(1, keepdims=True) / np.float32(127)
    found: F32 = np.rint(values / np.where(scales == 0, np.float32(1), scales)) * scales
    return found


RULES: Final[dict[str, dict[str, Rule]]] = {
    "int4": {
        "largest at 7": lambda values: by_group(values, -8, 7, True),
        "largest at -8": lambda values: by_group(values, -8, 7, False),
        "least squared error": lambda values: dense(encode(Encoding.INT4, values)),
    },
    "int8": {
        "largest at 127": by_output,
        "least squared error": lambda values: dense(encode(Encoding.INT8, values)),
    },
}


def drawn(kind: str) -> Iterator[F32]:
    """Rows of true length, of one distribution."""
    rng = np.random.default_rng(0)
    for _ in range(4):
        values = rng.laplace(size=(256, 6144)) if kind == "laplace" else rng.standard_normal((256, 6144))
        if kind == "outliers":
            values[rng.random(values.shape) < 1e-3] *= 20
        yield (0.02 * values).astype(np.float32)


def of_checkpoint(name: str) -> Iterator[F32]:
    """The large matrices of a model, a piece at a time."""
    with open_source(source_path(name)) as source:
        for plan in source.model().layout.tensors():
            if plan.role in (TensorRole.SMALL, TensorRole.EMBEDDING):
                continue
            source.require([plan.source])
            shape = source.shape(plan.source)
            rows, inputs = int(np.prod(shape[:-1])), shape[-1]
            step = max(1, PIECE // inputs)
            for row in range(0, rows, step):
                count = min(step, rows - row)
                yield source.read(plan.source, row * inputs, count * inputs).reshape(count, inputs)


def measure(name: str, pieces: Iterator[F32]) -> list[Result]:
    """All rules on the same weights."""
    sums = {(form, rule): Sums() for form, rules in RULES.items() for rule in rules}
    for values in pieces:
        for (form, rule), each in sums.items():
            each.add(values, RULES[form][rule](values))
    plain = {form: sums[form, next(iter(rules))].error for form, rules in RULES.items()}
    found = []
    for (form, rule), each in sums.items():
        mse, relative = each.error / each.count, (each.error / each.energy) ** 0.5
        found.append(Result(name, form, rule, mse, relative, each.error / max(plain[form], 1e-300)))
    return found


def speed() -> dict[str, float]:
    """Millions of weights a second and thread, the best of five."""
    values = next(drawn("normal"))
    found: dict[str, float] = {}
    for encoding in (Encoding.INT4, Encoding.INT8, Encoding.INT8_GROUPED):
        times = []
        for _ in range(5):
            started = time.perf_counter()
            encode(encoding, values)
            times.append(time.perf_counter() - started)
        found[encoding.value] = round(values.size / min(times) / 1e6, 1)
    return found


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(description=__doc__)
    result.add_argument(
        "models", nargs="*", metavar="MODEL", help=f"checkpoints, or names as {', '.join(KNOWN)}"
    )
    result.add_argument("--json", action="store_true", help="print JSON")
    return result


def main() -> int:
    """Measure and print."""
    args = parser().parse_args()
    set_threads(1)
    prepare()
    try:
        results = [
            result for kind in ("normal", "laplace", "outliers") for result in measure(kind, drawn(kind))
        ]
        for model in args.models:
            results += measure(model, of_checkpoint(model))
    except CascadiaError as error:
        print(f"quantise_gain: {error}", file=sys.stderr)
        return error.exit_code
    rates = speed()
    if args.json:
        print(json.dumps({"results": [asdict(each) for each in results], "weights_per_us": rates}, indent=2))
        return 0
    print(f"{'weights':14} {'form':5} {'scales by':20} {'mse':>10} {'rel. L2':>8} {'to plain':>9}")
    for each in results:
        print(
            f"{each.weights:14} {each.form:5} {each.rule:20} {each.mse:10.3e} {each.relative_l2:8.5f} "
            f"{each.against_plain:9.3f}"
        )
    print(", ".join(f"{form}: {rate:.0f} million weights/s a thread" for form, rate in rates.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
