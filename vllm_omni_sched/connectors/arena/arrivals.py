"""Messages of an edge that may be in an arena, for receivers that wait for many."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

from vllm_omni_sched.connectors.arena.wake import WakeWords, word_of
from vllm_omni_sched.connectors.arrivals import Arrivals
from vllm_omni_sched.connectors.edge import Edge, name_of

if TYPE_CHECKING:
    from vllm_omni_sched.connectors.arena.transport import ArenaTransport


class ArenaArrivals(Arrivals):
    """Arrivals of one edge, from the counters and indexes of all senders; sleeps on the word of the edge.

    Args:
        sleep: used instead of the word once the transport is closed, so that receivers do not spin.
    """

    def __init__(self, transport: ArenaTransport, edge: Edge, words: WakeWords, sleep: Callable[[float], None]) -> None:
        self._transport, self._edge, self._words, self._sleep = transport, edge, words, sleep
        self._word = word_of(edge)

    def ticket(self) -> Hashable:
        value = self._words.value(self._word)  # before the counters: what is shown later changes it later
        return value, self._transport.shown()

    def may_be_there(self, keys: Sequence[str], since: Hashable = None) -> list[bool]:
        shown = since[1] if isinstance(since, tuple) else None
        return self._transport.may_be_there([name_of(self._edge, key) for key in keys], shown)

    def wait(self, ticket: Hashable, seconds: float) -> None:
        assert isinstance(ticket, tuple)
        value, shown = ticket
        if shown is None:
            self._sleep(seconds)
        else:
            self._words.wait(self._word, value, seconds)

    def wake(self) -> None:
        self._words.wake(self._word)
