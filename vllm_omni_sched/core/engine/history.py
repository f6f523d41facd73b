"""Keep the last transitions of a core, so that the story of one request can be told."""

from collections import deque
from enum import Enum
from typing import NamedTuple


class Transition(Enum):
    """A kind of event in the life of a request."""

    ENTERED = "entered"  # detail: its class
    TAKEN = "taken"  # from the waiting queue; detail: the reason for its place there
    STARTED = "started"  # its first tokens are scheduled; detail: how many tokens were in the prefix cache
    PREEMPTED = "preempted"  # it lost its KV memory, and waits again
    RESUMED = "resumed"  # it is scheduled again after that
    FIRST_TOKEN = "first_token"
    PLACED = "placed"  # its next items are encoded in the step or in the lane; detail: the reason
    HELD = "held"  # it waits for items; detail: how many
    ENCODED = "encoded"  # an item that it waits for is ready in the lane; detail: the item
    LOADED = "loaded"  # an encoding of the lane goes into the encoder cache; detail: the item
    FAILED = "failed"  # an item cannot be encoded; detail: the item
    ROUND = "round"  # rounds decided about its next item or its first token; detail: the reason
    LEFT = "left"  # detail: how it ended, if known


DECISIONS = frozenset(
    one.value
    for one in (
        Transition.TAKEN,
        Transition.PREEMPTED,
        Transition.PLACED,
        Transition.HELD,
        Transition.FAILED,
        Transition.ROUND,
    )
)
"""Transitions that the engine decides, by their values; the others follow from them."""


class Entry(NamedTuple):
    """One transition; ``request_id`` is empty for one that concerns an item alone."""

    now: float
    transition: Transition
    request_id: str
    detail: str


class History:
    """Keeps the last ``size`` transitions, oldest first."""

    def __init__(self, size: int) -> None:
        self.entries: deque[Entry] = deque(maxlen=size)

    def add(self, now: float, transition: Transition, request_id: str, detail: str = "") -> None:
        """Add a transition."""
        self.entries.append(Entry(now, transition, request_id, detail))

    def story(self, request_id: str) -> str:
        """Return the transitions of one request, a line each."""
        return "\n".join(
            f"{one.now:.6f} {one.transition.value} {one.detail}".rstrip()
            for one in self.entries
            if one.request_id == request_id
        )
