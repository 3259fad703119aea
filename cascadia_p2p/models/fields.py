"""Values of a model's config, each checked as it is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from cascadia_p2p.errors import CheckpointError

LARGEST: Final = 2**31 - 1
MOST_LAYERS: Final = 4096


class Fields:
    """The values of one config object.

    Args:
        values: as decoded from JSON or from GGUF metadata; null counts as absent.
        where: what messages call the object.
        prefix: put in front of every name that is asked for.

    Every method raises CheckpointError for a value that it can not accept.
    """

    def __init__(self, values: Mapping[str, object], where: str = "config.json", prefix: str = "") -> None:
        self._values = values
        self._where = where
        self._prefix = prefix

    def has(self, name: str) -> bool:
        """Whether there is such a key, be its value null."""
        return self._prefix + name in self._values

    def value(self, name: str) -> object:
        """Whatever stands there; None when absent."""
        return self._values.get(self._prefix + name)

    def wrong(self, name: str, expected: str) -> CheckpointError:
        """The error for a value, naming it and what was expected."""
        return CheckpointError(
            f"{self._where} has {self._prefix}{name} = {self.value(name)!r}: expected {expected}"
        )

    def optional_integer(self, name: str, *, most: int = LARGEST) -> int | None:
        """A whole number from 1 on."""
        value = self.value(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise self.wrong(name, f"a whole number, 1 to {most}")
        return value

    def integer(self, name: str, default: int | None = None, *, most: int = LARGEST) -> int:
        """A whole number from 1 on, which has to be there when there is no default."""
        value = self.optional_integer(name, most=most)
        if value is None and default is None:
            raise CheckpointError(
                f"{self._where} has no {self._prefix}{name}: expected a whole number, 1 to {most}"
            )
        return value if value is not None else default or 0

    def number(self, name: str, default: float) -> float:
        """Any finite number."""
        value = self.value(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < float("inf"):
            raise self.wrong(name, "a number")
        return float(value)

    def positive(self, name: str, default: float) -> float:
        """A finite number above 0."""
        value = self.number(name, default)
        if value <= 0:
            raise CheckpointError(
                f"{self._where} has {self._prefix}{name} = {value!r}: expected a number above 0"
            )
        return value

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.value(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def words(self, name: str, length: int, allowed: Sequence[str]) -> list[str] | None:
        """A list of one of some words for every layer, or None when the key is absent."""
        value = self.value(name)
        if value is None:
            return None
        full = f"{self._where} has {self._prefix}{name}"
        if not isinstance(value, list) or len(value) != length:
            has = f"{len(value)} entries" if isinstance(value, list) else repr(value)
            raise CheckpointError(f"{full} with {has}: expected one for each of the {length} layers")
        for layer, word in enumerate(value):
            if not isinstance(word, str) or word not in allowed:
                choice = " or ".join(repr(each) for each in allowed)
                raise CheckpointError(f"{full}[{layer}] = {word!r}: expected {choice}")
        return list(value)

    def mapping(self, name: str) -> Fields | None:
        """An object within, or None when absent."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.wrong(name, "an object")
        return Fields(value, f"{self._where}, in {self._prefix}{name},")

    def ids(self, name: str) -> tuple[int, ...]:
        """Token ids: one, a list, or none."""
        value = self.value(name)
        if value is None:
            return ()
        found = value if isinstance(value, list | tuple) else [value]
        for number in found:
            if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= LARGEST:
                raise self.wrong(name, "a whole number, 0 or above, or a list of such")
        return tuple(found)
