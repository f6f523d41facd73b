"""Decide how much of the KV cache an engine lends to encodes, and when it is taken back."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from vllm_omni_sched.config.errors import ConfigError


class LendingReason(str, Enum):
    """Reason for the size of a loan; the simulator counts each as ``kv_loans_REASON``."""

    NOT_NEEDED = "not_needed"  # nothing is lent: all encodes fit into the memory that is set aside for them
    LENT = "lent"  # for waiting encodes
    IN_USE = "in_use"  # kept: encodes under way use it
    HELD = "held"  # kept: the next large encode may come soon
    RETURNED = "returned"  # taken back: no encode has used it for long
    RECALLED = "recalled"  # taken back: requests need the blocks
    NEEDED_BY_REQUESTS = "needed_by_requests"  # not lent: running requests will need the blocks
    REQUESTS_FIRST = "requests_first"  # not lent for now: a request waits for blocks
    SAVING = "saving"  # lent in parts: the encode has waited for long, so no new request is admitted meanwhile
    TOO_LARGE = "too_large"  # not lent: the encode needs more than may be lent


WHY_NOT = (
    "vLLM makes the KV cache in one allocation, and on a device other than a CPU the memory behind single blocks "
    "cannot be given to activations"
)
"""Why an engine on an accelerator cannot lend, for all supported versions of vLLM."""


class LendingEngine(NamedTuple):
    """Facts that decide whether a real engine may lend.

    ``device``: its type. ``workers``: ranks of its tensor parallelism; ``stages``: of its pipeline, or groups of its
    context parallelism. ``runner_v2``: whether it has vLLM's model runner V2. ``kv_connector``: name of the KV
    connector, "" without one. ``takes_embeddings``: whether clients may send embeddings instead of items;
    ``shared_items``: whether processed items are in shared memory: no lane encodes either. ``bytes_per_embed``: of an
    encode's activations, 0 if the operator has not set it. ``kv_groups``: groups of layers that share the KV blocks;
    ``block_bytes``: memory of a block that can be given back, None before the KV cache is known.
    """

    device: str
    encode_ahead: bool
    workers: int = 1
    stages: int = 1
    runner_v2: bool = False
    kv_connector: str = ""
    takes_embeddings: bool = False
    shared_items: bool = False
    bytes_per_embed: float = 0.0
    kv_groups: int = 1
    block_bytes: int | None = None


def refuse_lending(most: float, engine: LendingEngine) -> None:
    """Refuse ``kv_lending`` for a real engine that cannot lend.

    Raises:
        ConfigError: something is to be lent, and the engine cannot.
    """
    why_not, what = None, "set it to 0"
    if not most:
        return
    if engine.device != "cpu":
        why_not = f"it has the device {engine.device!r}: {WHY_NOT}"
    elif not engine.encode_ahead:
        why_not, what = "only the lane of encode-ahead borrows blocks", "set 'encode_ahead' to true, or it to 0"
    elif not engine.bytes_per_embed:
        why_not = "the memory of an encode is not known"
        what = "set 'expert.encode_bytes_per_embed' to the bytes of activations for each embedding, or it to 0"
    elif engine.stages > 1:
        why_not = "of several pipeline stages or context-parallel groups, only the first has the encoder"
        what = "set --pipeline-parallel-size and --prefill-context-parallel-size to 1, or it to 0"
    elif engine.workers > 1:
        why_not = f"each of {engine.workers} workers would have to give back the memory that the lanes of all need"
        what = "set --tensor-parallel-size to 1, or it to 0"
    elif engine.runner_v2:
        why_not = "loans were not tried with model runner V2 on a CPU"
        what = "set VLLM_USE_V2_MODEL_RUNNER to 0 in the environment, or it to 0"
    elif engine.kv_connector:
        why_not = (
            f"the KV connector {engine.kv_connector!r} may have registered the memory of the KV cache for transfers, "
            "which go on to use the pages that a loan gives away"
        )
        what = "leave out --kv-transfer-config, or set it to 0"
    elif engine.takes_embeddings:
        why_not = "clients may send embeddings, which no lane encodes"
        what = "leave out --enable-mm-embeds, or set it to 0"
    elif engine.shared_items:
        why_not = "processed items are kept in shared memory, where no lane gets them"
        what = "name --mm-processor-cache-type lru, or set it to 0"
    elif engine.kv_groups != 1:
        why_not = f"the layers of this model are in {engine.kv_groups} groups, which use KV blocks in different ways"
    elif engine.block_bytes is not None and engine.block_bytes <= 0:
        why_not = "a KV block has less memory in a layer than two pages"
        what = "raise --block-size, or set it to 0"
    if why_not is not None:
        raise ConfigError(f"option 'kv_lending' cannot be on in this engine, because {why_not}; {what}")


class EncodeDemand(NamedTuple):
    """A waiting encode, in the order in which they run.

    ``loan_blocks``: the loan with which it, those before it and those under way can run together.
    ``request_blocks``: KV blocks that requests which are not admitted yet need up to and including its own; below 0
    where running requests that wait for encodes will need so much less than `LendingSnapshot.needed_blocks` until it
    has ended.
    """

    loan_blocks: int
    request_blocks: int = 0


@dataclass(frozen=True)
class LendingSnapshot:
    """Blocks of an engine's KV cache, and the encodes that wait for memory.

    ``total_blocks``: of the cache. ``free_blocks``: neither used by a request nor lent. ``lent_blocks``: of the present
    loan. ``used_blocks``: of it, those that encodes under way need. ``needed_blocks``: that running requests will need
    until the encodes have ended. ``blocked``: whether a request waits for blocks.

    Raises:
        ValueError: a number is negative, more is used than lent, or the parts exceed the total.
    """

    total_blocks: int
    free_blocks: int
    lent_blocks: int = 0
    used_blocks: int = 0
    needed_blocks: int = 0
    demands: Sequence[EncodeDemand] = ()
    blocked: bool = False

    def __post_init__(self) -> None:
        for name in ("total_blocks", "free_blocks", "lent_blocks", "used_blocks", "needed_blocks"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if self.used_blocks > self.lent_blocks:
            raise ValueError(f"{self.used_blocks} blocks are used of {self.lent_blocks} that are lent")
        if self.free_blocks + self.lent_blocks > self.total_blocks:
            raise ValueError(
                f"{self.free_blocks} free and {self.lent_blocks} lent blocks are more than {self.total_blocks} in all"
            )

    @property
    def room(self) -> int:
        """Return the most blocks that may be lent without those that running requests need; may be below 0."""
        return self.free_blocks + self.lent_blocks - self.needed_blocks


class LendingPlan(NamedTuple):
    """The loan from now on.

    ``begins``: how many of the waiting encodes may begin, from the first one on. ``admits``: whether new requests may
    be admitted.
    """

    blocks: int
    reason: LendingReason
    begins: int = 0
    admits: bool = True


class MemoryLending:
    """Lends blocks of the KV cache that requests do not need now to encodes that need more than is set aside for them.

    1. No request is preempted: only free blocks are lent, and of these none that running requests will need until the
       encodes have ended.
    2. Blocks that an encode under way uses are not taken back before it has ended. A waiting encode that would go on to
       use them afterwards is one that waits for a loan, also where it needs no further block.
    3. At most ``most`` of all blocks are lent.
    4. The loan is for as many waiting encodes as fit, in their order, beside the blocks that the requests of these
       encodes need themselves.
    5. While a request waits for blocks, no loan is made, and an idle one is taken back, until an encode has waited for
       ``patience_seconds`` that cannot run without a loan. The next such encode waits as long again, after those under
       way have ended, so that requests and encodes take turns. A loan that was made stays until the encode has begun.
    6. An encode that has waited for so long gets its loan in parts, as running requests end, and no new request is
       admitted meanwhile. What running requests need is given back even then. If that does not suffice within
       ``saving_seconds``, all is given back and requests are admitted for as long; the next such turn lasts twice as
       long. While nothing runs there is nothing to wait for, and no turn begins.
    7. Encodes that could run one after another without a loan run together in one only while no request waits.
    8. An idle loan is kept for ``hold_seconds``, as large encodes often come together, unless requests need the blocks.
    """

    def __init__(
        self, most: float, hold_seconds: float = 1.0, patience_seconds: float = 2.0, saving_seconds: float = 30.0
    ) -> None:
        self.most, self.hold_seconds, self.patience_seconds = most, hold_seconds, patience_seconds
        self.saving_seconds = saving_seconds
        self._idle_since: float | None = None
        self._waits_since: float | None = None
        self._granted = False  # a loan that no encode has used yet
        self._saves_since: float | None = None
        self._turn_seconds = saving_seconds  # of the present or next turn by rule 6
        self._rests_until = -math.inf  # after such a turn

    def bound(self, total_blocks: int) -> int:
        """Return the most blocks that may be lent, of so many."""
        return int(self.most * total_blocks)

    def began(self) -> None:
        """Record that an encode has begun in the loan which may have ended by the next plan."""
        self._granted = False

    def forget(self) -> None:
        """Forget who waits, as nobody does any more."""
        self._waits_no_more()
        self._idle_since, self._granted = None, False

    def plan(self, snapshot: LendingSnapshot, now: float) -> LendingPlan:
        """Return the loan from ``now`` on; its blocks beyond the present loan are among the free ones."""
        used, demands = snapshot.used_blocks, snapshot.demands
        self._granted = self._granted and not used
        first = demands[0].loan_blocks if demands else 0
        if not first:
            self._granted = False
            self._waits_no_more()
            most, begins = self._most(snapshot)
            if most > used:
                return LendingPlan(most, LendingReason.LENT, begins)
            return self._idle(snapshot, now)._replace(begins=begins)
        self._idle_since = None
        if first > self.bound(snapshot.total_blocks):  # alone, or beside those under way
            return LendingPlan(used, LendingReason.IN_USE if used else LendingReason.TOO_LARGE)
        if self._waits_since is None or (used and snapshot.blocked):
            self._waits_since, self._saves_since = now, None
        late = now - self._waits_since >= self.patience_seconds
        if snapshot.blocked and not (late or self._granted):
            return LendingPlan(used, LendingReason.REQUESTS_FIRST)
        most, begins = self._most(snapshot)
        if begins:
            self._granted = not used
            self._waits_no_more()
            reason = LendingReason.LENT if most > used else LendingReason.IN_USE
            return LendingPlan(max(most, used), reason, begins)
        self._granted = False
        if not late:
            return LendingPlan(used, LendingReason.NEEDED_BY_REQUESTS)
        return self._save(snapshot, now)

    def _waits_no_more(self) -> None:
        self._waits_since = self._saves_since = None
        self._turn_seconds, self._rests_until = self.saving_seconds, -math.inf

    def _save(self, snapshot: LendingSnapshot, now: float) -> LendingPlan:
        """Return the part of a loan that there is for an encode which has waited for long: by rule 6."""
        used, first = snapshot.used_blocks, snapshot.demands[0]
        if now < self._rests_until or not snapshot.needed_blocks:
            return LendingPlan(used, LendingReason.NEEDED_BY_REQUESTS)
        if self._saves_since is None:
            self._saves_since = now
        if now - self._saves_since >= self._turn_seconds:
            self._saves_since, self._rests_until = None, now + self._turn_seconds
            self._turn_seconds *= 2
            return LendingPlan(used, LendingReason.NEEDED_BY_REQUESTS)
        saved = min(first.loan_blocks, snapshot.room - first.request_blocks)
        return LendingPlan(max(saved, used), LendingReason.SAVING, admits=False)

    def _most(self, snapshot: LendingSnapshot) -> tuple[int, int]:
        """Return the loan for as many of the waiting encodes as fit, in their order, and how many these are.

        If the first one needs no loan, those that do get none while a request waits: by rule 7.
        """
        bound, most, begins = self.bound(snapshot.total_blocks), 0, 0
        needs_none = not snapshot.demands or not snapshot.demands[0].loan_blocks
        for one in snapshot.demands:
            limit = min(bound, snapshot.room - one.request_blocks)
            if one.loan_blocks and (one.loan_blocks > limit or (needs_none and snapshot.blocked)):
                break
            begins += 1
            if one.loan_blocks:
                most = max(one.loan_blocks, min(snapshot.lent_blocks, limit))
        return most, begins

    def _idle(self, snapshot: LendingSnapshot, now: float) -> LendingPlan:
        """Return the loan while no encode waits for one: by rules 2, 5 and 8."""
        lent, used = snapshot.lent_blocks, snapshot.used_blocks
        if lent == used:
            self._idle_since = None
            return LendingPlan(used, LendingReason.IN_USE if used else LendingReason.NOT_NEEDED)
        if snapshot.blocked:
            return LendingPlan(used, LendingReason.RECALLED)
        missing = snapshot.needed_blocks - snapshot.free_blocks
        if missing > 0:
            return LendingPlan(max(used, lent - missing), LendingReason.RECALLED)
        if self._idle_since is None:
            self._idle_since = now
        if now - self._idle_since < self.hold_seconds:
            return LendingPlan(lent, LendingReason.HELD)
        self._idle_since = None
        return LendingPlan(used, LendingReason.RETURNED)
