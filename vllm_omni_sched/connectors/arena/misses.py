"""What a receiver has looked for in vain: it asks again every millisecond, and that must cost nearly nothing."""

from __future__ import annotations

from typing import NamedTuple

from vllm_omni_sched.connectors.arena import layout as at

LOOK_AGAIN = 0.05
"""Seconds until a message is looked for again whose senders say that there is nothing new."""
REMEMBERED = 4096
"""Messages."""


class Miss(NamedTuple):
    """A message that was not there, and what its senders said then (`Index.news`)."""

    digest: int
    news: list[int]
    at: float


class Misses:
    """By name. Times are real ones, whatever clock messages have."""

    def __init__(self) -> None:
        self._misses: dict[bytes, Miss] = {}

    def digest_of(self, name: bytes) -> int:
        """As of `layout`, remembered."""
        miss = self._misses.get(name)
        return at.digest_of(name) if miss is None else miss.digest

    def stand(self, name: bytes, news: list[int], now: float) -> bool:
        """Whether a look would find nothing again."""
        miss = self._misses.get(name)
        return miss is not None and miss.news == news and now - miss.at <= LOOK_AGAIN

    def note(self, name: bytes, miss: Miss | None) -> None:
        """Remember a look in vain; None forgets it."""
        if miss is None or len(name) > at.LONG_NAME:
            self._misses.pop(name, None)
            return
        if len(self._misses) >= REMEMBERED:
            self._misses.clear()
        self._misses[name] = miss

    def __len__(self) -> int:
        return len(self._misses)
