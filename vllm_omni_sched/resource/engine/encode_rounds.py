"""Decide when items are encoded, so that decoding requests get their tokens in time."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class RoundReason(str, Enum):
    """Reason why an item is encoded in this step or held back, or a first token is held back."""

    NOBODY_DECODES = "nobody_decodes"  # encoded: no request decodes whose tokens would come late
    BROKEN_BEFORE = "broken_before"  # encoded: every decoding request has exceeded its ITL promise before
    FITS = "fits"  # encoded: the whole step ends within the shortest ITL promise
    GOODPUT = "goodput"  # encoded: more requests would miss their TTFT by waiting than are delayed
    AGED = "aged"  # encoded: held for `max_wait_seconds`
    HELD = "held"  # held: a decoding request's tokens would come late
    FIRST_TOKEN_DUE = "first_token_due"  # held: a prompt of this round would miss its TTFT
    DRAINS = "drains"  # a first token waits: its request would start to decode and keep others from being encoded


HOLDS = frozenset({RoundReason.HELD, RoundReason.FIRST_TOKEN_DUE, RoundReason.DRAINS})
"""Reasons of work that is held back in this step."""


@dataclass(frozen=True, slots=True)
class PromptWork:
    """A request whose prompt waits or is being computed.

    ``encode_seconds``: predicted time of the items that its next chunk needs and that are not encoded yet; 0: none.
    ``prefill_seconds``: predicted time of the rest of its prompt. ``deadline``: when its first token is due, by the
    clock of ``now``; ``inf`` for no promise. ``runs``: it was admitted. ``reached``: the tokens of this step suffice
    to reach it.

    Raises:
        ValueError: a number of seconds is negative or not finite, or the deadline is not a number.
    """

    key: str
    encode_seconds: float
    prefill_seconds: float
    deadline: float
    runs: bool = False
    reached: bool = True

    def __post_init__(self) -> None:
        for name in ("encode_seconds", "prefill_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"request {self.key!r}: {name} must be finite and >= 0, got {getattr(self, name)}")
        if math.isnan(self.deadline):
            raise ValueError(f"request {self.key!r}: deadline must be a number")


@dataclass(frozen=True, slots=True)
class RoundSnapshot:
    """Input for the choices of one step.

    ``unharmed``: decoding requests that got all their tokens in time; ``broken``: those that did not.
    ``itl_seconds``: the shortest ITL promise of decoding requests, ``inf`` for none. ``prompts``: in the order in
    which they get tokens. ``token_budget``: prompt tokens that the step may have. ``base_seconds``, ``token_seconds``:
    predicted time of a step that only decodes, and of one prompt token.

    Raises:
        ValueError: a number is negative.
    """

    unharmed: int
    broken: int
    itl_seconds: float
    prompts: tuple[PromptWork, ...]
    token_budget: int
    base_seconds: float = 0.0
    token_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("unharmed", "broken", "itl_seconds", "token_budget", "base_seconds", "token_seconds"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")


class EncodeRounds:
    """Encodes in rounds: items of several requests while none decodes, then all of these requests decode together.

    1. While no request decodes whose promise could still be kept, a round is open: items are encoded, as many as the
       deadlines of the prompts in the round allow, and at least one if nothing else runs.
    2. Requests whose promise was broken before are delayed again only after a pause as long as the last encode,
       so they run for at least half of the time.
    3. While others decode, an item is encoded if it fits into the shortest ITL promise beside ``min_tokens`` tokens.
    4. Otherwise it is held until the decoding requests are finished. Encoded prompts go on except for their last
       token: a first token waits while its deadline allows, because its request would then decode and prolong the hold.
    5. A round opens nevertheless when more requests would miss their TTFT by waiting than unharmed requests decode.
    6. An item that was held for ``max_wait_seconds`` is encoded.

    Work whose time is not known yet counts 0 seconds and is encoded at once, as in vLLM. State: since when each request
    is held, and the mean length of answers; both are bounded by the number of requests present.

    Args:
        max_wait_seconds: longest hold of rule 6.
        min_tokens: prompt tokens that a step keeps beside an encode of rule 3.
    """

    _PROMISE_USED = 0.9  # fraction of the shortest promise that rule 3 uses: predictions are not exact
    _LENGTH_WEIGHT = 0.05  # weight of the last answer in the mean length

    def __init__(self, max_wait_seconds: float = 30.0, min_tokens: int = 64) -> None:
        self.max_wait_seconds = max_wait_seconds
        self.min_tokens = min_tokens
        self.mean_tokens = 0.0
        self._held: dict[str, float] = {}  # key -> since when
        self._rest_until = -math.inf

    def step(self, snapshot: RoundSnapshot, now: float) -> "RoundStep":
        """Return the object that makes the choices of one step."""
        return RoundStep(self, snapshot, now)

    def ended(self, key: str, tokens: int) -> None:
        """Forget a request that ended with so many tokens; 0 for one that was withdrawn."""
        self._held.pop(key, None)
        if tokens:
            weight = self._LENGTH_WEIGHT if self.mean_tokens else 1.0
            self.mean_tokens += weight * (tokens - self.mean_tokens)

    def forget(self) -> None:
        """Forget all requests, for example after a reset."""
        self._held.clear()
        self._rest_until = -math.inf

    @property
    def num_held(self) -> int:
        """Return the number of held requests."""
        return len(self._held)

    def drain_seconds(self, snapshot: RoundSnapshot) -> float:
        """Return the expected time until all unharmed requests stop decoding, if answer lengths are memoryless."""
        if not snapshot.unharmed:
            return 0.0
        last = math.log(snapshot.unharmed) + 0.577 + 0.5 / snapshot.unharmed  # the harmonic number
        return self.mean_tokens * snapshot.base_seconds * last


class RoundStep:
    """The choices of one step; each choice uses up resources of the next ones.

    ``opened``: why a round is open, None if none is. ``prompt_tokens``: most prompt tokens of the step, which
    leave an item of rule 3 its time. ``gathers``: items are encoded for an open round, so each request
    needs some of the step's tokens; ``joining``: how many of those requests are admitted for it.
    """

    __slots__ = (
        "_alone",
        "_drains",
        "_encode_seconds",
        "_encodes",
        "_granted",
        "_left_seconds",
        "_now",
        "_policy",
        "_room",
        "_spare",
        "gathers",
        "joining",
        "opened",
        "prompt_tokens",
    )

    def __init__(self, policy: EncodeRounds, snapshot: RoundSnapshot, now: float) -> None:
        self._policy, self._now = policy, now
        self._encodes = 0.0  # of this step
        waiting = [one for one in snapshot.prompts if one.encode_seconds]
        members = [one for one in snapshot.prompts if one.runs and not one.encode_seconds]
        self._encode_seconds = sum(one.encode_seconds for one in waiting)
        self._alone = not members
        self._left_seconds, self._spare = self._room_of(members)
        self.opened = self._open(snapshot, waiting)
        room = policy._PROMISE_USED * snapshot.itl_seconds - snapshot.base_seconds
        most = room - min(policy.min_tokens, snapshot.token_budget) * snapshot.token_seconds
        # an item that never fits would be held for as long as new requests start to decode
        self._drains = self.opened is None and any(one.encode_seconds > most for one in waiting)
        fits = next((one.encode_seconds for one in waiting if one.reached and one.encode_seconds <= most), None)
        self.prompt_tokens = snapshot.token_budget
        if self.opened is None and fits is not None and room - fits < snapshot.token_budget * snapshot.token_seconds:
            self.prompt_tokens = max(int((room - fits) / snapshot.token_seconds), 1)
        self._room = room - self.prompt_tokens * snapshot.token_seconds
        if fits is not None:
            self._room = max(self._room, fits)  # rounding may have made the room slightly smaller
        self._granted: set[str] = set()  # by rule 6
        self.gathers, self.joining = self._joining(waiting)

    def _room_of(self, members: Iterable[PromptWork]) -> tuple[float, float]:
        """Return the seconds until the last of these prompts is computed, and their least slack, late ones excluded."""
        left, spare = 0.0, math.inf
        for one in members:
            left += one.prefill_seconds
            slack = one.deadline - self._now - left
            if slack >= 0:
                spare = min(spare, slack)
        return left, spare

    def _open(self, snapshot: RoundSnapshot, waiting: list[PromptWork]) -> RoundReason | None:
        if not snapshot.unharmed:
            if not snapshot.broken:
                return RoundReason.NOBODY_DECODES
            return RoundReason.BROKEN_BEFORE if self._now >= self._policy._rest_until else None
        drain = self._policy.drain_seconds(snapshot)
        misses, due, at = 0, False, self._now
        for one in waiting:
            at += one.encode_seconds + one.prefill_seconds
            slack = one.deadline - at
            if 0 <= slack < drain:
                misses += 1
            due = due or 0 <= slack <= snapshot.itl_seconds
        return RoundReason.GOODPUT if due and misses > snapshot.unharmed else None

    def _joining(self, waiting: list[PromptWork]) -> tuple[bool, int]:
        gathers, count = False, 0
        if self.opened is None:
            return gathers, count
        spare, left, alone = self._spare, self._left_seconds, self._alone
        for one in waiting:
            if one.encode_seconds > spare and not alone:
                break
            gathers, alone = True, False
            count += not one.runs
            left += one.encode_seconds + one.prefill_seconds
            slack = one.deadline - self._now - left
            spare = min(spare - one.encode_seconds, slack if slack >= 0 else math.inf)
        return gathers, count

    def _reason(self, key: str, seconds: float) -> RoundReason:
        if self.opened is not None:
            due = seconds > self._spare and not self._alone
            reason = RoundReason.FIRST_TOKEN_DUE if due else self.opened
        else:
            reason = RoundReason.FITS if seconds <= self._room or not seconds else RoundReason.HELD
        if reason in HOLDS:
            since = self._policy._held.get(key, self._now)
            if key in self._granted or self._now - since >= self._policy.max_wait_seconds:
                return RoundReason.AGED
        return reason

    def holds(self, key: str, seconds: float) -> bool:
        """Return whether `encode` would hold the item; the state does not change."""
        return self._reason(key, seconds) in HOLDS

    def encode(self, key: str, seconds: float, prefill_seconds: float, deadline: float) -> RoundReason:
        """Decide whether the request's next item, which takes so many seconds, is encoded in this step."""
        policy, reason = self._policy, self._reason(key, seconds)
        if reason in HOLDS:
            policy._held.setdefault(key, self._now)
            return reason
        if reason is RoundReason.AGED:
            self._granted.add(key)  # rule 6 covers all of its items
            self.opened = self.opened or reason  # the delay has happened anyway
        policy._held.pop(key, None)
        self._take(seconds, prefill_seconds, deadline)
        if reason is RoundReason.BROKEN_BEFORE:
            policy._rest_until = self._now + 2 * self._encodes
        return reason

    def _take(self, seconds: float, prefill_seconds: float, deadline: float) -> None:
        self._room -= seconds
        self._encodes += seconds
        self._spare -= seconds
        self._alone = False
        self._left_seconds += seconds + prefill_seconds
        slack = deadline - self._now - self._left_seconds
        if slack >= 0:
            self._spare = min(self._spare, slack)

    def first_token_waits(self, prefill_seconds: float, deadline: float) -> bool:
        """Return whether a prompt stops before its last token (rule 4, `RoundReason.DRAINS`)."""
        slack = deadline - self._now - prefill_seconds
        return self._drains and self.opened is None and slack > self._encode_seconds + self._left_seconds
