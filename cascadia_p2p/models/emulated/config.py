"""What an emulated model is: how long each stage takes for a frame, and nothing that could be computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cascadia_p2p.models.fields import MOST_LAYERS, Fields

FAMILY = "emulated"

_LONGEST_S = 600.0


@dataclass(frozen=True, slots=True)
class EmulatedConfig:
    """Times of the stages of a fleet; each layer stands for all layers of one machine.

    No checkpoint has this model type: only `bench --emulate` writes a manifest with it.

    Args:
        hidden: numbers a row, at least 4.
        vocab: token ids that exist.
        context: positions a stream.
        frame_s: of each layer, the seconds that it takes for a frame of 1, 2, 3, ... rows; all equally many.
        head_s: seconds of choosing 1, 2, 3, ... tokens at the end, as many.
        link_s: of each layer, the seconds from its end to the next one's start for 1, 2, 3, ... rows,
            as many. The last one's are the way of tokens back to the first.
    """

    hidden: int
    vocab: int
    context: int
    frame_s: tuple[tuple[float, ...], ...]
    head_s: tuple[float, ...]
    link_s: tuple[tuple[float, ...], ...]

    @property
    def layers(self) -> int:
        """One a machine."""
        return len(self.frame_s)

    @property
    def rows(self) -> int:
        """Most rows of a frame whose time is known."""
        return len(self.head_s)

    @property
    def vocab_valid(self) -> int:
        """Token ids that exist: all."""
        return self.vocab

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """None: answers end by length."""
        return ()

    def to_json(self) -> dict[str, object]:
        """Every value, for `from_export` to give an equal config back."""
        return {
            "hidden_size": self.hidden,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.context,
            "frame_s": [list(times) for times in self.frame_s],
            "head_s": list(self.head_s),
            "link_s": [list(times) for times in self.link_s],
        }

    @classmethod
    def from_export(cls, values: Mapping[str, object]) -> EmulatedConfig:
        """What `to_json` gave.

        Raises:
            CheckpointError: a value is missing or impossible.
        """
        fields = Fields(values, "the manifest's config")
        head = _times(fields, "head_s", fields.value("head_s"), None)
        frames = _lists(fields, "frame_s", len(head))
        links = _lists(fields, "link_s", len(head))
        if len(links) != len(frames):
            raise fields.wrong("link_s", f"{len(frames)} lists of times, as many as frame_s has")
        config = cls(
            hidden=fields.integer("hidden_size"),
            vocab=fields.integer("vocab_size"),
            context=fields.integer("max_position_embeddings"),
            frame_s=frames,
            head_s=head,
            link_s=links,
        )
        if config.hidden < 4:
            raise fields.wrong("hidden_size", "at least 4")
        return config


def _lists(fields: Fields, name: str, count: int) -> tuple[tuple[float, ...], ...]:
    """Seconds for 1, 2, 3, ... rows of every layer."""
    value = fields.value(name)
    if not isinstance(value, list) or not 1 <= len(value) <= MOST_LAYERS:
        raise fields.wrong(name, f"1 to {MOST_LAYERS} lists of times")
    return tuple(_times(fields, name, each, count) for each in value)


def _times(fields: Fields, name: str, value: object, count: int | None) -> tuple[float, ...]:
    """Seconds for 1, 2, 3, ... rows."""
    right = isinstance(value, list) and value and (count is None or len(value) == count)
    if not right or not isinstance(value, list) or not all(_is_time(each) for each in value):
        raise fields.wrong(name, f"{count or 'one or more'} times, 0 to {_LONGEST_S:g} s each")
    return tuple(float(each) for each in value)


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _LONGEST_S
