"""Explain the history of a request: what happened, in sentences, and for what it waited until its first token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

from vllm_omni_sched.core.engine.history import Transition
from vllm_omni_sched.core.engine.history_lines import HistoryLine
from vllm_omni_sched.graph.order import PlaceReason
from vllm_omni_sched.resource.engine.encode_rounds import HOLDS, RoundReason
from vllm_omni_sched.resource.engine.lane import WhereReason


class WaitCause(str, Enum):
    """What a request waits for; the value is how a sentence says it."""

    QUEUE = "in the queue, for its turn and for room in the engine"
    LANE = "for items that are encoded in the lane"
    ROUNDS = "for items or a first token that rounds hold back"
    PREEMPTED = "in the queue after it lost its KV memory"
    COMPUTING = "while its prompt was computed"


PLACEMENTS: Mapping[str, str] = {
    WhereReason.NO_DECODE.value: "in the step, because that holds up no other request",
    WhereReason.TOO_LONG.value: "in the lane, because a request that arrives meanwhile would be held up, or because "
    "the lane is quicker",
    WhereReason.WOULD_NOT_BE_NOTICED.value: "in the step, because the step then still ends within the target of the "
    "requests that decode",
    WhereReason.WOULD_STALL_DECODE.value: "in the lane, because in the step it would delay requests that decode",
}
PLACES: Mapping[str, str] = {
    PlaceReason.HOLDS_MEMORY.value: "because its computed tokens hold KV memory",
    PlaceReason.AGED.value: "because it had waited for max_wait_seconds",
    PlaceReason.REALTIME.value: "because its class goes first",
    PlaceReason.PRIORITY.value: "because of the priority that its client set",
    PlaceReason.DEADLINE.value: "because its deadline was the next one to be missed",
    PlaceReason.ARRIVAL.value: "because it came first of those without a deadline",
    PlaceReason.LATE.value: "although it could not meet its deadline any more: no request that could was before it",
    PlaceReason.AFFINITY.value: "because it shares items with the request before it",
}
ROUNDS: Mapping[str, str] = {
    RoundReason.NOBODY_DECODES.value: "Its next item was encoded, because no request decoded that would be late.",
    RoundReason.BROKEN_BEFORE.value: "Its next item was encoded: all requests that decode had missed a target before.",
    RoundReason.FITS.value: "Its next item was encoded, because the step still ended within the targets of the others.",
    RoundReason.GOODPUT.value: "Its next item was encoded, because more requests would have missed their target by "
    "waiting than were delayed.",
    RoundReason.AGED.value: "Its next item was encoded, because it had been held back for max_wait_seconds.",
    RoundReason.HELD.value: "Its next item was held back, because tokens of requests that decode would have been late.",
    RoundReason.FIRST_TOKEN_DUE.value: "Its next item was held back, because another prompt was due first.",
    RoundReason.DRAINS.value: "Its first token was held back, because others wait until no request decodes.",
}
_HELD_BY_ROUNDS = frozenset(reason.value for reason in HOLDS)


def sentence_of(entry: HistoryLine) -> str:
    """Return what a line of the history says, as a sentence."""
    detail = entry.detail
    try:
        transition = Transition(entry.transition)
    except ValueError:  # of a later version
        return f"{entry.transition} {detail}".strip() + "."
    if transition is Transition.ROUND:
        return ROUNDS.get(detail, f"Rounds decided about its next item: {detail}.")
    return {
        Transition.ENTERED: f"It entered, as a request of the class {detail}.",
        Transition.TAKEN: f"It was taken from the queue, {PLACES.get(detail, detail)}.",
        Transition.STARTED: f"It started: its first tokens were scheduled{_cached(detail)}.",
        Transition.PREEMPTED: "It lost its KV memory to other requests, and waited again.",
        Transition.RESUMED: "It was scheduled again.",
        Transition.FIRST_TOKEN: "It got its first token.",
        Transition.PLACED: f"Its next items are encoded {PLACEMENTS.get(detail, detail)}.",
        Transition.HELD: f"It was held back: it waits {detail} of the lane.",
        Transition.ENCODED: f"The lane had encoded item {detail}.",
        Transition.LOADED: f"The encoding of item {detail} went into the encoder cache.",
        Transition.FAILED: f"Item {detail} could not be encoded, so that the request fails.",
        Transition.LEFT: f"It left{f' ({detail})' if detail else ''}.",
    }[transition]


def _cached(tokens: str) -> str:
    return "" if tokens in ("", "0") else f"; {tokens} of them were in the prefix cache"


def waits_of(entries: Sequence[HistoryLine]) -> dict[WaitCause, float]:
    """Return for how many seconds a request waited for what, until its first token, the longest first.

    1. From its entry on it waits in the queue, and from its start on for its own computation.
    2. While it is held for items of the lane, it waits for these, until all of them are encoded.
    3. While rounds hold its item or its first token back, it waits for them, until they decide otherwise.
    4. After it was preempted, it waits until it is scheduled again.
    5. Without a first token, its wait ends with its last line.
    """
    waits: dict[WaitCause, float] = {}
    cause, started, missing, since = WaitCause.QUEUE, False, 0, entries[0].at if entries else 0.0
    for entry in entries:
        waits[cause] = waits.get(cause, 0.0) + max(entry.at - since, 0.0)
        since = entry.at
        usual = WaitCause.COMPUTING if started else WaitCause.QUEUE
        match entry.transition:
            case Transition.FIRST_TOKEN.value:
                break
            case Transition.STARTED.value | Transition.RESUMED.value:
                started, cause = True, WaitCause.COMPUTING
            case Transition.PREEMPTED.value:
                started, cause = False, WaitCause.PREEMPTED
            case Transition.HELD.value:
                missing, cause = _number_in(entry.detail), WaitCause.LANE
            case Transition.ENCODED.value if cause is WaitCause.LANE:
                missing -= 1
                cause = usual if missing <= 0 else cause
            case Transition.ROUND.value:
                cause = WaitCause.ROUNDS if entry.detail in _HELD_BY_ROUNDS else usual
    longest = sorted(waits.items(), key=lambda one: -one[1])
    return {cause: seconds for cause, seconds in longest if seconds > 0}


def _number_in(detail: str) -> int:
    """Return the number of items in the detail of `Transition.HELD`."""
    return next((int(word) for word in detail.split() if word.isdecimal()), 1)


def summary_of(entries: Sequence[HistoryLine]) -> str:
    """Return how long a request waited for its first token, and for what."""
    waits = waits_of(entries)
    kinds = {entry.transition for entry in entries}
    total = sum(waits.values())
    parts = ", ".join(f"{seconds:.3f} s {cause.value}" for cause, seconds in waits.items())
    if Transition.FIRST_TOKEN.value in kinds:
        said = f"It waited {total:.3f} s for its first token"
    elif Transition.LEFT.value in kinds:
        said = f"It left without a token, after {total:.3f} s"
    else:
        said = f"It has no token yet, {total:.3f} s after it entered"
    lost = "" if Transition.ENTERED.value in kinds else " Its first lines are no longer in the file."
    return f"{said}{f': {parts}' if parts else ''}.{lost}"
