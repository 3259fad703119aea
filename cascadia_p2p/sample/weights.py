"""The numbers of a sample model, the same on every machine and with every version of numpy."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from cascadia_p2p.models.inkling.config import AttentionShape, InklingConfig
from cascadia_p2p.sample.recipe import CLASSES, Recipe

Array = npt.NDArray[np.float32]

_CLASS_AMPLITUDE = 2.5
"""Size of a class column in the embedding, where the other columns are uniform in [-1, 1)."""


def tensors(recipe: Recipe, seed: int) -> Iterator[tuple[str, Array]]:
    """All tensors of a sample model under their canonical names, float32, in the order of the model.

    The sizes of the numbers are chosen so that every part shows in the logits, the residual stays
    within a small factor of its start, and no two experts are ever nearly tied: which experts a row
    takes follows from its token's class, with a margin that float32 noise can not cross, while the
    experts' weights follow from the whole row.
    """
    return _Maker(recipe, seed).tensors()


class _Maker:
    """Draws tensors; each has its own stream of random bits, found by its name."""

    def __init__(self, recipe: Recipe, seed: int) -> None:
        self.recipe = recipe
        self.config: InklingConfig = recipe.config()
        self.seed = seed
        # Mean square that one attention or MLP adds to the residual, which starts with 1.
        self.step = 1.0 / recipe.layers

    def tensors(self) -> Iterator[tuple[str, Array]]:
        c = self.config
        yield "embed.weight", self._embedding()
        yield "embed.norm", self._norm("embed.norm", c.hidden)
        for index in range(c.layers):
            yield from self._attention(index)
            if c.sparse[index]:
                yield from self._experts(index)
            else:
                yield from self._dense(index)
        yield "final_norm", self._norm("final_norm", c.hidden)
        yield "head.weight", self._head()

    def _bits(self, name: str, count: int) -> npt.NDArray[np.uint64]:
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        return np.random.PCG64(int.from_bytes(digest[:8], "little")).random_raw(count)

    def _uniform(self, name: str, shape: tuple[int, ...], scale: float, offset: float = 0.0) -> Array:
        """Uniform in `offset` +- `scale`: 24 random bits a number, each step exact or rounded once."""
        bits = self._bits(name, math.prod(shape)) >> np.uint64(40)
        values = (bits.astype(np.int64) - 2**23).astype(np.float32) * np.float32(2.0**-23)
        return (values * np.float32(scale) + np.float32(offset)).reshape(shape)

    def _spread(self, name: str, shape: tuple[int, ...], deviation: float) -> Array:
        return self._uniform(name, shape, deviation * math.sqrt(3.0))

    def _norm(self, name: str, width: int, middle: float = 1.0) -> Array:
        return self._uniform(name, (width,), 0.25 * middle, middle)

    def _matrix(self, name: str, rows: int, columns: int, gain: float = 1.0) -> Array:
        """Rows that turn columns of variance one into numbers of deviation `gain`."""
        return self._spread(name, (rows, columns), gain / math.sqrt(columns))

    def _closed(self, matrix: Array) -> Array:
        """The same without the rows that would write to the class columns."""
        matrix[..., :CLASSES, :] = 0.0
        return matrix

    def _embedding(self) -> Array:
        c = self.config
        table = self._uniform("embed.weight", (c.vocab, c.hidden), 1.0)
        classes = (self._bits("classes", c.vocab) % np.uint64(CLASSES)).astype(np.int64)
        table[:, :CLASSES] = 0.0
        table[np.arange(c.vocab), classes] = _CLASS_AMPLITUDE
        return table

    def _head(self) -> Array:
        """Printable bytes win most, so that text can be read; padding would win over all if it were let."""
        c = self.config
        head = self._matrix("head.weight", c.vocab, c.hidden, 3.0 * c.mup_divisor)
        loudness = np.full((c.vocab, 1), 0.5, np.float32)
        loudness[32:127] = 1.0
        loudness[c.vocab_valid :] = 4.0
        if not c.eos_ids:
            # The id that the config class falls back to must turn up, to show that nothing stops there.
            loudness[2] = 1.0
        return head * loudness

    def _attention(self, index: int) -> Iterator[tuple[str, Array]]:
        c, at = self.config, f"layers.{index}."
        shape: AttentionShape = c.attention[index]
        out_gain = 1.6 * math.sqrt(self.step)
        yield f"{at}attn_norm", self._norm(f"{at}attn_norm", c.hidden)
        for part, width in (
            ("q", shape.q_width),
            ("k", shape.kv_width),
            ("v", shape.kv_width),
            ("r", shape.r_width),
        ):
            yield f"{at}{part}", self._matrix(f"{at}{part}", width, c.hidden)
        yield f"{at}o", self._closed(self._matrix(f"{at}o", c.hidden, shape.q_width, out_gain))
        for part in ("q_norm", "k_norm"):
            yield f"{at}{part}", self._norm(f"{at}{part}", shape.head_dim, 2.0)
        for part, width in (
            ("k_conv", shape.kv_width),
            ("v_conv", shape.kv_width),
            ("attn_conv", c.hidden),
            ("mlp_conv", c.hidden),
        ):
            yield f"{at}{part}", self._uniform(f"{at}{part}", (width, c.conv_kernel), 0.5)
        yield f"{at}rel_proj", self._uniform(f"{at}rel_proj", (shape.d_rel, shape.extent), 1.0)
        yield f"{at}mlp_norm", self._norm(f"{at}mlp_norm", c.hidden)

    def _dense(self, index: int) -> Iterator[tuple[str, Array]]:
        c, at = self.config, f"layers.{index}."
        for part in ("gate", "up"):
            yield f"{at}{part}", self._matrix(f"{at}{part}", c.dense_width, c.hidden)
        down = self._matrix(f"{at}down", c.hidden, c.dense_width, 1.3 * math.sqrt(self.step))
        yield f"{at}down", self._closed(down)
        yield f"{at}global_scale", self._uniform(f"{at}global_scale", (1,), 0.25, 1.25)

    def _experts(self, index: int) -> Iterator[tuple[str, Array]]:
        c, at = self.config, f"layers.{index}."
        yield from self._router(index)
        scale = self._uniform(f"{at}global_scale", (1,), 0.125, 0.75)
        yield f"{at}global_scale", scale
        # The weights of `taken` experts add up to route_scale x about 0.75.
        taken = c.experts_per_token + c.shared_experts
        gain = 1.3 * math.sqrt(self.step) * math.sqrt(taken) / (c.route_scale * 0.75)
        for group, count in (("experts", c.experts), ("shared", c.shared_experts)):
            shape = (count, c.expert_width, c.hidden)
            for part in ("gate", "up"):
                name = f"{at}{group}.{part}"
                yield name, self._spread(name, shape, 1.0 / math.sqrt(c.hidden))
            name, shape = f"{at}{group}.down", (count, c.hidden, c.expert_width)
            yield name, self._closed(self._spread(name, shape, gain / math.sqrt(c.expert_width)))

    def _router(self, index: int) -> Iterator[tuple[str, Array]]:
        """Rows under which a class's experts lead by about 0.3 in sigmoid plus bias, biases included."""
        c, at = self.config, f"layers.{index}."
        bias = self._uniform(f"{at}router_bias", (c.experts,), 0.15)
        # Each class takes the experts with the highest draws.
        draws = self._bits(f"{at}chosen", c.experts * CLASSES).reshape(c.experts, CLASSES)
        taken = np.argsort(np.argsort(draws, axis=0), axis=0) >= c.experts - c.experts_per_token
        goal = np.where(taken, np.float32(0.66), np.float32(0.34)).astype(np.float64)
        goal += self._uniform(f"{at}goal", goal.shape, 0.04)
        score = np.clip(goal - bias[:, None], 0.05, 0.95)
        logits = np.concatenate(
            [np.log(score / (1.0 - score)), self._uniform(f"{at}sink", (c.shared_experts, CLASSES), 1.0)]
        )
        router = self._spread(
            f"{at}router", (c.experts + c.shared_experts, c.hidden), 0.12 / math.sqrt(c.hidden)
        )
        router[:, :CLASSES] = _to_float32(logits / self._class_size(index))
        yield f"{at}router", router
        yield f"{at}router_bias", bias

    def _class_size(self, index: int) -> float:
        """About the size that a row's class column has after the norm in front of this layer's router."""
        c = self.config
        others = (c.hidden - CLASSES) / 3.0
        start = _CLASS_AMPLITUDE / math.sqrt((others + _CLASS_AMPLITUDE**2) / c.hidden)
        return start / math.sqrt(1.0 + self.step * (2 * index + 1))


def _to_float32(values: npt.NDArray[np.float64]) -> Array:
    """Rounded to 10 bits, so that the last digit of a platform's logarithm can not show."""
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.rint(mantissa * 1024.0) / 1024.0, exponent).astype(np.float32)
