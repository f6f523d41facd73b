"""Track encodes that run ahead of their prefill: each content is encoded once for all its requests."""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import NamedTuple

LEAST_PIECE = 64
"""Least number of tokens in front of a missing item that is worth a step."""


class EncodeState(Enum):
    """State of the encoding of one content."""

    QUEUED = "queued"  # no worker has been sent it yet
    ENCODING = "encoding"
    READY = "ready"  # a worker holds it, outside of the encoder cache


@dataclass
class _Encode:
    num_embeds: int
    state: EncodeState = EncodeState.QUEUED
    ticket: int = 0
    wanted_by: set[str] = field(default_factory=set)


class Orders(NamedTuple):
    """Orders to the workers in one step.

    Attributes:
        submit: contents to encode, in order: mm_hash, and the ticket that the answer must carry.
        forget: contents (mm_hash) that no request needs any more, encoded or not.
        load: encoded contents (mm_hash) that go into the encoder cache now.
    """

    submit: tuple[tuple[str, int], ...] = ()
    forget: tuple[str, ...] = ()
    load: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.submit or self.forget or self.load)


_NO_ORDERS = Orders()


class AheadLedger:
    """Tracks which requests need which encoding, and the state of each encoding.

    1. A content is encoded once for all requests that need it at the same time.
    2. At most ``max_embeds`` embeddings are being encoded or held ready, and at most ``max_encoding``
       contents are being encoded; others queue. If none is being encoded, one is submitted whatever its size,
       because all ready contents may be waiting for it.
       With ``max_active_embeds``, whatever else, those that are encoded at a time have no more embeddings. That are
       all contents that are being encoded, except for the smallest one where there are ``max_encoding``, which waits.
       Contents that were asked for since the last orders go first, in that order; then the ones queued longest.
       With ``submit_only``, these contents alone are submitted, in their order.
    3. When a request ends, contents that only it needed are dropped.
    4. An encoding leaves this ledger when it is loaded into the encoder cache.
    5. Answers may be late: the answer to an attempt that was given up is ignored.
    6. `drop_attempts` gives up all attempts, and all that is ready.

    Args:
        max_embeds: bound on the embeddings outside of the encoder cache.
        max_encoding: number of contents sent to workers at a time; later ones cannot overtake these.
    """

    def __init__(self, max_embeds: int, max_encoding: int = 2) -> None:
        self.max_embeds = max_embeds
        self.max_encoding = max_encoding
        self.max_active_embeds: int | None = None
        self.submit_only: Sequence[str] | None = None
        self.num_embeds = 0  # being encoded, or ready
        self._encoding: dict[str, int] = {}  # embeddings of what is being encoded
        self._encodes: dict[str, _Encode] = {}
        self._wants: dict[str, set[str]] = {}  # request id -> mm_hashes
        self._queue: OrderedDict[str, None] = OrderedDict()
        self._wanted: dict[str, None] = {}  # contents of the queue that were asked for since the last orders
        self._asked: dict[str, None] = {}  # those before that, when any were
        self._forget: list[str] = []
        self._load: list[str] = []
        self._tickets = 0

    def __len__(self) -> int:
        return len(self._encodes)

    @property
    def num_pending(self) -> int:
        """The number of contents that are not ready."""
        return len(self._queue) + len(self._encoding)

    def contents(self) -> Collection[str]:
        """Return all contents in this ledger."""
        return self._encodes.keys()

    @property
    def has_orders(self) -> bool:
        """Return whether workers must still be told to forget or to load a content."""
        return bool(self._forget or self._load)

    def state(self, mm_hash: str) -> EncodeState | None:
        """Return the state of this content; None if it is not in the ledger."""
        encode = self._encodes.get(mm_hash)
        return None if encode is None else encode.state

    def want(self, request_id: str, mm_hash: str, num_embeds: int) -> EncodeState:
        """Record that ``request_id`` needs this encoding; return its state."""
        encode = self._encodes.get(mm_hash)
        if encode is None:
            encode = self._encodes[mm_hash] = _Encode(num_embeds)
            self._queue[mm_hash] = None
        if encode.state is EncodeState.QUEUED:
            self._wanted[mm_hash] = None
        encode.wanted_by.add(request_id)
        self._wants.setdefault(request_id, set()).add(mm_hash)
        return encode.state

    def waits(self, request_id: str) -> bool:
        """Return whether a request needs an encoding that is not ready."""
        return any(self._encodes[one].state is not EncodeState.READY for one in self._wants.get(request_id, ()))

    def ready(self, mm_hash: str, ticket: int) -> set[str]:
        """Record that a worker has encoded this content; return the requests that need it."""
        encode = self._encodes.get(mm_hash)
        if encode is None or encode.ticket != ticket:
            return set()
        encode.state = EncodeState.READY
        del self._encoding[mm_hash]
        return encode.wanted_by

    def attempt_again(self) -> tuple[tuple[str, int], ...]:
        """Give up what is being encoded, and return it as mm_hash and new ticket, to be encoded once more."""
        again = []
        for mm_hash, encode in self._encodes.items():
            if encode.state is EncodeState.ENCODING:
                self._tickets += 1
                encode.ticket = self._tickets
                again.append((mm_hash, encode.ticket))
        return tuple(again)

    def drop_attempts(self) -> None:
        """Drop what is being encoded and what is ready; requests that still need it ask for it again."""
        for mm_hash in [mm_hash for mm_hash, one in self._encodes.items() if one.state is not EncodeState.QUEUED]:
            self._drop(mm_hash)
        self._forget, self._load = [], []

    def failed(self, mm_hash: str, ticket: int) -> Collection[str]:
        """Drop a content that cannot be encoded; return the requests that needed it."""
        encode = self._encodes.get(mm_hash)
        if encode is None or encode.ticket != ticket:
            return ()
        self._drop(mm_hash)
        return encode.wanted_by

    def load(self, mm_hash: str) -> bool:
        """Order the load of a content for which the encoder cache has made room; False if it is not ready here."""
        encode = self._encodes.get(mm_hash)
        if encode is None or encode.state is not EncodeState.READY:
            return False
        self._drop(mm_hash)
        self._load.append(mm_hash)
        return True

    def release(self, request_id: str) -> None:
        """Drop a request that has ended, or needs nothing more."""
        for mm_hash in sorted(self._wants.pop(request_id, ())):
            encode = self._encodes[mm_hash]
            encode.wanted_by.discard(request_id)
            if not encode.wanted_by:
                if encode.state is not EncodeState.QUEUED:
                    self._forget.append(mm_hash)
                self._drop(mm_hash)

    def _drop(self, mm_hash: str) -> None:
        encode = self._encodes.pop(mm_hash)
        self._queue.pop(mm_hash, None)
        self._encoding.pop(mm_hash, None)
        if encode.state is not EncodeState.QUEUED:
            self.num_embeds -= encode.num_embeds
        for request_id in encode.wanted_by:
            wants = self._wants.get(request_id)
            if wants is not None:
                wants.discard(mm_hash)
                if not wants:
                    del self._wants[request_id]

    def take_orders(self) -> Orders:
        """Return the orders that have accumulated since the last call."""
        submit = []
        for mm_hash in self._next() if len(self._encoding) < self.max_encoding else ():
            encode = self._encodes[mm_hash]
            full = self.num_embeds + encode.num_embeds > self.max_embeds
            if self._encoding and (full or len(self._encoding) >= self.max_encoding):
                break
            bound = self.max_active_embeds
            if bound is not None and self.active_embeds(encode.num_embeds) > bound:
                break
            del self._queue[mm_hash]
            self._encoding[mm_hash] = encode.num_embeds
            self._tickets += 1
            encode.state, encode.ticket = EncodeState.ENCODING, self._tickets
            self.num_embeds += encode.num_embeds
            submit.append((mm_hash, encode.ticket))
        if self._wanted:
            self._asked, self._wanted = self._wanted, {}
        if not submit and not self.has_orders:
            return _NO_ORDERS
        orders = Orders(tuple(submit), tuple(self._forget), tuple(self._load))
        self._forget, self._load = [], []
        return orders

    def active_embeds(self, *more: int) -> int:
        """Return the embeddings that are encoded at a time, with further contents of these sizes."""
        sizes = sorted([*self._encoding.values(), *more])
        return sum(sizes[-max(self.max_encoding - 1, 1) :])

    def encoding(self) -> Collection[str]:
        """Return the contents that were sent to workers and are not ready."""
        return self._encoding.keys()

    def queued(self) -> Iterator[tuple[str, int]]:
        """Yield the contents that no worker was sent yet, with their embeddings, in the order of rule 2.

        Between two steps, those that requests asked for in the last one go first.
        """
        seen: set[str] = set()
        for mm_hash in chain(self._wanted, self._asked, self._queue):
            if mm_hash in self._queue and mm_hash not in seen:
                seen.add(mm_hash)
                yield mm_hash, self._encodes[mm_hash].num_embeds

    def _next(self) -> Iterator[str]:
        """Yield the contents to submit, in the order of rule 2; each must leave the queue before the next is taken."""
        for mm_hash in self._wanted if self.submit_only is None else self.submit_only:
            if mm_hash in self._queue:
                yield mm_hash
        while self._queue and self.submit_only is None:
            yield next(iter(self._queue))

    def validate(self) -> None:
        """Check the invariants of this ledger; for tests and debugging.

        Raises:
            AssertionError: names the invariant that is broken.
        """
        held = sum(e.num_embeds for e in self._encodes.values() if e.state is not EncodeState.QUEUED)
        assert held == self.num_embeds, f"{self.num_embeds} embeddings counted, {held} held"
        encoding = {h: e.num_embeds for h, e in self._encodes.items() if e.state is EncodeState.ENCODING}
        assert encoding == self._encoding, f"{self._encoding} counted, {encoding} being encoded"
        assert set(self._queue) == {h for h, e in self._encodes.items() if e.state is EncodeState.QUEUED}
        wants: dict[str, set[str]] = {}
        for mm_hash, encode in self._encodes.items():
            assert encode.wanted_by, f"no request needs {mm_hash}"
            for request_id in encode.wanted_by:
                wants.setdefault(request_id, set()).add(mm_hash)
        assert wants == self._wants, "requests and contents disagree on which request needs which content"
