"""What a GPU may take of this PC's memory, and whether a model stays within it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from cascadia_p2p.engine.memory import in_words
from cascadia_p2p.engine.openvino.device import DeviceKind, DeviceRules, core
from cascadia_p2p.errors import CapacityError, CascadiaError

_PAGES_LIMIT: Final = Path("/sys/module/ttm/parameters/pages_limit")
_PAGE: Final = 4096
_MOST_GROWTH: Final = 1.6
"""How much more than its weights a model may take before they must have been decompressed."""
_GROWTH_SLACK: Final = 96 * 2**20


def device_asker(device: str) -> Callable[[str], Any]:
    """Asks a device for properties; None for those that it does not know."""

    def ask(name: str) -> Any:
        try:
            return core().get_property(device, name)
        except RuntimeError:
            return None

    return ask


def pages_limit(path: Path = _PAGES_LIMIT) -> int | None:
    """Bytes that Linux lets graphics drivers take, if it says so."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return int(text) * _PAGE if text.isdigit() and int(text) > 0 else None


class DeviceMemory:
    """The budget of one GPU.

    Args:
        rules: of the device.
        ask: for its properties.
        cap: bytes that the system lets it take; None where that is not known.
    """

    def __init__(self, rules: DeviceRules, ask: Callable[[str], Any], cap: int | None) -> None:
        self._device, self._piece = rules.device, rules.largest_constant
        self._ask = ask
        total = ask("GPU_DEVICE_TOTAL_MEM_SIZE")
        limits = [int(limit) for limit in (total, cap) if limit]
        self.limit = min(limits) if limits else None
        largest = ask("GPU_DEVICE_MAX_ALLOC_MEM_SIZE")
        if largest and self._piece is not None:
            self._piece = min(self._piece, int(largest))

    @classmethod
    def of(cls, rules: DeviceRules) -> DeviceMemory | None:
        """That of the rules' device; None where it has no memory limits of its own."""
        if rules.kind is not DeviceKind.GPU:
            return None
        return cls(rules, device_asker(rules.device), pages_limit())

    def used(self) -> int:
        """Bytes that the plugin holds now."""
        held = self._ask("GPU_MEMORY_STATISTICS")
        return sum(int(count) for count in held.values()) if isinstance(held, Mapping) else 0

    def require(self, constants: list[int], name: str) -> None:
        """Refuse weights that do not fit, before they are compiled.

        Args:
            constants: bytes of each.
            name: of the layer.

        Raises:
            CapacityError: one of them is too large for one allocation, or all together for the device.
        """
        largest = max(constants, default=0)
        if self._piece is not None and largest > self._piece:
            raise CapacityError(
                f"{name}: {self._device} takes {in_words(self._piece)} in one piece and this matrix has "
                f"{in_words(largest)}: export it in an encoding with fewer bits, or use --device CPU"
            )
        used = self.used()
        if self.limit is not None and used + sum(constants) > self.limit:
            raise CapacityError(
                f"{name}: its weights of {in_words(sum(constants))} do not fit beside the "
                f"{in_words(used)} that are on {self._device}, which may take {in_words(self.limit)}: raise "
                "that limit ('cascadia-p2p doctor' says how), or export the model into more shards"
            )

    def require_growth(self, before: int, constants: int, name: str) -> None:
        """Refuse a model that took much more than its weights.

        Args:
            before: `used` before it was compiled.
            constants: bytes of its weights.
            name: of the layer.

        Raises:
            CascadiaError: it did.
        """
        grown = self.used() - before
        if grown > _MOST_GROWTH * constants + _GROWTH_SLACK:
            raise CascadiaError(
                f"{name}: its weights of {in_words(constants)} take {in_words(grown)} on {self._device}, so "
                "they were decompressed: use an OpenVINO version and driver that this release was tested with"
            )
