"""Stop strings: text is held back exactly as long as it may still become one, and a stop is never shown."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopStrings"]


class StopStrings:
    """Cuts one stream's text at the first stop string that is complete.

    What is shown does not depend on how the text was cut into pieces: everything before the stop that is
    completed first (the longest of those that are completed by the same character), or the whole text.

    Args:
        stops: strings of at least one character; none means that all text is shown at once.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._patterns = [_Pattern(stop) for stop in stops]
        self._held = ""
        self.met: str | None = None
        """The stop string that ended the text."""
        self.rest = ""
        """What came behind it in the same piece."""

    def add(self, text: str) -> str:
        """The text that can be shown now; nothing once a stop was met."""
        if not self._patterns:
            return text
        if self.met is not None:
            return ""
        for place, char in enumerate(text, 1):
            complete = [pattern.text for pattern in self._patterns if pattern.step(char)]
            if complete:
                self.met = max(complete, key=len)
                self.rest = text[place:]
                # Every proper beginning of a stop was held, so all of it is in these two.
                return (self._held + text[:place]).removesuffix(self.met)
        text = self._held + text
        shown = len(text) - max(pattern.matched for pattern in self._patterns)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """The text that was held back, at the end of the stream; nothing when a stop was met."""
        held, self._held = self._held, ""
        return "" if self.met is not None else held


class _Pattern:
    """Follows one stop string through the text, a character at a time (Knuth, Morris and Pratt 1977)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        """Characters at the end of the text that are the beginning of the stop string: the most there are."""
        self._shorter = _shorter_beginnings(text)

    def step(self, char: str) -> bool:
        """Take the next character; whether it completes the stop string."""
        matched = self.matched
        while matched and self.text[matched] != char:
            matched = self._shorter[matched - 1]
        self.matched = matched + (self.text[matched] == char)
        return self.matched == len(self.text)


def _shorter_beginnings(text: str) -> list[int]:
    """For each beginning of `text` the length of its longest proper end that is a beginning as well."""
    result = [0]
    for char in text[1:]:
        length = result[-1]
        while length and text[length] != char:
            length = result[length - 1]
        result.append(length + (text[length] == char))
    return result
