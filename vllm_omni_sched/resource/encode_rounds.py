"""When items are encoded in the step, so that whoever decodes gets its tokens in time."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from vllm_omni_sched.errors import ConfigError


class RoundReason(str, Enum):
    """Why an item is encoded in this step or held back, or a first token is."""

    NOBODY_DECODES = "nobody_decodes"  # encoded: nobody's tokens would come late
    BROKEN_BEFORE = "broken_before"  # encoded: all who decode have had a gap above their promise before
    FITS = "fits"  # encoded: with the rest of the step it ends within the least promise
    GOODPUT = "goodput"  # encoded: more requests would miss their TTFT by waiting than are held up
    AGED = "aged"  # encoded: held for `max_wait_seconds`
    HELD = "held"  # held: tokens of somebody who decodes would come late
    FIRST_TOKEN_DUE = "first_token_due"  # held: a prompt of this round would miss its TTFT
    DRAINS = "drains"  # a first token waits: who decodes from here on would keep others from being encoded


HOLDS = frozenset({RoundReason.HELD, RoundReason.FIRST_TOKEN_DUE, RoundReason.DRAINS})
"""Reasons of what is not done in this step."""


@dataclass(frozen=True, slots=True)
class PromptWork:
    """A request whose prompt is to be computed, or is being.

    ``encode_seconds``: predicted, of the items that its next chunk needs and nobody has encoded; 0: none.
    ``prefill_seconds``: predicted, of what is left of its prompt. ``deadline``: when its first token is due, by the
    clock of ``now``; ``inf`` for no promise. ``runs``: it has been let in. ``reached``: the tokens of this step suffice
    to come to it.

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
    """What a step's choice depends on.

    ``unharmed``: requests that decode and have had all their tokens in time; ``broken``: those that have not.
    ``itl_seconds``: the least promise of those who decode, ``inf`` for none. ``prompts``: in the order in which they
    get tokens. ``token_budget``: prompt tokens that the step may have. ``base_seconds``, ``token_seconds``: predicted,
    of a step that only decodes, and of a prompt token.

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
    """Encodes in rounds: several requests' items while nobody decodes, then all of them decode together.

    1. While nobody decodes whose promise could still be broken, a round is open: items are encoded, as many as the
       deadlines of the prompts in the round allow. One item at least, if nothing else goes on.
    2. Requests whose promise was broken before are held up again only after as long a time as the last encode took,
       so they have half of the time at least.
    3. While others decode, an item is encoded if it fits into the least ITL promise, beside ``min_tokens`` of prompts.
    4. Otherwise it is held, until those who decode are done; prompts that are encoded go on, but for their last
       token: a first token waits while its deadline allows, as who gets it would decode and prolong the hold.
    5. A round opens nevertheless when more requests would miss their TTFT by waiting than decode unharmed.
    6. An item that was held for ``max_wait_seconds`` is encoded.

    What has not been timed costs 0, and is encoded at once, as vLLM does it. State: since when each request is held,
    and the mean length of answers; both bounded by the requests that are here.

    Args:
        max_wait_seconds: of rule 6.
        min_tokens: prompt tokens that a step keeps beside an encode of rule 3.

    Raises:
        ConfigError: an argument is not above 0.
    """

    _PROMISE_USED = 0.9  # of the least promise, by rule 3: predictions are not exact
    _LENGTH_WEIGHT = 0.05  # of the last answer in their mean length

    def __init__(self, max_wait_seconds: float = 30.0, min_tokens: int = 64) -> None:
        if not max_wait_seconds > 0:
            raise ConfigError(f"max_wait_seconds must be above 0, got {max_wait_seconds}")
        if min_tokens < 1:
            raise ConfigError(f"min_tokens must be 1 or more, got {min_tokens}")
        self.max_wait_seconds = max_wait_seconds
        self.min_tokens = min_tokens
        self.mean_tokens = 0.0
        self._held: dict[str, float] = {}  # key -> since when
        self._rest_until = -math.inf

    def step(self, snapshot: RoundSnapshot, now: float) -> "RoundStep":
        """The choices of one step."""
        return RoundStep(self, snapshot, now)

    def ended(self, key: str, tokens: int) -> None:
        """A request is over, with so many tokens made; 0 for one that was taken back."""
        self._held.pop(key, None)
        if tokens:
            weight = self._LENGTH_WEIGHT if self.mean_tokens else 1.0
            self.mean_tokens += weight * (tokens - self.mean_tokens)

    def forget(self) -> None:
        """All requests are gone at once."""
        self._held.clear()
        self._rest_until = -math.inf

    @property
    def num_held(self) -> int:
        """Requests that are held now."""
        return len(self._held)

    def drain_seconds(self, snapshot: RoundSnapshot) -> float:
        """Expected time until those who decode unharmed are done, if answers have no memory of their length."""
        if not snapshot.unharmed:
            return 0.0
        last = math.log(snapshot.unharmed) + 0.577 + 0.5 / snapshot.unharmed  # the harmonic number
        return self.mean_tokens * snapshot.base_seconds * last


class RoundStep:
    """The choices of one step; what is chosen uses up what the next choice may use.

    ``opened``: why a round is open, None while it is not. ``prompt_tokens``: most prompt tokens of the step, which
    leave an item of rule 3 its time. ``gathers``: items are encoded for an open round, so each request
    needs a piece of the step's tokens; ``joining``: of those requests, how many are let in for it.
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
        # an item that never fits would be held for as long as others join those who decode
        self._drains = self.opened is None and any(one.encode_seconds > most for one in waiting)
        fits = next((one.encode_seconds for one in waiting if one.reached and one.encode_seconds <= most), None)
        self.prompt_tokens = snapshot.token_budget
        if self.opened is None and fits is not None and room - fits < snapshot.token_budget * snapshot.token_seconds:
            self.prompt_tokens = max(int((room - fits) / snapshot.token_seconds), 1)
        self._room = room - self.prompt_tokens * snapshot.token_seconds
        if fits is not None:
            self._room = max(self._room, fits)  # which rounding may have taken a little of
        self._granted: set[str] = set()  # by rule 6
        self.gathers, self.joining = self._joining(waiting)

    def _room_of(self, members: Iterable[PromptWork]) -> tuple[float, float]:
        """Seconds until the last of these prompts is computed, and by which all may be later; late ones may."""
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
        """Whether `encode` would hold it; nothing is decided by asking."""
        return self._reason(key, seconds) in HOLDS

    def encode(self, key: str, seconds: float, prefill_seconds: float, deadline: float) -> RoundReason:
        """Whether the next item of a request is encoded in this step, which takes so many seconds."""
        policy, reason = self._policy, self._reason(key, seconds)
        if reason in HOLDS:
            policy._held.setdefault(key, self._now)
            return reason
        if reason is RoundReason.AGED:
            self._granted.add(key)  # all of its items
            self.opened = self.opened or reason  # the harm is done
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
        """Whether a prompt stops before its last token (rule 4), for the reason `RoundReason.DRAINS`."""
        slack = deadline - self._now - prefill_seconds
        return self._drains and self.opened is None and slack > self._encode_seconds + self._left_seconds
