"""Cache of a receiver's vain searches: it asks again every millisecond, which must cost nearly nothing."""

from __future__ import annotations

from typing import NamedTuple

from vllm_omni_sched.connectors.arena import layout as at

LOOK_AGAIN = 0.05
"""Seconds after which a message is searched for again although its senders report nothing new."""
REMEMBERED = 4096
"""Most cached misses."""


class Miss(NamedTuple):
    """A message that was not found, and the counters of its senders at that time (`Index.news`)."""

    digest: int
    news: list[int]
    at: float


class Misses:
    """Caches misses by name. Times are real ones, whatever clock messages have."""

    def __init__(self) -> None:
        self._misses: dict[bytes, Miss] = {}

    def digest_of(self, name: bytes) -> int:
        """Return `layout.digest_of` of a name, from the cache if it is there."""
        miss = self._misses.get(name)
        return at.digest_of(name) if miss is None else miss.digest

    def stand(self, name: bytes, news: list[int], now: float) -> bool:
        """Return whether a search would find nothing again."""
        miss = self._misses.get(name)
        return miss is not None and miss.news == news and now - miss.at <= LOOK_AGAIN

    def note(self, name: bytes, miss: Miss | None) -> None:
        """Cache a miss; None removes it."""
        if miss is None or len(name) > at.LONG_NAME:
            self._misses.pop(name, None)
            return
        if len(self._misses) >= REMEMBERED:
            self._misses.clear()
        self._misses[name] = miss

    def __len__(self) -> int:
        return len(self._misses)
