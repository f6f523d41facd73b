"""What a sender remembers of its messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_omni_sched.connectors.base import Edge


class Sent(NamedTuple):
    """A message on its way."""

    slot: int
    edge: Edge
    key: str
    name: bytes
    pool: int
    offset: int
    nbytes: int
    put_at: float
    done: Callable[[], None] | None


@dataclass
class OutboxCounts:
    """What has become of messages."""

    put: int = 0
    put_bytes: int = 0
    inline: int = 0
    consumed: int = 0
    replaced: int = 0
    discarded: int = 0  # with those that were got, and given back by receivers that died
    expired: int = 0
    given_back: int = 0  # by receivers that died
    refused: int = 0
    damaged: int = 0  # in the index, by somebody else
    waiting: Counter[Edge] = field(default_factory=Counter)  # messages that nobody has got, as far as is known
    waiting_bytes: Counter[Edge] = field(default_factory=Counter)
